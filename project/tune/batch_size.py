"""The whole batch-size search: the largest that fits, then every size timed at full speed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from project import hardware
from project.engine.cli import ProjectCLI
from project.errors import UserError
from project.hardware import GIB
from project.tune.short_training import Measured, TrainingSteps

# Of the free host memory: what an operation needs only inside itself is not counted, and others live here, too.
CPU_SHARE = 0.6
NOTHING_FITS = "not even one sample fits into the device's memory. Choose a smaller network or --precision."


def find_and_sweep(
    cli: ProjectCLI,
    flags: dict[str, Any],
    max_batch_size: int | None,
    memory_limit_gib: float | None,
    max_step_seconds: float,
    tell: Callable[[str], None],
) -> tuple[Search, list[Measured], Advice]:
    """Find the largest batch that fits and time all sizes up to it.

    Args:
        cli: The command line, with its classes instantiated.
        flags: The Trainer's arguments, for one device.
        max_batch_size: Try no larger one.
        memory_limit_gib: Pretend that the device has no more memory than this.
        max_step_seconds: Try no size that takes much longer.
        tell: Is told of progress.

    Raises:
        UserError: Not even one sample fits.
    """
    limit = None if memory_limit_gib is None else int(memory_limit_gib * hardware.GIB)
    on_cpu = flags["accelerator"] == "cpu" or not torch.accelerator.is_available()
    if on_cpu:
        safe = int(CPU_SHARE * hardware.memory()["available_gib"] * hardware.GIB)
        limit = safe if limit is None else min(limit, safe)
    steps = TrainingSteps(cli, flags, limit)
    ceilings = {steps.training_samples: "the training set has no more images"}
    if max_batch_size is not None:
        ceilings.setdefault(max_batch_size, "--max_batch_size allows no larger one")
    ceiling = min(ceilings)
    search = find_largest(steps.one_try, ceiling, ceilings[ceiling], max_step_seconds, tell)
    if search.largest == 0:
        raise UserError(NOTHING_FITS)
    peaks = {row.batch_size: row.peak_bytes for row in search.tries}
    measured: list[Measured] = []
    sizes = sizes_to_sweep(search.largest)
    for number, size in enumerate(sizes, start=1):
        tell(f"timing batch size {size:,} ({number} of {len(sizes)})")
        try:
            row = steps.timed(size)
        except torch.OutOfMemoryError:  # two steps fitted, but the allocator's gaps grew over more of them
            tell(f"batch size {size:,}: out of memory after a while")
            continue
        row.peak_bytes = peaks.get(size, row.peak_bytes)
        measured.append(row)
    if not measured:
        raise UserError(NOTHING_FITS)
    if measured[-1].batch_size < search.largest:
        search.smallest_failed, search.largest = search.largest, measured[-1].batch_size
        search.limited_by = "memory"
    tell("")
    return search, measured, advise(measured)


# From measured batch sizes to a table, a picture and advice.


# A size pays as long as the next ones are this much faster, of the best rate.
WORTH = 0.05


def sizes_to_sweep(largest: int) -> list[int]:
    """Powers of two from ``FIRST`` up to ``largest``, and ``largest`` itself; it alone where it is smaller."""
    sizes = []
    size = FIRST
    while size <= largest:
        sizes.append(size)
        size *= 2
    return sizes if largest in sizes else [*sizes, largest]


@dataclass(frozen=True)
class Advice:
    """Which sizes to use."""

    best: int  # of best throughput
    enough: int  # the smallest within WORTH of the best: past it, a larger batch stops paying
    samples_per_sec: float  # at ``best``
    enough_samples_per_sec: float


def advise(measured: Sequence[Measured]) -> Advice:
    """The size of best throughput, and the size past which it stops paying."""
    best = max(measured, key=lambda row: row.samples_per_sec)
    enough = next(row for row in measured if row.samples_per_sec >= (1 - WORTH) * best.samples_per_sec)
    return Advice(best.batch_size, enough.batch_size, best.samples_per_sec, enough.samples_per_sec)


def table_rows(measured: Sequence[Measured], advice: Advice) -> list[dict[str, Any]]:
    """One row per size: ``samples_per_sec``, ``step_ms``, ``spread_pct``, ``peak_allocated_gib``, ``note``."""
    rows = []
    for row in measured:
        notes = ["best throughput"] if row.batch_size == advice.best else []
        notes += ["larger stops paying"] if row.batch_size == advice.enough else []
        rows.append(
            {
                "batch_size": row.batch_size,
                "samples_per_sec": row.samples_per_sec,
                "step_ms": row.step_ms,
                **({} if row.spread_pct is None else {"spread_pct": row.spread_pct}),
                **({} if row.peak_bytes is None else {"peak_allocated_gib": row.peak_bytes / GIB}),
                "note": ", ".join(notes),
            }
        )
    return rows


def advice_lines(search: Search, advice: Advice, current: int, training_samples: int) -> list[str]:
    """What the figures mean, and the flags to paste."""
    if search.limited_by == "memory":
        lines = [f"largest batch that fits: {search.largest:,} ({search.smallest_failed:,} does not)"]
    else:
        lines = [f"largest batch tried: {search.largest:,}, and it fits ({search.limited_by})"]
    lines.append(f"best throughput: {advice.best:,} at {advice.samples_per_sec:,.0f} samples/s")
    if advice.enough != advice.best:
        gain = 100 * (advice.samples_per_sec / advice.enough_samples_per_sec - 1)
        lines.append(f"past {advice.enough:,} it stops paying: {advice.best:,} is only {gain:.1f} % faster")
    lines += ["", f"  --data.batch_size {advice.enough}", ""]
    if advice.enough != current:
        steps, steps_now = (max(1, training_samples // size) for size in (advice.enough, current))
        lines += [
            f"An epoch then has {steps:,} optimizer steps, at {current:,} it has {steps_now:,}. "
            "Another number of steps wants another learning rate:",
            f"  python -m project.tune lr --data.batch_size {advice.enough}",
        ]
    return lines


def draw_batch_sizes(path: Path, measured: Sequence[Measured], search: Search, advice: Advice, title: str) -> None:
    """Throughput and peak memory over batch size, the two advised sizes marked, as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullLocator

    sizes = [row.batch_size for row in measured]
    with_memory = [row for row in measured if row.peak_bytes is not None]
    count = 3 if with_memory else 2
    figure = Figure(figsize=(4.2 * count, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, count)
    rates = [row.samples_per_sec for row in measured]
    errors = [rate * (row.spread_pct or 0) / 200 for rate, row in zip(rates, measured, strict=True)]
    panels[0].errorbar(sizes, rates, yerr=errors, marker="o", markersize=4, capsize=2, color="#4477aa")
    panels[0].axhspan((1 - WORTH) * max(rates), max(rates), color="#228833", alpha=0.12, linewidth=0)
    marks = ((advice.best, "#228833", 13, "best throughput"), (advice.enough, "#ee6677", 9, "past it, stops paying"))
    for size, colour, diameter, meaning in marks:
        panels[0].plot(
            size,
            rates[sizes.index(size)],
            marker="o",
            markersize=diameter,
            markeredgewidth=1.5,
            fillstyle="none",
            color=colour,
            linestyle="",
            label=f"{size:,}: {meaning}",
        )
    panels[0].legend(loc="lower right", fontsize=8, frameon=False)
    panels[0].set_ylim(0, 1.15 * max(rates))
    panels[0].set_ylabel("samples per second")
    panels[1].plot(sizes, [row.step_ms for row in measured], marker="o", markersize=4, color="#4477aa")
    panels[1].set_yscale("log")
    panels[1].set_ylabel("milliseconds per step")
    if with_memory:
        memory = [(row.peak_bytes or 0) / GIB for row in with_memory]
        panels[2].plot([row.batch_size for row in with_memory], memory, marker="o", markersize=4, color="#4477aa")
        panels[2].set_yscale("log")
        panels[2].set_ylabel("peak GiB of tensors")
        if search.smallest_failed:
            panels[2].axvline(search.smallest_failed, color="#ee6677", linestyle="--", linewidth=1)
            panels[2].annotate(
                "out of memory",
                (search.smallest_failed, min(memory)),
                (-4, 0),
                color="#ee6677",
                textcoords="offset points",
                rotation=90,
                ha="right",
                fontsize=9,
            )
    for axes in panels:
        axes.set_xscale("log", base=2)
        named = [size for size, after in pairwise([*sizes, math.inf]) if after > 1.3 * size]  # names must not overlap
        axes.set_xticks(named, [f"{size:,}" for size in named], rotation=45, fontsize=8)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("batch size")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_yscale() == "linear":
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=130)


