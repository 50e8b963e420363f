"""The run report, ``report.html``: one file with charts, images and styles, no script, no address outside it. Its
charts are matplotlib figures as SVG that takes its colours from the page, light or dark.
"""

import base64
import io
import math
import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from matplotlib import rc_context, rcParams
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from PIL import Image

from project.engine.summary import RunRecord, Series
from project.loggers import PANELS, PARTS

HERE = Path(__file__).parent
MOST_PIXELS = 96  # of a mistake's longer side: 24 such colour images are about half a megabyte
MOST_OTHERS = 24  # charts of metrics that no panel names
MOST_CLASSES = 25  # that are listed with their accuracy, the worst ones
PREDICTIONS = "Predictions on the test set"
# Not drawn under "Other metrics": a panel shows them, or the same in another unit
SHOWN = {
    "epoch",
    "throughput/device_samples_per_sec",
    "throughput/batches_per_sec",
    "memory/reserved_gib",
}
SHOWN |= {metric for panel in PANELS for metric in panel.lines}

MOST_EPOCHS, MOST_POINTS = 8, 300  # marked in a chart; per line
MOST_NAMED_CLASSES, MOST_COUNTED_CLASSES, MOST_LETTERS = 40, 16, 14
# A colour in report.mplstyle → the page's, which replaces it
THEME = {"#010203": "ink", "#040506": "grid"}
THEME |= {"#070809": "line1", "#0a0b0c": "line2", "#0d0e0f": "line3", "#101112": "line4"}
CELL = "#3b82f6"  # of the confusion matrix, from transparent to full; legible on white and on black


def render(record: RunRecord) -> str:
    """The report's HTML. Every text in it is escaped; only our style and matplotlib's SVG are markup."""
    monitored = (record.summary.monitor or "").partition("/")[2]
    tested = [name for name in record.summary.metrics if name.startswith("test")]
    return fill_page(
        "report.html.j2",
        record=record,
        tested=sorted(
            tested, key=lambda name: name.partition("/")[2] != monitored
        ),  # the monitored metric first
        sections=chart_sections(record),
        left_out=len(other_metrics(record)) - MOST_OTHERS,
        mistakes=[
            (png(m.image), record.names[m.label], record.names[m.prediction], m)
            for m in record.mistakes
        ],
        parts=PARTS,
        timedelta=timedelta,
    )


def fill_page(template: str, **facts: Any) -> str:
    """One of the templates beside this file, filled in; every text is escaped."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.loader = FileSystemLoader(HERE)
    return environment.get_template(template).render(facts)


def chart_sections(record: RunRecord) -> dict[str, list[tuple[str, Markup]]]:
    """Section → (title, SVG) of its charts; metrics of the user's own get theirs under "Other metrics"."""
    sections: dict[str, list[tuple[str, Markup]]] = {}

    def add(section: str, title: str, paint: Callable[..., None], *facts: Any) -> None:
        sections.setdefault(section, []).append((title, draw(title, paint, *facts)))

    last_step = max((series[-1][0] for series in record.series.values()), default=0)
    rows = record.series.get("epoch", [])
    epochs = {
        int(epoch) + 1: step for step, epoch in rows if epoch < record.summary.epochs
    }  # trained to their ends
    for panel in PANELS:
        lines = {
            label: record.series[metric]
            for metric, label in panel.lines.items()
            if metric in record.series
        }
        if lines and panel.in_report:
            classifier = panel.title == "Loss" and record.confusion is not None
            unit = "cross-entropy (nats)" if classifier else panel.unit or panel.title.lower()
            add(panel.section, panel.title, curves, lines, unit, panel.axis, last_step, epochs)
    if record.breakdown:
        mib = [(use, 1024 * gib) for use, gib in record.breakdown.items()]
        add("Memory", "Memory by use", amounts, mib, "MiB on one device")
    for title, lines in list(other_metrics(record).items())[:MOST_OTHERS]:
        add("Other metrics", title, curves, lines, "value", "fitting", last_step, epochs)
    if record.confusion is not None:
        add(PREDICTIONS, "Confusion matrix", confusion_matrix, record.confusion, record.names)
        title = "Accuracy per class" + (
            f", the {MOST_CLASSES} worst" if len(record.names) > MOST_CLASSES else ""
        )
        classes = [
            (shortened(name), share) for name, share, _ in record.class_accuracy[:MOST_CLASSES]
        ]
        add(PREDICTIONS, title, amounts, classes, "accuracy on the test set (fraction)", False)
    return sections


def other_metrics(record: RunRecord) -> dict[str, dict[str, Series]]:
    """Chart → label → values: ``train/f1`` and ``val/f1`` share the chart ``f1``."""
    found: dict[str, dict[str, Series]] = {}
    for metric, series in record.series.items():
        part, _, rest = metric.partition("/")
        title, label = (rest, PARTS[part]) if part in PARTS and rest else (metric, metric)
        if metric not in SHOWN:
            found.setdefault(title, {})[label] = series
    return found


