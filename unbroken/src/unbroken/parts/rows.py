"""The rows of metrics.csv."""

from typing import Protocol

from lightning.pytorch import Trainer
from unbroken.parts.part import Part


class Rows(Protocol):
    """A logger whose rows lie in a file beside the checkpoint."""

    @property
    def count(self) -> int:
        """The number of rows, also of those that are not written yet."""
        ...

    def write(self, to_disk: bool = False) -> None:
        """Write what is logged so far; NotWritten where the disk does not take it."""
        ...

    def keep_rows(self, count: int) -> None:
        """Remove the rows after the first ``count``."""
        ...


class MetricRows(Part):
    """How many rows metrics.csv has: a resumed run writes the later ones again."""

    name = "metric_rows"
    of_each_rank = False
    has_a_file = True

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def take(self, trainer: Trainer) -> int:
        return self.rows.count

    def give_back(self, trainer: Trainer, value: int) -> None:
        if not isinstance(value, int):
            raise TypeError("the number of rows is no whole number")
        self.rows.keep_rows(value)

    def flush(self) -> None:
        self.rows.write(to_disk=True)

    def start_anew(self) -> None:
        # A run that saved nothing may have left rows.
        self.rows.keep_rows(0)
