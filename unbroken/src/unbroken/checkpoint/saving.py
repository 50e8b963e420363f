"""What is due to be saved, and the one place that saves it.

A run is saved

- before the next batch (:meth:`Saving.before_batch`), where the time or the steps between two saves
  are over (interval.py), where a validation has found a new best, or where the run is asked to
  stop. A save by time or steps is put off while the previous one is being written. With loaders
  that cannot start inside an epoch only a new best is saved there;
- between two epochs (:meth:`Saving.between_epochs`): in the ``on_train_epoch_start`` of the next
  one, before the user's hooks of that name. A new best, a save that the ranks have agreed on and a
  stop are always saved there. Else none is made while the previous one is being written, or where
  it is so recent that another one would cost too much (``Interval.is_too_soon``; of the saves that
  a thread writes the third is the first that may be left out so). A run that cannot start inside an
  epoch may so lose several short epochs of a large state: those after its last save, if it is
  stopped or killed inside a later one. Before Lightning's extra epoch that updates batch norms for
  averaged weights, only a new best is saved;
- inside a validation, where the run is asked to stop: the state is that of the validation's start
  (nothing is saved if the validation has changed weights, or with loaders that cannot start inside
  an epoch);
- after training (:meth:`Saving.training_ends`), also where ``max_steps`` or ``max_time`` has cut an
  epoch: that checkpoint has the place inside it, too (cut_epoch.py).

At an error nothing more is saved; a save that is under way is written to its end.

hooks.py calls these methods. A part is one thing that a checkpoint keeps beside Lightning's own
entries, such as the generators (parts/part.py); a seam is a place where a method of Lightning's is
replaced (seams.py). In the order in which it happens:

1. When a batch has ended an optimizer step (with manual optimization: each batch), the ranks agree
   on what any of them asks for: to save by the clock, or to stop (:meth:`Saving.batch_ends`;
   stopping/__init__.py has the whole way of a stop). One rank acts on that before its next batch,
   several act one optimizer step later. Saves by steps and of a new best need no such agreement,
   because all ranks count the same: they come before the next batch. (Before one by steps the ranks
   ask each other whether the disk is still busy.) ``every="500"`` saves at the multiples of 500
   optimizer steps, whatever was saved between them.
2. At one of the moments above every part is taken: places in loaders, generators, metrics, what the
   user's objects hold (:meth:`KeptParts.take`; kept.py has the list). Their values are copied
   there; weights and the states of optimizers stay where they are until item 3. Then
   :meth:`Saving.save_and_maybe_stop` saves it, if a run can resume from it or it is a new best
   (:meth:`Saving._plan`). The batch before is done with its logging and its validation,
   and no hook of the next one was called. (validation.py takes the parts for a stop inside a
   validation.)
3. :class:`unbroken.storage.run_files.RunFiles` waits until the previous save is written. It lets
   Lightning make its checkpoint, which calls

   - our ``on_save_checkpoint`` (hooks.py), which calls
   - ``CheckpointMaker.add_our_state`` (run_files.py), which calls
   - :meth:`Saving._put_state_into`, which adds what Lightning's checkpoint lacks.

   Then the rows of ``metrics.csv`` up to this step are brought to the disk, because a resume needs
   them (:meth:`KeptParts.flush`). A state whose tensors have less than 16 MiB is written while
   training waits; a larger one is copied, and a thread writes the copy. The other ranks wait as
   long as rank zero does. A new best is written to ``best.ckpt`` and, if a run can resume from this
   state, copied to ``last.ckpt``; any other save is written to ``last.ckpt`` alone. (A best that
   the disk did not take before is tried once more in front of it.) What may fail, and what follows,
   stands at the head of run_files.py.
4. A file is written beside its target, flushed to the disk, and renamed; then its folder is flushed
   (:func:`unbroken.storage.files.written_atomically`). On any error the file beside it is removed;
   the system's errors, such as a full disk, are NotWritten. When all files of a save are there,
   :meth:`Saving._note_saved` sets ``saved_step`` (if last.ckpt is one of them) and hands them to
   the mirror, in the thread that has written them.

A ModelCheckpoint of the user's saves as ever, beside these two files.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning.pytorch import Trainer
from unbroken import contract
from unbroken.checkpoint import other_version
from unbroken.checkpoint.cut_epoch import CutEpoch
from unbroken.checkpoint.ending import Ending
from unbroken.checkpoint.following import Following
from unbroken.checkpoint.interval import Interval
from unbroken.checkpoint.kept import KeptParts
from unbroken.checkpoint.not_exact import is_before_epoch_for_batch_norms
from unbroken.checkpoint.own_folder import OwnFolder
from unbroken.checkpoint.snapshot import Snapshot
from unbroken.chosen import Chosen
from unbroken.errors import NotSaved, UserError
from unbroken.loading import RunLoaders
from unbroken.loading.log_steps import is_optimizer_step
from unbroken.parts.declared import plain_state
from unbroken.parts.loops import BETWEEN_EPOCHS, clean_counters
from unbroken.stopping.agreement import (
    SAVE_DUE,
    Agreement,
    NextBatch,
    request_of_this_rank,
)
from unbroken.stopping.ranks import gather_from_ranks, say
from unbroken.stopping.signals import STOP_S
from unbroken.storage.contents import CHOSEN, RUN_KEY
from unbroken.storage.savable import NotPlain
from unbroken.version import __version__


@dataclass(frozen=True)
class PlannedSave:
    """What is to be saved.

    Attributes:
        snapshot: The state that is saved.
        is_best: Whether it is a new best.
        can_resume_from_it: Whether a run can resume from it. If not, ``last.ckpt`` stays as it is.
    """

    snapshot: Snapshot
    is_best: bool
    can_resume_from_it: bool


class Saving:
    """Saves a training.

    Args:
        own_folder: The folder of the run.
        interval: How often it is saved.
        kept: The parts of a checkpoint.
        following: Tells of a new best, on every rank alike.
        agreement: What the ranks ask for: to stop, to save, or nothing.
        ending: How the run ends.
        cut_epoch: The epoch that a limit has cut.
        loading: The run's loaders. They know whether training can start inside an epoch.
        chosen: What the run chose by itself.

    Attributes:
        saved_step: The optimizer step of the ``last.ckpt`` that this training has written. None: it
            has written none yet, or this is not rank zero.
    """

    def __init__(
        self,
        own_folder: OwnFolder,
        interval: Interval,
        kept: KeptParts,
        following: Following,
        agreement: Agreement,
        ending: Ending,
        cut_epoch: CutEpoch,
        loading: RunLoaders,
        chosen: Chosen,
    ) -> None:
        self.saved_step: int | None = None
        self._own_folder = own_folder
        self._interval = interval
        self._kept = kept
        self._following = following
        self._agreement = agreement
        self._ending = ending
        self._cut_epoch = cut_epoch
        self._loading = loading
        self._chosen = chosen
        self._began = time.monotonic()
        self._last_save = self._began
        # Saves may be due at the multiples of a number of optimizer steps. This is the step of the
        # last call of ``save_and_maybe_stop``, whether that has saved anything or not; at first, of
        # the training's start.
        self._counted_from_step = 0

    def training_starts(self, trainer: Trainer) -> None:
        """Count the time until the first save from here."""
        self._began = time.monotonic()
        self._last_save = self._began
        self._counted_from_step = trainer.global_step

    # What is due

    def batch_ends(self, trainer: Trainer, batch_idx: int) -> None:
        """Agree with the other ranks whether to save or stop. The save or the stop comes before the
        next batch; with several ranks one optimizer step later, but for a save by steps.
        """
        automatic = trainer.lightning_module.automatic_optimization
        if automatic and not is_optimizer_step(trainer, batch_idx):
            # Inside an accumulated step nobody asks for a save or a stop. A new best is saved there
            # (before_batch), and a stop inside a validation saves the state at its start.
            return
        self._agreement.agree(self._own_request(trainer))
        # Every rank counts the same steps. A batch may have several.
        steps_are_over = self._interval.is_due_between(self._counted_from_step, trainer.global_step)
        is_due = steps_are_over and self._loading.can_start_inside_epochs
        if is_due and not self._waits_for_disk():
            self._agreement.add_save()

    def _waits_for_disk(self) -> bool:
        """Whether the disk still writes the previous save. Then this one is put off, and training
        goes on. Every rank must call it.
        """
        busy = gather_from_ranks(self._own_folder.files.is_busy, self._agreement.group)
        if any(busy):
            self._interval.tell_of_waiting()
        return any(busy)

    def agree_on_next_batch(self, trainer: Trainer, has_one: bool) -> NextBatch:
        """Tell the other ranks whether this one has a further batch; the request goes along."""
        return self._agreement.agree_on_next_batch(
            trainer.global_rank, has_one, self._own_request(trainer)
        )

    def _own_request(self, trainer: Trainer) -> int:
        """What this rank asks for: to stop, to save, or nothing."""
        return request_of_this_rank() or self._request_if_overdue(trainer)

    def _request_if_overdue(self, trainer: Trainer) -> int:
        """SAVE_DUE on rank zero when the seconds between two saves are over, else 0."""
        files = self._own_folder.files
        # A save that is still on its way to the disk has the memory that the next one needs. And
        # where a loader cannot start inside an epoch, nothing is saved there by the clock.
        if not trainer.is_global_zero or files.is_busy or not self._loading.can_start_inside_epochs:
            return 0
        passed = time.monotonic() - self._last_save
        return SAVE_DUE if self._interval.seconds_are_over(passed, files.costs) else 0

    # The moments for a save

    def before_batch(self, trainer: Trainer) -> None:
        """Save if that is due, and then stop if the ranks have agreed to. The next batch is
        fetched, and no hook has seen it.
        """
        if self._agreement.is_save_or_stop or self._following.is_new:
            self.save_and_maybe_stop(trainer, self._kept.take(trainer, "batch"))

    def between_epochs(self, trainer: Trainer) -> None:
        """Save after an epoch, and then stop if the ranks have agreed to. Where epochs are short, a
        large state is not saved after each of them.
        """
        must = self._agreement.is_save_or_stop or self._following.is_new
        if must or not self._is_too_soon():
            self.save_and_maybe_stop(trainer, self._kept.take(trainer, BETWEEN_EPOCHS))

    def _is_too_soon(self) -> bool:
        """Whether the previous save is not written yet, or so recent that another one would cost
        too much. Every rank must call it.
        """
        files = self._own_folder.files
        passed = time.monotonic() - self._last_save
        mine = files.is_busy or self._interval.is_too_soon(passed, files.costs)
        return any(gather_from_ranks(mine, self._agreement.group))

    def training_ends(self, trainer: Trainer) -> None:
        """Save after the last epoch."""
        self._agreement.agree_at_the_end(request_of_this_rank())
        self.save_and_maybe_stop(trainer, self._kept.take(trainer, BETWEEN_EPOCHS), is_end=True)

    # The save

    def save_and_maybe_stop(
        self, trainer: Trainer, snapshot: Snapshot | None, is_end: bool = False
    ) -> None:
        """Save a snapshot, if there is one from which a run can resume, or which is a new best.
        Then end the run by ``Ending.stop`` if the ranks have agreed to stop. Before a run ends
        (``is_end``) or stops, its newest save is on the disk. Where nothing is saved now, that is
        the one before, and it may be some epochs old.

        Raises:
            Stopped: The ranks have agreed to (or what a script's own handler has raised).
            NotSaved: The disk has not taken the last save of the run: that of now even at a second
                try, or the one before where nothing is saved now.
            UserError: No file can hold the state.
        """
        stops = self._agreement.is_stop
        is_last = stops or is_end
        self._counted_from_step = trainer.global_step
        save = self._plan(trainer, snapshot)
        if save is not None:
            with self._pauses(trainer):
                if stops:
                    self._tell_of_a_slow_end()
                self._write_files(trainer, save)
                if is_last:
                    self._settle(trainer, save)
        elif is_last and self._own_folder.saves:
            # A run resumes from the previous save. It must be on the disk, and its best as well.
            wait = partial(
                self._own_folder.files.wait_at_the_end,
                trainer,
                flush=self._kept.flush,
                when_saved=partial(self._note_saved, None),
            )
            self._refuse_to_end_unsaved(wait)
        if is_last and (save is None or not save.can_resume_from_it):
            self._tell_what_is_saved(trainer)
        self._following.is_new = False
        if stops:
            # It raises.
            self._ending.stop(trainer, self._agreement.stop_signal)
        self._agreement.forget()

    def _plan(self, trainer: Trainer, snapshot: Snapshot | None) -> PlannedSave | None:
        """What is to be saved of a snapshot. None: nothing. With loaders that cannot start inside
        an epoch, that is so inside one, unless there is a new best.
        """
        if snapshot is None or not self._own_folder.saves:
            return None
        can_resume_from_it = self._can_resume_from(trainer, snapshot)
        save = PlannedSave(snapshot, self._following.is_new, can_resume_from_it)
        return save if save.can_resume_from_it or save.is_best else None

    @contextmanager
    def _pauses(self, trainer: Trainer) -> Iterator[None]:
        """Inside, monitors count no time."""
        with ExitStack() as pauses:
            for callback in trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, contract.PausesWhileSaving):
                    pauses.enter_context(callback.pause_while_saving())
            yield

    def _can_resume_from(self, trainer: Trainer, snapshot: Snapshot) -> bool:
        """Whether a run that is resumed with this snapshot can start there."""
        if snapshot.place == BETWEEN_EPOCHS:
            return not is_before_epoch_for_batch_norms(trainer)
        return self._loading.can_start_inside_epochs

    def _write_files(self, trainer: Trainer, save: PlannedSave) -> None:
        """Begin to write the files. Where no run can resume from the snapshot, ``best.ckpt`` alone
        is written.

        A large state is on the disk later: :meth:`_note_saved` is called then.
        """
        step = trainer.global_step if save.can_resume_from_it else None
        files = self._own_folder.files
        with self._kept.without_a_trace(trainer):
            files.write(
                trainer,
                target=files.best if save.is_best else files.last,
                copied_to=files.last if save.is_best and save.can_resume_from_it else None,
                group=self._agreement.group,
                add_state=partial(self._put_state_into, trainer, save),
                add_weights=partial(self._kept.add_weights_left_out, trainer, save.snapshot),
                flush=self._kept.flush,
                when_saved=partial(self._note_saved, step),
            )
        self._last_save = time.monotonic()

    def _put_state_into(
        self, trainer: Trainer, save: PlannedSave, checkpoint: dict[str, Any]
    ) -> dict[str, Any]:
        """Put into Lightning's checkpoint what a resume needs beyond it; returns the library's
        entry. Every rank must call it.
        """
        snapshot = save.snapshot
        group = self._agreement.group
        was_validated = self._kept.was_validated.is_so
        clean_counters(checkpoint["loops"]["fit_loop"], snapshot.place, was_validated)
        schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
        checkpoint["lr_schedulers"] = [plain_state(schedule) for schedule in schedules]
        # At a stop inside a validation its hooks have changed callbacks' states and buffers since
        # the snapshot.
        snapshot.put_entries_into(checkpoint)
        state = self._kept.state_of(snapshot, group)
        if snapshot.place == BETWEEN_EPOCHS:
            inside = self._cut_epoch.as_data(trainer, group)
            if inside is not None:
                state["inside_epoch"] = inside
        record = self.add_choices(checkpoint)
        record["state"] = state
        record["run_id"] = self._own_folder.run_id
        record["resumed_at"] = self._kept.chain.resumed_at
        record["can_go_on"] = save.can_resume_from_it
        record.setdefault("versions", {})[other_version.NAME] = __version__
        return record

    def add_choices(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Put what the run chose by itself into a checkpoint, also into one that another callback
        saves inside a hook; returns the library's entry.
        """
        record: dict[str, Any] = checkpoint.setdefault(RUN_KEY, {})
        record[CHOSEN] = self._chosen.values
        return record

    def _note_saved(self, step: int | None) -> None:
        """The files of a save are on the disk. ``step``: that of last.ckpt, if it was written."""
        if step is not None:
            self.saved_step = step
            self._own_folder.last_is_of_this_training = True
        if self._own_folder.mirror is not None:
            # The mirror is told which step last.ckpt holds; None: best.ckpt alone is new.
            self._own_folder.mirror.take(step)

    def _tell_of_a_slow_end(self) -> None:
        """Say so, before the save of a stop, where the last save's time tells that the run cannot
        end in the time that a stop takes.
        """
        files = self._own_folder.files
        seconds = files.seconds_to_save()
        if seconds > STOP_S:
            gib = files.costs.last_bytes / 2**30
            say(
                f"the run ends when its state of {gib:.1f} GiB is on the disk, in about"
                f" {seconds:.0f} s."
            )

    def _tell_what_is_saved(self, trainer: Trainer) -> None:
        """Say from where a script's run resumes that has stopped where no run can resume. A command
        says so itself.
        """
        if self._own_folder.is_managed_by_caller or not self._own_folder.saves:
            return
        if self.saved_step is not None:
            saved = f"last.ckpt holds step {self.saved_step}, and a resume repeats the steps since"
        elif self._own_folder.files.last.exists():
            saved = "last.ckpt is still the one that this start has found"
        else:
            saved = "there is no last.ckpt yet"
        say(f"the run stops at step {trainer.global_step}, from which it cannot resume: {saved}.")

    def _settle(self, trainer: Trainer, save: PlannedSave) -> None:
        """Wait until the last save of a run is on the disk. One that has failed is tried once more.

        Raises:
            NotSaved: On all ranks, where that fails again.
        """
        wait = self._own_folder.files.wait
        if self._trouble_after(wait) is None:
            return
        self._write_files(trainer, save)
        self._refuse_to_end_unsaved(wait)

    def _refuse_to_end_unsaved(self, wait: Callable[[], None]) -> None:
        reason = self._trouble_after(wait)
        if reason is not None:
            raise NotSaved(f"the run has ended, and its last state is not saved: {reason}")

    def _trouble_after(self, wait: Callable[[], None]) -> str | None:
        """Wait for the disk. Returns why the newest save of any rank is not on it; None where all
        are. Every rank must call it.
        """
        try:
            wait()
            mine = self._own_folder.files.trouble.reason
        except (UserError, NotPlain) as error:
            mine = str(error)
        return next((each for each in gather_from_ranks(mine, self._agreement.group) if each), None)

    # What it has cost

    def facts(self) -> dict[str, float]:
        """What the saves of this start have cost, by the names of the summary."""
        costs = self._own_folder.files.costs
        seconds = max(time.monotonic() - self._began, costs.wait_seconds)
        if not costs.last_bytes or seconds <= 0:
            return {}
        return {
            "checkpoint/wait_pct": 100 * costs.wait_seconds / seconds,
            "checkpoint/seconds": costs.last_write_seconds,
            "checkpoint/gib": costs.last_bytes / 2**30,
        }
