"""The report's charts: matplotlib figures as SVG that takes its colours from the page, light or dark."""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from project.engine.summary import Series

WIDTH, HEIGHT = 4.2, 2.7  # inches: legible when a phone scales them to its width
MOST_EPOCHS = 8  # that are marked in a chart
MOST_POINTS = 300  # per line; more cannot be told apart at this width
MOST_NAMED_CLASSES, MOST_COUNTED_CLASSES, MOST_LETTERS = 40, 16, 14
# Stand-ins for the page's colours, which replace them: see THEME.
INK, FAINT, LINES = "#010203", "#040506", ("#070809", "#0a0b0c", "#0d0e0f", "#101112")
THEME = {INK: "var(--ink)", FAINT: "var(--grid)", **{line: f"var(--line{i})" for i, line in enumerate(LINES, 1)}}
CELL = "#3b82f6"  # of the confusion matrix, from transparent to full; legible on white and on black
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: the page's font, selectable, small
    "text.parse_math": False,  # a metric's name may hold dollar signs
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("axes.edgecolor", "grid.color"), FAINT),
    **dict.fromkeys(("font.size", "axes.labelsize"), 8.5),
    **dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize"), 8),
    **dict.fromkeys(("axes.grid", "axes.axisbelow"), True),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.6,
}


def draw(name: str, paint: Callable[[Axes], None], height: float = HEIGHT) -> str:
    """A chart as an SVG element: what ``paint`` draws on one pair of axes, ``height`` inches high.

    ``name`` is what a screen reader calls it; it must be another one for each chart of a page.
    """
    with rc_context({**STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")  # without pyplot: no window, no global state
        paint(figure.subplots())
        text = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(text, format="svg", transparent=True, metadata=nothing)
    # matplotlib's group names are the same in every chart
    svg = re.sub(r' id="[a-z]\w*_\d+"', "", text.getvalue().partition("<svg")[2])
    for colour, variable in THEME.items():
        svg = svg.replace(colour, variable)
    head, _, body = svg.partition(">")
    viewbox = re.findall(r'viewBox="[^"]+"', head)[0]
    return f'<svg {viewbox} role="img" aria-label="{html.escape(name)}">{body}'


def curves(
    name: str,
    unit: str,
    lines: dict[str, Series],
    last_step: int,
    axis: Literal["from zero", "fitting", "log"] = "from zero",
    epochs: dict[int, int] | None = None,
) -> str:
    """Metrics over optimizer steps: ``lines`` are label → values, ``unit`` labels the vertical axis.

    The horizontal axis ends at ``last_step``, in all charts of a run; the vertical one is logarithmic only where values
    span more than a factor of ten. ``epochs``, number from 1 → last step, are marked above the chart.
    """

    def paint(ax: Axes) -> None:
        for (label, series), colour in zip(lines.items(), LINES, strict=False):
            steps, values = thinned(series)
            # few values, such as one per epoch, get dots: a single one would not be seen as a line
            marker, size = ("D", 5) if len(steps) == 1 else ("o", 3) if len(steps) <= 12 else (None, 0)
            ax.plot(steps, values, color=colour, label=label, marker=marker, markersize=size, clip_on=False)
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

    return draw(name, paint)


def mark_epochs(ax: Axes, epochs: dict[int, int]) -> None:
    """A light vertical line at the end of each epoch, or of every so many; its number above."""
    apart = math.ceil(len(epochs) / MOST_EPOCHS)
    shown = {epoch: step for epoch, step in epochs.items() if epoch % apart == 0}
    ax.grid(axis="x", visible=False)
    for step in shown.values():
        ax.axvline(step, color=FAINT, linewidth=0.6, linestyle="--", zorder=0.5)
    top = ax.secondary_xaxis("top")
    top.set_xticks(list(shown.values()), [str(epoch) for epoch in shown])
    top.tick_params(length=0, pad=1)
    top.spines["top"].set_visible(False)
    top.set_xlabel("end of epoch", fontsize=8)


def thinned(series: Series) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values, each point the mean of neighbours where there are more than ``MOST_POINTS``."""
    points = np.array(series, dtype=float)  # (points, 2)
    if len(points) > MOST_POINTS:
        points = np.array([part.mean(axis=0) for part in np.array_split(points, MOST_POINTS)])
    return points[:, 0], points[:, 1]


def shortened(name: str) -> str:
    """A class's name, shortened to fit beside a chart."""
    return name if len(name) <= MOST_LETTERS else name[: MOST_LETTERS - 1] + "…"


def amounts(name: str, unit: str, rows: Sequence[tuple[str, float]], from_zero: bool = True) -> str:
    """Named amounts, one under the other, each with its value: bars from zero, or dots on an axis that fits them."""

    def paint(ax: Axes) -> None:
        places, values = range(len(rows)), [value for _, value in rows]
        if from_zero:
            ax.barh(places, values, color=LINES[0], height=0.6)
        else:
            ax.plot(values, places, "o", color=LINES[0], markersize=5)
        for place, value in zip(places, values, strict=True):
            ax.annotate(f"{value:.3g}", (value, place), (6, 0), textcoords="offset points", va="center")
        ax.set_yticks(places, [label for label, _ in rows])
        ax.invert_yaxis()
        ax.margins(x=0.2, y=0.06)
        ax.grid(axis="y", visible=not from_zero)
        ax.set_xlabel(unit)

    return draw(name, paint, height=0.8 + 0.3 * len(rows))


def confusion_matrix(counts: np.ndarray, names: Sequence[str]) -> str:
    """Labels (rows) against predictions; the colour grows with the cube root of the count."""
    classes, labels = len(names), [shortened(name) for name in names]

    def paint(ax: Axes) -> None:
        shades = LinearSegmentedColormap.from_list("shades", [CELL + "00", CELL + "ff"])
        root = PowerNorm(1 / 3, vmin=0, vmax=max(1, counts.max()))  # else only the diagonal is seen
        ax.imshow(counts, cmap=shades, norm=root, interpolation="none")
        size = min(8, 84 / classes)
        for (row, column), count in np.ndenumerate(counts) if classes <= MOST_COUNTED_CLASSES else ():
            colour = "white" if 4 * count > counts.max() else INK  # shade above 0.63
            ax.text(column, row, str(count or ""), ha="center", va="center", fontsize=size, color=colour)
        ax.set(xlabel="predicted class", ylabel="true class", xticks=[], yticks=[])
        if classes <= MOST_NAMED_CLASSES:
            turned: dict[str, Any] = {"rotation": 45, "ha": "right"} if max(map(len, names)) > 2 else {}
            ax.set_xticks(range(classes), labels, **turned)
            ax.set_yticks(range(classes), labels)
        ax.grid(visible=False)
        ax.tick_params(length=0, labelsize=min(8, 240 / classes))

    return draw("Confusion matrix", paint, height=0.93 * WIDTH)
