"""The report's HTML: which charts, figures and tables it shows. The rest stands in the template."""

import base64
import io
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image
from unbroken.errors import without_control_characters
from unbroken.loggers.panels import PANELS, PARTS
from unbroken.report.charts import amounts, confusion_matrix, curves, draw, shortened
from unbroken.report.samples import Sample
from unbroken.results.run_result import SPLITS, RunResult, Series, split_of
from unbroken.tables import columns_of, format_cell

TEMPLATE = Path(__file__).with_name("report.html.j2")
# Of a mistake's longer side: 24 such colour images are about half a megabyte.
MOST_PIXELS = 96
# Charts of metrics that no panel names
MOST_OTHERS = 24
# Epochs in the table: of more, the last ones
MOST_EPOCHS_LISTED = 200
# The unit of a metric whose name says so, if its values are such: a module may log percent.
FRACTION = "fraction"
NAMES_OF_FRACTIONS = ("accuracy", "acc", "f1", "precision", "recall", "auroc", "iou", "dice")
# The end of a metric's name → its unit. Any other metric is its own unit.
UNITS = {**dict.fromkeys(NAMES_OF_FRACTIONS, FRACTION), "lr": "learning rate"}
# Lightning's names of one metric that is logged at each step and at the end of each epoch
MOMENTS = {"_step": ", each step", "_epoch": ""}
# Classes that are listed with their accuracy, the worst ones
MOST_CLASSES = 25
PREDICTIONS = "Predictions on the test set"
OTHERS = "Other metrics"
# Not drawn under "Other metrics": a panel shows them, or the same in another unit.
SHOWN = {
    "epoch",
    "throughput/device_samples_per_sec",
    "throughput/batches_per_sec",
    "memory/reserved_gib",
    *(metric for panel in PANELS for metric in panel.lines),
}


def render(record: RunResult, deadline: float | None = None, samples: Sequence[Sample] = ()) -> str:
    """The report's HTML. Every text in it is escaped; only our style and the charts are markup.

    Args:
        record: The run.
        deadline: A time of ``time.monotonic()``. Charts that would be drawn later are left out.
        samples: What the network got first.
    """
    _, followed = split_of(record.summary.monitor or "")
    tested = [name for name in record.summary.metrics if name.startswith("test")]
    # The followed metric comes first.
    tested.sort(key=lambda name: split_of(name)[1] != followed)
    mistakes = []
    for each in record.mistakes:
        label = record.names[each.label]
        mistakes.append((png(each.image), label, record.names[each.prediction], each))
    charts = Charts(record, deadline)
    return fill_page(
        TEMPLATE,
        record=record,
        tested=tested,
        sections=charts.sections,
        not_drawn=charts.not_drawn,
        left_out=len(other_metrics(record)) - MOST_OTHERS,
        mistakes=mistakes,
        samples=[(png(each.image), label_of(each.target, record)) for each in samples],
        epochs=record.epochs[-MOST_EPOCHS_LISTED:],
        epoch_columns=sorted(columns_of(record.epochs), key=place_in_table),
        cell=format_cell,
        figure=lambda metric, value: figure_of(metric, value, record),
        split_of=split_of,
        parts=PARTS,
        timedelta=timedelta,
    )


def figure_of(metric: str, value: float, record: RunResult) -> str:
    """A result as the page shows it: an accuracy in percent where all its values in the run are
    fractions, any other metric as it is.
    """
    _, kind = split_of(metric)
    known = [record.series[name] for name in record.series if split_of(as_ours(name))[1] == kind]
    if metric.endswith("accuracy") and are_fractions([*known, [(0, value)]]):
        return f"{100 * value:.2f} %"
    return f"{value:.4g}"


def are_fractions(lines: Iterable[Series]) -> bool:
    """Whether all values of these series lie between 0 and 1."""
    return all(0 <= value <= 1 for series in lines for _, value in series)


def label_of(target: int | float | None, record: RunResult) -> str:
    """A sample's target as it is shown: the name of a class, or a number."""
    if isinstance(target, int) and 0 <= target < len(record.class_names):
        return record.class_names[target]
    return "" if target is None else format_cell(target)


def place_in_table(metric: str) -> tuple[int, int]:
    """Where a column of the table of epochs stands: by its split, losses first."""
    split, rest = split_of(metric)
    if metric == "epoch":
        return (-1, 0)
    place = SPLITS.index(split) if split else len(SPLITS)
    return (place, "loss" not in rest)


def _shown(value: Any) -> Any:
    """A value as the page holds it. Markup is of our own making, and is not escaped."""
    return value if isinstance(value, Markup) else without_control_characters(value)


def fill_page(template: Path, **facts: Any) -> str:
    """A template, filled in; every text is escaped, and has no control characters."""
    environment = Environment(
        loader=FileSystemLoader(template.parent),
        autoescape=True,
        finalize=_shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template.name).render(facts)


