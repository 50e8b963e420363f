"""The learning-rate range test: a short training whose rate grows from step to step, and what its losses say."""

from __future__ import annotations

import math
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer

from project.engine.cli import Configuration
from project.errors import UserError
from project.tables import format_table
from project.tune.short_training import ShortTraining, picture, scratch_trainer

WIDTH = 1 / 25  # of the whole range: standard deviation of the smoothing
# Below the rate of the lowest loss, from which on it rises. Four epochs on the bundled digits, best validation accuracy
# over rates 0.0006 to 0.03, constant and one-cycle: ConvNet 0.006 (lowest loss of the test at 0.015), MLP 0.006 to
# 0.012 one-cycle and 0.006 constant (lowest at 0.007).
BELOW_LOWEST = 2.0
LEAST_FALL = 0.05  # of the first loss; less is noise


class RateRamp(ShortTraining):
    """Gives every parameter group the same learning rate, which grows exponentially, and notes each step's loss.

    It ends after ``steps`` optimizer steps, or at a loss that is no number. Lightning's own finder needs an attribute
    ``lr`` and gives a running mean that lags 50 steps behind.
    """

    def __init__(self, min_lr: float, max_lr: float, steps: int) -> None:
        self.min_lr, self.growth, self.steps = min_lr, (max_lr / min_lr) ** (1 / (steps - 1)), steps
        self.present = math.nan  # the highest rate that the module itself chose
        self.rates: list[float] = []
        self.losses: list[float] = []  # of each step, the mean over its accumulated batches
        self._parts: list[float] = []
        self._rate = min_lr

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        self.present = max(float(group.get("initial_lr", group["lr"])) for group in groups)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._rate = self.min_lr * self.growth**self.steps_done
        for group in (group for optimizer in trainer.optimizers for group in optimizer.param_groups):
            group["lr"] = group["lr"].fill_(self._rate) if isinstance(group["lr"], torch.Tensor) else self._rate

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if outputs:  # Lightning has divided the loss by the number of batches of a step
            self._parts.append(float(outputs["loss"]) * trainer.accumulate_grad_batches)
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def after_step(self, trainer: Trainer) -> None:
        if self._parts:  # a training_step may skip a batch
            self.rates.append(self._rate)
            self.losses.append(sum(self._parts) / len(self._parts))
        self._parts = []
        trainer.should_stop = self.steps_done >= self.steps or not all(map(math.isfinite, self.losses[-1:]))


def tune_lr(config: Configuration, flags: dict[str, Any], options: Namespace) -> tuple[list[Any], dict[str, Any]]:
    """Find a learning rate, print and draw it. Returns a row per step and all facts."""
    print(f"training {options.steps} steps at rates from {options.min_lr:g} to {options.max_lr:g}", file=sys.stderr)
    ramp = RateRamp(options.min_lr, options.max_lr, options.steps)
    with scratch_trainer(flags, ramp) as trainer:
        trainer.fit(config.module, datamodule=config.datamodule)
    smooth, lowest = read_curve(ramp.rates, ramp.losses)
    rates, losses, now = ramp.rates[: len(smooth)], ramp.losses[: len(smooth)], ramp.present
    columns = zip(rates, losses, smooth, strict=True)
    rows = [{"lr": rate, "loss": loss, "smooth_loss": mean} for rate, loss, mean in columns]
    print(format_table(rows[:: max(1, len(rows) // 20)]))
    found, suggestion = rates[lowest], rates[lowest] / BELOW_LOWEST
    says = f"lowest loss at a learning rate of {found:.2g}; half of it is a safe peak"
    if lowest >= len(rows) - 3:
        says = f"the loss still fell at {found:.2g}: a larger --max_lr may find a better rate"
    flag = "--model.lr" if "lr" in (config.resolved["model"].get("init_args") or {}) else "learning rate"
    print(f"\n{says}\n\n  {flag} {suggestion:.2g}\n\nIt was {now:g}.")
    with picture(options.plot, config, flags, 1) as (axes,):
        axes.plot(rates, losses, ".", markersize=3, color="#bbccee", label="each step")
        axes.plot(rates, smooth, color="#4477aa", label="smoothed")
        height = np.interp(suggestion, rates, smooth)
        axes.plot(suggestion, height, "o", color="#ee6677", label=f"suggested: {suggestion:.2g}")
        axes.plot(found, smooth[lowest], "o", color="#228833", fillstyle="none", label=f"lowest loss: {found:.2g}")
        if rates[0] < now < rates[-1]:
            axes.axvline(now, color="#999999", linestyle="--", linewidth=1, label=f"now: {now:g}")
        fall = smooth[0] - smooth[lowest]
        limits = min(0.0, smooth[lowest] - 0.1 * fall), smooth[0] + 0.3 * fall  # a diverging end would flatten the rest
        axes.set(xscale="log", ylim=limits, xlabel="learning rate", ylabel="training loss")
    return rows, {"suggested_lr": suggestion, "lowest_loss_lr": found, "curve": rows}


def read_curve(rates: Sequence[float], losses: Sequence[float]) -> tuple[list[float], int]:
    """The smoothed losses up to the first that is no number, and the step at which they are lowest.

    Lightning's ``suggestion()`` divides by the difference of the rates themselves, which at the low end are 1e-7 apart:
    noise there beats every real slope, and what it suggests for our ConvNet is 0.00002 or 0.00006, by the seed.
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
            return smooth, lowest
    raise UserError("tune lr: the loss never fell. Widen --min_lr and --max_lr, or raise --steps.")
