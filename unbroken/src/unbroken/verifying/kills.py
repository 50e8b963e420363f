"""Where a run is killed: places of every kind, chosen by a seed from an undisturbed run's."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

from lightning.pytorch import Callback, LightningModule, Trainer

# Kinds of places, in the order in which they are tried.
INSIDE = "inside an epoch"
VALIDATION = "inside a validation"
ACCUMULATED = "inside an accumulated step"
EDGE = "at an epoch's end"
KINDS = (INSIDE, VALIDATION, ACCUMULATED, EDGE)
# Optimizer steps before the first kill. A kill before the first save proves nothing.
FIRST_STEPS = 3
# Seconds for which a kill waits until a checkpoint is there.
PATIENCE_S = 10.0


class Kill(NamedTuple):
    """A place in a run."""

    kind: str
    # That of the recorder, after whose row the process ends.
    moment: list[Any]


def choose(rows: list[dict[str, Any]], count: int, seed: int) -> list[Kill]:
    """Places in the order of the run, of as many kinds as there are.

    Args:
        rows: The rows of an undisturbed run, of one rank.
        count: How many places, where there are so many.
        seed: Chooses others.
    """
    draw = random.Random(seed)
    by_kind = places(rows)
    chosen: dict[int, Kill] = {}
    kinds = [kind for kind in KINDS if by_kind[kind]]
    if not kinds:
        return []
    draw.shuffle(kinds)
    for turn in range(4 * count):
        kind = kinds[turn % len(kinds)]
        place = draw.choice(by_kind[kind])
        if len(chosen) < count:
            chosen.setdefault(place, Kill(kind, rows[place]["at"]))
    return [chosen[place] for place in sorted(chosen)]


def places(rows: list[dict[str, Any]]) -> dict[str, list[int]]:
    """Kind → the numbers of the rows after which a kill is of this kind."""
    found: dict[str, list[int]] = {kind: [] for kind in KINDS}
    last_epoch = max((row["at"][1] for row in rows if row["at"][0] == "epoch"), default=0)
    last_batches: dict[int, int] = {}
    started: dict[tuple[int, int], int] = {}
    for row in rows:
        if row["at"][0] == "train":
            started[row["at"][1], row["at"][2]] = row["step"]
            last_batches[row["at"][1]] = row["at"][2]
    for place, row in enumerate(rows):
        kind, *rest = row["at"]
        is_late = row["step"] >= FIRST_STEPS
        if kind == "trained" and is_late and rest[1] < last_batches[rest[0]]:
            is_part = row["step"] == started.get((rest[0], rest[1]))
            found[ACCUMULATED if is_part else INSIDE].append(place)
        elif kind == "validation" and is_late:
            found[VALIDATION].append(place)
        elif kind == "epoch" and is_late and rest[0] < last_epoch:
            found[EDGE].append(place)
    return found


class Killer(Callback):
    """Ends this process, and all that it has started, after the recorder's row of a moment.

    Args:
        kill: Where. None: nowhere.
        group: The group of processes that ends. Nothing happens in another one.
        checkpoint: The file that is waited for before.
    """

    def __init__(self, kill: Kill | None, group: int, checkpoint: Path) -> None:
        self._moment = None if kill is None else kill.moment
        self._group = group
        self._checkpoint = checkpoint

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._end_at(["trained", trainer.current_epoch, batch_idx])

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end_at(["epoch", trainer.current_epoch])

    def on_validation_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if not trainer.sanity_checking:
            self._end_at(["validation", trainer.global_step, dataloader_idx, batch_idx])

    def _end_at(self, moment: list[Any]) -> None:
        if moment != self._moment:
            return
        end = time.monotonic() + PATIENCE_S
        while not self._checkpoint.exists() and time.monotonic() < end:
            time.sleep(0.01)
        if hasattr(os, "killpg") and os.getpgrp() == self._group:
            os.killpg(self._group, signal.SIGKILL)
        os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))
