"""Which charts the report shows of which metrics, and its headline figures."""

from __future__ import annotations

from typing import Any, NamedTuple

from project.report import charts
from project.report.record import RunRecord


class Curves(NamedTuple):
    """A chart of metrics over steps. It is left out where none of them was logged."""

    title: str
    unit: str
    lines: dict[str, str]  # metric → label
    axis: charts.VerticalAxis = "from zero"


CURVES: dict[str, list[Curves]] = {
    "Training": [
        Curves(
            "Loss",
            "cross-entropy (nats)",
            {"train/loss": "train", "val/loss": "validation", "test/loss": "test"},
            axis="log",
        ),
        Curves(
            "Accuracy",
            "share that is right (0–1)",
            {"train/accuracy": "train", "val/accuracy": "validation", "test/accuracy": "test"},
            axis="fitting",
        ),
        Curves("Learning rate", "learning rate", {"optimizer/lr": "learning rate"}),
        Curves("Gradient norm", "L2 norm before clipping", {"optimizer/grad_norm": "gradient norm"}),
        Curves("Loss scale", "factor of the loss", {"optimizer/loss_scale": "loss scale"}),
    ],
    "Throughput": [
        Curves("Throughput", "training samples / second", {"throughput/samples_per_sec": "samples/s"}),
        Curves("Data wait", "share of the time (%)", {"throughput/data_wait_pct": "waiting for data"}),
        Curves("Step time", "ms / optimizer step", {"throughput/step_ms": "step"}),
        Curves(
            "GPU",
            "share (%)",
            {"throughput/gpu_utilization_pct": "a kernel runs", "throughput/mfu_pct": "model FLOPs utilization"},
        ),
    ],
    "Memory": [
        Curves(
            "Device memory",
            "GiB",
            {
                "memory/peak_reserved_gib": "peak reserved",
                "memory/peak_allocated_gib": "peak allocated",
                "memory/allocated_gib": "allocated",
            },
        ),
        Curves("Host memory", "GiB resident, all processes", {"memory/rss_gib": "resident"}),
    ],
}
# Drawn above, or another view of what is
SHOWN = {metric for group in CURVES.values() for chart in group for metric in chart.lines} | {
    "throughput/device_samples_per_sec",
    "throughput/batches_per_sec",
    "memory/reserved_gib",
    "memory/peak_reserved_pct",
}
MOST_OTHERS = 12


def chart_sections(record: RunRecord) -> dict[str, list[tuple[str, str]]]:
    """Section → (title, SVG) of its charts; a metric of the user's own gets a chart under "Other metrics"."""
    sections: dict[str, list[tuple[str, str]]] = {}
    last_step = max((series[-1][0] for series in record.metrics.values()), default=0)
    for section, group in CURVES.items():
        for chart in group:
            lines = {label: record.metrics[metric] for metric, label in chart.lines.items() if metric in record.metrics}
            if lines:
                svg = charts.curves(chart.title, chart.unit, lines, last_step, chart.axis)
                sections.setdefault(section, []).append((chart.title, svg))
    if record.breakdown:
        svg = charts.bars("Memory by use", "MiB on one device", {k: 1024 * gib for k, gib in record.breakdown.items()})
        sections.setdefault("Memory", []).append(("Memory by use", svg))
    for metric in [name for name in record.metrics if name not in SHOWN][:MOST_OTHERS]:
        svg = charts.curves(metric, metric, {metric: record.metrics[metric]}, last_step, "fitting")
        sections.setdefault("Other metrics", []).append((metric, svg))
    return sections


def headline(record: RunRecord) -> list[tuple[str, str, str]]:
    """(figure, what it is, more about it), most important first; what is not known is left out."""
    facts = record.facts
    tiles: list[tuple[str, str, str]] = []
    if (test := facts.get("test/accuracy")) is not None:
        more = ""
        if record.confusion is not None:
            samples = int(record.confusion.sum())
            more = f"{samples - int(record.confusion.trace()):,} wrong of {samples:,}"
        tiles.append((f"{100 * test:.2f} %", "test accuracy", more))
    if (best := facts.get("val/accuracy")) is not None:
        tiles.append((f"{100 * best:.2f} %", "validation accuracy", f"best, epoch {facts['best_epoch'] + 1}"))
    if facts.get("fit_seconds"):
        more = f"{facts['steps']:,} steps" + (f", {facts['epochs']} epochs" if facts.get("epochs") else "")
        tiles.append((duration(facts["fit_seconds"]), "of training", more))
    if (speed := facts.get("throughput/samples_per_sec")) is not None:
        wait = facts.get("throughput/data_wait_pct")
        tiles.append((f"{speed:,.0f}", "samples per second", "" if wait is None else f"{wait:.0f} % waiting for data"))
    if (peak := facts.get("memory/peak_allocated_gib")) is not None:
        tiles.append((f"{peak:.2f} GiB", "peak device memory", "allocated"))
    if (peak := facts.get("memory/peak_rss_gib")) is not None:
        tiles.append((f"{peak:.2f} GiB", "peak host memory", "all processes"))
    if (parameters := facts.get("parameters")) is not None:
        tiles.append((short(parameters), "parameters", f"{parameters:,}" if parameters >= 1e6 else ""))
    return tiles


def duration(seconds: float) -> str:
    """``41.3 s``, ``12 min 5 s``, ``3 h 20 min``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def short(number: int) -> str:
    """``235,146``, ``1.23 M``, ``7.1 G``."""
    for unit, size in (("G", 1e9), ("M", 1e6)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:,}"


def origin(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """(name, value) of what the run ran on, and with which code."""
    commit = facts.get("git_commit")
    rows = [
        ("device", f"{facts['device']} × {facts['world_size']}" if facts.get("device") else None),
        ("precision", facts.get("precision")),
        ("data", facts.get("data_source")),
        ("training samples", f"{facts['train_samples']:,}" if facts.get("train_samples") else None),
        ("start-up", f"{facts['start_seconds']:.1f} s to the first step" if facts.get("start_seconds") else None),
        ("git commit", commit.removesuffix("-dirty") if commit else "not known: the code is in no git checkout"),
        ("git state", None if not commit else "files were changed" if commit.endswith("-dirty") else "clean"),
        *((name, version) for name, version in (facts.get("versions") or {}).items()),
    ]
    return [(name, str(value)) for name, value in rows if value]
