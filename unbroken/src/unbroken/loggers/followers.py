"""What a tracker needs so that a resumed run goes on in it: every value once, in order.

A run that was killed has told its trackers of steps that its checkpoint does not know. The resumed
run trains these steps again. Or a tracker lacks the last values, since they were still on their
way. metrics.csv holds exactly the rows that the checkpoint knows, so a tracker compares itself with
them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from unbroken.storage.files import write_atomically
from unbroken.storage.reading import UNREADABLE, read_json
from unbroken.tables import is_plain_number

Row = Mapping[str, Any]
# Holds the name of the run in each tracker.
NAMES = "trackers.json"


@runtime_checkable
class FollowsRows(Protocol):
    """A logger that goes on in the tracker's run of before."""

    def go_on_after(self, rows: Sequence[Row]) -> None:
        """Called when a run starts or is resumed: these rows of metrics.csv stay, later ones are
        logged again. A row has its ``step``, and a number for each metric.
        """
        ...


class WholeRows:
    """Passes each step's values on as one row, and none that the tracker already has.

    Args:
        send: Is given a step and its values.
        known: Metric → the last step of which the tracker has a value.
    """

    def __init__(self, send: Callable[[int, Row], None], known: Mapping[str, int] = {}) -> None:
        self._send = send
        self._known = known
        self._step = 0
        self._row: dict[str, float] = {}

    def add(self, values: Row, step: int | None) -> None:
        """Join values with the row of their step. A row is passed on when the next one begins."""
        step = step or 0
        if step != self._step:
            self.flush()
            self._step = step
        for name, value in values.items():
            # A module may tell all of its loggers a text.
            if name != "step" and not isinstance(value, str) and step > self._known.get(name, -1):
                self._row[name] = float(value)

    def flush(self) -> None:
        """Pass on the row that may still have grown."""
        row = self._row
        self._row = {}
        if row:
            self._send(self._step, row)

    def go_on_after(self, rows: Sequence[Row]) -> None:
        """Add what the tracker lacks of these rows."""
        for row in rows:
            self.add(row, row["step"])


def last_steps(rows: Sequence[Row]) -> dict[str, int]:
    """Metric → the last step of which these rows have a value."""
    found: dict[str, int] = {}
    for row in rows:
        for name, value in row.items():
            if name != "step" and is_plain_number(value):
                found[name] = max(row["step"], found.get(name, -1))
    return found


def name_in_tracker(folder: Path, tracker: str) -> str | None:
    """The name that a run has in a tracker; None where it has not started there."""
    name = _names(folder).get(tracker)
    return name if isinstance(name, str) else None


def keep_name(folder: Path, tracker: str, name: str | None) -> None:
    """Keep a run's name in a tracker for when the run is resumed. None: forget it."""
    text = json.dumps({**_names(folder), tracker: name}, indent=2)
    write_atomically(text + "\n", folder / NAMES)


def _names(folder: Path) -> dict[str, Any]:
    try:
        return read_json(folder / NAMES)
    except UNREADABLE:
        return {}
