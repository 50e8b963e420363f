"""The learning-rate range test: train at ever larger rates, and see where the loss is lowest."""

import itertools
import math
import statistics
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from matplotlib.axes import Axes
from unbroken.cli.cli import Configuration
from unbroken.commands.tune.picture import picture
from unbroken.commands.tune.short_training import ShortTraining, train_shortly
from unbroken.errors import UserError
from unbroken.tables import Row, format_table

# The standard deviation of the loss curve's smoothing, as a fraction of all steps.
WIDTH = 1 / 25
# The suggested rate is that of the lowest loss, divided by this. Best validation accuracy after
# four epochs on 9,000 small images, of rates 0.0006 to 0.03: ConvNet 0.006 (its lowest loss is at
# 0.015), MLP 0.006 to 0.012 (its lowest loss is at 0.007).
BELOW_LOWEST = 2.0
# A fall of the loss below this share of the first loss is noise.
LEAST_FALL = 0.05
MOST_ROWS = 20
# What a module calls its learning rate, as Lightning's own finder has it
NAMES = ("lr", "learning_rate")


class RateRamp(ShortTraining):
    """Raises the learning rate of all parameter groups exponentially, and records each step's loss.

    Lightning's finder needs a module with an attribute ``lr``, and its running mean lags 50 steps
    behind.
    """

    def __init__(self, min_lr: float, max_lr: float, steps: int) -> None:
        super().__init__()
        self.min_lr = min_lr
        self.growth = (max_lr / min_lr) ** (1 / (steps - 1))
        self.steps = steps
        # The rates and losses of the steps so far. A loss is the mean over accumulated batches.
        self.rates: list[float] = []
        self.losses: list[float] = []
        # The losses of the batches of the step that is under way.
        self._parts: list[float] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._groups: list[dict[str, Any]] = []
        for optimizer in trainer.optimizers:
            self._groups += optimizer.param_groups
        if not all("lr" in group for group in self._groups):
            raise UserError("tune lr: the optimizer has no learning rate.")
        # The highest rate that the module itself chose.
        self.present = max(chosen_rate(group) for group in self._groups)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        rate = self.min_lr * self.growth**self.steps_done
        for group in self._groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # There are no outputs where training_step skips a batch.
        if outputs:
            # Lightning has divided the loss by the batches per step.
            self._parts.append(float(outputs["loss"]) * trainer.accumulate_grad_batches)
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def after_step(self, trainer: Trainer) -> None:
        if self._parts:
            self.rates.append(self.min_lr * self.growth ** (self.steps_done - 1))
            self.losses.append(statistics.fmean(self._parts))
            self._parts = []
        has_diverged = bool(self.losses) and not math.isfinite(self.losses[-1])
        trainer.should_stop = self.steps_done >= self.steps or has_diverged


def chosen_rate(group: dict[str, Any]) -> float:
    """The peak of a parameter group's rate: ``max_lr`` of a cycle, else the rate at the start."""
    rate = group.get("max_lr", group.get("initial_lr", group["lr"]))
    return float(rate)


@dataclass
class Curve:
    """The losses of a range test, up to the first that is not finite."""

    rates: list[float]
    losses: list[float]
    smooth: list[float]
    # The step at which the smoothed loss is lowest.
    lowest: int
    # The module's own rate.
    present: float

    @property
    def lowest_rate(self) -> float:
        """The rate at which the loss is lowest."""
        return self.rates[self.lowest]

    @property
    def suggestion(self) -> float:
        """A safe peak."""
        return self.lowest_rate / BELOW_LOWEST

    def rows(self) -> list[Row]:
        """A row per step."""
        rows: list[Row] = []
        for rate, loss, smooth in zip(self.rates, self.losses, self.smooth, strict=True):
            rows.append({"lr": rate, "loss": loss, "smooth_loss": smooth})
        return rows


