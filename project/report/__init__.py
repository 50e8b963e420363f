"""The run report, ``report.html``: one file with charts, images and styles, no script, no address outside it."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image

from project.engine.checkpoint_files import write_atomically
from project.engine.summary import RunRecord, Series, Summary
from project.loggers import PANELS
from project.report import charts

MOST_PIXELS = 96  # of a mistake's longer side: 24 such colour images are about half a megabyte
MOST_OTHERS = 24  # charts of metrics that no panel names
MOST_CLASSES = 25  # that are listed with their accuracy, the worst ones
PREDICTIONS = "Predictions on the test set"
PARTS = {"train": "train", "val": "validation", "test": "test"}  # first word of a metric's name → label
# Not drawn under "Other metrics": a panel shows them, or the same in another unit
SHOWN = {metric for panel in PANELS for metric in panel.lines} | {
    *("epoch", "throughput/device_samples_per_sec", "throughput/batches_per_sec", "memory/reserved_gib")
}


def write_report(path: Path, record: RunRecord) -> None:
    """Write the report of a run, whole or not at all."""
    write_atomically(render(record).encode(), path)


def render(record: RunRecord) -> str:
    """The report's HTML. Every text in it is escaped; only our style and matplotlib's SVG are markup."""
    here = Path(__file__).parent
    environment = Environment(
        loader=FileSystemLoader(here), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("report.html.j2").render(
        record=record,
        summary=record.summary,
        status=status(record),
        tiles=headline(record),
        sections=chart_sections(record),
        left_out=len(other_metrics(record)) - MOST_OTHERS,
        confusions=record.confusions[:8],
        mistakes=[(png(m.image), record.names[m.label], record.names[m.prediction], m) for m in record.mistakes],
        origin=origin(record.summary),
        style=Markup((here / "report.css").read_text(encoding="utf-8")),
    )


def status(record: RunRecord) -> str:
    """How the run ended."""
    epochs = record.summary.epochs
    if not record.stopped_by:
        return f"finished after {epochs} epoch{'s' if epochs != 1 else ''}"
    of = f" of {record.max_epochs}" if record.max_epochs and record.max_epochs > 0 else ""
    return f"stopped by {record.stopped_by} at step {record.summary.steps:,}, {epochs}{of} epochs done"


def headline(record: RunRecord) -> list[tuple[str, str, str]]:
    """(figure, what it is, more about it), most important first; what is not known is left out."""
    run, metrics = record.summary, record.summary.metrics
    monitor, tiles = run.monitor or "", []
    tested = [name for name in metrics if name.startswith("test")]
    # that of the monitored metric first
    for name in sorted(tested, key=lambda name: name.partition("/")[2] != monitor.partition("/")[2]):
        more = ""
        if name == "test/accuracy" and record.confusion is not None:
            samples = int(record.confusion.sum())
            more = f"{samples - int(record.confusion.trace()):,} wrong of {samples:,}"
        tiles.append((figure(name, metrics[name]), in_words(name), more))
    if run.best_score is not None:
        epoch = "" if run.best_epoch is None else f"best, epoch {run.best_epoch + 1} of {run.epochs}"
        tiles.append((figure(monitor, run.best_score), in_words(monitor), epoch))
    if run.fit_seconds:
        tiles.append((duration(run.fit_seconds), "of training", f"{run.steps:,} steps"))
    if (speed := metrics.get("throughput/samples_per_sec")) is not None:
        wait = metrics.get("throughput/data_wait_pct")
        tiles.append((f"{speed:,.0f}", "samples per second", "" if wait is None else f"{wait:.0f} % waiting for data"))
    for place, metric, more in (("device", "peak_allocated", "allocated"), ("host", "peak_rss", "all processes")):
        if (peak := metrics.get(f"memory/{metric}_gib")) is not None:
            tiles.append((f"{peak:.2f} GiB", f"peak {place} memory", more))
    exact = f"{run.parameters:,}"
    short = f"{run.parameters / 1e6:,.4g} M" if run.parameters >= 1e6 else exact
    return [*tiles, (short, "parameters", exact if short != exact else "")]


def figure(metric: str, value: float) -> str:
    """A metric's value: accuracies in percent, others as they are."""
    return f"{100 * value:.2f} %" if metric.endswith("accuracy") else f"{value:.4g}"


