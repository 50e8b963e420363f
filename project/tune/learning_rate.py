"""Lightning's learning-rate range test, and what its losses say."""

from __future__ import annotations

import contextlib
import io
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from project.engine.cli import ProjectCLI
from project.errors import UserError
from project.tune.short_training import quiet_lightning, scratch_trainer

BETA = 0.98  # of the running mean that Lightning keeps of the loss
WIDTH = 1 / 25  # of the whole range: standard deviation of the smoothing here
# Below the rate of the lowest loss, from which on it rises. Four epochs on the bundled digits, best validation accuracy
# over rates 0.0006 to 0.03, constant and one-cycle: ConvNet 0.006 (lowest loss of the test at 0.015), MLP 0.006 to
# 0.012 one-cycle and 0.006 constant (lowest at 0.007).
BELOW_LOWEST = 2.0
LEAST_FALL = 0.05  # of the first loss; less is noise


@dataclass(frozen=True)
class RangeTest:
    """A training with a learning rate that grows from step to step."""

    rates: list[float]
    losses: list[float]  # of each step's batch, nats
    smooth: list[float]  # the same, averaged over the steps around each
    lowest: float  # the rate at which ``smooth`` is lowest

    @property
    def suggestion(self) -> float:
        """The rate to train with."""
        return self.lowest / BELOW_LOWEST

    @property
    def still_falling(self) -> bool:
        """Whether the loss was lowest at the very end, so that a larger rate may be better."""
        return self.lowest >= self.rates[-3]

    def rows(self) -> list[dict[str, Any]]:
        """One row per step: ``lr``, ``loss``, ``smooth_loss``."""
        columns = zip(self.rates, self.losses, self.smooth, strict=True)
        return [{"lr": rate, "loss": loss, "smooth_loss": smooth} for rate, loss, smooth in columns]


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
    with quiet_lightning(), tempfile.TemporaryDirectory(prefix="tune-") as folder, no_bar_in_a_log():
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
    return read_curve(finder.results["lr"], finder.results["loss"], steps)


def read_curve(rates: Sequence[float], running_means: Sequence[float], steps: int) -> RangeTest:
    """What Lightning's finder measured, without what it made of it.

    Its ``suggestion()`` divides by the difference of the rates themselves, which at the low end are 1e-7 apart: noise
    there beats every real slope, and what it suggests for our ConvNet is 0.00002 or 0.00006, by the seed. Its running
    mean lags 50 steps behind, a decade or two, and counts one loss more than it has seen, which halves its first
    value. Here the single losses are computed back from it, and averaged over the steps on both sides.

    Args:
        rates: Learning rates, growing exponentially.
        running_means: As Lightning returns them, one per rate.
        steps: Length of the whole test, of which a diverging loss may have cut off the end.

    Raises:
        UserError: The loss never fell.
    """
    losses: list[float] = []
    sums = [mean * (1 - BETA ** (step + 2)) for step, mean in enumerate(running_means)]
    for before, now in zip([0.0, *sums], sums, strict=False):
        losses.append((now - BETA * before) / (1 - BETA))
        if not math.isfinite(losses[-1]):
            losses.pop()
            break
    count = min(len(losses), len(rates))
    rates, losses = list(rates[:count]), losses[:count]
    smooth = smoothed(losses, WIDTH * steps)
    lowest = min(range(count), key=lambda step: smooth[step], default=0)
    if not count or smooth[lowest] > (1 - LEAST_FALL) * smooth[0]:
        raise UserError("tune lr: the loss never fell. Widen --min_lr and --max_lr, or raise --steps.")
    return RangeTest(rates, losses, smooth, rates[lowest])


def smoothed(values: Sequence[float], width: float) -> list[float]:
    """Each value averaged with those around it, by a Gaussian of that standard deviation, in values."""
    means = []
    for centre in range(len(values)):
        weights = [math.exp(-0.5 * ((index - centre) / width) ** 2) for index in range(len(values))]
        means.append(sum(w * value for w, value in zip(weights, values, strict=True)) / sum(weights))
    return means


@contextlib.contextmanager
def no_bar_in_a_log() -> Iterator[None]:
    """The finder's bar on a terminal only; it has no switch."""
    if sys.stderr.isatty():
        yield
        return
    with contextlib.redirect_stderr(io.StringIO()):
        yield


def advice_lines(test: RangeTest, current: float) -> list[str]:
    """What the curve means, and the flag to paste."""
    lines = [f"lowest loss at a learning rate of {test.lowest:.2g}; half of it is a safe peak"]
    if test.still_falling:
        lines = [f"the loss still fell at {test.lowest:.2g}: a larger --max_lr may find a better rate"]
    return [*lines, "", f"  --model.lr {test.suggestion:.2g}", "", f"It was {current:g}."]


def draw_range_test(path: Path, test: RangeTest, current: float, title: str) -> None:
    """Loss over learning rate with the suggestion and the present value marked, as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot(test.rates, test.losses, ".", markersize=3, color="#bbccee", label="each step")
    axes.plot(test.rates, test.smooth, color="#4477aa", label="smoothed")
    at = min(range(len(test.rates)), key=lambda step: abs(math.log(test.rates[step] / test.suggestion)))
    axes.plot(
        test.suggestion,
        test.smooth[at],
        marker="o",
        markersize=9,
        color="#ee6677",
        linestyle="",
        label=f"suggested: {test.suggestion:.2g}",
    )
    lowest = test.rates.index(test.lowest)
    axes.plot(
        test.lowest,
        test.smooth[lowest],
        marker="o",
        markersize=9,
        fillstyle="none",
        color="#228833",
        linestyle="",
        label=f"lowest loss: {test.lowest:.2g}",
    )
    if test.rates[0] < current < test.rates[-1]:
        axes.axvline(current, color="#999999", linestyle="--", linewidth=1, label=f"now: {current:g}")
    axes.set_xscale("log")
    axes.set_ylim(0, 1.3 * test.smooth[0])  # a diverging end would press everything else flat
    axes.legend(loc="lower left", fontsize=8, frameon=False)
    axes.set_xlabel("learning rate")
    axes.set_ylabel("training loss")
    axes.grid(alpha=0.3, which="both")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, fontsize=9)
    figure.savefig(path, dpi=130)
