"""Where scalars go in any case: metrics.csv in the run's folder."""

import csv
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import DummyExperiment
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from project.errors import UserError
from project.tables import columns_of, read_rows, write_atomically

FIRST = {"step": 0, "epoch": 0}  # the first columns, of whole numbers


class MetricsCSV(Logger):
    """One row per logged step in ``metrics.csv``. Lightning's CSVLogger writes a row per call, and deletes the file of
    a resumed run. Here such a run keeps the rows its checkpoint knew: the file ends like that of an undisturbed one.
    """

    name, version = "csv", ""
    experiment = property(
        lambda self: DummyExperiment()
    )  # for code that logs to another kind of logger

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        rows = self._read()
        self._columns, self._before = (
            columns_of([FIRST, *rows]),
            len(rows),
        )  # rows before the one being gathered
        self._row: dict[str, Any] = {}  # being gathered
        self._row_start = 0  # where it begins in the file, in bytes
        self._row_changed = False

    save_dir = log_dir = property(
        lambda self: str(self.path.parent)
    )  # where a module's own code puts its files

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing: the run's config.yaml holds them."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        metrics = {**metrics, "step": step or 0}
        if not self._row or self._row["step"] != metrics["step"]:
            self._before, self._row = self.save(), {}
            self._row_start = self.path.stat().st_size if self.path.exists() else 0
        self._row |= {
            k: int(x) if k in FIRST else float(x)
            for k, x in metrics.items()
            if not isinstance(x, str)
        }
        self._row_changed = True

    def save(self, to_disk: bool = False) -> int:  # type: ignore[override] # finalize calls it, too
        """Write the row, which may still grow; returns the number of rows, which ``to_disk`` saves from a power cut."""
        if self._row_changed:
            new = sorted(self._row.keys() - {*self._columns})
            if new or not self.path.exists():
                self._columns += new
                self._rewrite([*self._read()[: self._before], self._row])
            else:  # append the row, or put it over its earlier state: the file may be long, and is not written anew
                with open(self.path, "r+b") as file:
                    file.seek(self._row_start)
                    file.write(self._as_text([self._row]))
                    file.truncate()
            self._row_changed = False
        if to_disk and self._row and self.path.exists():
            with open(self.path, "rb") as file:
                os.fsync(file.fileno())
        return self._before + bool(self._row)

    @rank_zero_only
    def keep_rows(self, count: int) -> None:
        """Go on after the first ``count`` rows, the last of which may still grow: a resumed run repeats the others."""
        rows = self._read()[:count]
        self._columns = columns_of([FIRST, *rows])
        self._row, self._row_changed = dict(*rows[-1:]), False
        if self.path.exists():
            self._rewrite(rows)

    def _read(self) -> list[dict[str, Any]]:
        try:
            return [
                row | {name: int(row[name]) for name in FIRST if name in row}
                for row in read_rows(self.path)
            ]
        except (
            ValueError,
            TypeError,
            csv.Error,
        ) as error:  # TypeError: a row has more values than there are names
            raise UserError(
                f"{self.path} is damaged ({error}). Move it away and go on: its rows begin anew."
            ) from None

    def _rewrite(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the whole file anew. Its last row may still grow."""
        head = self._as_text([dict(zip(self._columns, self._columns, strict=True)), *rows[:-1]])
        write_atomically(head + self._as_text(rows[-1:]), self.path)
        self._before, self._row_start = len(rows[:-1]), len(head)

    def _as_text(self, rows: Sequence[Mapping[str, Any]]) -> bytes:
        text = io.StringIO()
        csv.DictWriter(text, self._columns).writerows(rows)
        return text.getvalue().encode()