class Charts:
    """The charts of a run.

    Attributes:
        sections: Section → (title, SVG) of its charts.
        not_drawn: How many charts the time did not suffice for.
    """

    def __init__(self, record: RunResult, deadline: float | None = None) -> None:
        self.record = record
        self.deadline = deadline
        self.sections: dict[str, list[tuple[str, Markup]]] = {}
        self.not_drawn = 0
        self.last_step = max((series[-1][0] for series in record.series.values()), default=0)
        # Number of an epoch that was trained to its end, from 1 → its last step
        self.epochs = {
            int(epoch) + 1: step
            for step, epoch in record.series.get("epoch", [])
            if epoch < record.summary.epochs
        }
        self._add_panels()
        self._add_memory()
        self._add_other_metrics()
        self._add_predictions()

    def _add(self, section: str, title: str, paint: Callable[..., None], *facts: Any) -> None:
        if self.deadline is not None and time.monotonic() > self.deadline:
            self.not_drawn += 1
            return
        self.sections.setdefault(section, []).append((title, draw(title, paint, *facts)))

    def _add_curves(
        self, section: str, title: str, lines: dict[str, Series], unit: str, axis: str
    ) -> None:
        self._add(section, title, curves, lines, unit, axis, self.last_step, self.epochs)

    def _add_panels(self) -> None:
        for panel in PANELS:
            lines = {}
            for metric, label in panel.lines.items():
                for name in self.record.series:
                    if name == metric or as_ours(name) == metric:
                        lines[label + moment_of(name)] = self.record.series[name]
            if lines and panel.in_report:
                unit = panel.unit or panel.title.lower()
                if unit == FRACTION and not are_fractions(lines.values()):
                    unit = panel.title.lower()
                self._add_curves(panel.section, panel.title, lines, unit, panel.axis)

    def _add_memory(self) -> None:
        if self.record.breakdown:
            mib = [(use, 1024 * gib) for use, gib in self.record.breakdown.items()]
            self._add("Memory", "Memory by use", amounts, mib, "MiB on one device")

    def _add_other_metrics(self) -> None:
        for title, lines in list(other_metrics(self.record).items())[:MOST_OTHERS]:
            word = title.replace("/", "_").rpartition("_")[2].lower()
            unit = UNITS.get(word, title)
            if unit == FRACTION and not are_fractions(lines.values()):
                unit = title
            self._add_curves(OTHERS, title, lines, unit, "fitting")

    def _add_predictions(self) -> None:
        record = self.record
        if record.confusion is None:
            return
        names = record.names
        self._add(PREDICTIONS, "Confusion matrix", confusion_matrix, record.confusion, names)
        title = "Accuracy per class"
        if len(names) > MOST_CLASSES:
            title += f", the {MOST_CLASSES} worst"
        worst = record.class_accuracy[:MOST_CLASSES]
        classes = [(shortened(name), share) for name, share, _ in worst]
        unit = "accuracy on the test set (fraction)"
        self._add(PREDICTIONS, title, amounts, classes, unit, True)


def other_metrics(record: RunResult) -> dict[str, dict[str, Series]]:
    """Chart → label → values: ``train/f1``, ``val/f1`` and ``test_f1`` share the chart ``f1``."""
    found: dict[str, dict[str, Series]] = {}
    for metric, series in record.series.items():
        if metric in SHOWN or as_ours(metric) in SHOWN:
            continue
        split, title = split_of(metric)
        label = metric
        if split:
            moment = moment_of(metric)
            title = without_moment(title)
            label = PARTS[split] + moment
        found.setdefault(title, {})[label] = series
    return found


def as_ours(metric: str) -> str:
    """The name of a metric of a split as ours are called: ``val/loss`` for ``val_loss``."""
    split, rest = split_of(metric)
    return f"{split}/{without_moment(rest)}" if split else metric


def without_moment(name: str) -> str:
    """A metric's name without Lightning's ``_step`` or ``_epoch`` at its end."""
    for ending in MOMENTS:
        if name.endswith(ending) and name != ending:
            return name.removesuffix(ending)
    return name


def moment_of(metric: str) -> str:
    """What the label of a metric's curve adds to its split."""
    split, rest = split_of(metric)
    ending = rest.removeprefix(without_moment(rest))
    return MOMENTS.get(ending, "") if split else ""


def png(pixels: np.ndarray) -> str:
    """An image, uint8 (height, width, channels), as a ``data:`` address."""
    if pixels.shape[2] == 1:
        picture = Image.fromarray(pixels[..., 0])
    else:
        picture = Image.fromarray(np.ascontiguousarray(pixels[..., :3]))
    picture.thumbnail((MOST_PIXELS, MOST_PIXELS))
    file = io.BytesIO()
    picture.save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
