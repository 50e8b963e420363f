"""The two checkpoints of a run, ``last.ckpt`` and ``best.ckpt``: how they are written and kept."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Trainer
from unbroken.errors import UserError
from unbroken.stopping.ranks import of_all_ranks, say
from unbroken.storage.checkpoint_files import AtomicCheckpointIO, OneSave, damage, read_or_reason
from unbroken.storage.contents import record_in
from unbroken.storage.files import NotWritten, copy_atomically
from unbroken.storage.savable import NotPlain
from unbroken.storage.staging import MemoryRange, Staging, bytes_in, memory_made_for
from unbroken.storage.writer import Writer

# Bytes of a state. A smaller one is written before a copy and a thread would have begun.
WRITTEN_AT_ONCE = 16 * 2**20


@dataclass(frozen=True)
class WriteJob:
    """How one checkpoint comes to the disk.

    Attributes:
        writer: Writes it.
        target: The file.
        copy: A second file with the same bytes. None: there is none.
        when_saved: Called when all of it is on the disk.
    """

    writer: AtomicCheckpointIO
    target: Path
    copy: Path | None
    when_saved: Callable[[], None]


class RunFiles:
    """The checkpoints in a run's folder.

    A small state is written while training waits. A large one is copied in memory, and a thread
    writes it while training goes on: see :class:`Writer` and :class:`Staging`.
    """

    def __init__(self, folder: Path) -> None:
        self.best = folder / "best.ckpt"
        self.last = folder / "last.ckpt"
        # Why nothing is saved at the moment. None: the newest save is on the disk.
        self.trouble: str | None = None
        # Writes where the Trainer has another way.
        self._own_io = AtomicCheckpointIO()
        self._writer = Writer()
        self._staging = Staging()
        self.costs = Costs()

    @property
    def is_busy(self) -> bool:
        """Whether a save is still on its way to the disk."""
        return self._writer.is_busy

    def seconds_to_save(self) -> float:
        """About how long a save takes from now on: as long as the last one, and once more where
        that is still on its way. 0: nothing is known yet.
        """
        return self.costs.write_seconds * (2 if self.is_busy else 1)

    def wait(self) -> None:
        """Wait until the save that is under way is on the disk, or has failed."""
        self._writer.wait()

    def let_go(self) -> None:
        """Give back the memory of the copy. The next large save takes new memory."""
        self._staging = Staging()

    def check(self) -> None:
        """Raise what a save that was under way has raised. Nothing is waited for."""
        self._writer.check()

    def newest_whole(self) -> Path | None:
        """The checkpoint to go on from. A line says which is skipped, and why."""
        self.wait()
        path, skipped = newest_whole(self.last, self.best)
        say(*skipped)
        return path

    def write(
        self,
        trainer: Trainer,
        *,
        is_best: bool,
        is_last: bool,
        group: Any,
        add_state: Callable[[dict[str, Any]], dict[str, Any]],
        when_saved: Callable[[], None],
    ) -> None:
        """Save the state that the Trainer has now. Every rank calls it; rank zero writes.

        ``trainer.save_checkpoint`` calls our ``on_save_checkpoint``, which adds the state, and then
        the :class:`OneSave` that stands in the place of the Trainer's CheckpointIO: it begins to
        write.

        A disk that fails is no error here: :attr:`trouble` says so, and a line does.

        Args:
            trainer: Its own CheckpointIO is left alone.
            is_best: Whether ``best.ckpt`` is written. Else ``last.ckpt`` is.
            is_last: Whether a new best is copied to ``last.ckpt``, too.
            group: The ranks' group in CPU memory.
            add_state: See :class:`OneSave`.
            when_saved: Called on rank zero when the files are on the disk.

        Raises:
            UserError: On all ranks, with one line, where the state cannot be saved at all.
        """
        failure = None
        begun = time.perf_counter()
        theirs = trainer.strategy.checkpoint_io
        writer = theirs if isinstance(theirs, AtomicCheckpointIO) else self._own_io
        job = WriteJob(
            writer,
            target=self.best if is_best else self.last,
            copy=self.last if is_best and is_last else None,
            when_saved=when_saved,
        )
        private: set[MemoryRange] = set()

        def add_and_note(checkpoint: dict[str, Any]) -> dict[str, Any]:
            private.update(memory_made_for(checkpoint, trainer))
            return add_state(checkpoint)

        begin_to_write = partial(self._begin_to_write, job, private)
        keys = restored_by_lightning(trainer)
        one_save = OneSave(writer, keys, add_and_note, begin_to_write)
        try:
            trainer.strategy.checkpoint_io = one_save
            trainer.save_checkpoint(job.target, weights_only=False)
        except (UserError, NotPlain) as error:
            # Rank zero writes, and the others wait for it at the end of save_checkpoint. If the
            # write failed, rank zero must still meet them at that barrier.
            failure = str(error)
            trainer.strategy.barrier()
        finally:
            trainer.strategy.checkpoint_io = theirs
            self.costs.last_wait_seconds = time.perf_counter() - begun
            self.costs.wait_seconds += self.costs.last_wait_seconds
        failures = [reason for reason in of_all_ranks(failure, group) if reason]
        if failures:
            reason = failures[0].rstrip(".")
            if not self.last.exists() and not self.best.exists():
                raise UserError(f"{reason}. The run has stopped; nothing was saved.")
            raise UserError(f"{reason}. The run has stopped; go on with --ckpt_path auto.")

    @contextmanager
    def reading(self, trainer: Trainer, path: Any) -> Iterator[None]:
        """Inside, a plain Trainer reads a checkpoint of this run as :class:`AtomicCheckpointIO`
        does, with no copy of the weights in memory. Any other file, and where the user has chosen a
        CheckpointIO, the Trainer reads in its own way.
        """
        theirs = trainer.strategy.checkpoint_io
        is_own = Path(path).absolute() in (self.last, self.best)
        if not is_own or type(theirs) is not TorchCheckpointIO:
            yield
            return
        trainer.strategy.checkpoint_io = self._own_io
        try:
            yield
        finally:
            trainer.strategy.checkpoint_io = theirs

    def _begin_to_write(
        self, job: WriteJob, private: Collection[MemoryRange], checkpoint: dict[str, Any]
    ) -> None:
        """Write a plain checkpoint now, or copy it and let the thread write it. What is
        ``private`` to it need not be copied.
        """
        self._writer.wait()
        size = bytes_in(checkpoint)
        self.costs.bytes = size
        if size < WRITTEN_AT_ONCE:
            self._write(job, checkpoint)
            self.costs.last_background_seconds = 0.0
            return
        staged = self._staging.copy(checkpoint, private)

        def write_staged() -> None:
            self._staging.wait()
            self._write(job, staged)
            self.costs.last_background_seconds = self.costs.write_seconds

        self._writer.begin(write_staged)

    def _write(self, job: WriteJob, checkpoint: dict[str, Any]) -> None:
        """Bring a checkpoint that nobody changes meanwhile to the disk. A disk that is full is no
        error: the trouble is told, and the next save is tried.
        """
        begun = time.perf_counter()
        try:
            job.writer.write(checkpoint, job.target)
            if job.copy is not None:
                # The best comes first: a run that is killed in between repeats the steps to the
                # best.
                copy_atomically(job.target, job.copy)
        except NotWritten as error:
            self._note_trouble(str(error))
        else:
            self._note_success()
            job.when_saved()
        self.costs.write_seconds = time.perf_counter() - begun

    def _note_trouble(self, reason: str) -> None:
        if self.trouble is None:
            now = time.strftime("%H:%M:%S")
            say(f"since {now} nothing is saved: {reason} The run goes on, and tries again.")
        self.trouble = reason

    def _note_success(self) -> None:
        if self.trouble is not None:
            say(f"the run is saved again, since {time.strftime('%H:%M:%S')}.")
        self.trouble = None

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
            copy_atomically(self.best, self.last)


@dataclass
class Costs:
    """What the saves of a run have cost."""

    # All saves together: how long training stood still.
    wait_seconds: float = 0.0
    # The last save: how long training stood still, how long the file took, how much of that was
    # beside the training, and its size.
    last_wait_seconds: float = 0.0
    write_seconds: float = 0.0
    last_background_seconds: float = 0.0
    bytes: int = 0

    @property
    def last_seconds(self) -> float:
        """What the last save took: the wait, and the write beside the training."""
        return self.last_wait_seconds + self.last_background_seconds


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
