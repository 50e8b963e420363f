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
from project.tables import write_atomically


class MetricsCSV(Logger):
    """One row per logged step in ``metrics.csv``.

    Lightning's CSVLogger writes a row per call, and deletes the file of a run that is resumed. Here a resumed run keeps
    the rows its checkpoint knew, so the file of a killed run ends like that of an undisturbed one.
    """

    name, version = "csv", ""
    experiment = property(lambda self: DummyExperiment())  # for code that logs to another kind of logger

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self._row: dict[str, float] = {}  # the row being gathered
        self._row_start: int | None = None  # where its earlier state begins in the file, in bytes; None: not in it
        self._row_changed = False
        self._adopt(self._read())

    @property
    def save_dir(self) -> str:
        return str(self.path.parent)

    log_dir = save_dir  # where a module's own code puts its files

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing: the run's config.yaml holds them."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        step = int(step or 0)
        if self._row and self._row["step"] != step:
            self.flush_rows()
            self._row, self._row_start = {}, None
        self._row |= {key: int(value) if key == "epoch" else float(value) for key, value in metrics.items()}
        self._row |= {"step": step}
        self._row_changed = True

    def save(self) -> None:  # finalize calls it, too
        self.flush_rows()

    def flush_rows(self, to_disk: bool = False) -> int:
        """Write the row being gathered, which may still grow; returns the number of rows. ``to_disk``: they survive a
        power cut, as a checkpoint that counts them does.
        """
        if self._row_changed:
            self._count += self._row_start is None
            new = sorted(self._row.keys() - set(self._columns))
            self._columns += new
            if new or not self.path.exists():
                rows = self._read()
                self._rewrite([*(rows if self._row_start is None else rows[:-1]), self._row])
            else:  # append the row, or put it over its earlier state: the file may be long, and is not written anew
                with open(self.path, "r+b") as file:
                    end = file.seek(0, os.SEEK_END)
                    self._row_start = file.seek(end if self._row_start is None else self._row_start)
                    file.write(self._as_text([self._row]))
                    file.truncate()
            self._row_changed = False
        if to_disk and self._row_start is not None and self.path.exists():
            with open(self.path, "rb") as file:
                os.fsync(file.fileno())
        return self._count

    @rank_zero_only
    def keep_rows(self, count: int) -> None:
        """Go on after the first ``count`` rows of the file; the resumed run repeats the steps of the others."""
        rows = self._read()[:count]
        self._adopt(rows)
        if self.path.exists():
            self._rewrite(rows)
        # what is still logged at its step joins the last row
        self._row = {key: float(value) for row in rows[-1:] for key, value in row.items() if value}
        self._row_start, self._row_changed = self._row_start if rows else None, False

    def _read(self) -> list[dict[str, str]]:
        if not self.path.exists():
            return []
        try:
            with open(self.path, newline="", encoding="utf-8") as file:
                rows = list(csv.DictReader(file))
            for row in rows:
                for value in filter(None, row.values()):
                    float(value)
        except (ValueError, TypeError, csv.Error) as error:  # TypeError: a row has more values than there are names
            raise UserError(f"{self.path} is damaged ({error}). Move it away and go on: its rows begin anew.") from None
        return rows

    def _adopt(self, rows: list[dict[str, str]]) -> None:
        """Take over columns and number of the file's rows."""
        self._columns = list(dict.fromkeys(["step", "epoch", *(key for row in rows for key in row)]))
        self._count = len(rows)

    def _rewrite(self, rows: Sequence[Mapping[str, Any]]) -> None:
        head = self._as_text([dict(zip(self._columns, self._columns, strict=True)), *rows[:-1]])
        write_atomically(head + self._as_text(rows[-1:]), self.path)
        self._row_start = len(head)

    def _as_text(self, rows: Sequence[Mapping[str, Any]]) -> bytes:
        text = io.StringIO()
        csv.DictWriter(text, self._columns).writerows(rows)
        return text.getvalue().encode()
