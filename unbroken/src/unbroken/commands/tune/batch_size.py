"""The search for a batch size: the largest that fits, and those between that are worth to know."""

import enum
import shlex
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from matplotlib.axes import Axes
from unbroken.cli.cli import Configuration
from unbroken.commands.tune.advice import WORTH, Advice, advice_lines, advise
from unbroken.commands.tune.picture import picture
from unbroken.commands.tune.steps import CannotTrain, Measured, TrainingSteps
from unbroken.errors import UserError
from unbroken.loading.batch_size import batch_size_of
from unbroken.machine import hardware
from unbroken.tables import Row, format_table

# The first batch size that is tried.
FIRST = 16
# The largest size that is tried for data of unknown length.
CEILING = 65_536

BY_MEMORY = "memory"
BY_SAMPLES = "the training set has no more samples"
BY_FLAG = "--max_batch_size allows no larger one"
BY_TIME = "larger steps take longer than --max_step_seconds"


class Outcome(enum.Enum):
    """What trying a size has shown."""

    FITS = enum.auto()
    NO_MEMORY = enum.auto()
    # The training fails with this size, for another reason. That says nothing about memory.
    CANNOT_TRAIN = enum.auto()


class Search:
    """Tries batch sizes by ``measure``, and remembers what each has shown."""

    def __init__(self, measure: Callable[[int], Measured | None]) -> None:
        self.measure = measure
        self.fitting: dict[int, Measured] = {}
        # The reason, by size.
        self.failed: dict[int, str] = {}

    def try_size(self, size: int) -> Outcome:
        """Train with this size for a moment.

        A size that the search chose itself must not end it. Such is 64 for 65 samples and a network
        with BatchNorm, which cannot train on the single sample that is left.
        """
        try:
            measured = self.measure(size)
        except CannotTrain as error:
            self.failed[size] = str(error)
            return Outcome.CANNOT_TRAIN
        if measured is None:
            return Outcome.NO_MEMORY
        self.fitting[size] = measured
        return Outcome.FITS

    def find_largest(self, ceiling: int, reason: str, max_step_s: float) -> str:
        """Double the size while it fits, then halve the distance to the first that does not.

        Returns what limits the size: memory, time, or else ``reason``, which is that of the
        ceiling.
        """
        size = min(FIRST, ceiling)
        while True:
            outcome = self.try_size(size)
            if outcome is Outcome.NO_MEMORY:
                break
            if size == ceiling:
                return reason
            # A step of twice the size takes about twice as long.
            if outcome is Outcome.FITS and 2 * self.fitting[size].step_ms > 1000 * max_step_s:
                return BY_TIME
            size = min(2 * size, ceiling)
        low = max(self.fitting, default=0)
        high = size
        while high - low > 1:
            middle = (low + high) // 2
            if self.try_size(middle) is Outcome.FITS:
                low = middle
            else:
                high = middle
        return BY_MEMORY

    def try_present(self, present: int) -> None:
        """Try the configured size as well, where it may fit and was not tried."""
        was_tried = present in self.fitting or present in self.failed
        may_fit = not self.fitting or present < max(self.fitting)
        if may_fit and not was_tried:
            self.try_size(present)

    def check(self) -> None:
        """Where no size trains, the model's own error, or a UserError where memory is too small."""
        if self.fitting:
            return
        if self.failed:
            # The errors were not kept, because their frames hold the tensors of their trainings.
            self._fail_once_more(min(self.failed))
        raise UserError(
            "not even one sample fits into the device's memory. "
            "Choose a smaller network or --precision."
        )

    def _fail_once_more(self, size: int) -> None:
        try:
            self.measure(size)
        except CannotTrain as error:
            if error.__cause__ is not None:
                raise error.__cause__ from None
            raise

    def measured(self) -> list[Measured]:
        """What fits, in rising order."""
        return [self.fitting[size] for size in sorted(self.fitting)]


