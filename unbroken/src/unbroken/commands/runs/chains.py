"""In which window the chains of digests of two runs part, and by what."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from contextlib import suppress

from unbroken.commands.runs.saved_run import SavedRun, is_readable

# The same names stand in unbroken/parts/chain.py and unbroken/checkpoint/digests_csv.py. To import
# them would import torch.
DIGESTS = "digests.csv"
KINDS = ("batches", "generators", "weights", "optimizer")
MOMENT = ("epoch", "step")

# A line of digests.csv
Window = dict[str, str]


def windows_of(run: SavedRun) -> list[Window]:
    """The windows of a run; none where it has no digests, or where they are damaged."""
    path = run.folder / DIGESTS
    rows: list[Window] = []
    if not is_readable(path):
        return rows
    with suppress(OSError, ValueError, csv.Error):
        lines = path.read_text(encoding="utf-8").splitlines()
        rows = [row for row in csv.DictReader(lines) if row.keys() == {*MOMENT, *KINDS}]
    return rows


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
        place = f"window {number} (epoch {mine['epoch']}, after step {step_before}"
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
