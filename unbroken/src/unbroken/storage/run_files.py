"""The two checkpoints of a run, ``last.ckpt`` and ``best.ckpt``: how they are written and kept.

What may come between, and what follows (checkpoint/saving.py says when a run is saved):

- The run is killed, or the power fails, while a file is written, or its copy waits in memory. The
  file before is whole, and a resume starts from it; where there is none, the run starts anew. What
  was written of the new one (``.last.ckpt.PID.part``) is removed at the next start.
- It is killed between ``best.ckpt`` and its copy as ``last.ckpt``. A resume starts from the
  ``last.ckpt`` before, repeats the steps since, and looks for the best anew (restoring.py). Where
  there is none yet it starts from ``best.ckpt``, if a run can resume from that.
- A bit of a file has flipped. A resume takes the other file, and a line says so (usable.py).
- The disk does not take ``last.ckpt``. A line says so, the run goes on, and its next save tries
  again.
- The disk does not take ``best.ckpt``. A line says so; the new best waits in memory and is written
  at the next save, before ``last.ckpt``, or where the run stops without a further save. As long as
  the disk refuses it, both files stay the ones before. Where there is no memory for it, a line says
  that the best stays an older one, and a resume looks for the best anew.
- The disk takes ``best.ckpt``, and not its copy as ``last.ckpt``. A line says so, and the next save
  tries again.
- The disk does not take the last save of a run, even at a second try. The run ends with NotSaved; a
  resume starts from the ``last.ckpt`` before. (Where a run stops inside an epoch in which its
  loader cannot start, only a new best is saved then; where a validation has changed weights,
  nothing is. If the disk has not taken an earlier ``last.ckpt``, it is not tried again, and the run
  ends with NotSaved.)
- A file is renamed, and the disk fails as its folder is flushed. That counts as not taken: a power
  cut may undo the rename. File systems that cannot flush a folder at all are no such disk.
- No file can hold the state, or there is no memory to write it. The run ends with one line, on all
  ranks; the files stay the ones before.
- The first file cannot be read back. The run ends with one line: at once where training writes the
  file; where the thread writes it, before rank zero's next batch, or at the next save on all ranks.
  Where the thread has written the last save of a run, that one is tried once more first.
- The thread that writes has an error of another kind. Rank zero raises it before its next batch or
  save, where ``best_model_path`` or ``last_model_path`` is asked for, or at the end. The other
  ranks' next exchange with it fails, and ends them.
- There is no memory to copy a large state, or the copy fails otherwise. Training waits for the
  disk.
- The training itself raises an error. A save that is under way is written to its end, and nothing
  more is saved: a resume repeats the steps since.

Where several saves fail, a line tells the first, and one that the run is saved again. A save that
has failed does not lengthen the interval, nor does one that is slow for once: the next one comes
when the time or the steps are over and the disk is no longer busy (interval.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Trainer
from unbroken.errors import UserError
from unbroken.stopping.ranks import gather_from_ranks, say
from unbroken.storage.checkpoint_files import AtomicCheckpointIO
from unbroken.storage.contents import RUN_KEY
from unbroken.storage.files import NotWritten, copy_atomically
from unbroken.storage.savable import NotPlain
from unbroken.storage.staging import MemoryRange, Staging, bytes_in, memory_made_for
from unbroken.storage.trouble import Trouble
from unbroken.storage.usable import checkpoint_to_resume
from unbroken.storage.writing_thread import WritingThread

# Bytes of a state. A smaller one is written faster than a copy is made and a thread started.
WRITTEN_AT_ONCE = 16 * 2**20


@dataclass(frozen=True)
class WriteJob:
    """How one checkpoint comes to the disk.

    Attributes:
        io: Writes it.
        target: The file.
        copied_to: A second file with the same bytes. None: there is none.
        when_saved: Called when all of it is on the disk.
    """

    io: AtomicCheckpointIO
    target: Path
    copied_to: Path | None
    when_saved: Callable[[], None]

    def writes(self, file: Path) -> bool:
        """Whether the file is one of the two."""
        return file in (self.target, self.copied_to)


class RunFiles:
    """The checkpoints in a run's folder.

    A small state is written while training waits. A large one is copied in memory, and a thread
    writes it while training goes on: see :class:`WritingThread` and :class:`Staging`. From a GPU
    the copy is only asked for, in order with the GPU's other work. The thread waits until the GPU
    has done all that it was asked for, that copy among it.
    """

    def __init__(self, folder: Path) -> None:
        self.best = folder / "best.ckpt"
        self.last = folder / "last.ckpt"
        # Writes where the Trainer's CheckpointIO is no AtomicCheckpointIO.
        self._own_io = AtomicCheckpointIO()
        self._thread = WritingThread()
        self._staging = Staging()
        self.forget_earlier_training()

    def forget_earlier_training(self) -> None:
        """Forget what an earlier training in the folder could not save, and what its saves cost."""
        self.trouble = Trouble("saves fail", "the run is saved again")
        # A best that the disk did not take. None: the disk has the newest best.
        self._waiting_best: dict[str, Any] | None = None
        # Whether the disk did not take the newest last.
        self._lacks_last = False
        self.costs = Costs()

    @property
    def is_busy(self) -> bool:
        """Whether a save is still on its way to the disk."""
        return self._thread.is_busy

    def seconds_to_save(self) -> float:
        """About how long a save takes from now on: as long as the last one that is written, and
        once more where one is on its way. 0: nothing is known yet.
        """
        return self.costs.last_write_seconds * (2 if self.is_busy else 1)

    def wait(self) -> None:
        """Wait until the save that is under way is on the disk, or has failed."""
        self._thread.wait()

    def wait_at_the_end(
        self, trainer: Trainer, *, flush: Callable[[], None], when_saved: Callable[[], None]
    ) -> None:
        """Wait, where a run ends and nothing more is saved. A best that the disk did not take is
        tried once more, and written as :meth:`write` does it.
        """
        self.wait()
        if self._waiting_best is None:
            return
        job = WriteJob(self._io_of(trainer), self.best, None, when_saved)
        try:
            flush()
        except NotWritten as error:
            self._note_trouble(job, error)
        else:
            self._to_disk(job, self._waiting_best, is_copy=True)

    def let_go(self) -> None:
        """Give back the memory of the copy. The next large save takes new memory."""
        self._staging = Staging()

    def check(self) -> None:
        """Raise what a save that was under way has raised. Nothing is waited for."""
        self._thread.check()

    def checkpoint_to_resume(self) -> Path | None:
        """The checkpoint to resume from. A line says which is skipped, and why."""
        self.wait()
        path, skipped = checkpoint_to_resume(self.last, self.best)
        say(*skipped)
        return path

    def write(
        self,
        trainer: Trainer,
        *,
        target: Path,
        copied_to: Path | None,
        group: Any,
        add_state: Callable[[dict[str, Any]], dict[str, Any]],
        add_weights: Callable[[dict[str, Any]], None],
        flush: Callable[[], None],
        when_saved: Callable[[], None],
    ) -> None:
        """Save the Trainer's state, as ``add_state`` completes it. Every rank must call it; rank
        zero writes.

        Lightning makes its checkpoint, and ``add_state`` adds to it (:class:`CheckpointMaker`). It
        is made plain. Then it is written, or copied for the thread that writes it.

        A disk that fails is no error here: :attr:`trouble` says so, and a line does. A best that
        it did not take waits in memory, and is written before the next save.

        Args:
            trainer: Its CheckpointIO is replaced while Lightning makes the checkpoint. A
                CheckpointIO of the user's own class writes neither file.
            target: The file that is written.
            copied_to: A second file with the same bytes. None: there is none.
            group: The ranks' group in CPU memory.
            add_state: Puts what a resume needs into Lightning's checkpoint; returns the library's
                entry of it.
            add_weights: Called on rank zero with the checkpoint as the user's own hooks have left
                it, to add what they have left out.
            flush: Called on rank zero before the checkpoint is written, to bring to the disk what
                it refers to. NotWritten: then it is not written.
            when_saved: Called on rank zero when the files are on the disk, in the thread that has
                written them.

        Raises:
            UserError: On all ranks, with one line, where the state itself (not the disk) is what
                cannot be saved, or where the previous save has failed for such a reason.
        """
        begun = time.perf_counter()
        io = self._io_of(trainer)
        job = WriteJob(io, target, copied_to, when_saved)
        maker = CheckpointMaker(trainer, add_state)
        # Even if the previous save has failed, this one is made: the other ranks wait for it there.
        failure = self._wait_for_previous_save()
        before = self.costs.last_seconds
        try:
            checkpoint = maker.make(target)
            if checkpoint is not None and failure is None:
                add_weights(checkpoint)
                io.make_plain(checkpoint, restored_by_lightning(trainer))
                self._begin_to_write(job, maker.private, checkpoint, flush)
        except (UserError, NotPlain) as error:
            failure = failure or str(error)
        finally:
            waited = time.perf_counter() - begun
            self.costs.wait_seconds += waited
            if self.trouble.reason is None:
                # A save that has failed says nothing of what one costs. Whether one that the thread
                # writes fails is not known yet: ``trouble`` is still that of the save before.
                self.costs.seconds_before = before
                self.costs.last_wait_seconds = waited
        failures = [reason for reason in gather_from_ranks(failure, group) if reason]
        if failures:
            reason = failures[0].rstrip(".")
            raise UserError(f"{reason}. The run has stopped; what its folder holds is whole.")

    def _io_of(self, trainer: Trainer) -> AtomicCheckpointIO:
        theirs = trainer.strategy.checkpoint_io
        return theirs if isinstance(theirs, AtomicCheckpointIO) else self._own_io

    def _wait_for_previous_save(self) -> str | None:
        """Wait for the previous save, because it has memory for a whole state. Returns why the run
        cannot go on: no file can hold the state, or the first file cannot be read back. Else None,
        also where the disk did not take it: :attr:`trouble` says that.
        """
        try:
            self._thread.wait()
        except (UserError, NotPlain) as error:
            return str(error)
        return None

    @contextmanager
    def reading(self, trainer: Trainer, path: Any) -> Iterator[None]:
        """Inside, a checkpoint of this run is read as :class:`AtomicCheckpointIO` has written it,
        with no copy of the weights in memory. The Trainer reads any other file in its own way.
        """
        theirs = trainer.strategy.checkpoint_io
        is_own = Path(path).absolute() in (self.last, self.best)
        if not is_own or isinstance(theirs, AtomicCheckpointIO):
            yield
            return
        trainer.strategy.checkpoint_io = self._own_io
        try:
            yield
        finally:
            trainer.strategy.checkpoint_io = theirs

    def _begin_to_write(
        self,
        job: WriteJob,
        private: Collection[MemoryRange],
        checkpoint: dict[str, Any],
        flush: Callable[[], None],
    ) -> None:
        """Write a plain checkpoint now, or copy it and let the thread write it. What is
        ``private`` to it need not be copied.
        """
        size = bytes_in(checkpoint)
        self.costs.last_bytes = size
        try:
            flush()
        except NotWritten as error:
            self._note_not_written(job, checkpoint, error, is_copy=False)
            return
        staged = None if size < WRITTEN_AT_ONCE else self._staged(checkpoint, private)
        if staged is None:
            self._to_disk(job, checkpoint, is_copy=False)
            self.costs.last_background_seconds = 0.0
            return
        staging = self._staging

        def write_staged() -> None:
            staging.wait()
            self._to_disk(job, staged, is_copy=True)
            self.costs.last_background_seconds = self.costs.last_write_seconds

        self._thread.begin(write_staged)

    def _staged(
        self, checkpoint: dict[str, Any], private: Collection[MemoryRange]
    ) -> dict[str, Any] | None:
        """A copy for the thread; None where there is no memory for one, and training waits for the
        disk.
        """
        try:
            return self._staging.copy(checkpoint, private)
        except (MemoryError, RuntimeError):
            self.let_go()
            return None

    def _to_disk(self, job: WriteJob, checkpoint: dict[str, Any], is_copy: bool) -> None:
        """Bring a checkpoint that nobody changes meanwhile to the disk. A disk that is full is no
        error: the trouble is told, and the next save is tried. ``is_copy``: in memory of its own.
        """
        begun = time.perf_counter()
        try:
            self._write_waiting_best(job)
            job.io.write(checkpoint, job.target)
        except NotWritten as error:
            self._note_not_written(job, checkpoint, error, is_copy)
        else:
            self._copy_and_tell(job)
            self.costs.last_write_seconds = time.perf_counter() - begun

    def _copy_and_tell(self, job: WriteJob) -> None:
        """The target is on the disk. The best comes before the last: a run that is killed in
        between repeats the steps to the best.
        """
        try:
            if job.copied_to is not None:
                copy_atomically(job.target, job.copied_to)
        except NotWritten as error:
            self._note_trouble(job, error)
        else:
            if job.writes(self.last):
                self._lacks_last = False
            # A best alone does not mend a last that is missing.
            if not self._lacks_last:
                self.trouble.end()
            job.when_saved()

    def _note_trouble(self, job: WriteJob, error: NotWritten) -> None:
        self.trouble.note(str(error))
        self._lacks_last = self._lacks_last or job.writes(self.last)

    def _write_waiting_best(self, job: WriteJob) -> None:
        """Write the best that the disk did not take before, unless a newer one comes now."""
        if self._waiting_best is not None and job.target != self.best:
            job.io.write(self._waiting_best, self.best)
        self._waiting_best = None

    def _note_not_written(
        self, job: WriteJob, checkpoint: dict[str, Any], error: NotWritten, is_copy: bool
    ) -> None:
        """Tell of the trouble, and keep a best in memory of its own, as long as there is some."""
        self._note_trouble(job, error)
        if job.target == self.best:
            # A copy gets memory of its own, and the next save takes other memory.
            self.let_go()
            self._waiting_best = checkpoint if is_copy else self._staged(checkpoint, ())
            self._staging.wait()
            self.let_go()
            if self._waiting_best is None:
                say(f"there is no memory to keep the new best: {self.best} stays an older one.")


class CheckpointMaker(TorchCheckpointIO):
    """Lets Lightning make a checkpoint, and takes it in the place of the Trainer's CheckpointIO.

    Args:
        trainer: Makes it.
        add_state: Puts what a resume needs into Lightning's checkpoint; returns the library's entry
            of it.

    Attributes:
        private: Memory in the checkpoint that nobody else holds, so that it need not be copied.
    """

    def __init__(
        self, trainer: Trainer, add_state: Callable[[dict[str, Any]], dict[str, Any]]
    ) -> None:
        self.private: set[MemoryRange] = set()
        self._trainer = trainer
        self._add_state = add_state
        self._record: dict[str, Any] | None = None
        self._made: dict[str, Any] | None = None

    def make(self, target: Path) -> dict[str, Any] | None:
        """The checkpoint of this moment, on rank zero; None on the others. Every rank must call it.

        ``target`` is what the hooks of others are told.
        """
        strategy = self._trainer.strategy
        theirs = strategy.checkpoint_io
        strategy.checkpoint_io = self
        try:
            # It calls our on_save_checkpoint (hooks.py), which calls add_our_state below, and
            # then save_checkpoint below.
            self._trainer.save_checkpoint(target, weights_only=False)
        except (UserError, NotPlain):
            # The others wait for this rank at the end of save_checkpoint.
            strategy.barrier()
            raise
        finally:
            strategy.checkpoint_io = theirs
        if self._made is not None and self._made.get(RUN_KEY) is not self._record:
            raise UserError(
                f"a checkpoint's entry {RUN_KEY!r} is this project's, and on_save_checkpoint of the"
                " module or of a callback has set it. Give that entry another name."
            )
        return self._made

    def add_our_state(self, checkpoint: dict[str, Any]) -> None:
        """Called before the user's own ``on_save_checkpoint``, with Lightning's checkpoint."""
        self._record = self._add_state(checkpoint)
        # Only now: it may have put other tensors in the place of Lightning's.
        self.private = memory_made_for(checkpoint, self._trainer)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Take the whole checkpoint, on rank zero."""
        self._made = checkpoint


@dataclass
class Costs:
    """What the saves of a run have cost."""

    # All saves together: how long training stood still.
    wait_seconds: float = 0.0
    # The last save: how long training stood still, how long the file took, how much of that was in
    # the background, and its size.
    last_wait_seconds: float = 0.0
    last_write_seconds: float = 0.0
    last_background_seconds: float = 0.0
    last_bytes: int = 0
    # What the save before it has taken.
    seconds_before: float = 0.0

    @property
    def last_seconds(self) -> float:
        """What the last save took: the wait, and the write in the background."""
        return self.last_wait_seconds + self.last_background_seconds

    @property
    def usual_seconds(self) -> float:
        """The shorter of the last two saves, because a disk may have slowed down one; 0 before the
        second.
        """
        return min(self.last_seconds, self.seconds_before)


def restored_by_lightning(trainer: Trainer) -> set[str]:
    """The names under which a checkpoint holds the states of data module and precision."""
    owners = [trainer.precision_plugin, trainer.datamodule]  # type: ignore[attr-defined]
    return {type(owner).__qualname__ for owner in owners}