def tune_batch_size(
    config: Configuration, flags: dict[str, Any], options: Namespace
) -> tuple[list[Row], Row]:
    """Find batch sizes, print and draw them.

    Returns a row per size (what is not known is left out), and all facts.
    """
    # At this moment the load is that of others: nothing has begun here.
    load = hardware.load_average()
    present = present_size(config)
    steps = TrainingSteps(config, flags, options.memory_limit_gib)
    ceiling = steps.training_samples or CEILING
    reason = BY_SAMPLES
    if options.max_batch_size is not None and options.max_batch_size < ceiling:
        ceiling = options.max_batch_size
        reason = BY_FLAG
    search = Search(steps.measure)
    limited_by = search.find_largest(ceiling, reason, options.max_step_seconds)
    search.try_present(present)
    search.check()
    measured = search.measured()
    advice = advise(measured, present)
    rows = rows_of(measured, advice, present)
    print(format_table(rows))
    lr_words = ["python", "-m", f"{config.program.package}.tune", "lr"]
    lr_words += [*options.fit_flags, "--data.batch_size"]
    lines = advice_lines(measured, limited_by, present, shlex.join(lr_words))
    print("\n" + "\n".join([*warnings_of(search, load), *lines]))
    with picture(options.plot, config, flags, 2) as (speed, memory):
        draw_speed(speed, measured, advice)
        draw_memory(memory, measured, limited_by)
    facts: dict[str, Any] = {
        "largest_batch_size": max(search.fitting),
        "limited_by": limited_by,
        "best_throughput_batch_size": advice.best.batch_size,
        "enough_batch_size": advice.enough.batch_size,
        "recommended_batch_size": advice.use.batch_size if advice.use else None,
        "sizes": rows,
    }
    if search.failed:
        facts["cannot_train"] = {str(size): reason for size, reason in search.failed.items()}
    if load is not None:
        facts["load_average"] = load
    return rows, facts


def present_size(config: Configuration) -> int:
    """The configured batch size; a UserError where the data module has none."""
    present = batch_size_of(config.datamodule)
    if present is not None:
        return present
    raise UserError(
        "tune batch_size needs a data module whose loader follows its attribute batch_size or "
        "hparams.batch_size. One of the module (--model) is not searched."
    )


def warnings_of(search: Search, load: float | None) -> list[str]:
    """What makes the figures doubtful, and the sizes that cannot train."""
    lines = []
    if load is not None and load > hardware.QUIET_LOAD:
        lines.append(
            f"The machine was busy when this began (load {load}): the speeds are rough. "
            "Measure again on an idle machine before you rely on them."
        )
    reasons: dict[str, list[str]] = {}
    for size, reason in search.failed.items():
        reasons.setdefault(reason, []).append(f"{size:,}")
    for reason, sizes in reasons.items():
        lines.append(f"No training with a batch size of {', '.join(sizes)}: {reason}")
    return lines


def rows_of(measured: list[Measured], advice: Advice, present: int) -> list[Row]:
    """A row per size; what is not known is left out."""
    rows: list[Row] = []
    for size in measured:
        notes = []
        if size.batch_size == present:
            notes.append("now")
        if size is advice.best:
            notes.append("best throughput")
        if size is advice.enough:
            notes.append("larger stops paying")
        if size is advice.use:
            notes.append("use")
        row = {
            "batch_size": size.batch_size,
            "samples_per_sec": size.samples_per_sec,
            **vars(size),
            "note": ", ".join(notes),
        }
        rows.append({name: value for name, value in row.items() if value is not None})
    return rows


def draw_speed(axes: Axes, measured: list[Measured], advice: Advice) -> None:
    """Throughput over batch size, the advised sizes marked."""
    sizes = [row.batch_size for row in measured]
    rates = [row.samples_per_sec for row in measured]
    errors = [row.samples_per_sec * row.spread_pct / 200 for row in measured]
    fastest = max(rates)
    axes.errorbar(sizes, rates, yerr=errors, capsize=2, marker="o", markersize=4, color="#4477aa")
    # The band in which a size counts as equally fast.
    axes.axhspan((1 - WORTH) * fastest, fastest, color="#228833", alpha=0.12, linewidth=0)
    mark(axes, advice.best, "best throughput", "#228833", diameter=13)
    if advice.use is not None:
        mark(axes, advice.use, "use", "#ee6677", diameter=9)
    axes.set(ylabel="samples per second", ylim=(0, 1.15 * fastest))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    label_sizes(axes)


def mark(axes: Axes, size: Measured, meaning: str, colour: str, diameter: int) -> None:
    """A circle around one size."""
    axes.plot(
        size.batch_size,
        size.samples_per_sec,
        "o",
        fillstyle="none",
        markersize=diameter,
        color=colour,
        label=f"{size.batch_size:,}: {meaning}",
    )


def draw_memory(axes: Axes, measured: list[Measured], limited_by: str) -> None:
    """Peak memory over batch size, and where it ends."""
    known = [row for row in measured if row.peak_allocated_gib is not None]
    sizes = [row.batch_size for row in known]
    peaks = [row.peak_allocated_gib for row in known]
    axes.semilogy(sizes, peaks, marker="o", markersize=4, color="#4477aa")
    axes.set_ylabel("peak GiB of tensors" if known else "peak memory (not told by this device)")
    if limited_by == BY_MEMORY:
        first_without = measured[-1].batch_size + 1
        axes.axvline(
            first_without, color="#ee6677", linestyle="--", linewidth=1, label="out of memory"
        )
    label_sizes(axes)


def label_sizes(axes: Axes) -> None:
    """Batch sizes along the axis, each twice the one before."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("batch size")