def png(pixels: np.ndarray) -> str:
    """An image, uint8 (height, width, channels), as a ``data:`` address."""
    picture = Image.fromarray(
        pixels[..., 0] if pixels.shape[2] == 1 else np.ascontiguousarray(pixels[..., :3])
    )
    picture.thumbnail((MOST_PIXELS, MOST_PIXELS))
    file = io.BytesIO()
    picture.save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def draw(name: str, paint: Callable[..., None], *facts: Any) -> Markup:
    """What ``paint`` draws of ``facts`` on its axes, as an SVG element; ``name``, for screen readers, is unique."""
    with rc_context({"svg.hashsalt": name}, HERE / "report.mplstyle"):
        figure, text = Figure(), io.StringIO()  # without pyplot: no window, no global state
        paint(figure.subplots(), *facts)
        figure.savefig(
            text, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
        )
    viewbox, body = re.findall(r'(?s)<svg[^>]*(viewBox="[^"]+")[^>]*>(.*)', text.getvalue())[0]
    body = re.sub(
        r' id="[a-z]\w*_\d+"', "", body
    )  # matplotlib's group names are the same in every chart
    for colour, variable in THEME.items():
        body = body.replace(colour, f"var(--{variable})")
    return Markup(f'<svg {viewbox} role="img" aria-label="{escape(name)}">{body}')


def curves(
    ax: Axes, lines: dict[str, Series], unit: str, axis: str, last_step: int, epochs: dict[int, int]
) -> None:
    """Metrics by label over optimizer steps. ``axis`` is a :class:`Panel`'s; ``epochs``: number from 1 → last step."""
    for label, series in lines.items():
        # where there are more points than could be told apart, each is the mean of neighbours
        parts = np.array_split(
            np.array(series, dtype=float), min(len(series), MOST_POINTS)
        )  # of (points, 2)
        steps, values = np.array([part.mean(axis=0) for part in parts]).T
        # few values, such as one per epoch, get dots: a single one would not be seen as a line
        marker, size = ("D", 5) if len(steps) == 1 else ("o", 3) if len(steps) <= 12 else (None, 0)
        ax.plot(steps, values, label=label, marker=marker, markersize=size, clip_on=False)
    every = [value for series in lines.values() for _, value in series]
    logarithmic = axis == "log" and min(every) > 0 and max(every) > 10 * min(every)
    ax.set(xlabel="optimizer step", ylabel=f"{unit}, log scale" if logarithmic else unit)
    ax.set_xlim(0, max(1, last_step) * 1.02)
    if logarithmic:
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_formatter("")
    else:
        ax.ticklabel_format(axis="y", scilimits=(-3, 6))
    if axis == "from zero" and min(every) >= 0:
        ax.set_ylim(0, 1.12 * max(every) or 1)
    if epochs:
        mark_epochs(ax, epochs)
    if len(lines) > 1:
        ax.legend()


def mark_epochs(ax: Axes, epochs: dict[int, int]) -> None:
    """A light vertical line at the end of each epoch, or of every so many; its number above."""
    apart = math.ceil(len(epochs) / MOST_EPOCHS)
    shown = {str(epoch): step for epoch, step in epochs.items() if epoch % apart == 0}
    ax.grid(axis="x", visible=False)
    for step in shown.values():
        ax.axvline(step, color=rcParams["grid.color"], linewidth=0.6, linestyle="--", zorder=0.5)
    top = ax.secondary_xaxis("top")
    top.set_xticks([*shown.values()], [*shown])
    top.tick_params(length=0, pad=1)
    top.spines["top"].set_visible(False)
    top.set_xlabel("end of epoch", fontsize=8)


def shortened(name: str) -> str:
    """A class's name, shortened to fit beside a chart."""
    return name if len(name) <= MOST_LETTERS else name[: MOST_LETTERS - 1] + "…"


def amounts(ax: Axes, rows: Sequence[tuple[str, float]], unit: str, from_zero: bool = True) -> None:
    """Named amounts, one under the other, each with its value: bars from zero, or dots on an axis that fits them."""
    ax.figure.set(figheight=0.8 + 0.3 * len(rows))
    places, values = range(len(rows)), [value for _, value in rows]
    if from_zero:
        ax.barh(places, values, height=0.6)
    else:
        ax.plot(values, places, "o", markersize=5)
    for place, value in enumerate(values):
        ax.annotate(f"{value:.3g}", (value, place), (6, 0), textcoords="offset points", va="center")
    ax.set_yticks(places, [label for label, _ in rows])
    ax.invert_yaxis()
    ax.margins(x=0.2, y=0.06)
    ax.grid(axis="y", visible=not from_zero)
    ax.set_xlabel(unit)


def confusion_matrix(ax: Axes, counts: np.ndarray, names: Sequence[str]) -> None:
    """Labels (rows) against predictions; the colour grows with the cube root of the count."""
    ax.figure.set(figheight=0.93 * rcParams["figure.figsize"][0])
    classes, labels = len(names), [shortened(name) for name in names]
    shades = LinearSegmentedColormap.from_list("shades", [CELL + "00", CELL + "ff"])
    root = PowerNorm(1 / 3, vmin=0, vmax=max(1, counts.max()))  # else only the diagonal is seen
    ax.imshow(counts, cmap=shades, norm=root, interpolation="none")
    size = min(8, 84 / classes)
    for (row, column), count in np.ndenumerate(counts) if classes <= MOST_COUNTED_CLASSES else ():
        colour = "white" if 4 * count > counts.max() else None  # shade above 0.63
        ax.text(
            column, row, str(count or ""), ha="center", va="center", fontsize=size, color=colour
        )
    ax.set(xlabel="predicted class", ylabel="true class", xticks=[], yticks=[])
    if classes <= MOST_NAMED_CLASSES:
        turned: dict[str, Any] = {"rotation": 45, "ha": "right"} if max(map(len, names)) > 2 else {}
        ax.set_xticks(range(classes), labels, **turned)
        ax.set_yticks(range(classes), labels)
    ax.grid(visible=False)
    ax.tick_params(length=0, labelsize=min(8, 240 / classes))
