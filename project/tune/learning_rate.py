"""The learning-rate range test: a short training whose rate grows from step to step, and what its losses say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer

from project.engine.cli import Configuration
from project.errors import UserError
from project.tune.short_training import ShortTraining, scratch_trainer

WIDTH = 1 / 25  # of the whole range: standard deviation of the smoothing
# Below the rate of the lowest loss, from which on it rises. Four epochs on the bundled digits, best validation accuracy
# over rates 0.0006 to 0.03, constant and one-cycle: ConvNet 0.006 (lowest loss of the test at 0.015), MLP 0.006 to
# 0.012 one-cycle and 0.006 constant (lowest at 0.007).
BELOW_LOWEST = 2.0
LEAST_FALL = 0.05  # of the first loss; less is noise


class RateRamp(ShortTraining):
    """Gives every parameter group the same learning rate, which grows exponentially, and notes each step's loss.

    Lightning's own finder needs an attribute ``lr`` and gives a running mean that lags 50 steps behind.

    Args:
        min_lr: Rate of the first optimizer step.
        max_lr: Rate of the last one.
        steps: Optimizer steps, fewer where a loss is no number any more.
    """

    def __init__(self, min_lr: float, max_lr: float, steps: int) -> None:
        self.min_lr, self.growth, self.steps = min_lr, (max_lr / min_lr) ** (1 / (steps - 1)), steps
        self.present = math.nan  # the highest rate that the module itself chose
        self.rates: list[float] = []
        self.losses: list[float] = []  # of each step, the mean over its accumulated batches
        self._parts: list[float] = []
        self._groups: list[dict[str, Any]] = []
        self._step, self._rate = 0, min_lr

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        self.present = max(float(group.get("initial_lr", group["lr"])) for group in self._groups)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._rate = self.min_lr * self.growth**self._step
        for group in self._groups:
            group["lr"] = group["lr"].fill_(self._rate) if isinstance(group["lr"], torch.Tensor) else self._rate

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if outputs:  # Lightning has divided the loss by the number of batches of a step
            self._parts.append(float(outputs["loss"]) * trainer.accumulate_grad_batches)
        if trainer.global_step == self._step:  # gradients are being accumulated
            return
        self._step = trainer.global_step
        if self._parts:  # a training_step may skip a batch
            self.rates.append(self._rate)
            self.losses.append(sum(self._parts) / len(self._parts))
        self._parts = []
        trainer.should_stop = self._step >= self.steps or not all(map(math.isfinite, self.losses[-1:]))


@dataclass(frozen=True)
class RangeTest:
    """A training with a learning rate that grew from step to step."""

    rates: list[float]
    losses: list[float]  # of each step
    smooth: list[float]  # the same, averaged over the steps around each
    lowest: float  # the rate at which ``smooth`` is lowest
    present: float  # the rate with which the module would train

    @property
    def suggestion(self) -> float:
        """The rate to train with."""
        return self.lowest / BELOW_LOWEST

    @property
    def still_falling(self) -> bool:
        """Whether the loss was lowest at the very end, so that a larger rate may be better."""
        return self.lowest >= self.rates[-3]

    def rows(self) -> list[dict[str, float]]:
        """One row per step: ``lr``, ``loss``, ``smooth_loss``."""
        columns = zip(self.rates, self.losses, self.smooth, strict=True)
        return [{"lr": rate, "loss": loss, "smooth_loss": smooth} for rate, loss, smooth in columns]


def range_test(config: Configuration, flags: dict[str, Any], min_lr: float, max_lr: float, steps: int) -> RangeTest:
    """Train ``steps`` optimizer steps at rates from ``min_lr`` to ``max_lr``; ``flags`` are the Trainer's arguments.

    Raises:
        UserError: The loss never fell: there is nothing to suggest.
    """
    ramp = RateRamp(min_lr, max_lr, steps)
    with scratch_trainer(flags, ramp) as trainer:
        trainer.fit(config.module, datamodule=config.datamodule)
    return read_curve(ramp.rates, ramp.losses, ramp.present)


def read_curve(rates: Sequence[float], losses: Sequence[float], present: float) -> RangeTest:
    """What the losses say, up to the first that is no number; ``rates`` grow exponentially.

    Lightning's ``suggestion()`` divides by the difference of the rates themselves, which at the low end are 1e-7 apart:
    noise there beats every real slope, and what it suggests for our ConvNet is 0.00002 or 0.00006, by the seed.

    Raises:
        UserError: The loss never fell.
    """
    count = next((step for step, loss in enumerate(losses) if not math.isfinite(loss)), len(losses))
    if count:
        # Each loss averaged with those around it by a Gaussian. Diverged losses are cut to the first losses:
        # a loss of 1e12 would be seen a hundred steps before.
        capped = np.minimum(losses[:count], max(losses[: max(1, count // 10)]))
        distance = np.subtract.outer(np.arange(count), np.arange(count)) / (WIDTH * len(rates))
        weights = np.exp(-0.5 * distance**2)
        smooth = (weights @ capped / weights.sum(axis=1)).tolist()
        lowest = smooth.index(min(smooth))
        if smooth[0] - smooth[lowest] > LEAST_FALL * abs(smooth[0]):
            return RangeTest(list(rates[:count]), list(losses[:count]), smooth, rates[lowest], present)
    raise UserError("tune lr: the loss never fell. Widen --min_lr and --max_lr, or raise --steps.")


def advice_lines(test: RangeTest, flag: str) -> list[str]:
    """What the curve means, and the flag to paste."""
    lines = [f"lowest loss at a learning rate of {test.lowest:.2g}; half of it is a safe peak"]
    if test.still_falling:
        lines = [f"the loss still fell at {test.lowest:.2g}: a larger --max_lr may find a better rate"]
    return [*lines, "", f"  {flag} {test.suggestion:.2g}", "", f"It was {test.present:g}."]


def draw_range_test(path: Path, test: RangeTest, title: str) -> None:
    """Loss over learning rate with the suggestion and the present value marked, as PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(test.rates, test.losses, ".", markersize=3, color="#bbccee", label="each step")
    axes.plot(test.rates, test.smooth, color="#4477aa", label="smoothed")
    at = min(range(len(test.rates)), key=lambda step: abs(math.log(test.rates[step] / test.suggestion)))
    dot: dict[str, Any] = {"marker": "o", "markersize": 9, "linestyle": ""}
    axes.plot(test.suggestion, test.smooth[at], color="#ee6677", label=f"suggested: {test.suggestion:.2g}", **dot)
    lowest, name = min(test.smooth), f"lowest loss: {test.lowest:.2g}"
    axes.plot(test.lowest, lowest, fillstyle="none", color="#228833", label=name, **dot)
    if test.rates[0] < test.present < test.rates[-1]:
        axes.axvline(test.present, color="#999999", linestyle="--", linewidth=1, label=f"now: {test.present:g}")
    fall = test.smooth[0] - lowest  # a diverging end would flatten the rest
    axes.set(xscale="log", ylim=(min(0.0, lowest - 0.1 * fall), test.smooth[0] + 0.3 * fall))
    axes.set(xlabel="learning rate", ylabel="training loss")
    axes.legend(loc="lower left", fontsize=8, frameon=False)
    axes.grid(alpha=0.3, which="both")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, fontsize=9)
    figure.savefig(path, dpi=130)
