"""From measured batch sizes to a table, a picture and advice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from project.hardware import GIB
from project.tuning.largest_batch import FIRST, Search
from project.tuning.training_steps import Measured

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
