"""Charts as SVG that takes its colours from the page, light or dark. matplotlib draws them."""

import io
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup, escape
from matplotlib import rc_context, rcParams
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator
from unbroken.results.run_result import Series

STYLE = Path(__file__).with_name("report.mplstyle")
# Epochs that are marked in a chart, and points per line
MOST_EPOCHS = 8
MOST_POINTS = 300
# A line of at most so many points gets dots.
FEW_POINTS = 12
# Where the labels of the axes are, in fractions of the figure
AXIS_LABEL_FROM_BELOW = 0.07
AXIS_LABEL_FROM_THE_LEFT = 0.04
# Classes that are named beside a confusion matrix, and that have their counts written in it
MOST_NAMED_CLASSES = 40
MOST_COUNTED_CLASSES = 16
# Letters of a class's name
MOST_LETTERS = 14
# A colour in report.mplstyle → the page's own, which takes its place
THEME = {
    "#010203": "ink",
    "#040506": "grid",
    "#070809": "line1",
    "#0a0b0c": "line2",
    "#0d0e0f": "line3",
    "#101112": "line4",
}
# The split that the label of a curve begins with → its colour, in every chart of a page
COLOUR_OF_SPLIT = {"train": "#070809", "validation": "#0a0b0c", "test": "#0d0e0f"}
# Of the confusion matrix, from transparent to this much. The page's own colour of text has a
# contrast of at least 4.5 on all its shades, light or dark.
CELL = "#3b82f6"
FULLEST = "b3"


def draw(name: str, paint: Callable[..., None], *facts: Any) -> Markup:
    """What ``paint`` draws of ``facts`` on its axes, as an SVG element.

    ``name`` is for screen readers, and unique in the page.
    """
    text = io.StringIO()
    with rc_context({"svg.hashsalt": name}, STYLE):
        # A figure without pyplot: there is no window, and no global state.
        figure = Figure()
        paint(figure.subplots(), *facts)
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(text, format="svg", metadata=nothing)
    found = re.search(r'(?s)<svg[^>]*(viewBox="[^"]+")[^>]*>(.*)', text.getvalue())
    assert found is not None
    viewbox, body = found.groups()
    # matplotlib's names of groups are the same in every chart.
    body = re.sub(r' id="[a-z]\w*_\d+"', "", body)
    for colour, variable in THEME.items():
        body = body.replace(colour, f"var(--{variable})")
    return Markup(f'<svg {viewbox} role="img" aria-label="{escape(name)}">{body}')


def curves(
    ax: Axes, lines: dict[str, Series], unit: str, axis: str, last_step: int, epochs: dict[int, int]
) -> None:
    """Draw metrics over optimizer steps.

    Args:
        ax: Where.
        lines: Values by label.
        unit: Of the vertical axis.
        axis: A :class:`unbroken.loggers.panels.Panel`'s: ``from zero``, ``fitting`` or ``log``.
        last_step: Where the horizontal axis ends.
        epochs: Number of an epoch, from 1 → its last step.
    """
    for label, series in lines.items():
        draw_line(ax, series, label)
    # A step is a whole number.
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    values = [value for series in lines.values() for _, value in series]
    # A logarithmic axis helps only where values span a factor of ten.
    logarithmic = axis == "log" and min(values) > 0 and max(values) > 10 * min(values)
    ax.set_xlabel("optimizer step")
    ax.set_ylabel(f"{unit}, log scale" if logarithmic else unit)
    place_axis_labels(ax)
    ax.set_xlim(0, max(1, last_step) * 1.02)
    if logarithmic:
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_formatter("")
    if axis == "from zero" and min(values) >= 0:
        ax.set_ylim(0, 1.12 * max(values) or 1)
    if epochs:
        mark_epochs(ax, epochs)
    if len(lines) > 1:
        ax.legend()


def place_axis_labels(ax: Axes) -> None:
    """Put the labels of the axes, once they are written, at the figure's edge: the margins of
    report.mplstyle leave room for them.

    matplotlib can find their place itself. That takes it as long as to draw the chart.
    """
    # In fractions of the figure, as are the two places at its edge.
    axes = ax.get_position()
    whole = ax.figure.transFigure
    middle_x = (axes.x0 + axes.x1) / 2
    middle_y = (axes.y0 + axes.y1) / 2
    ax.xaxis.set_label_coords(middle_x, AXIS_LABEL_FROM_BELOW, transform=whole)
    ax.yaxis.set_label_coords(AXIS_LABEL_FROM_THE_LEFT, middle_y, transform=whole)


