"""The rows of metrics.csv."""

from typing import Protocol

from lightning.pytorch import Trainer
from unbroken.parts.part import Part


class Rows(Protocol):
    """A logger whose rows lie in a file beside the checkpoint."""

    def save(self, to_disk: bool = False) -> int:
        """Write what is logged so far; returns the number of rows."""
        ...

    def keep_rows(self, count: int) -> None:
        """Remove the rows after the first ``count``."""
        ...


class MetricRows(Part):
    """How many rows of metrics.csv were written: a resumed run writes the later ones again."""

    name = "metric_rows"
    of_each_rank = False
    has_a_file = True

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def take(self, trainer: Trainer) -> int:
        return self.rows.save()

    def give_back(self, trainer: Trainer, value: int) -> None:
        if not isinstance(value, int):
            raise TypeError("the number of rows is no whole number")
        self.rows.keep_rows(value)

    def flush(self) -> None:
        self.rows.save(to_disk=True)

    def start_anew(self) -> None:
        # A run that saved nothing may have left rows.
        self.rows.keep_rows(0)
