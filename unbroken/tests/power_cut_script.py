"""A training that a power cut ends: power_cut_script FOLDER NOTES BOUNDARY WORLD [MIRROR].

NOTES gets a line for the step at which it began, for each save that was on the disk, and for each
boundary. Without a boundary (0) it trains to its end. With a mirror the boundaries are those of the
mirror's store, and nothing but the process is lost. FROZEN_MIB in the environment: the module has
so much of frozen weights, which take a while to write.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from torch import nn
from unbroken import ExactCheckpoint
from unbroken.checkpoint.saving import Saving
from unbroken.mirror import copying, lease
from unbroken.mirror.store import Store

from tests.plain_module import Regression
from tests.power_cut import PowerCut


def note(notes: Path, kind: str, text: Any) -> None:
    """Add a line that survives the process."""
    with open(notes, "a") as file:
        print(kind, text, file=file)


def note_saves(patch: pytest.MonkeyPatch, notes: Path) -> None:
    """Add a line for each save that the engine takes for written."""
    original = Saving._note_saved

    def noted(saving: Saving, step: int | None) -> None:
        original(saving, step)
        note(notes, "saved", step)

    patch.setattr(Saving, "_note_saved", noted)


class StoreBoundaries:
    """Ends the process at a boundary of what a mirror does with its store."""

    def __init__(self, notes: Path, last: int) -> None:
        self._notes = notes
        self._left = last

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        """Watch this process."""
        for name in ("write", "put", "remove"):
            self._watch(patch, name)

    def _watch(self, patch: pytest.MonkeyPatch, name: str) -> None:
        original = getattr(Store, name)

        def act(*args: Any, **kwargs: Any) -> None:
            self._boundary(f"before {name}")
            original(*args, **kwargs)
            self._boundary(f"after {name}")

        patch.setattr(Store, name, act)

    def _boundary(self, name: str) -> None:
        note(self._notes, "boundary", name)
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


class Frozen(Regression):
    """The regression beside frozen weights."""

    def __init__(self) -> None:
        super().__init__()
        mib = int(os.environ.get("FROZEN_MIB", "0"))
        self.frozen = nn.Parameter(torch.ones(mib * 2**18), requires_grad=False)


def main() -> None:
    """Train."""
    folder, notes, last, world = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    mirror = sys.argv[5] if len(sys.argv) > 5 else None
    copying.FIRST_PAUSE_S = 0.1
    # The lease of a machine that is lost runs out soon.
    lease.BEAT_S, lease.LOOK_S, lease.PATIENCE_S = 0.2, 0.3, 2.0
    seed_everything(7, verbose=False)
    torch.set_num_threads(1)
    keep = ExactCheckpoint(folder, monitor="val_loss", mode="min", every="2", mirror=mirror)
    trainer = Trainer(
        max_epochs=2,
        limit_train_batches=3,
        accelerator="cpu",
        callbacks=[keep],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    path = keep.resume_from
    step = 0 if path is None else torch.load(path, weights_only=True)["global_step"]
    note(notes, "begun", step)
    folder.mkdir(parents=True, exist_ok=True)

    with pytest.MonkeyPatch.context() as patch:

        def act(cut: PowerCut) -> None:
            note(notes, "boundary", cut.boundaries[-1])
            if len(cut.boundaries) == last:
                patch.undo()
                cut.leave(world)
                os.kill(os.getpid(), signal.SIGKILL)

        note_saves(patch, notes)
        if mirror is None:
            PowerCut(folder, act, writes=50).watch(patch)
        else:
            StoreBoundaries(notes, last).watch(patch)
        trainer.fit(Frozen(), ckpt_path=path)


if __name__ == "__main__":
    main()
