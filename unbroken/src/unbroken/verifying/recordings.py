"""Reads what recorders have written: the values of each moment of a run."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unbroken.verifying.digests import Entry
from unbroken.verifying.recorder import kinds_at

# Which rank, and when: see Recorder.
Moment = tuple[Any, ...]


@dataclass
class Row:
    """The values of one moment."""

    step: int
    values: dict[str, Entry]
    # How often the run was started before the start that wrote the row.
    start: int


@dataclass
class Recording:
    """What a run did, over all of its starts.

    Attributes:
        rows: The moments in their order. What a start has repeated counts as it was the last time.
        resumes: The first training batch of each start but the first, of each rank.
    """

    rows: dict[Moment, Row] = field(default_factory=dict)
    resumes: list[Moment] = field(default_factory=list)

    @property
    def resumed_at(self) -> list[Moment]:
        """Where rank zero has resumed."""
        return [moment for moment in self.resumes if moment[0] == 0]


def read_recording(folder: Path) -> Recording:
    """All rows of all ranks and starts."""
    found = Recording()
    files = [(numbers_of(path), path) for path in folder.glob("rank*-start*.jsonl")]
    for (rank, start), path in sorted(files):
        has_resumed = False
        for moment, row in rows_of(path):
            place = (rank, *moment)
            if start > 0 and moment[0] == "train" and not has_resumed:
                has_resumed = True
                found.resumes.append(place)
            # A moment that is repeated stands where it stood.
            found.rows[place] = Row(row["step"], row["values"], start)
    return found


def numbers_of(path: Path) -> tuple[int, int]:
    """The rank and the start of a recorder's file."""
    rank, start = re.findall(r"\d+", path.name)
    return int(rank), int(start)


def rows_of(path: Path) -> list[tuple[Moment, dict[str, Any]]]:
    """The rows of a file, each with all values of its moment. A half-written last line is left
    out.
    """
    found = []
    values: dict[str, Entry] = {}
    for line in raw_rows(path):
        for name in line["gone"]:
            values.pop(name, None)
        for name, (digest, shown, rows) in line["changed"].items():
            values[name] = Entry(digest, shown, tuple(rows))
        kinds = kinds_at(line["at"])
        now = {name: entry for name, entry in values.items() if name.startswith(kinds)}
        found.append((tuple(line["at"]), {"step": line["step"], "values": now}))
    return found


def raw_rows(path: Path) -> list[dict[str, Any]]:
    """The lines of a recorder's file."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found
