"""The tables as one picture: a panel per table, a bar per row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# Table → the quantity drawn, its axis label, and the columns that name a row.
PANELS = {
    "devices": ("samples_per_sec", "samples per second", ("device", "network", "precision", "batch_size")),
    "loaders": ("ms_per_batch", "milliseconds per batch", ("loader",)),
    "memory": (
        "peak_mib",
        "peak MiB",
        ("device", "precision", "activation_checkpointing", "accumulation", "batch_size"),
    ),
    "overhead": ("epoch_s", "seconds per epoch", ("loop",)),
    "threads": ("step_ms", "milliseconds per step", ("threads", "wait_policy", "beside")),
    "accuracy": ("test/accuracy", "test accuracy", ("configuration",)),
}


def draw(path: Path, tables: dict[str, list[dict[str, Any]]], facts: dict[str, Any]) -> None:
    """Write the chart as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from project.benchmark.conditions import one_line

    heights = [max(1.2, 0.28 * len(rows)) for rows in tables.values()]
    figure = Figure(figsize=(10, sum(heights) + 1.1 * len(tables) + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(tables), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for axes, (table, rows) in zip(panels, tables.items(), strict=True):
        quantity, label, naming = PANELS[table]
        drawn = [row for row in rows if row.get(quantity) is not None]
        names = [" ".join(_word(key, row[key]) for key in naming if key in row) for row in drawn]
        values = [row[quantity] for row in drawn]
        errors = [value * row.get("spread_pct", 0) / 200 for value, row in zip(values, drawn, strict=True)]
        places = range(len(drawn))
        axes.barh(places, values, xerr=errors if any(errors) else None, color="#4477aa", ecolor="#999999", height=0.7)
        axes.set_yticks(places, names, fontsize=8)
        axes.invert_yaxis()
        axes.set_title(table, loc="left", fontsize=10)
        axes.set_xlabel(label, fontsize=8)
        if values and max(values) > 50 * max(min(values), 1e-9):
            axes.set_xscale("log")
        axes.grid(axis="x", alpha=0.3)
    figure.suptitle(one_line(facts), fontsize=7)
    figure.savefig(path, dpi=120)


def _word(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return key.replace("_", " ") if value else ""
    return f"{key.replace('_', ' ')} {value}" if isinstance(value, int) else str(value)
