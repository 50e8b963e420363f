"""Where scalars go in any case: metrics.csv in the run's folder."""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import DummyExperiment
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from unbroken.errors import UserError
from unbroken.loggers.followers import FollowsRows
from unbroken.storage.files import NotWritten, append_whole, not_written, write_atomically
from unbroken.storage.reading import LONGEST_LINE, NotRead, opened
from unbroken.storage.trouble import Trouble
from unbroken.tables import columns_of

# The first columns, of whole numbers.
FIRST = {"step": 0, "epoch": 0}
Row = dict[str, Any]


class MetricsCSV(Logger):
    """One row per logged step in ``metrics.csv``.

    Lightning's CSVLogger writes a row per call, and deletes the file of a resumed run. Here such a
    run keeps the rows its checkpoint knew: the file ends like that of an undisturbed one.

    While a run goes on, lines are only appended. A step that is logged to again after its line was
    saved gets another line with what is new. :func:`read_metrics` joins the lines of a step, and
    the file is joined when training ends or is resumed.

    Args:
        path: The file.
        goes_on: Whether rows of it may stay. A run that starts afresh reads none of those that it
            finds: the folder may be somebody else's.
    """

    def __init__(self, path: Path, goes_on: bool = True) -> None:
        super().__init__()
        self.path = path
        # Loggers that are told which rows stay when a run starts or is resumed.
        self.followers: Sequence[FollowsRows] = ()
        # Of a long run that goes on there may be millions, which are not kept in memory.
        names = dict(FIRST)
        self._count = 0  # rows, with the one of this step
        for row in rows_of(path) if goes_on else ():
            names |= dict.fromkeys(row, 0)
            self._count += 1
        self._columns = columns_of([names])
        self._step: int | None = None  # what is logged to; None before the first
        self._unsaved: Row = {}  # values of this step that are in no line yet
        self._waiting: list[Row] = []  # lines of earlier steps that the disk has not taken
        self._trouble = Trouble(f"{path.name} is not written", f"{path.name} is written again")
        self._has_line = False  # whether this step has a line in the file
        self._has_split_rows = False  # whether a step has several

    @property
    def name(self) -> str:
        return "csv"

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str:
        """The run's folder: where a module's own code puts its files."""
        return str(self.path.parent)

    @property
    def log_dir(self) -> str:
        return self.save_dir

    @property
    def experiment(self) -> DummyExperiment:
        """Takes everything and does nothing: for code that logs to another kind of logger."""
        return DummyExperiment()

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing: the run's config.yaml holds them."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        step = step or 0
        numbers: dict[str, float] = {}
        for name, value in metrics.items():
            # A module may tell all of its loggers a text.
            if name != "step" and not isinstance(value, str):
                numbers[name] = as_number(name, value)
        if not numbers:
            return
        if step != self._step:
            self.save()
            self._step = step
            self._has_line = False
            self._count += 1
        self._unsaved |= numbers

    @property
    def count(self) -> int:
        """The number of rows, the last of which may still grow."""
        return self._count

    def save(self) -> None:
        """Write what is logged so far. A disk that does not take it ends no run: the rows wait."""
        try:
            self.write()
        except NotWritten as error:
            self._trouble.note(str(error))
            # A line may come to stand behind those of later steps.
            self._has_split_rows = True

    def write(self, to_disk: bool = False) -> None:
        """Append what was logged since the last call.

        ``to_disk``: also save the file from a power cut.

        Raises:
            NotWritten: The disk does not take it. The rows wait for the next call.
        """
        if self._unsaved:
            self._waiting.append({"step": self._step, **self._unsaved})
            self._unsaved = {}
        try:
            while self._waiting:
                self._append(self._waiting[0])
                del self._waiting[0]
            if to_disk and self.path.exists():
                with open(self.path, "rb") as file:
                    os.fsync(file.fileno())
        except OSError as error:
            raise not_written(self.path, error) from error
        self._trouble.end()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Called by Lightning when training or a test has ended, or failed."""
        try:
            self.write()
            if self._has_split_rows:
                self._rewrite(read_metrics(self.path), self._columns)
        except NotWritten:
            # The error that ends the run is the one to be told.
            if status == "success":
                raise

    @rank_zero_only
    def keep_rows(self, count: int) -> None:
        """Go on after the first ``count`` rows, the last of which may still grow: a resumed run
        repeats the others.
        """
        rows = list(islice(rows_of(self.path), count))
        self._columns = columns_of([FIRST, *rows])
        self._count = len(rows)
        self._step = rows[-1]["step"] if rows else None
        self._unsaved = {}
        self._waiting = []
        if self.path.exists():
            self._rewrite(rows, self._columns)
        for follower in self.followers:
            follower.go_on_after(rows)

    def _append(self, row: Row) -> None:
        new = sorted(row.keys() - {*self._columns})
        if new or not self.path.exists():
            self._rewrite([*read_metrics(self.path), row], [*self._columns, *new])
            return
        append_whole(as_text([row], self._columns), self.path)
        self._has_split_rows = self._has_split_rows or self._has_line
        self._has_line = True

    def _rewrite(self, rows: Sequence[Row], columns: list[str]) -> None:
        """Write the whole file anew, a line per step."""
        # Somebody may delete the folder of a run that trains. RunRecord fills it again and says so.
        self.path.parent.mkdir(parents=True, exist_ok=True)
        heading = dict(zip(columns, columns, strict=True))
        write_atomically(as_text([heading, *joined(rows)], columns), self.path)
        self._columns = columns
        self._has_line = bool(rows)
        self._has_split_rows = False


def as_text(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> bytes:
    """Rows as they stand in the file."""
    text = io.StringIO()
    csv.DictWriter(text, columns).writerows(rows)
    return text.getvalue().encode()


def as_number(name: str, value: Any) -> float:
    """A logged value as it stands in the file. A step and an epoch are whole numbers, unless they
    are not finite.
    """
    number = float(value)
    if name in FIRST and math.isfinite(number):
        return int(number)
    return number


def read_metrics(path: Path) -> list[Row]:
    """The rows of a metrics.csv, a row per step, without empty cells; none where there is no file.

    A line without an end is left out: the run was killed while it wrote it. A UserError where the
    file is damaged.
    """
    return list(rows_of(path))


def rows_of(path: Path) -> Iterator[Row]:
    """The rows of :func:`read_metrics`, one after the other: no more of the file than a row is in
    memory.
    """
    try:
        yield from joined(_rows_as_written(path))
    except FileNotFoundError:
        return
    # TypeError: a line has more values than there are names.
    except (ValueError, TypeError, csv.Error) as error:
        raise damaged(path, error) from None


def _rows_as_written(path: Path) -> Iterator[Row]:
    with opened(path, None) as file:
        for cells in csv.DictReader(_whole_lines(file)):
            row = numbers_of(cells)
            if "step" not in row:
                raise ValueError("a row without a step")
            yield row


def _whole_lines(file: BinaryIO) -> Iterator[str]:
    while line := file.readline(LONGEST_LINE):
        if line.endswith(b"\n"):
            yield line.decode()
        elif len(line) == LONGEST_LINE:
            raise NotRead("has a line that is too long")


def numbers_of(cells: Mapping[str, str]) -> Row:
    """A line's numbers by column, without empty cells."""
    return {name: as_number(name, cell) for name, cell in cells.items() if cell}


def damaged(path: Path, error: Exception) -> UserError:
    """The error to raise where a file cannot be read, and how to go on."""
    return UserError(f"{path} is damaged ({error}). Move it away and go on: its rows begin anew.")


def joined(rows: Iterable[Row]) -> Iterator[Row]:
    """Rows whose neighbours of the same step are one row. The later value of a name wins."""
    last: Row = {}
    for row in rows:
        if last and last["step"] != row["step"]:
            yield last
            last = {}
        last = last | row
    if last:
        yield last
