"""What a run has reached, and the two hooks by which a feature takes part in it.

A callback or logger may have ``add_facts``, which is called on every rank when training and test
have ended, and ``leave``, which is called on rank zero when all facts are known. Both are optional.
When a run was stopped, both are called on rank zero alone: neither may wait for other ranks. See
:class:`AddsFacts` and :class:`LeavesSomething`.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from unbroken.results.facts import Summary
from unbroken.tables import is_number, read_rows

Series = list[tuple[int, float]]  # One metric over a run: (optimizer step, value), by step
# A row of the table of epochs: the epoch's number, from 1, and the last value of each metric in it
EpochRow = dict[str, float]
# With these words the names of metrics begin, as in val/loss and val_loss.
SPLITS = ("train", "val", "test")
# Not in the table of epochs: what monitors log
MONITORED = ("throughput/", "memory/", "optimizer/")


@dataclass(frozen=True)
class Mistake:
    """A test image with a wrong prediction."""

    image: np.ndarray  # uint8 (height, width, channels), as it was before normalisation
    label: int
    prediction: int
    probability: float  # 0-1, of the prediction


@dataclass
class RunResult:
    """What the summary, the report and W&B show of a run that has ended or was stopped."""

    summary: Summary
    config: str  # resolved configuration as YAML
    series: dict[str, Series] = field(default_factory=dict)  # by metric name
    class_names: list[str] = field(default_factory=list)
    epochs: list[EpochRow] = field(default_factory=list)  # those that were completed
    stopped_by: str | None = None  # name of the signal; None for a run that has finished
    max_epochs: int | None = None
    breakdown: dict[str, float] = field(default_factory=dict)  # GiB of memory by use
    leaks: list[str] = field(default_factory=list)  # what looks like one, in words
    # int64 (classes, classes), row: label; None without a classifier's test
    confusion: np.ndarray | None = None
    mistakes: list[Mistake] = field(default_factory=list)
    folder: Path | None = None  # the run's; None only where no run is behind it

    @property
    def names(self) -> list[str]:
        """One name per class of the confusion matrix; numbers where the data module names another
        number of classes.
        """
        classes = 0 if self.confusion is None else len(self.confusion)
        if len(self.class_names) == classes:
            return self.class_names
        return [str(number) for number in range(classes)]

    @property
    def class_accuracy(self) -> list[tuple[str, float, int]]:
        """(class, share of its test samples with the right label (0-1), samples), worst first."""
        if self.confusion is None:
            return []
        rows = []
        for place, name in enumerate(self.names):
            samples = int(self.confusion[place].sum())
            if samples:
                rows.append((name, int(self.confusion[place, place]) / samples, samples))
        return sorted(rows, key=lambda row: row[1])

    @property
    def confusions(self) -> list[tuple[str, str, int]]:
        """(label, prediction, samples) of the pairs that were mixed up, most frequent first."""
        if self.confusion is None:
            return []
        names = self.names
        pairs = []
        for (label, prediction), count in np.ndenumerate(self.confusion):
            if count and label != prediction:
                pairs.append((names[label], names[prediction], int(count)))
        return sorted(pairs, key=lambda pair: -pair[2])


def split_of(metric: str) -> tuple[str, str]:
    """The split that a metric is of, and its name there: ``("val", "loss")`` of ``val/loss`` and of
    ``val_loss``. The split of any other is empty.
    """
    for split in SPLITS:
        for separator in ("/", "_"):
            rest = metric.removeprefix(f"{split}{separator}")
            if rest and rest != metric:
                return split, rest
    return "", metric


def read_epochs(path: Path, epochs: int) -> list[EpochRow]:
    """What a ``metrics.csv`` tells of each of the completed epochs, whose number is ``epochs``."""
    found: dict[int, EpochRow] = {}
    for row in read_rows(path):
        if "epoch" not in row or row["epoch"] >= epochs:
            continue
        number = int(row["epoch"]) + 1
        shown = found.setdefault(number, {"epoch": number})
        for name, value in row.items():
            is_metric = name not in ("step", "epoch") and not name.startswith(MONITORED)
            if is_metric and is_number(value):
                shown[name] = value
    return [found[number] for number in sorted(found)]


def read_series(path: Path, epochs: int, most: int | None = None) -> dict[str, Series]:
    """The columns of a ``metrics.csv`` as charts show them, ``epoch`` too, without values that
    cannot be drawn.

    Of a training metric there are values within epochs and means at their ends. The series holds
    the kind of which there are more.

    Args:
        path: The file.
        epochs: How many epochs were completed.
        most: How many points all series together have, at least one each. None: the file is that of
            one's own run, and all are kept.
    """
    columns: dict[str, tuple[array[int], array[float]]] = {}
    for row in read_rows(path, is_bounded=most is not None):
        step = int(row["step"])
        for name, value in row.items():
            if name != "step" and is_number(value):
                steps, values = columns.setdefault(name, (array("q"), array("d")))
                steps.append(step)
                values.append(value)
    each = None if most is None else max(1, most // max(1, len(columns)))
    series = {name: thinned(steps, values, each) for name, (steps, values) in columns.items()}
    last_step_of = {epoch: step for step, epoch in series.get("epoch", []) if epoch < epochs}
    ends = set(last_step_of.values())
    for name, points in series.items():
        if split_of(name)[0] == "train":
            within = [point for point in points if point[0] not in ends]
            at_ends = [point for point in points if point[0] in ends]
            series[name] = at_ends if len(at_ends) > len(within) else within
    return series


def thinned(steps: Sequence[int], values: Sequence[float], most: int | None) -> Series:
    """The points of a series. Of more than ``most`` those that are seen in a chart: of neighbours
    the first, the least, the greatest and the last.
    """
    count = len(values)
    if most is None or count <= most:
        return list(zip(steps, values, strict=True))
    parts = max(1, most // 4)
    kept: set[int] = set()
    for part in range(parts):
        places = range(count * part // parts, count * (part + 1) // parts)
        kept |= {places[0], places[-1]}
        kept.add(min(places, key=values.__getitem__))
        kept.add(max(places, key=values.__getitem__))
    return [(steps[place], values[place]) for place in sorted(kept)]


@runtime_checkable
class AddsFacts(Protocol):
    """A callback or logger that knows something for ``summary.json``, the closing lines, the report
    or W&B.
    """

    def add_facts(self, trainer: Trainer, result: RunResult) -> None:
        """Write what is known into ``result``: ``result.summary.metrics``, ``result.breakdown`` and
        the like.
        """
        ...


@runtime_checkable
class LeavesSomething(Protocol):
    """A callback or logger that leaves something behind when a run has ended or was stopped, such
    as a page.
    """

    def leave(self, trainer: Trainer, result: RunResult) -> None:
        """Write it. An error here never ends the run: it becomes a warning."""
        ...


def parts_of(trainer: Trainer) -> list[Any]:
    """A Trainer's callbacks, then its loggers, each once.

    W&B's logger is a callback as well. It comes with the loggers: it sends what callbacks, such as
    the report, have left before.
    """
    loggers = trainer.loggers
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return [*(each for each in callbacks if each not in loggers), *loggers]


def add_all_facts(trainer: Trainer, result: RunResult) -> None:
    """Let every callback and logger write what it knows into ``result``."""
    for part in parts_of(trainer):
        if isinstance(part, AddsFacts):
            try:
                part.add_facts(trainer, result)
            except Exception as error:
                _warn(part, "add its facts", error)


def leave_everything(trainer: Trainer, result: RunResult) -> None:
    """Let every callback and logger leave what it wants to leave. Rank zero calls it."""
    for part in parts_of(trainer):
        if isinstance(part, LeavesSomething):
            try:
                part.leave(trainer, result)
            except Exception as error:
                _warn(part, "leave its part of the result", error)


def _warn(part: Any, what: str, error: Exception) -> None:
    reason = f"{type(error).__name__}: {error}"
    rank_zero_warn(f"{type(part).__name__} could not {what} ({reason}). The run is safe.")
