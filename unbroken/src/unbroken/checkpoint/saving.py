"""What is due to be saved, and the one place that saves it.

A run is saved

- before the next step, where the time or the steps between two saves are over (interval.py; it is
  put off while the save before is being written), where a validation has found a new best, or where
  the run is asked to stop;
- between two epochs; a state of 16 MiB or more, unless it is a new best or a stop, only if the
  save before is old enough for what it costs (interval.py);
- inside a validation, where the run is asked to stop: the state is that of the validation's start;
- after the last epoch.

In the order in which it happens:

1. At the end of an optimizer step, and where ranks ask each other whether all have a next batch,
   they agree on what any of them asks for: a save, or a stop (:meth:`Saving.batch_ends`,
   :meth:`Saving.agree_on_next_batch`). A validation or an epoch's end may find a new best; all
   ranks find it together.
2. At one of the moments above every part is taken: places in loaders, generators, metrics, what the
   user's objects hold (:meth:`KeptParts.take`; kept.py has the list). Then
   :meth:`Saving.save_and_stop_if_asked` saves it. The step before is done with its logging and its
   validation, and no hook of the next one was called. (validation.py takes the parts for a stop
   inside a validation.)
3. :class:`unbroken.storage.run_files.RunFiles` lets Lightning make its checkpoint. Lightning calls
   our ``on_save_checkpoint`` (hooks.py) as it does so, by which :meth:`Saving._put_state_into` adds
   what Lightning's lacks. A save that was not put off first waits for the one before. One of less
   than 16 MiB is written at once; a larger one is copied, and a thread writes the copy. A new best
   is written to ``best.ckpt`` and, where a resumed run can start there, copied to ``last.ckpt``;
   any other save is written to ``last.ckpt`` alone.
4. A file is written beside its target, flushed to the disk, and renamed
   (:func:`unbroken.storage.files.written_atomically`). Then :meth:`Saving._note_saved` sets
   ``saved_step`` and hands the files to the mirror, in the thread that has written them.

A ModelCheckpoint of the user's saves as ever, beside these two files.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
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
from unbroken.loading import ExactLoading
from unbroken.loading.log_steps import is_optimizer_step
from unbroken.parts.declared import plain_state
from unbroken.parts.loops import BETWEEN_EPOCHS, clean_counters
from unbroken.stopping.ranks import of_all_ranks, say
from unbroken.stopping.signals import STOP_S
from unbroken.stopping.stop import SAVE_DUE, NextBatch, request_of_this_rank
from unbroken.storage.contents import CHOSEN, RUN_KEY
from unbroken.version import __version__


@dataclass(frozen=True)
class Wish:
    """One save that is wanted.

    Attributes:
        snapshot: The state that is saved.
        is_best: Whether it is a new best.
        can_go_on: Whether a resumed run can start there. If not, ``last.ckpt`` stays as it is.
    """

    snapshot: Snapshot
    is_best: bool
    can_go_on: bool


class Saving:
    """Saves a training.

    Args:
        own_folder: The folder of the run.
        interval: How often it is saved.
        kept: The parts of a checkpoint.
        following: Tells of a new best, on every rank alike.
        ending: What the ranks ask for.
        cut_epoch: The epoch that a limit has cut.
        loading: Whether training can start inside an epoch.
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
        ending: Ending,
        cut_epoch: CutEpoch,
        loading: ExactLoading,
        chosen: Chosen,
    ) -> None:
        self.saved_step: int | None = None
        self._own_folder = own_folder
        self._interval = interval
        self._kept = kept
        self._following = following
        self._ending = ending
        self._cut_epoch = cut_epoch
        self._loading = loading
        self._chosen = chosen
        self._began = time.monotonic()
        self._last_save = self._began
        # Optimizer steps at the newest moment at which a save could be, whether or not there was
        # one. The steps to the next are counted from it.
        self._counted_from = 0

    def training_starts(self, trainer: Trainer) -> None:
        """Count the time and the steps until the first save from here."""
        self._began = time.monotonic()
        self._last_save = self._began
        self._counted_from = trainer.global_step

    # What is due

    def batch_ends(self, trainer: Trainer, batch_idx: int) -> None:
        """Agree with the other ranks whether to save or stop before the next batch."""
        automatic = trainer.lightning_module.automatic_optimization
        if automatic and not is_optimizer_step(trainer, batch_idx):
            # Neither the clock nor a stop saves inside an accumulated step. A new best is saved
            # there (before_batch).
            return
        self._ending.agree(self._own_request(trainer))
        # Every rank counts the same steps. A batch may have several.
        steps_are_over = self._interval.is_due_between(self._counted_from, trainer.global_step)
        is_due = steps_are_over and self._loading.starts_inside_epochs
        if is_due and not self._waits_for_disk():
            self._ending.request = max(self._ending.request, SAVE_DUE)

    def _waits_for_disk(self) -> bool:
        """Whether the disk still writes the save before. Then this one is put off, and training
        goes on. Every rank calls it.
        """
        busy = of_all_ranks(self._own_folder.files.is_busy, self._ending.group)
        if any(busy):
            self._interval.tell_of_waiting()
        return any(busy)

    def agree_on_next_batch(self, trainer: Trainer, has_one: bool) -> NextBatch:
        """Tell the other ranks whether this one has a further batch; the request goes along."""
        return self._ending.agree_on_next_batch(
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
        if not trainer.is_global_zero or files.is_busy or not self._loading.starts_inside_epochs:
            return 0
        passed = time.monotonic() - self._last_save
        return SAVE_DUE if self._interval.seconds_are_over(passed, files.costs) else 0

    # The moments for a save

    def before_batch(self, trainer: Trainer) -> None:
        """Save and stop, if that is due. The next batch is fetched, and no hook has seen it."""
        if self._ending.request or self._following.is_new:
            self.save_and_stop_if_asked(trainer, self._kept.take(trainer, "batch"))

    def between_epochs(self, trainer: Trainer) -> None:
        """Save and stop after an epoch. A large state is saved less often than short epochs end."""
        must = self._ending.request or self._following.is_new
        if must or not self._is_too_soon():
            self.save_and_stop_if_asked(trainer, self._kept.take(trainer, BETWEEN_EPOCHS))

    def _is_too_soon(self) -> bool:
        """Whether the save before is not written yet, or so recent that another one would cost too
        much. Every rank calls it.
        """
        files = self._own_folder.files
        passed = time.monotonic() - self._last_save
        mine = files.is_busy or self._interval.is_too_soon(passed, files.costs)
        return any(of_all_ranks(mine, self._ending.group))

    def training_ends(self, trainer: Trainer) -> None:
        """Save after the last epoch."""
        self._ending.agree_at_the_end()
        self.save_and_stop_if_asked(trainer, self._kept.take(trainer, BETWEEN_EPOCHS), is_end=True)

    # The save

    def save_and_stop_if_asked(
        self, trainer: Trainer, snapshot: Snapshot | None, is_end: bool = False
    ) -> None:
        """Save a snapshot, unless there is none, and raise Stopped if the ranks have agreed to
        stop. The last save of a run (``is_end``, or a stop) is on the disk then.
        """
        stops = self._ending.is_asked_for
        is_last = stops or is_end
        self._counted_from = trainer.global_step
        wish = self._wish(trainer, snapshot)
        if wish is not None:
            with self._pauses(trainer):
                if stops:
                    self._tell_of_a_slow_end()
                self._save(trainer, wish)
                if is_last:
                    self._settle(trainer, wish)
        elif is_last and self._own_folder.saves:
            # A resume starts from the save before. It must be on the disk.
            self._refuse_to_end_unsaved()
        self._following.is_new = False
        if stops:
            # It raises.
            self._ending.stop(trainer)
        self._ending.forget_request()

    def _wish(self, trainer: Trainer, snapshot: Snapshot | None) -> Wish | None:
        """What is to be saved of a snapshot. None: nothing. With loaders that cannot start inside
        an epoch, that is so inside one, unless there is a new best.
        """
        if snapshot is None or not self._own_folder.saves:
            return None
        wish = Wish(snapshot, self._following.is_new, self._can_go_on(trainer, snapshot))
        return wish if wish.can_go_on or wish.is_best else None

    @contextmanager
    def _pauses(self, trainer: Trainer) -> Iterator[None]:
        """Inside, monitors count no time."""
        with ExitStack() as pauses:
            for callback in trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, contract.PausesWhileSaving):
                    pauses.enter_context(callback.pause_while_saving())
            yield

    def _can_go_on(self, trainer: Trainer, snapshot: Snapshot) -> bool:
        """Whether a run that is resumed with this snapshot can start there."""
        if snapshot.place == BETWEEN_EPOCHS:
            return not is_before_epoch_for_batch_norms(trainer)
        return self._loading.starts_inside_epochs

    def _save(self, trainer: Trainer, wish: Wish) -> None:
        """Begin to write the files. Where a resumed run cannot go on, a new best is saved alone.

        A large state is on the disk later: :meth:`_note_saved` is called then.
        """
        step = trainer.global_step if wish.can_go_on else None
        files = self._own_folder.files
        files.write(
            trainer,
            target=files.best if wish.is_best else files.last,
            also=files.last if wish.is_best and wish.can_go_on else None,
            group=self._ending.group,
            add_state=partial(self._put_state_into, trainer, wish),
            add_left_out=partial(self._kept.add_left_out, trainer, wish.snapshot),
            flush=self._kept.flush,
            when_saved=partial(self._note_saved, step),
        )
        self._last_save = time.monotonic()

    def _put_state_into(
        self, trainer: Trainer, wish: Wish, checkpoint: dict[str, Any]
    ) -> dict[str, Any]:
        """Put into Lightning's checkpoint what a resume needs beyond it; returns the library's
        entry. Every rank calls it.
        """
        snapshot = wish.snapshot
        group = self._ending.group
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
        record["can_go_on"] = wish.can_go_on
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
        if self._own_folder.mirror is not None:
            # The mirror is told which step last.ckpt holds; None: best.ckpt alone is new.
            self._own_folder.mirror.take(step)

    def _tell_of_a_slow_end(self) -> None:
        """Say so where the run cannot end in the time that a stop takes, because of the disk."""
        files = self._own_folder.files
        seconds = files.seconds_to_save()
        if seconds > STOP_S:
            gib = files.costs.last_bytes / 2**30
            say(
                f"the run ends when its state of {gib:.1f} GiB is on the disk, in about"
                f" {seconds:.0f} s."
            )

    def _settle(self, trainer: Trainer, wish: Wish) -> None:
        """Wait until the last save of a run is on the disk. One that has failed is tried once more.

        Raises:
            NotSaved: On all ranks, where that fails again.
        """
        if self._trouble_after_waiting() is None:
            return
        self._save(trainer, wish)
        self._refuse_to_end_unsaved()

    def _refuse_to_end_unsaved(self) -> None:
        reason = self._trouble_after_waiting()
        if reason is not None:
            raise NotSaved(f"the run has ended, and its last state is not saved: {reason}")

    def _trouble_after_waiting(self) -> str | None:
        """Wait for the disk. Returns why the newest save of any rank is not on it; None where all
        are. Every rank calls it.
        """
        files = self._own_folder.files
        try:
            files.wait()
            mine = files.trouble.reason
        except UserError as error:
            mine = str(error)
        return next((each for each in of_all_ranks(mine, self._ending.group) if each), None)

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
