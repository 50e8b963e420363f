"""From files to rows: prepares each file, predicts in batches, and skips what cannot be read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]
from unbroken.cli.read_checkpoint import Loaded
from unbroken.commands.predict.answers import note_for, predict_batch, to_rows
from unbroken.commands.predict.contact_sheet import MOST_SHOWN
from unbroken.commands.predict.preparation import choose_preparation
from unbroken.errors import BadImage, UserError
from unbroken.pictures import refuse_what_has_no_end
from unbroken.tables import Row

BATCH_SIZE = 256


class Labelled(NamedTuple):
    """What came of the files, everything in their order."""

    # ``file``, the columns of the answer, and beside a label a ``note``
    rows: list[Row]
    # The first ones, for the contact sheet
    inputs: list[Tensor]
    # Files that could not be read, with the reason
    skipped: list[tuple[Path, str]]


def predict_files(loaded: Loaded, paths: Sequence[Path]) -> Labelled:
    """One row per readable file, the first ``MOST_SHOWN`` inputs, and the files that were
    skipped.
    """
    preparation = choose_preparation(loaded)
    print(preparation.description)
    batches = Batches(loaded)
    notes: list[tuple[Path, str]] = []
    inputs: list[Tensor] = []
    skipped: list[tuple[Path, str]] = []
    # disable=None: a log file gets no bar
    for path in tqdm(paths, unit="file", desc="predict", leave=False, disable=None):
        try:
            refuse_what_has_no_end(path)
            made, note = preparation.prepare(path)
            prepared = torch.as_tensor(made)
        except Exception as error:  # a reader of somebody else's fails in its own ways
            skipped.append((path, reason_of(error)))
            continue
        batches.add(prepared)
        notes.append((path, note))
        if len(inputs) < MOST_SHOWN:
            inputs.append(prepared)
    rows: list[Row] = []
    for row, (path, note) in zip(to_rows(loaded, batches.end()), notes, strict=True):
        if "probability" in row:
            row["note"] = note_for(row, note)
        rows.append({"file": str(path), **row})
    return Labelled(rows, inputs, skipped)


class Batches:
    """Collects inputs of one shape, and predicts them together."""

    def __init__(self, loaded: Loaded) -> None:
        self.loaded = loaded
        self.waiting: list[Tensor] = []
        # What predict_step returned, and for how many inputs
        self.answers: list[tuple[Any, int]] = []

    def add(self, prepared: Tensor) -> None:
        """Take an input. One of another shape begins a batch of its own."""
        is_full = len(self.waiting) == BATCH_SIZE
        if is_full or (self.waiting and self.waiting[0].shape != prepared.shape):
            self.predict()
        self.waiting.append(prepared)

    def end(self) -> list[tuple[Any, int]]:
        """Predict what is left; returns all answers."""
        if self.waiting:
            self.predict()
        return self.answers

    def predict(self) -> None:
        """Predict the inputs that wait."""
        batch = torch.stack(self.waiting)
        self.answers.append((predict_batch(self.loaded, batch), len(batch)))
        self.waiting = []


def reason_of(error: Exception) -> str:
    """Why a file could not be read, in one line; an unexpected error with its kind."""
    reason = " ".join(str(error).split())
    if isinstance(error, BadImage | UserError):
        return reason
    return f"{type(error).__name__}: {reason}"