def draw_line(ax: Axes, series: Series, label: str) -> None:
    """Draw one metric. Of more points than can be told apart, each is the mean of neighbours."""
    points = np.array(series, dtype=float)  # (points, 2)
    parts = np.array_split(points, min(len(series), MOST_POINTS))
    steps, values = np.array([part.mean(axis=0) for part in parts]).T
    # Few values, such as one per epoch, get dots: a single one would not be seen as a line.
    marker = None
    size = 0
    if len(steps) == 1:
        marker = "D"
        size = 5
    elif len(steps) <= FEW_POINTS:
        marker = "o"
        size = 3
    colour = COLOUR_OF_SPLIT.get(label.partition(",")[0])
    # Values within epochs stand behind the means at their ends.
    width = 0.7 if "," in label and colour else None
    ax.plot(
        steps,
        values,
        label=label,
        color=colour,
        linewidth=width,
        marker=marker,
        markersize=size,
        clip_on=False,
    )


def mark_epochs(ax: Axes, epochs: dict[int, int]) -> None:
    """Draw a light vertical line at the end of each epoch, or of every so many; its number
    above.
    """
    apart = math.ceil(len(epochs) / MOST_EPOCHS)
    shown = {str(epoch): step for epoch, step in epochs.items() if epoch % apart == 0}
    ax.grid(axis="x", visible=False)
    for name, step in shown.items():
        ax.axvline(step, color=rcParams["grid.color"], linewidth=0.6, linestyle="--", zorder=0.5)
        # Across, the place is a step; upwards, it is a share of the axis, just above it.
        above = ax.get_xaxis_transform()
        ax.text(step, 1.01, name, transform=above, ha="center", va="bottom", fontsize=8)
    ax.text(0.5, 1.09, "end of epoch", transform=ax.transAxes, ha="center", fontsize=8)


def shortened(name: str) -> str:
    """A class's name, shortened to fit beside a chart."""
    return name if len(name) <= MOST_LETTERS else name[: MOST_LETTERS - 1] + "…"


def amounts(
    ax: Axes, rows: Sequence[tuple[str, float]], unit: str, are_fractions: bool = False
) -> None:
    """Draw named amounts as bars, one under the other, each with its value. The axis of fractions
    goes from 0 to 1.
    """
    ax.figure.set(figheight=0.8 + 0.3 * len(rows))
    leave_room_for_names(ax)
    places = range(len(rows))
    # Fractions that stand one under the other have as many digits each.
    digits = ".3f" if are_fractions else ".3g"
    labels = [label for label, _ in rows]
    values = [value for _, value in rows]
    ax.barh(places, values, height=0.6)
    for place, value in enumerate(values):
        text = f"{value:{digits}}"
        ax.annotate(text, (value, place), (6, 0), textcoords="offset points", va="center")
    ax.set_yticks(places, labels)
    ax.invert_yaxis()
    ax.margins(x=0.2, y=0.06)
    if are_fractions:
        ax.set_xlim(0, 1)
    ax.grid(axis="y", visible=False)
    ax.set_xlabel(unit)


def confusion_matrix(ax: Axes, counts: np.ndarray, names: Sequence[str]) -> None:
    """Draw labels (rows) against predictions; the colour grows with the cube root of the count."""
    ax.figure.set(figheight=0.93 * rcParams["figure.figsize"][0])
    leave_room_for_names(ax)
    classes = len(names)
    shades = LinearSegmentedColormap.from_list("shades", [CELL + "00", CELL + FULLEST])
    # Without the root only the diagonal would be seen.
    root = PowerNorm(1 / 3, vmin=0, vmax=max(1, counts.max()))
    ax.imshow(counts, cmap=shades, norm=root, interpolation="none")
    if classes <= MOST_COUNTED_CLASSES:
        write_counts(ax, counts)
    ax.set(xlabel="predicted class", ylabel="true class", xticks=[], yticks=[])
    if classes <= MOST_NAMED_CLASSES:
        name_classes(ax, names)
    ax.grid(visible=False)
    ax.tick_params(length=0, labelsize=min(8, 240 / classes))


def leave_room_for_names(ax: Axes) -> None:
    """Have matplotlib find the margins: names of classes, of any length, stand beside the axes."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    figure.set_layout_engine("constrained")


def write_counts(ax: Axes, counts: np.ndarray) -> None:
    """Write each count above 0 into its cell."""
    size = min(8, 84 / len(counts))
    for (row, column), count in np.ndenumerate(counts):
        if count:
            ax.text(column, row, str(count), ha="center", va="center", fontsize=size)


def name_classes(ax: Axes, names: Sequence[str]) -> None:
    """Name the rows and columns; long names are turned below the columns."""
    labels = [shortened(name) for name in names]
    turned: dict[str, Any] = {}
    if max(len(name) for name in names) > 2:
        turned = {"rotation": 45, "ha": "right"}
    ax.set_xticks(range(len(names)), labels, **turned)
    ax.set_yticks(range(len(names)), labels)