def in_words(metric: str) -> str:
    """``val/top5_accuracy`` → ``validation top5 accuracy``."""
    part, _, rest = metric.partition("/")
    return f"{PARTS.get(part, part)} {rest}".strip().replace("_", " ")


def duration(seconds: float) -> str:
    """``41.3 s``, ``12 min 5 s``, ``3 h 20 min``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def chart_sections(record: RunRecord) -> dict[str, list[tuple[str, Markup]]]:
    """Section → (title, SVG) of its charts; metrics of the user's own get theirs under "Other metrics"."""
    sections: dict[str, list[tuple[str, Markup]]] = {}

    def add(section: str, title: str, svg: str) -> None:
        sections.setdefault(section, []).append((title, Markup(svg)))

    last_step = max((series[-1][0] for series in record.series.values()), default=0)
    epochs = epoch_ends(record)
    for panel in PANELS:
        lines = {label: record.series[metric] for metric, label in panel.lines.items() if metric in record.series}
        if lines and panel.in_report:
            classifier = panel.title == "Loss" and record.confusion is not None
            unit = "cross-entropy (nats)" if classifier else panel.unit or panel.title.lower()
            add(panel.section, panel.title, charts.curves(panel.title, unit, lines, last_step, panel.axis, epochs))
    if record.breakdown:
        mib = [(use, 1024 * gib) for use, gib in record.breakdown.items()]
        add("Memory", "Memory by use", charts.amounts("Memory by use", "MiB on one device", mib))
    for title, lines in list(other_metrics(record).items())[:MOST_OTHERS]:
        add("Other metrics", title, charts.curves(title, "value", lines, last_step, "fitting", epochs))
    if record.confusion is not None:
        add(PREDICTIONS, "Confusion matrix", charts.confusion_matrix(record.confusion, record.names))
        title = "Accuracy per class" + (f", the {MOST_CLASSES} worst" if len(record.names) > MOST_CLASSES else "")
        classes = [(charts.shortened(name), share) for name, share, _ in record.class_accuracy[:MOST_CLASSES]]
        add(PREDICTIONS, title, charts.amounts(title, "accuracy on the test set (fraction)", classes, from_zero=False))
    return sections


def epoch_ends(record: RunRecord) -> dict[int, int]:
    """Number of an epoch that was trained to its end, from 1 → the last step logged in it."""
    rows = record.series.get("epoch", [])
    return {int(epoch) + 1: step for step, epoch in rows if epoch < record.summary.epochs}


def other_metrics(record: RunRecord) -> dict[str, dict[str, Series]]:
    """Chart → label → values: ``train/f1`` and ``val/f1`` share the chart ``f1``."""
    found: dict[str, dict[str, Series]] = {}
    for metric, series in record.series.items():
        part, _, rest = metric.partition("/")
        title, label = (rest, PARTS[part]) if part in PARTS and rest else (metric, metric)
        if metric not in SHOWN:
            found.setdefault(title, {})[label] = series
    return found


def origin(run: Summary) -> list[tuple[str, str]]:
    """(name, value) of what the run ran on, and with which code."""
    state = {True: "files were changed: see uncommitted.diff", False: "clean", None: "not known"}[run.git_dirty]
    rows = [
        ("date", run.date),
        ("hardware", run.hardware),
        ("device", f"{run.device} × {run.world_size}"),
        ("precision", run.precision),
        ("data", run.data_source),
        ("training samples", f"{run.train_samples:,}" if run.train_samples else None),
        ("start-up", f"{run.start_seconds:.1f} s to the first step" if run.start_seconds else None),
        ("git commit", run.git_commit or "not known: the code is in no git checkout"),
        ("git state", state if run.git_commit else None),
        *run.versions.items(),
    ]
    return [(name, value) for name, value in rows if value]


def png(pixels: np.ndarray) -> str:
    """An image, uint8 (height, width, channels), as a ``data:`` address."""
    picture = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else np.ascontiguousarray(pixels[..., :3]))
    picture.thumbnail((MOST_PIXELS, MOST_PIXELS))
    file = io.BytesIO()
    picture.save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
