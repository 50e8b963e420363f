"""In which window the chains of digests of two runs part, and by what."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from unbroken.commands.runs.saved_run import SavedRun
from unbroken.storage.reading import Cells

# The same names stand in unbroken/parts/chain.py and unbroken/checkpoint/digests_csv.py. To import
# them would import torch.
DIGESTS = "digests.csv"
KINDS = ("batches", "generators", "weights", "optimizer")
MOMENT = ("epoch", "step")
# Of eighty thousand windows; and of one, in bytes
MOST_CELLS = 2**19
LONGEST_LINE = 2_000

# A line of digests.csv
Window = dict[str, str]


def windows_of(run: SavedRun) -> list[Window]:
    """The windows of a run; none where it has no digests, or where they are damaged."""
    rows: list[Window] = run.read(DIGESTS, read_windows, [])
    return rows


def read_windows(path: Path) -> list[Window]:
    """The windows in a file; a ValueError where it is damaged, or larger than a run's."""
    cells = Cells(path, most_cells=MOST_CELLS, longest_line=LONGEST_LINE)
    names = cells.names
    if set(names) != {*MOMENT, *KINDS} or len(names) != len(MOMENT) + len(KINDS):
        raise ValueError("has other columns than a run's")
    return [dict(zip(names, row, strict=True)) for row in cells]


def compared(run: SavedRun, other: SavedRun) -> str:
    """A line on the chains of two runs: the first window that differs, and what of it does."""
    names = f"{run.name} and {other.name}"
    windows = windows_of(run)
    windows_of_other = windows_of(other)
    if not windows or not windows_of_other:
        lacks = other if windows else run
        return f"{names}: their training is not compared, because {lacks.name} has no {DIGESTS}."
    step_before = "0"
    for number, (mine, its) in enumerate(zip(windows, windows_of_other, strict=False), start=1):
        # Files count epochs from 0, and what is printed counts from 1.
        epoch = int(mine["epoch"]) + 1 if mine["epoch"].isdecimal() else mine["epoch"]
        place = f"window {number} (epoch {epoch}, after step {step_before}"
        if any(mine[name] != its[name] for name in MOMENT):
            ends = f"to step {mine['step']} in one and to step {its['step']} in the other"
            return f"{names}: {number - 1} windows are equal, then {place}) goes {ends}."
        differing = [kind for kind in KINDS if mine[kind] != its[kind]]
        if differing:
            return f"{names} differ first in {place} to {mine['step']}): {', '.join(differing)}."
        step_before = mine["step"]
    return f"{names}: {equal_windows(windows, windows_of_other)}"


def equal_windows(windows: Sequence[Window], windows_of_other: Sequence[Window]) -> str:
    """What is said where no window differs."""
    both = min(len(windows), len(windows_of_other))
    more = abs(len(windows) - len(windows_of_other))
    what = "batches, generators, weights and optimizer"
    if not more:
        return f"all {both} windows are equal: {what}."
    return f"the first {both} windows are equal: {what}. One run has {more} more."
