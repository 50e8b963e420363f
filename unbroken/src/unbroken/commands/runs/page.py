"""The page that compares runs: a chart per metric with a line per run, and tables."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup
from unbroken.commands.runs.listing import by_module, differing, shown_settings
from unbroken.commands.runs.saved_run import SavedRun
from unbroken.commands.runs.seeds import by_configuration, seed_rows
from unbroken.report.charts import draw, place_axis_labels
from unbroken.report.page import fill_page
from unbroken.results.run_result import Series, read_series
from unbroken.tables import Row, columns_of, format_cell

TEMPLATE = Path(__file__).with_name("page.html.j2")
# Of configurations, legible on white and on black. Further ones have the same colours, dashed.
COLOURS = (
    "#4c8bf5",
    "#e8710a",
    "#1e9e5a",
    "#c2379a",
    "#8a6de9",
    "#b8860b",
    "#d93025",
    "#12a4af",
)
DASHES = ("-", "--", ":")
# A chart takes a tenth of a second to draw. Nobody looks through more.
MOST_CHARTS = 60
# Of all charts of a run together. Of more, a chart keeps what can be seen.
MOST_POINTS = 50_000
# Columns of the table of metrics that have a single value
MOST_SINGLE = 1_000
# How the names of metrics begin that are not drawn
NOT_DRAWN = ("epoch", "test", "throughput/", "memory/", "optimizer/")


@dataclass
class Line:
    """A run in the charts: its colour and dashes are those of its configuration."""

    run: SavedRun
    colour: str
    dashes: str
    # By metric
    series: dict[str, Series]


def render(runs: Sequence[SavedRun]) -> str:
    """The page's HTML. Every text of a run is escaped; the charts, which are not, hold numbers."""
    lines = make_lines(runs)
    return fill_page(
        TEMPLATE,
        date=time.strftime("%Y-%m-%d %H:%M"),
        lines=lines,
        charts=draw_charts(lines),
        tables=make_tables(runs, lines),
        columns=columns_of,
        cell=format_cell,
    )


def make_lines(runs: Sequence[SavedRun]) -> list[Line]:
    """A line per run, runs of one configuration one after the other."""
    lines = []
    for place, (_, group) in enumerate(by_configuration(runs)):
        colour = COLOURS[place % len(COLOURS)]
        dashes = DASHES[place // len(COLOURS) % len(DASHES)]
        lines += [Line(run, colour, dashes, series_of(run)) for run in group]
    return lines


def series_of(run: SavedRun) -> dict[str, Series]:
    """A run's metrics over its steps; none where its file is missing or damaged."""
    epochs = run.summary.get("epochs", 0)

    def read(path: Path) -> dict[str, Series]:
        try:
            return read_series(path, epochs, MOST_POINTS)
        except (ArithmeticError, KeyError) as error:
            raise ValueError("is damaged") from error

    series: dict[str, Series] = run.read("metrics.csv", read, {})
    return series


def metrics_of(lines: Sequence[Line]) -> list[str]:
    """The metrics that a chart or a table shows, sorted."""
    names = {name for line in lines for name in line.series}
    return sorted(name for name in names if not name.startswith(NOT_DRAWN))


def with_curve(lines: Sequence[Line]) -> set[str]:
    """Metrics that have two values in some run; a chart of single dots would say nothing."""
    return {name for line in lines for name, series in line.series.items() if len(series) > 1}


def draw_charts(lines: Sequence[Line]) -> list[tuple[str, Markup]]:
    """Metric and chart, for each metric that has a curve; of very many the first."""
    curved = with_curve(lines)
    drawn = [metric for metric in metrics_of(lines) if metric in curved]
    charts: list[tuple[str, Markup]] = []
    for metric in drawn[:MOST_CHARTS]:
        # The name is an attribute in the chart, and a metric's name could be markup.
        charts.append((metric, draw(f"chart {len(charts)}", paint, metric, lines)))
    if len(drawn) > MOST_CHARTS:
        charts.append((f"{len(drawn) - MOST_CHARTS:,} further metrics are not drawn", Markup()))
    return charts


def paint(ax: Any, metric: str, lines: Sequence[Line]) -> None:
    """A metric over the steps, a line per run."""
    for line in lines:
        series = line.series.get(metric)
        if not series:
            continue
        steps = [step for step, _ in series]
        values = [value for _, value in series]
        # A single value would not be seen as a line.
        marker = "o" if len(series) == 1 else None
        ax.plot(
            steps,
            values,
            color=line.colour,
            linestyle=line.dashes,
            marker=marker,
            linewidth=1.1,
        )
    ax.set_xlabel("optimizer step")
    place_axis_labels(ax)


def make_tables(runs: Sequence[SavedRun], lines: Sequence[Line]) -> dict[str, list[Row]]:
    """Title and rows: for each module its runs, means over seeds, settings, and test results."""
    tables: dict[str, list[Row]] = {}
    groups = by_module(runs)
    for module, group in groups.items():
        of = f" of {module}" if len(groups) > 1 else ""
        names = differing(group)
        settings = shown_settings(group, names)
        tables[f"Runs{of}"] = [run.row(shown) for run, shown in zip(group, settings, strict=True)]
        tables[f"Mean and standard deviation over seeds{of}"] = seed_rows(group)
        tables[f"Settings that differ{of}"] = settings_rows(group, settings, names)
        tables[f"Test results{of}"] = [test_row(run) for run in group]
    curved = with_curve(lines)
    single = [metric for metric in metrics_of(lines) if metric not in curved]
    first = ""
    if len(single) > MOST_SINGLE:
        first = f", the first {MOST_SINGLE:,} of {len(single):,}"
    tables[f"Metrics with a single value{first}"] = single_rows(single[:MOST_SINGLE], lines)
    return tables


def settings_rows(
    runs: Sequence[SavedRun], settings: Sequence[Row], names: Sequence[str]
) -> list[Row]:
    """A row per setting, a column per run."""
    rows: list[Row] = []
    for name in names:
        row: dict[str, Any] = {"": name}
        row |= {run.name: shown[name] for run, shown in zip(runs, settings, strict=True)}
        rows.append(row)
    return rows


def test_row(run: SavedRun) -> Row:
    """A run's test metrics."""
    tests = {name: value for name, value in run.results.items() if name.startswith("test")}
    return {"name": run.name, **tests}


def single_rows(metrics: Sequence[str], lines: Sequence[Line]) -> list[Row]:
    """A row per run with the values of metrics that were logged once."""
    rows: list[Row] = []
    for line in lines:
        values = {name: line.series[name][0][1] for name in metrics if line.series.get(name)}
        if values:
            rows.append({"name": line.run.name, **values})
    return rows