# The largest batch that fits, by doubling and then halving the gap.


FIRST = 16


@dataclass
class Search:
    """What the search found."""

    largest: int = 0  # 0: not even one sample fits
    limited_by: str = "memory"  # or what else kept it from trying larger ones
    tries: list[Measured] = field(default_factory=list)  # those that fitted, in the order they were made
    smallest_failed: int | None = None


def find_largest(
    one_try: Callable[[int], Measured],
    ceiling: int,
    ceiling_name: str,
    max_step_seconds: float,
    tell: Callable[[str], None],
) -> Search:
    """The exact largest batch size for which ``one_try`` does not raise ``torch.OutOfMemoryError``.

    Args:
        one_try: Makes training steps at a batch size.
        ceiling: Largest size to try.
        ceiling_name: What sets it, for the report.
        max_step_seconds: No size is doubled whose step takes longer than half of this: larger ones would not end.
        tell: Is told of every try.
    """
    search = Search()

    def fits(size: int) -> bool:
        try:
            search.tries.append(one_try(size))
        except torch.OutOfMemoryError:
            search.smallest_failed = size
            tell(f"batch size {size:,}: out of memory")
            return False
        search.largest = size
        tell(f"batch size {size:,}: fits, {search.tries[-1].step_ms:,.1f} ms per step")
        return True

    size = min(FIRST, ceiling)
    while fits(size):
        if size == ceiling:
            search.limited_by = ceiling_name
            return search
        if search.tries[-1].step_ms > 500 * max_step_seconds:
            search.limited_by = "larger steps take longer than --max_step_seconds"
            return search
        size = min(2 * size, ceiling)
    failed = size
    while failed - search.largest > 1:
        middle = (search.largest + failed) // 2
        if not fits(middle):
            failed = middle
    return search
