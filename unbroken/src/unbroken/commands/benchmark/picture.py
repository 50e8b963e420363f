"""The tables as one picture."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from unbroken.tables import MADE_BY, Row, format_cell

# Above this ratio of the largest to the smallest value, the axis is logarithmic.
WIDE_RANGE = 50


def draw(path: Path, tables: dict[str, list[Row]], quantities: dict[str, str], title: str) -> None:
    """A panel per table, a bar per row. ``quantities``: table → the column that is drawn."""
    heights = [max(1.2, 0.28 * len(rows)) for rows in tables.values()]
    height = sum(heights) + 1.1 * len(tables) + 0.5
    figure = Figure(figsize=(10, height), layout="constrained")
    grid = {"height_ratios": heights}
    panels = figure.subplots(len(tables), 1, squeeze=False, gridspec_kw=grid)[:, 0]
    for axes, name in zip(panels, tables, strict=True):
        quantity = quantities[name]
        drawn = [row for row in tables[name] if row.get(quantity) is not None]
        # There are none of such as a compiled network's memory on a CPU.
        if drawn:
            draw_bars(axes, name, quantity, drawn)
    figure.suptitle(title, fontsize=7)
    figure.savefig(path, dpi=120, metadata=MADE_BY)


def draw_bars(axes: Axes, table: str, quantity: str, rows: Sequence[Row]) -> None:
    """A bar per row, named by what tells it from the others."""
    naming = naming_columns(rows, quantity)
    names = [", ".join(format_cell(row.get(column)) for column in naming) for row in rows]
    values = [row[quantity] for row in rows]
    errors = [row[quantity] * row.get("spread_pct", 0) / 200 for row in rows]
    axes.barh(
        range(len(rows)), values, xerr=errors, tick_label=names, color="#4477aa", ecolor="#999999"
    )
    axes.invert_yaxis()
    axes.set_title(f"{table}: {quantity} by {', '.join(naming)}", loc="left", fontsize=10)
    is_wide = max(values) > WIDE_RANGE * max(min(values), 1e-9)
    axes.set_xscale("log" if is_wide else "linear")


def naming_columns(rows: Sequence[Row], quantity: str) -> list[str]:
    """The columns in which rows differ, of those that say what was measured."""
    columns = list(rows[0])
    # They stand before the measured quantity.
    before = columns[: columns.index(quantity)]
    differing = [name for name in before if any(row.get(name) != rows[0][name] for row in rows)]
    return differing or before[:1]
