"""The folder of a run: whose it is, and what is told of an earlier training in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from unbroken.checkpoint.digests_csv import write_digests
from unbroken.mirror.mirror import Mirror
from unbroken.parts.chain import Link
from unbroken.run_folder import (
    ENDED,
    RunFolder,
    last_owner,
    read_run_id,
    refuse_checkpoints_of_others,
)
from unbroken.stopping.ranks import say
from unbroken.storage.files import NotWritten, write_atomically
from unbroken.storage.run_files import RunFiles


class OwnFolder:
    """Where the checkpoints of a run are, and whose they are.

    Args:
        path: The folder. None: nothing is saved.
        run_id: Identifies the run in its checkpoints. A caller that gives one has made and locked
            the folder, and releases it. None: this class does both.
        mirror: Where the run is copied to.

    Attributes:
        is_managed_by_caller: Whether the caller has made and locked the folder.
        files: The checkpoints in it.
        last_is_of_this_training: Whether this training has written last.ckpt, or was resumed. If
            not, one that is there is of an earlier training.
    """

    def __init__(self, path: str | Path | None, run_id: str | None, mirror: Mirror | None) -> None:
        # W&B and others may change the working folder later.
        self.path = Path(path if path is not None else ".").absolute()
        self.has_path = path is not None
        self.run_id = run_id
        self.is_managed_by_caller = run_id is not None
        self.mirror = mirror
        self.files = RunFiles(self.path)
        self.last_is_of_this_training = False
        self._is_rehearsal = False
        self._lock: RunFolder | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy has neither the lock nor a file that is on its way."""
        return vars(self) | {"files": RunFiles(self.path), "_lock": None}

    @property
    def saves(self) -> bool:
        """Whether checkpoints are written there."""
        return self.has_path and not self._is_rehearsal

    def bring_from_mirror(self) -> None:
        """Get the mirror's newest whole save, if it is ahead of what is here."""
        assert self.mirror is not None
        self.mirror.claim(self.path, last_owner(self.path))
        say(*self.mirror.bring(read_run_id(self.path)))

    def begin(self, trainer: Trainer) -> None:
        """Make and lock the folder for a training, unless whoever gave the run's id has done so."""
        self.files.forget_earlier_training()
        self.last_is_of_this_training = False
        batches: int = trainer.fast_dev_run  # type: ignore[attr-defined]
        # Whoever gives the run's id has given a rehearsal a folder of its own.
        self._is_rehearsal = batches > 0 and not self.is_managed_by_caller
        if self.is_managed_by_caller or not self.saves or not trainer.is_global_zero:
            return
        refuse_checkpoints_of_others(self.path)
        self._lock = RunFolder(self.path, mirror=self.mirror)
        if self.mirror is not None:
            self.mirror.claim(self.path, last_owner(self.path))
            self.mirror.refuse_another(self._lock.run_id)
        self._lock.create()
        self.run_id = self._lock.run_id

    def training_is_resumed(self, of_checkpoint: str | None) -> None:
        """Let a resumed run have the id of its checkpoint: the folder may have lost its own, as
        where the checkpoints alone were copied.
        """
        self.last_is_of_this_training = True
        if not self.is_managed_by_caller and of_checkpoint is not None:
            self.run_id = of_checkpoint

    def earlier_training(self) -> str | None:
        """A line for a training that starts anew and writes over the checkpoints of one before.

        Whoever gives the run's id has chosen the folder, and told what is in it.
        """
        if self.is_managed_by_caller or not self.saves:
            return None
        if not self.files.best.exists() and not self.files.last.exists():
            return None
        return (
            f"{self.path} holds an earlier training, and this one starts anew and replaces"
            " its checkpoints. To go on with it: trainer.fit(..., ckpt_path=keep.resume_from)."
        )

    def training_starts(self) -> None:
        """Take away the sign that the training has ended. What could not be resumed was refused
        before.
        """
        if self._lock is not None:
            (self.path / ENDED).unlink(missing_ok=True)

    def training_is_over(self, links: Sequence[Link]) -> None:
        """Leave the digests of a script's run, and a sign: the list of runs has no other that it
        has come to its end. Of a command's run, whoever made the folder leaves both. Where the disk
        takes neither, a line says so: the run is saved.
        """
        if self._lock is None:
            return
        try:
            write_digests(links, self.path)
            write_atomically("", self.path / ENDED)
        except NotWritten as error:
            say(f"{error} The training is complete, and its last state is saved.")

    def finish_mirror(self, seconds: float | None) -> None:
        """Bring the last save over, unless whoever made the folder does so.

        ``seconds``: how long it may take. None: as long as something still arrives there.
        """
        if self._lock is not None and self.mirror is not None:
            say(*self.mirror.finish(seconds))

    def release(self) -> None:
        """Let others have the folder."""
        self.files.let_go()
        if self._lock is not None:
            self._lock.release()
            self._lock = None
