"""Lightning's learning-rate range test, read in the way it is meant to be read."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from project.cli import ProjectCLI
from project.errors import UserError
from project.tuning.training_steps import quiet_lightning, scratch_trainer

BETA = 0.98  # of Lightning's running mean of the loss
# The first steps' mean is of few batches; the last one is where the test broke off.
SKIPPED_AT_START, SKIPPED_AT_END = 10, 1


@dataclass(frozen=True)
class RangeTest:
    """A training with a learning rate that grows from step to step."""

    rates: list[float]
    losses: list[float]  # running mean, nats
    suggestion: float  # where the loss falls fastest per decade of learning rate
    lowest: float  # rate with the lowest loss: the edge, from where on it rises
    diverged: bool  # it ended early because the loss had grown fourfold

    def rows(self) -> list[dict[str, Any]]:
        """One row per step: ``lr`` and ``loss``."""
        return [{"lr": rate, "loss": loss} for rate, loss in zip(self.rates, self.losses, strict=True)]


def range_test(cli: ProjectCLI, flags: dict[str, Any], min_lr: float, max_lr: float, steps: int) -> RangeTest:
    """Run Lightning's finder on a command line's model and data.

    Args:
        cli: The command line, with its classes instantiated.
        flags: The Trainer's arguments, for one device.
        min_lr: Rate of the first step.
        max_lr: Rate of the last step.
        steps: Optimizer steps.

    Raises:
        UserError: The loss never fell: there is nothing to suggest.
    """
    from lightning.pytorch.tuner import Tuner

    # in a folder of its own: the finder saves the module's weights beside a run's checkpoints otherwise
    with quiet_lightning(), tempfile.TemporaryDirectory(prefix="tune-") as folder:
        trainer = scratch_trainer(flags, folder, [])
        finder = Tuner(trainer).lr_find(
            cli.model,
            datamodule=cli.datamodule,
            min_lr=min_lr,
            max_lr=max_lr,
            num_training=steps,
            update_attr=False,
        )
    assert finder is not None
    return read_curve(finder.results["lr"], finder.results["loss"], diverged=len(finder.results["lr"]) < steps)


def read_curve(rates: Sequence[float], smoothed: Sequence[float], diverged: bool) -> RangeTest:
    """Where the curve falls most steeply, per decade.

    Lightning's ``suggestion()`` divides by the difference of the rates themselves, which are 1e-6 apart at the low
    end: noise there beats every real slope, and its suggestion for our ConvNet is 100 times too low. Its running mean
    is divided as if it held one loss more than it does, which halves the first value; that is mended here.

    Args:
        rates: Learning rates, growing exponentially.
        smoothed: Lightning's running means of the loss, one per rate.
        diverged: Whether the test ended early.
    """
    count = min(len(rates), len(smoothed))
    mended = [loss * (1 - BETA ** (step + 1)) / (1 - BETA**step) for step, loss in enumerate(smoothed[:count], start=1)]
    usable = range(SKIPPED_AT_START, count - SKIPPED_AT_END)
    slopes = {
        step: (mended[step + 1] - mended[step - 1]) / math.log10(rates[step + 1] / rates[step - 1])
        for step in usable
        if math.isfinite(mended[step - 1]) and math.isfinite(mended[step + 1])
    }
    if not slopes or min(slopes.values()) >= 0:
        raise UserError(
            f"tune lr: the loss fell at no rate between {rates[0]:g} and {rates[count - 1]:g}. "
            "Widen --min_lr and --max_lr, or raise --steps."
        )
    steepest = min(slopes, key=lambda step: slopes[step])
    lowest = min((step for step in range(count) if math.isfinite(mended[step])), key=lambda step: mended[step])
    return RangeTest(list(rates[:count]), mended, rates[steepest], rates[lowest], diverged)


def advice_lines(test: RangeTest, current: float) -> list[str]:
    """What the curve means, and the flag to paste."""
    lines = [f"steepest fall of the loss at {test.suggestion:.2g}, lowest loss at {test.lowest:.2g}"]
    if test.diverged:
        lines[0] += f", diverged before {test.rates[-1]:.2g}"
    lines += ["", f"  --model.lr {test.suggestion:.2g}", "", f"It was {current:g}."]
    if test.suggestion < current < test.lowest:
        lines[-1] += " That lies between the steepest fall and the lowest loss, where a schedule's peak may be."
    return lines


def draw_range_test(path: Path, test: RangeTest, current: float, title: str) -> None:
    """Loss over learning rate with the suggestion and the present value marked, as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot(test.rates, test.losses, color="#4477aa")
    at = test.losses[test.rates.index(test.suggestion)]
    axes.plot(test.suggestion, at, marker="o", markersize=9, color="#ee6677")
    axes.annotate(
        f"suggested: {test.suggestion:.2g}", (test.suggestion, at), (10, 8), color="#ee6677", textcoords="offset points"
    )
    if test.rates[0] < current < test.rates[-1]:
        axes.axvline(current, color="#999999", linestyle="--", linewidth=1)
        axes.annotate(
            f"now: {current:g}",
            (current, axes.get_ylim()[0]),
            (-4, 6),
            color="#777777",
            textcoords="offset points",
            rotation=90,
            ha="right",
            fontsize=9,
        )
    axes.set_xscale("log")
    # a diverging end would press everything else flat
    axes.set_ylim(0, 1.15 * max(test.losses[: SKIPPED_AT_START + 1]))
    axes.set_xlabel("learning rate")
    axes.set_ylabel("training loss, running mean")
    axes.grid(alpha=0.3, which="both")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, fontsize=9)
    figure.savefig(path, dpi=130)
