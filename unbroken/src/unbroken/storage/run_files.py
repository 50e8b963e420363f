"""The two checkpoints of a run, ``last.ckpt`` and ``best.ckpt``: how they are written and kept."""

import os
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from unbroken.errors import UserError
from unbroken.stopping.ranks import of_all_ranks, say
from unbroken.storage.checkpoint_files import (
    AtomicCheckpointIO,
    NotPlain,
    damage,
    read_or_reason,
    record_in,
)
from unbroken.storage.files import write_atomically


class RunFiles:
    """The checkpoints in a run's folder."""

    def __init__(self, folder: Path) -> None:
        self.best = folder / "best.ckpt"
        self.last = folder / "last.ckpt"
        # Writes where the Trainer has another way.
        self._own_io = AtomicCheckpointIO()

    def newest_whole(self) -> Path | None:
        """The checkpoint to go on from. A line says which is skipped, and why."""
        path, skipped = newest_whole(self.last, self.best)
        say(*skipped)
        return path

    def write(self, trainer: Trainer, is_best: bool, is_last: bool, group: Any) -> None:
        """Save the state that the Trainer has now. Every rank calls it; rank zero writes.

        Args:
            trainer: Its own CheckpointIO is left alone.
            is_best: Whether ``best.ckpt`` is written. Else ``last.ckpt`` is.
            is_last: Whether a new best becomes ``last.ckpt``, too.
            group: The ranks' group in CPU memory.

        Raises:
            UserError: On all ranks, with one line, where rank zero could not write.
        """
        failure = None
        is_saved = False
        theirs = trainer.strategy.checkpoint_io
        atomic = theirs if isinstance(theirs, AtomicCheckpointIO) else self._own_io
        try:
            trainer.strategy.checkpoint_io = atomic
            atomic.restored = restored_by_lightning(trainer)
            trainer.save_checkpoint(self.best if is_best else self.last, weights_only=False)
            is_saved = True
            if is_best and is_last and trainer.is_global_zero:
                # The best comes first: a run that is killed in between repeats the steps to the
                # best.
                self._copy_best_to_last()
        except (UserError, NotPlain) as error:
            # Rank zero writes, and the others wait for it at the end of save_checkpoint. If the
            # write failed, rank zero must still meet them at that barrier.
            failure = str(error)
            if not is_saved:
                trainer.strategy.barrier()
        finally:
            trainer.strategy.checkpoint_io = theirs
            atomic.record = None
        failures = [reason for reason in of_all_ranks(failure, group) if reason]
        if failures:
            reason = failures[0].rstrip(".")
            if not self.last.exists() and not self.best.exists():
                raise UserError(f"{reason}. The run has stopped; nothing was saved.")
            raise UserError(f"{reason}. The run has stopped; go on with --ckpt_path auto.")

    def usable_best(self, run_id: str | None) -> tuple[dict[str, Any], str | None]:
        """The contents of ``best.ckpt``, and None; or nothing, and why it cannot be used.

        One that is damaged, or belongs to another run, is renamed.
        """
        if not self.best.exists():
            return {}, f"{self.best} is missing;"
        checkpoint, reason = read_or_reason(self.best)
        if reason is None and record_in(checkpoint).get("run_id") != run_id:
            reason = f"{self.best} belongs to another run."
        if reason is None:
            return checkpoint, None
        aside = self.best.with_suffix(".ckpt.set-aside")
        number = 1
        # One that was set aside before stays.
        while os.path.lexists(aside):
            number += 1
            aside = self.best.with_suffix(f".ckpt.set-aside-{number}")
        os.replace(self.best, aside)
        return {}, f"{reason} It was set aside;"

    def replace_damaged_last(self) -> None:
        """Copy ``best.ckpt`` where ``last.ckpt`` is damaged, for nothing else would do so."""
        if damage(self.last) is not None and self.best.exists():
            self._copy_best_to_last()

    def _copy_best_to_last(self) -> None:
        """Copy the file; a link would let damage to one damage the other."""
        write_atomically(self.best.read_bytes(), self.last)


def restored_by_lightning(trainer: Trainer) -> set[str]:
    """The names under which a checkpoint holds the states of data module and precision."""
    owners = [trainer.precision_plugin, trainer.datamodule]  # type: ignore[attr-defined]
    return {type(owner).__qualname__ for owner in owners}


def newest_whole(last: Path, best: Path) -> tuple[Path | None, list[str]]:
    """The checkpoint that a run goes on from; and a line for each that is skipped.

    That is ``last``, or else ``best``. A ``best`` inside an epoch of data that cannot be started
    there is taken only where a damaged ``last`` would lose more than this epoch.
    """
    skipped: list[str] = []
    for path in (last, best):
        if not path.exists():
            continue
        checkpoint, reason = read_or_reason(path)
        is_best_alone = path == best and not last.exists()
        if reason is None and is_best_alone and not can_start_from(checkpoint):
            reason = f"{path} is inside an epoch, and its data cannot be started there."
        if reason is None:
            return path, skipped
        skipped.append(f"skipped: {reason}")
    return None, skipped


def can_start_from(checkpoint: dict[str, Any]) -> bool:
    """Whether a resume from a checkpoint is exact, as far as its place and loaders are concerned.

    It is not in a new best inside an epoch of data that cannot be started there.
    """
    return record_in(checkpoint).get("can_go_on") is not False
