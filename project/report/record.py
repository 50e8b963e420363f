"""What a report shows, gathered from a run that has ended or was stopped."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from project.callbacks.test_predictions import Mistake

# One metric: (optimizer step, value), by step
Series = list[tuple[int, float]]


@dataclass
class RunRecord:
    """Everything that the report shows of a run."""

    facts: dict[str, Any]  # those of summary.json
    config: str  # resolved configuration as YAML
    class_names: list[str] = field(default_factory=list)
    metrics: dict[str, Series] = field(default_factory=dict)  # by metric name
    stopped_by: str | None = None  # name of the signal; None for a run that has finished
    max_epochs: int | None = None
    breakdown: dict[str, float] = field(default_factory=dict)  # GiB by use
    savings: dict[str, float] = field(default_factory=dict)  # share (0-100) that a flag would save
    remarks: list[str] = field(default_factory=list)  # advice and warnings of the monitors
    confusion: np.ndarray | None = None  # int64 (classes, classes), row: label; None without a test
    mistakes: list[Mistake] = field(default_factory=list)

    @property
    def class_accuracy(self) -> list[tuple[str, float, int]]:
        """(class, share of its test samples that were labelled right (0-1), samples), worst first."""
        if self.confusion is None:
            return []
        totals = self.confusion.sum(axis=1)
        rows = zip(self.names, np.diag(self.confusion), totals, strict=True)
        return sorted(((name, int(right) / int(n), int(n)) for name, right, n in rows if n), key=lambda row: row[1])

    @property
    def names(self) -> list[str]:
        """One name per class of the confusion matrix; numbers where the data module does not name as many."""
        classes = 0 if self.confusion is None else len(self.confusion)
        return self.class_names if len(self.class_names) == classes else [str(index) for index in range(classes)]

    @property
    def confusions(self) -> list[tuple[str, str, int]]:
        """(label, prediction, samples) of the pairs that were mixed up, most frequent first."""
        if self.confusion is None:
            return []
        wrong = self.confusion - np.diag(np.diag(self.confusion))
        rows, columns = np.nonzero(wrong)
        pairs = ((self.names[i], self.names[j], int(wrong[i, j])) for i, j in zip(rows, columns, strict=True))
        return sorted(pairs, key=lambda pair: -pair[2])


def read_metrics(path: Path) -> dict[str, Series]:
    """The columns of a ``metrics.csv``; empty where there is none. Values that are not finite are left out."""
    metrics: dict[str, Series] = {}
    if not path.exists():
        return metrics
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            step = int(float(row["step"]))
            for name, text in row.items():
                if name not in ("step", "epoch") and text and math.isfinite(value := float(text)):
                    metrics.setdefault(name, []).append((step, value))
    return metrics
