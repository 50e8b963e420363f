"""The table of hooks: what happens when, and who does it."""

from __future__ import annotations

import signal
from contextlib import suppress
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from unbroken import lightning_internals
from unbroken.checkpoint.engine import Engine
from unbroken.checkpoint.not_exact import what_is_not_exact, why_callbacks_need_whole_epochs
from unbroken.checkpoint.shared_buffers import share_buffers
from unbroken.checkpoint.shared_metrics import share_sums
from unbroken.loading import ExactLoader, position_of
from unbroken.seams import Seams
from unbroken.stopping import signals
from unbroken.stopping.agreement import request_of_this_rank
from unbroken.stopping.ranks import say
from unbroken.storage.run_files import CheckpointMaker


class Hooks(Callback):
    """The hooks of :class:`ExactCheckpoint`, called before those of all other callbacks.

    Lightning moves checkpoint callbacks behind all others, and a module's own code finds the first
    of them in ``trainer.checkpoint_callback``. So the place of ``ExactCheckpoint`` is left to
    Lightning, and this callback stands in front. What happens when, in the order of a run:

    | hook | what happens | who does it |
    | --- | --- | --- |
    | setup | loaders and signals are taken over; seams (seams.py) are put in | ExactCheckpoint |
    | (Lightning) | data module and module are given their states | Lightning |
    | on_load_checkpoint | the state is read; where loaders start is set | restoring |
    | (Lightning) | callbacks are given their states | Lightning |
    | on_fit_start | what this start has made is noted; three seams more | kept, restoring |
    | (Lightning) | optimizers, schedules and loops are given their states | Lightning |
    | (seam) before train_dataloader | what it finds is noted, or given back | restoring |
    | on_sanity_check_start, on_sanity_check_end | what this check changes is noted | kept |
    | on_train_start | signals are only noted from here; changed hyperparameters win | restoring |
    | (seam) after on_train_start | RESTORE, inside an epoch after its hooks | restoring |
    | (seam) the first epoch's loop begins | samplers, generators once more; counters | restoring |
    | (seam) before an epoch's first batch | what its start has set is noted | kept |
    | (seam) before each batch, on_train_batch_start | SAVE if one is due; the stop | saving |
    | on_save_checkpoint | every part is put into the checkpoint that is saved | saving |
    | on_train_batch_end | the batch may be digested, a window may end | windows |
    | on_train_batch_end | the ranks agree to save or stop before the next batch | saving |
    | on_validation_start | a snapshot, for a stop inside the validation | validation |
    | on_validation_batch_end, on_test_batch_end | sums over ranks | hooks |
    | on_validation_batch_end | at a stop: SAVE the state of the validation's start | saving |
    | on_test_batch_end | at a stop: the test is given up | ending |
    | on_validation_end | the followed metric is compared | validation, following |
    | on_test_start | signals are only noted from here | hooks |
    | on_validation_end, on_test_end | values that ranks do not share are told | hooks |
    | on_train_epoch_end | a snapshot where a limit cuts the epoch | cut_epoch |
    | on_train_epoch_end | loaders are told; sums over ranks | loading, hooks |
    | on_train_epoch_end | a window of digests ends | windows |
    | on_train_epoch_end, on_train_epoch_start | data that change in between are told | kept |
    | on_train_epoch_start, on_train_end | SAVE between two epochs, and after the last | saving |
    | on_train_epoch_start | generators are noted before the user's hooks of it | kept |
    | on_exception | waits for a save under way, and then for the mirror until 8 s after | hooks |
    | | the signal; gives signals back | |
    | teardown | waits for a save, the mirror; signals back; a late stop | ExactCheckpoint |
    | on_fit_end | where nothing was left to train: the hooks of its end again | restoring |
    """

    def __init__(self, engine: Engine, seams: Seams) -> None:
        self.engine = engine
        self.seams = seams

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy, as a hook may make one of all callbacks, does nothing: the run is not copied."""
        return Callback, ()

    # The start

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self.engine.restoring.read(trainer, pl_module, checkpoint)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        engine = self.engine
        # Before the sanity check, which puts the generators back after it.
        engine.loading.settle_seed()
        # With other threads sums are rounded differently.
        engine.chosen.values.setdefault("threads", torch.get_num_threads())
        engine.kept.fit_starts(trainer, pl_module)
        engine.restoring.fit_starts(trainer)
        lightning_internals.average_on_the_device(trainer)
        self.seams.before_loaders(lambda: engine.restoring.before_loaders(trainer))
        self.seams.after_train_start(lambda: self._after_train_start(trainer))
        self.seams.before_each_batch(lambda: self._before_batch(trainer))
        lightning_internals.leave_out_empty_hooks()

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # A resumed run has no such check. So what it changes belongs to the state.
        self.engine.kept.objects.check_begins(trainer)

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.engine.kept.objects.check_ends(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        engine = self.engine
        signals.note_from_now_on()
        engine.own_folder.training_starts()
        engine.saving.training_starts(trainer)
        engine.windows.training_starts(trainer)
        engine.restoring.training_starts(trainer)
        engine.lines += engine.best.assumptions()
        engine.lines += what_is_not_exact(trainer)
        engine.loading.resume_only_between_epochs(why_callbacks_need_whole_epochs(trainer))

    def _after_train_start(self, trainer: Trainer) -> None:
        everyone: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        # A finder of Lightning's trains a few steps first, without the run's callbacks.
        if any(isinstance(each, Hooks) for each in everyone):
            self.engine.restoring.restore(trainer)
            # Several loaders may say the same.
            say(*dict.fromkeys(self.engine.lines))

    # The training

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        engine = self.engine
        if trainer.reload_dataloaders_every_n_epochs == 1:  # type: ignore[attr-defined]
            # Lightning forgets them, too, but after the save below, which holds these counts.
            engine.restoring.forget_validated_batches(trainer)
        engine.restoring.give_generators_again(trainer)
        if engine.own_folder.saves:
            say(*engine.kept.data_sets.lines_of_changed())
        # Before the first epoch there is nothing to save.
        if trainer.current_epoch > 0 and not engine.restoring.is_resumed_without_a_batch:
            if engine.loading.loaded_at == trainer.current_epoch:
                engine.kept.settings.loaders_are_made(trainer)
                engine.kept.objects.loaders_are_made(trainer)
                engine.kept.data_sets.begin()
            engine.following.epoch_is_over(trainer, engine.agreement.group)
            engine.saving.between_epochs(trainer)
        if engine.own_folder.saves:
            engine.kept.objects.before_epoch_starts(trainer)
        engine.kept.before_hooks_of_epoch.before_hooks(trainer)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # A training_step that reads its batches itself (dataloader_iter) passes no seam. In any
        # other step this is the second call, and nothing is due any more.
        self._before_batch(trainer)

    def _before_batch(self, trainer: Trainer) -> None:
        engine = self.engine
        engine.own_folder.files.check()
        if engine.restoring.came_only_for_a_validation:
            # Lightning's loop ends an epoch by this.
            raise StopIteration
        if engine.own_folder.saves:
            engine.kept.objects.before_batch(trainer)
        engine.saving.before_batch(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        engine = self.engine
        engine.restoring.batch_ends()
        engine.kept.was_validated.is_so = False
        engine.windows.batch_ends(trainer, batch)
        engine.saving.batch_ends(trainer, batch_idx)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        engine = self.engine
        if engine.loading.can_start_inside_epochs and engine.own_folder.saves:
            engine.cut_epoch.note(trainer)
        # A longer run that goes on inside the epoch goes on with its open window.
        engine.windows.epoch_ends(trainer)
        engine.kept.data_sets.epoch_ends()
        engine.loading.epoch_ends(trainer)
        engine.restoring.epoch_ends(trainer)
        share_sums(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        engine = self.engine
        if engine.restoring.was_over:
            # fit_ends has called the hooks of an end again. The run is saved already.
            return
        # A run that is resumed after its end has rank zero's on all ranks.
        share_buffers(trainer, pl_module, engine.agreement.group)
        engine.following.training_is_over(trainer, engine.agreement.group, engine.own_folder.saves)
        engine.saving.training_ends(trainer)
        engine.restoring.training_ends()

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint_io = trainer.strategy.checkpoint_io
        if isinstance(checkpoint_io, CheckpointMaker):
            checkpoint_io.add_our_state(checkpoint)
        else:
            # Another callback saves, inside a hook: a resume from there is not exact.
            self.engine.saving.add_choices(checkpoint)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.engine.restoring.fit_ends(trainer)
        self.engine.own_folder.training_is_over(self.engine.kept.chain.links)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        if isinstance(exception, SIGTERMException) and exception.code is None:
            # It comes from a plain Trainer inside a hook. Without a code it would end as a success.
            exception.code = signals.Stopped(signal.SIGTERM).exit_code
        engine = self.engine
        # Here, in front of all others: Lightning calls no further callback if one raises, and the
        # script would be left with signals that are only noted.
        try:
            # The error that ends the run is the one to be told. A device that has failed fails the
            # thread that writes, too.
            with suppress(Exception):
                engine.own_folder.files.wait()
            engine.own_folder.finish_mirror(signals.seconds_left())
        finally:
            engine.own_folder.release()
            engine.ending.give_signals_back_at(exception, trainer)

    # Evaluations

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        engine = self.engine
        if trainer.state.fn != "fit":
            signals.note_from_now_on()
            return
        share_buffers(trainer, pl_module, engine.agreement.group)
        engine.restoring.validation_starts(trainer)
        engine.following.validation_starts(trainer)
        engine.validation.starts(trainer)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        engine = self.engine
        self._agree_in_evaluation(trainer, batch_idx, dataloader_idx)
        if not engine.agreement.is_stop or trainer.sanity_checking:
            # In the sanity check a signal is raised, and ends the run at once. One that is only
            # noted, such as SLURM's, stops it before its first batch, where it can be saved.
            return
        if engine.validation.runs:
            snapshot = engine.validation.state_for_a_stop(trainer)
            engine.saving.save_and_maybe_stop(trainer, snapshot)
        else:
            engine.ending.stop(trainer, engine.agreement.stop_signal)

    def _agree_in_evaluation(self, trainer: Trainer, batch_idx: int, dataloader_idx: int) -> None:
        """Where all ranks are known to be here, let them agree on a stop. After the last batch of a
        loader they add up what was logged.
        """
        if trainer.world_size > 1:
            loaders, is_last = lightning_internals.evaluated(trainer, batch_idx, dataloader_idx)
            # Only exact loaders are known to have equally many batches on all ranks.
            if not all(has_equal_batches(each) for each in loaders):
                return
            if is_last and not trainer.sanity_checking:
                # Lightning computes the values before the epoch's end.
                share_sums(trainer)
        self.engine.agreement.agree(request_of_this_rank())

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        engine = self.engine
        engine.unshared_values.tell(trainer)
        if trainer.state.fn != "fit":
            return
        engine.restoring.validation_is_over(trainer)
        engine.validation.is_over(trainer)
        if not trainer.sanity_checking:
            engine.following.validation_is_over(trainer, engine.agreement.group)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        signals.note_from_now_on()

    on_test_batch_end = on_validation_batch_end

    on_test_end = on_validation_end


def put_in_front(trainer: Trainer, hooks: Hooks) -> None:
    """Put the hooks before all other callbacks: what these do for a step comes after a save."""
    take_hooks_out(trainer)
    trainer.callbacks = [hooks, *trainer.callbacks]  # type: ignore[attr-defined]


def take_hooks_out(trainer: Trainer) -> None:
    """Leave no :class:`Hooks` among a Trainer's callbacks. The list is replaced, so that a loop
    that runs over it is not disturbed.
    """
    everyone: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    others = [each for each in everyone if not isinstance(each, Hooks)]
    trainer.callbacks = others  # type: ignore[attr-defined]


def has_equal_batches(loader: Any) -> bool:
    """Whether a loader has as many batches on every rank."""
    return isinstance(loader, ExactLoader) and position_of(loader).ranks_agree