def tune_lr(
    config: Configuration, flags: dict[str, Any], options: Namespace
) -> tuple[list[Row], Row]:
    """Find a learning rate, print and draw it. Returns a row per step and all facts."""
    ends = f"{options.min_lr:g} to {options.max_lr:g}"
    print(f"training {options.steps} steps at rates from {ends}", file=sys.stderr)
    ramp = RateRamp(options.min_lr, options.max_lr, options.steps)
    train_shortly(flags, ramp, config.module, config.datamodule)
    smooth, lowest = read_curve(ramp.losses)
    steps = len(smooth)
    curve = Curve(ramp.rates[:steps], ramp.losses[:steps], smooth, lowest, ramp.present)
    rows = curve.rows()
    print(format_table(rows[:: max(1, steps // MOST_ROWS)]))
    print(f"lowest loss at a learning rate of {curve.lowest_rate:.2g}; half of it is a safe peak")
    print(f"\n  {flag_of(config)} {curve.suggestion:.2g}\n\nIt was {curve.present:g}.")
    with picture(options.plot, config, flags, 1) as (axes,):
        draw(axes, curve)
    facts = {
        "suggested_lr": curve.suggestion,
        "lowest_loss_lr": curve.lowest_rate,
        "curve": rows,
    }
    return rows, facts


def flag_of(config: Configuration) -> str:
    """The flag that sets the learning rate, or words where the module has no such argument."""
    arguments = config.resolved["model"].get("init_args") or {}
    for name in NAMES:
        if name in arguments:
            return f"--model.{name}"
    return "learning rate"


def read_curve(losses: Sequence[float]) -> tuple[list[float], int]:
    """The losses up to the first that is not finite, smoothed by a Gaussian, and their lowest step.

    Lightning's ``suggestion()`` divides by differences of rates, which are 1e-7 at the low end:
    noise beats every real slope. A UserError where the loss never fell.
    """
    finite = list(itertools.takewhile(math.isfinite, losses))
    if finite:
        smooth = smoothed(finite, WIDTH * len(losses))
        lowest = smooth.index(min(smooth))
        if smooth[0] - smooth[lowest] > LEAST_FALL * abs(smooth[0]):
            return smooth, lowest
    raise UserError("tune lr: the loss never fell. Widen --min_lr and --max_lr, or raise --steps.")


def smoothed(losses: Sequence[float], width: float) -> list[float]:
    """The losses averaged over their neighbours, with a Gaussian's weights, ``width`` in steps."""
    # No loss counts more than the first ones do: a diverged loss of 1e12 would show a hundred steps
    # earlier.
    first_tenth = losses[: max(1, len(losses) // 10)]
    capped = np.minimum(losses, max(first_tenth))
    steps = np.arange(len(losses))
    distance = np.subtract.outer(steps, steps) / width
    weights = np.exp(-0.5 * distance**2)
    smooth: list[float] = (weights @ capped / weights.sum(axis=1)).tolist()
    return smooth


def draw(axes: Axes, curve: Curve) -> None:
    """Loss over learning rate, with the lowest loss, the suggestion and the present rate marked."""
    rates = curve.rates
    smooth = curve.smooth
    lowest_loss = smooth[curve.lowest]
    axes.plot(rates, curve.losses, ".", markersize=3, color="#bbccee", label="each step")
    axes.plot(rates, smooth, color="#4477aa", label="smoothed")
    suggestion = curve.suggestion
    height = np.interp(suggestion, rates, smooth)
    axes.plot(suggestion, height, "o", color="#ee6677", label=f"suggested: {suggestion:.2g}")
    axes.plot(
        curve.lowest_rate,
        lowest_loss,
        "o",
        color="#228833",
        fillstyle="none",
        label=f"lowest loss: {curve.lowest_rate:.2g}",
    )
    if rates[0] < curve.present < rates[-1]:
        label = f"now: {curve.present:g}"
        axes.axvline(curve.present, color="#999999", linestyle="--", linewidth=1, label=label)
    # A diverging end would flatten the rest.
    fall = smooth[0] - lowest_loss
    bottom = min(0.0, lowest_loss - 0.1 * fall)
    top = smooth[0] + 0.3 * fall
    axes.set(xscale="log", ylim=(bottom, top), xlabel="learning rate", ylabel="training loss")
