"""The engine's one callback: exact resume, clean stop, whole files and exact evaluation in any
Trainer.

    keep = ExactCheckpoint("checkpoints/mine", monitor="val_loss", mode="min", every="60s")
    trainer = Trainer(max_epochs=10, callbacks=[keep])
    trainer.fit(module, datamodule, ckpt_path=keep.resume_from)

Lightning's ModelCheckpoint saves from within hooks, where a resume repeats or skips validations and
logging steps. It forgets the best when its folder changes, and numbers its files (Lightning issues
17543, 21800, 11379). Here every checkpoint is taken between two optimizer steps: the last step, its
validation and its logging are done, and no hook of the next step has been called.
"""

from __future__ import annotations

import math
import re
import signal
import time
import warnings
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, callbacks
from lightning.pytorch.plugins import DoublePrecision
from lightning.pytorch.utilities.exceptions import SIGTERMException
from unbroken import contract, lightning_internals
from unbroken.checkpoint import other_version
from unbroken.checkpoint.following import Best
from unbroken.checkpoint.not_exact import (
    begins_averaged_batch_norms,
    has_averaged_batch_norms,
    mend_states_of_lightnings_callbacks,
    what_is_not_exact,
    what_loaders_side_by_side_lack,
)
from unbroken.checkpoint.other_version import note_of_version
from unbroken.checkpoint.resume import Resume, call_epoch_start_again, uses_hooks
from unbroken.checkpoint.shared_buffers import share_buffers, share_buffers_in_next_pass
from unbroken.checkpoint.shared_metrics import RankZeroAlone, share_sums
from unbroken.checkpoint.snapshot import BeforeHooks, Snapshot, TrainingState
from unbroken.chosen import Chosen
from unbroken.errors import NotSaved, UserError
from unbroken.loading import ExactLoader, ExactLoading, Start
from unbroken.loading.log_steps import SHARDING, is_optimizer_step
from unbroken.loading.seeding import Seeds
from unbroken.machine import threads
from unbroken.machine.waiting import waiting
from unbroken.mirror.mirror import Mirror
from unbroken.parts import all_parts
from unbroken.parts.declared import plain_state
from unbroken.parts.hyperparameters import StartingHyperparameters, apply_changes
from unbroken.parts.loaders import LoaderPositions
from unbroken.parts.loops import Place, clean_counters
from unbroken.parts.module import PlainBuffers, Switches, give_plain_buffers
from unbroken.parts.part import Part
from unbroken.parts.users_callbacks import NOT_THE_USERS, users_callbacks
from unbroken.parts.users_objects import UsersObjects
from unbroken.run_folder import (
    ENDED,
    RunFolder,
    last_owner,
    read_run_id,
    refuse_checkpoints_of_others,
)
from unbroken.seams import Seams
from unbroken.stopping import signals
from unbroken.stopping.ranks import decided_by_rank_zero, of_all_ranks, say
from unbroken.stopping.slurm import requeue_job, requeue_signal_of
from unbroken.stopping.stop import SAVE_DUE, Agreement, NextBatch, Terminated
from unbroken.storage.checkpoint_files import (
    CHOSEN,
    RUN_KEY,
    AtomicCheckpointIO,
    buffers_left_out,
    fill_in_what_was_left_out,
    make_room_for_buffers,
    record_in,
)
from unbroken.storage.files import NotWritten, copy_atomically
from unbroken.storage.run_files import RunFiles, can_start_from
from unbroken.version import __version__

# The part of a run's time that its saves may take, to copy and to write them
LARGEST_SHARE = 0.02


class ExactCheckpoint(callbacks.Checkpoint):
    """Saves ``last.ckpt`` and ``best.ckpt``, goes on from them bit for bit, and ends a run cleanly
    when it is asked to.

    With the Trainer's ``fast_dev_run`` a script saves nothing. What happens at which hook stands at
    :class:`Hooks`, which calls the methods below.

    Args:
        folder: Where ``last.ckpt`` and ``best.ckpt`` are. None: nothing is saved, and the rest
            works.
        monitor: The metric that ``best.ckpt`` follows. None: the module's own ``monitor``; else
            ``val/accuracy``, ``val/loss`` or ``val_loss``, the first that is logged; else the last
            checkpoint is the best.
        mode: ``max`` or ``min``. None: the module's own ``mode``, else what the metric's name says.
        every: How often ``last.ckpt`` is saved: seconds (``60s``) or optimizer steps (``500``).
            Where saves take more than a fiftieth of the time, the seconds between them grow, and a
            line says so.
        parts: Further parts of a checkpoint, for state that your own code keeps.
        mirror: Where the run is copied to while it trains, such as ``s3://bucket/runs``: any file
            system that fsspec knows, or a folder. ``resume_from`` then also finds what lies there.
        run_id: Tells the checkpoints of this run from another's in the same folder. Whoever gives
            it has made and locked the folder. None: this callback does both.
        changed: Whether the user has changed settings since the checkpoint. Then the
            hyperparameters of optimizers and schedules that are made now win over the checkpoint's.
        seed: Of the order and the random numbers of the data. None: it is drawn from torch's
            generator as a training starts, so it is that of ``seed_everything`` or of
            ``torch.manual_seed`` where the script calls one. A loader's own generator comes first.
            A resumed run keeps the one that was drawn.
        requeue_signal: SLURM's signal, at which the job is saved and queued again. None: the one
            that the Trainer would take, if any. See :mod:`unbroken.stopping.slurm`.
        chosen: What the run chose by itself. The checkpoints hold it.
        undeclared: Whether plain attributes that training changes, and modules that are no layers,
            are kept. If not, only what declares a state is, and what else changes is told.
    """

    def __init__(
        self,
        folder: str | Path | None,
        monitor: str | None = None,
        mode: str | None = None,
        every: str = "60s",
        parts: Sequence[Part] = (),
        *,
        mirror: str | Mirror | None = None,
        run_id: str | None = None,
        changed: bool = False,
        seed: int | None = None,
        requeue_signal: int | None = None,
        chosen: Chosen | None = None,
        undeclared: bool = True,
    ) -> None:
        lightning_internals.refuse_without_checkpointing(ExactCheckpoint)
        self.saves = folder is not None
        # W&B and others may change the working folder later.
        self.folder = Path(folder if folder is not None else ".").absolute()
        self.files = RunFiles(self.folder)
        self.files.is_saved = self._note_saved
        self.mirror = Mirror(mirror) if isinstance(mirror, str) else mirror
        self.best = Best.of(monitor, mode)
        self.every_seconds, self.every_steps = parse_interval(every)
        self.run_id = run_id
        self._id_was_given = run_id is not None
        self._folder: RunFolder | None = None
        self.changed = changed
        self.seed = seed
        self.requeue_signal = requeue_signal
        self.chosen = chosen or Chosen()
        self.agreement: Agreement | None = None
        self._further_parts = list(parts)
        self._keeps_undeclared = undeclared
        self._signals = signals.TakenOver()
        # Whether the watch over waiting threads is this run's, and ends with it.
        self._watches_threads = False
        self._seams: Seams | None = None
        self._of_rank_zero_alone = RankZeroAlone()
        self._begin_training()

    def _begin_training(self) -> None:
        """Forget a training that was before, of the same object."""
        self.loading = ExactLoading(self.seed)
        self._hyperparameters = StartingHyperparameters()
        self._buffers = PlainBuffers()
        self._objects = UsersObjects(self._keeps_undeclared)
        self._positions = LoaderPositions(self.loading)
        self.parts = all_parts(
            self._positions,
            self._buffers,
            self._hyperparameters,
            self._objects,
            self._further_parts,
        )
        # Whether this training has what it goes on from, if anything.
        self._has_loaded = False
        # Agreed upon by all ranks: the signal to stop by, or SAVE_DUE.
        self._request = 0
        self._best_due = False
        self._last_save = time.monotonic()
        self._began = self._last_save
        self._has_told_interval = False
        # The optimizer step that last.ckpt holds. None: it was neither read nor written yet.
        self.saved_step: int | None = None
        self._steps = 0
        # The training had ended when this process began.
        self._was_over = False
        # The Trainer tries a few batches, and nothing is saved.
        self._is_rehearsal = False
        # What is written now. None: another callback saves a checkpoint.
        self._saving: Snapshot | None = None
        # The state at the start of the validation that runs, for a stop inside it.
        self._before_validation: Snapshot | None = None
        # Where the run ends inside an epoch: the parts, and what hooks of its end may change.
        self._inside_epoch: Snapshot | None = None
        self._at_epochs_end: TrainingState | None = None
        # Whether a validation has followed the last batch, which ended a step.
        self._validated = False
        # Whether validations log the followed metric. None before the first validation.
        self._followed: bool | None = None
        # What the training had as a validation began.
        self._training_before_validation: TrainingState | None = None
        # Whether a validation has changed weights by other ways than the hooks of its start.
        self._validations_change_weights = False
        # What a resumed run still has to get back. None after its first batch.
        self._resume: Resume | None = None
        self._batches_validated_before: dict[int, int] = {}
        self._before_hooks: BeforeHooks | None = None
        # The Trainer's own number, while it is 0 because the run is a resumed one.
        self._sanity_steps: float | None = None

    # What others ask for, by the names of ModelCheckpoint

    @property
    def best_path(self) -> Path:
        return self.files.best

    @property
    def last_path(self) -> Path:
        return self.files.last

    @property
    def dirpath(self) -> str:
        return str(self.folder)

    @property
    def best_model_path(self) -> str:
        self.files.wait()
        return str(self.best_path) if self.saves and self.best_path.exists() else ""

    @property
    def last_model_path(self) -> str:
        self.files.wait()
        return str(self.last_path) if self.saves and self.last_path.exists() else ""

    @property
    def best_model_score(self) -> torch.Tensor | None:
        return None if self.best.score is None else torch.tensor(self.best.score)

    @property
    def monitor(self) -> str | None:
        return self.best.monitor

    @property
    def mode(self) -> str:
        return self.best.mode

    @property
    def resume_from(self) -> str | None:
        """The newest whole checkpoint, for ``trainer.fit(..., ckpt_path=...)``; None the first
        time, and where nothing is saved.

        A damaged file is skipped, and a line says so. With a mirror, its newest whole save is
        brought here first, if it is ahead of what is here.
        """
        if not self.saves:
            return None
        if self.mirror is not None and not self.mirror.was_asked:
            # One rank asks the mirror, and the others wait for it.
            decided_by_rank_zero("mirror", self._bring)
        path = self.files.newest_whole()
        return None if path is None else str(path)

    def _bring(self) -> None:
        assert self.mirror is not None
        self.mirror.claim(self.folder, last_owner(self.folder))
        say(*self.mirror.bring(read_run_id(self.folder)))

    def state_dict(self) -> dict[str, Any]:
        return self.best.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best.load_state_dict(state_dict)

    # The start

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        refuse_another_lightning(trainer)
        refuse_what_is_not_found(trainer)
        if stage == "predict":
            return
        refuse_ranks_of_functions(trainer)
        lightning_internals.check()
        # Of a stage before that ended without a teardown.
        self._put_everything_back(trainer)
        if stage == "fit":
            self._begin_training()
            self.best.ask(pl_module)
            batches: int = trainer.fast_dev_run  # type: ignore[attr-defined]
            # Whoever gives the run's id has given a rehearsal a folder of its own.
            self._is_rehearsal = batches > 0 and not self._id_was_given
            self._own_folder(trainer)
        self._add_hooks(trainer)
        if self.agreement is None:
            self.agreement = Agreement(trainer.world_size)
        self.loading.next_batch = partial(self._next_batch, trainer)
        self.loading.shares = lightning_internals.take_over_sharing(trainer)
        self._seams = Seams(trainer)
        self.loading.install(self._seams, trainer)
        if trainer.world_size > 1:
            group = self.agreement.group
            self._seams.before_gathering(
                lambda tensor, of: compare_sizes(trainer, tensor, of or group)
            )
        self._seams.after_loading(lambda checkpoint: self._fill_in(trainer, checkpoint))
        lightning_internals.leave_signals_alone(trainer)
        self._settle_requeue_signal(trainer)
        self._signals.begin(self.requeue_signal)
        if not self._id_was_given:
            # A command has seen to its threads before it imported torch.
            threads.configure_later()
        self._watches_threads = waiting.start()
        if isinstance(trainer.precision_plugin, DoublePrecision):
            # Lightning does so after a checkpoint was loaded, into weights of half the size.
            pl_module.double()

    def _settle_requeue_signal(self, trainer: Trainer) -> None:
        """Take SLURM's signal as the Trainer would, unless it was given."""
        if self.requeue_signal is None:
            environment = lightning_internals.cluster_environment(trainer)
            self.requeue_signal = requeue_signal_of(environment)

    def _fill_in(self, trainer: Trainer, checkpoint: dict[str, Any]) -> None:
        """Put the objects of this start into a checkpoint that could not hold those of the last,
        and make room for its buffers.
        """
        module = trainer.lightning_module
        of_callbacks = [
            partial(callback.on_save_checkpoint, trainer, module)
            for callback in users_callbacks(trainer)
        ]
        fill_in_what_was_left_out(checkpoint, [module.on_save_checkpoint, *of_callbacks])
        make_room_for_buffers(module, checkpoint)

    def _own_folder(self, trainer: Trainer) -> None:
        """Make and lock the folder, unless whoever gave the run's id has done so."""
        if self._is_rehearsal:
            return
        if self.saves and not self._id_was_given and trainer.is_global_zero:
            refuse_checkpoints_of_others(self.folder)
            self._folder = RunFolder(self.folder, mirror=self.mirror)
            if self.mirror is not None:
                self.mirror.claim(self.folder, last_owner(self.folder))
                self.mirror.refuse_another(self._folder.run_id)
            self._folder.create()
            self.run_id = self._folder.run_id

    def _add_hooks(self, trainer: Trainer) -> None:
        """Put the hooks before all other callbacks: what these do for a step comes after a save."""
        take_hooks_out(trainer)
        trainer.callbacks = [Hooks(self), *trainer.callbacks]  # type: ignore[attr-defined]

    def read_state(
        self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Read what Lightning does not restore, and set where training goes on in its loaders."""
        saved = record_in(checkpoint)
        if trainer.state.fn != "fit":
            lightning_internals.forget_averages(trainer)
            # Its state dict lacks buffers that are not persistent. One that training has changed
            # later only is again as it was made.
            buffers: dict[str, torch.Tensor | None] = {}
            for name, value in self._buffers.fresh.items():
                buffers[name] = None if value is None else value.clone()
            buffers |= buffers_left_out(checkpoint, trainer.global_rank)
            give_plain_buffers(module, buffers)
            return
        if self._has_loaded:
            # A finder of Lightning's has trained a few steps, and puts back what was before.
            mend_states_of_lightnings_callbacks(trainer, checkpoint["callbacks"])
            return
        self._has_loaded = True
        self.saved_step = checkpoint["global_step"]
        lightning_internals.average_what_setup_has_made(trainer, is_loaded=True)
        mend_states_of_lightnings_callbacks(trainer, checkpoint["callbacks"])
        if saved.get("state") is None:
            self.loading.start = start_of_anothers(checkpoint)
            self.loading.notes.append(
                "that checkpoint was not saved between two steps: the resume is not exact."
            )
            return
        of_version = note_of_version(saved)
        if of_version is not None:
            self.loading.notes.append(of_version)
        if not can_start_from(checkpoint):
            self.loading.notes.append(
                "that checkpoint is inside an epoch, and its data cannot be started there: the"
                " resume is not exact."
            )
        # Lightning tells from the loader's names that it cannot be resumed, and advises what is not
        # needed here.
        advice = "You're resuming from a checkpoint that ended before the epoch ended"
        warnings.filterwarnings("ignore", advice)
        resume = Resume.of(checkpoint, trainer, self.changed)
        self._resume = resume
        if len(resume.ranks) == trainer.world_size:
            self._note_other_threads(trainer, saved.get(CHOSEN, {}).get("threads"))
        # Lightning's sanity check calls the hooks of a validation. The run that was killed has had
        # its check, and what those hooks did then is in the checkpoint.
        self._sanity_steps = trainer.num_sanity_val_steps
        trainer.num_sanity_val_steps = 0
        if not self._id_was_given and resume.run_id is not None:
            # The folder may have lost its own, as where the checkpoints alone were copied.
            self.run_id = resume.run_id
        self.loading.start = resume.start
        # Loaders are made before everything else is given back.
        self._objects.give_back_early(trainer, resume.mine(trainer).get(self._objects.name, {}))
        self._keep_seeds_of(resume)
        # It had stopped early, and nothing was changed since. A validation that it was killed in
        # comes first.
        trainer.should_stop = resume.should_stop and resume.place != "validation"

    def _keep_seeds_of(self, resume: Resume) -> None:
        """Let the order of samples stay that of the checkpoint, whatever this start would draw.

        With another order, the epoch that goes on would read some samples twice and others never.
        """
        seed = resume.shared.get("seed")
        is_another = self.seed is not None and self.seed != seed
        if seed is None or (is_another and self.changed):
            return
        self.loading.seed = seed
        self.loading.seeds = [Seeds(*each) for each in resume.shared.get("seeds", [])]
        if is_another:
            self.loading.notes.append(
                f"the order of samples stays that of the checkpoint's seed, {seed}: this start has"
                " another one."
            )

    def _note_other_threads(self, trainer: Trainer, before: int | None) -> None:
        """Say so where as many CPU threads compute as the run had not: sums are added up in another
        order.
        """
        now = torch.get_num_threads()
        if before in (None, now) or trainer.strategy.root_device.type != "cpu":
            return
        self.loading.notes.append(
            f"{now} CPU threads compute, and this run had {before}: they round sums differently,"
            f" so the resume is not exact. OMP_NUM_THREADS={before} makes it exact."
        )

    def fit_starts(self, trainer: Trainer, module: LightningModule) -> None:
        """Settle the seed, and make ready what a restore needs, before a checkpoint's states come:
        what optimizers, schedules and buffers start with, what is frozen, averages of the module as
        its setup has made it, and the two seams of the training.
        """
        assert self._seams is not None
        # Before the sanity check, which puts the generators back behind it.
        self.loading.settle_seed()
        self.chosen.values.setdefault("threads", torch.get_num_threads())
        self._hyperparameters.begin(trainer)
        self._buffers.begin(module)
        self._objects.fit_starts(trainer)
        for part in self.parts:
            if isinstance(part, Switches):
                part.begin(trainer)
        if trainer.ckpt_path is None:
            self._has_loaded = True
            lightning_internals.average_what_setup_has_made(trainer, is_loaded=False)
        lightning_internals.average_on_the_device(trainer)
        if self._resume is not None:
            trainer.fit_loop.epoch_loop.max_steps += self._resume.steps_more
            if uses_hooks(trainer):
                self._before_hooks = BeforeHooks()
                if not trainer.strategy.restore_checkpoint_after_setup:
                    self._before_hooks.take_loaded(trainer)
        self._seams.after_train_start(lambda: self._training_begins(trainer))
        self._seams.before_each_batch(lambda: self.before_batch(trainer))
        self._seams.leave_out_empty_hooks()

    def sanity_check_starts(self, trainer: Trainer) -> None:
        """A resumed run has no such check. So what it changes belongs to the state."""
        self._objects.check_begins(trainer)

    def sanity_check_ends(self, trainer: Trainer) -> None:
        self._objects.check_ends(trainer)

    def training_starts(self, trainer: Trainer) -> None:
        """Let hyperparameters that the user has changed win, and gather what the run says at its
        start. The user's hooks come after this.
        """
        signals.defer()
        if self._folder is not None:
            # What could not be resumed was refused before.
            (self.folder / ENDED).unlink(missing_ok=True)
        self._last_save = time.monotonic()
        self._began = self._last_save
        self._steps = trainer.global_step
        if self._resume is not None:
            self._followed = self._resume.shared.get("followed")
            before = self._resume.shared.get("start")
            apply_changes(trainer, self._hyperparameters.now, before, self.changed)
            if self._before_hooks is not None:
                if trainer.strategy.restore_checkpoint_after_setup:
                    # Such a strategy loads after on_fit_start, and so over what it has changed.
                    self._before_hooks.take_loaded(trainer)
                self._before_hooks.take_training(trainer)
        notes = self.loading.notes
        if self.best.asked and self.best.named_mode is None:
            notes.append(f"--mode {self.best.mode} is taken for {self.best.monitor}, by its name.")
        notes += what_is_not_exact(trainer, self.loading)

    # The restore

    def _training_begins(self, trainer: Trainer) -> None:
        """Restore, where it is the run's own training that begins."""
        everyone: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        # A finder of Lightning's trains a few steps first, without the run's callbacks.
        if any(isinstance(each, Hooks) for each in everyone):
            self._restore(trainer)

    def _restore(self, trainer: Trainer) -> None:
        """Put every part back.

        All hooks of the start are done: what they do must change nothing of it.
        """
        resume = self._resume
        self._objects.begin(trainer)
        if resume is not None and resume.place == "epoch":
            lightning_internals.end_restart(trainer)
        elif resume is not None:
            for loader in self.loading.training:
                loader.set_epoch(trainer.current_epoch)
            resume.enter_epoch(trainer)
            call_epoch_start_again(trainer)
        if not self.loading.read_early:
            # The module's own hooks may have read whole epochs.
            self.loading.begin()
        if resume is not None:
            # The hooks of the epoch's start have changed attributes. What the module loads itself
            # comes later, and stays.
            self._objects.undo(trainer)
            if self._before_hooks is not None:
                self._before_hooks.give_back(trainer)
                self._before_hooks = None
            resume.settle_place(trainer, self.loading)
            resume.give_back(trainer, [part for part in self.parts if not part.is_a_file])
            self._batches_validated_before = dict(lightning_internals.validated_batches(trainer))
            # Files are changed last: what cannot be restored is refused before.
            self._set_aside_unusable_best(trainer)
            resume.give_back(trainer, [part for part in self.parts if part.is_a_file])
        elif trainer.global_step == 0:
            # The best of a training before, with the same callback, says nothing of this one.
            self.best.forget()
            self._note_if_replaced()
            for part in self.parts:
                part.start_anew()
        self.loading.notes += what_loaders_side_by_side_lack(trainer, self.loading)
        say(*dict.fromkeys(self.loading.notes))

    def _note_if_replaced(self) -> None:
        """Say that a training which starts anew writes over the checkpoints of one before.

        Whoever gives the run's id has chosen the folder, and told what is in it.
        """
        if self._id_was_given or self._is_rehearsal:
            return
        if self.best_model_path or self.last_model_path:
            self.loading.notes.append(
                f"{self.folder} holds an earlier training, and this one starts anew and replaces"
                " its checkpoints. To go on with it: trainer.fit(..., ckpt_path=keep.resume_from)."
            )

    def _set_aside_unusable_best(self, trainer: Trainer) -> None:
        """Look for the best anew, where ``best.ckpt`` is not what the state says."""
        if not self.saves:
            return
        reason = None
        if self.best.score is not None and trainer.is_global_zero:
            checkpoint, reason = self.files.usable_best(self.run_id)
            if reason is None:
                reason = self._says_another_best(checkpoint)
        reason = trainer.strategy.broadcast(reason)
        if reason:
            say(f"{reason} the best is looked for anew.")
            self.best.forget()

    def _says_another_best(self, checkpoint: dict[str, Any]) -> str | None:
        """Why ``best.ckpt``, which holds this checkpoint, is not the best of this state: a new one
        was saved before a kill.
        """
        saved = checkpoint.get("callbacks", {}).get(self.state_key)
        if saved is None or (saved["score"], saved["epoch"]) == (self.best.score, self.best.epoch):
            return None
        return f"{self.files.best} is ahead of the checkpoint:"

    # Steps

    def before_batch(self, trainer: Trainer) -> None:
        """Save and stop, if that is due. Nothing of the next step has been done."""
        self.files.check()
        if self._resume is not None and self._resume.steps_more:
            # The run went on only for a validation, and that is not wanted any more. This ends the
            # epoch.
            raise StopIteration
        if self._request or self._best_due:
            self._save_and_stop(trainer, self._take(trainer, "batch"))

    def batch_ends(self, trainer: Trainer, batch_idx: int) -> None:
        """Agree with the other ranks whether to save or stop before the next batch."""
        # The first batch is done: nothing is left to give back.
        self._resume = None
        self._validated = False
        automatic = trainer.lightning_module.automatic_optimization
        if automatic and not is_optimizer_step(trainer, batch_idx):
            # A step that is partly accumulated is not the place for a checkpoint.
            return
        agreed = self._agree(self._own_request(trainer))
        # Every rank counts the same steps. A batch may have several.
        before = self._steps
        self._steps = trainer.global_step
        every = self.every_steps
        is_due = every is not None and before // every < self._steps // every
        self._request = max(self._request, agreed, SAVE_DUE if is_due else 0)

    def _own_request(self, trainer: Trainer) -> int:
        """What this rank asks for: to stop, to save, or nothing."""
        return signals.state.requested or self._overdue(trainer)

    def _overdue(self, trainer: Trainer) -> int:
        """SAVE_DUE on rank zero when the seconds between two saves are over."""
        if self.every_steps is not None or not trainer.is_global_zero:
            return 0
        # A save that is still on its way to the disk has the memory that the next one needs.
        if self.files.is_busy:
            return 0
        return SAVE_DUE if time.monotonic() - self._last_save >= self._interval() else 0

    def _interval(self) -> float:
        """Seconds between two saves: the wish, or more where saves cost too large a share."""
        costs = self.files.costs
        needed = (costs.last_wait_seconds + costs.write_seconds) / LARGEST_SHARE
        if needed <= self.every_seconds:
            return self.every_seconds
        if not self._has_told_interval:
            self._has_told_interval = True
            say(
                f"a save takes {costs.write_seconds:.1f} s of writing and"
                f" {costs.last_wait_seconds:.1f} s of waiting: every {needed:.0f} s"
                f" in the place of every {self.every_seconds:g} s."
            )
        return needed

    def _next_batch(self, trainer: Trainer, has_one: bool) -> NextBatch:
        """Tell the other ranks whether this one has a further batch; the request goes along."""
        assert self.agreement is not None
        request = self._own_request(trainer)
        return self.agreement.next_batch(trainer.global_rank, has_one, request)

    def _agree(self, request: int) -> int:
        assert self.agreement is not None
        return self.agreement.latest(request)

    # Epochs

    def epoch_starts(self, trainer: Trainer) -> None:
        """Save between two epochs."""
        if trainer.reload_dataloaders_every_n_epochs == 1:  # type: ignore[attr-defined]
            # Lightning does so, too, but later.
            lightning_internals.validated_batches(trainer).clear()
        if trainer.current_epoch > 0 and self._resume is None:
            self._follow_training(trainer)
            self._save_and_stop(trainer, self._take(trainer, "epoch"))

    def epoch_ends(self, trainer: Trainer) -> None:
        """End what a resume has begun, and add up over the ranks what was logged."""
        self._note_if_cut(trainer)
        if self._resume is not None:
            # It went on in the epoch's last validation.
            trainer.fit_loop.epoch_loop.max_steps -= self._resume.steps_more
            self._resume = None
        share_sums(trainer)
        lightning_internals.end_restart(trainer)

    def _note_if_cut(self, trainer: Trainer) -> None:
        """Keep the state of this moment where the run ends inside an epoch: by ``--max_steps``, by
        ``--max_time``, or by an early stop. A later start with more to do goes on there.
        """
        is_last_step = trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps
        is_cut = is_last_step or trainer.should_stop
        batches = trainer.fit_loop.epoch_loop.batch_progress
        is_done = batches.current.completed >= trainer.num_training_batches
        if not is_cut or is_done or batches.is_last_batch:
            return
        if not self.loading.anywhere or not self.saves:
            return
        self._inside_epoch = self._take(trainer, "batch")
        self._inside_epoch.add_entries(trainer)
        self._inside_epoch.add_saved(trainer)
        is_sharded = isinstance(trainer.strategy, SHARDING)
        self._at_epochs_end = TrainingState(trainer, copies_weights=not is_sharded)
        loops = trainer.fit_loop.state_dict()
        # Lightning has counted the epoch as processed by now.
        for counters in loops["epoch_progress"].values():
            counters["processed"] -= 1
        clean_counters(loops, "batch", self._validated)
        self._inside_epoch.loops = loops

    def training_ends(self, trainer: Trainer) -> None:
        """Save after the last epoch."""
        if self._was_over:
            # It is saved.
            return
        assert self.agreement is not None
        requests = of_all_ranks(signals.state.requested, self.agreement.group)
        self._request = max(self._request, *requests)
        self._follow_training(trainer)
        if self.best.score is None:
            # No metric was followed: the last is the best.
            self._best_due = True
            if self.saves and self.best.monitor is None and trainer.callback_metrics:
                names = ", ".join(sorted(trainer.callback_metrics))
                say(
                    "no metric was followed, so best.ckpt is the last."
                    f" Name one of those that are logged with --monitor: {names}."
                )
        self._save_and_stop(trainer, self._take(trainer, "epoch"), is_end=True)

    def _end_again(self, trainer: Trainer) -> None:
        """Call the hooks of a training's end, before which the last checkpoint was saved.

        Such a hook may give the module its averaged weights. Lightning calls none of them where
        nothing is left to train. Those of the start come first, since callbacks rely on them.
        """
        self._was_over = True
        trainer.fit_loop.on_run_start()
        trainer.fit_loop.on_run_end()

    def fit_ends(self, trainer: Trainer) -> None:
        """Put right what a training leaves, where nothing was left to train."""
        if self._resume is not None:
            # Only the test is repeated.
            if self._resume.place == "epoch" and not has_averaged_batch_norms(trainer):
                self._end_again(trainer)
            else:
                left = [each for each in self.parts if each.is_a_file or each.is_left_at_the_end]
                self._resume.give_back(trainer, left)
            if self.saves and trainer.is_global_zero:
                # The run may have been resumed from best.ckpt after its end.
                self.files.replace_damaged_last()
        if self._folder is not None:
            # The list of runs has no other sign that a script has come to its end.
            (self.folder / ENDED).touch()

    def _follow_training(self, trainer: Trainer) -> None:
        """At an epoch's end: follow a metric that training logs; refuse one that nobody logs."""
        best = self.best
        if self._followed or not best.asked:
            # What is followed comes from validations, or nobody has named it.
            return
        logged = self._logged(trainer)
        is_typed_without_validation = best.asked == "typed" and not trainer.enable_validation
        must_be_there = self._followed is not None or is_typed_without_validation
        if must_be_there and best.monitor not in logged:
            names = ", ".join(sorted(logged))
            raise UserError(f"--monitor must be logged, got {best.monitor}. Logged: {names}.")
        if best.take(logged, trainer.current_epoch - 1):
            self._best_due = True

    def _logged(self, trainer: Trainer) -> dict[str, Any]:
        """The latest logged values. All ranks get rank zero's: a value that is not shared differs
        among them, and only together can they save a new best.
        """
        if trainer.world_size == 1:
            return trainer.callback_metrics
        assert self.agreement is not None
        mine = {name: float(value) for name, value in trainer.callback_metrics.items()}
        found: dict[str, Any] = of_all_ranks(mine, self.agreement.group)[0]
        return found

    # Evaluations

    def validation_starts(self, trainer: Trainer, module: LightningModule) -> None:
        """Take a snapshot, for a stop inside the validation."""
        if trainer.state.fn != "fit":
            signals.defer()
            return
        assert self.agreement is not None
        share_buffers(trainer, module, self.agreement.group)
        # Lightning may have begun to count anew.
        lightning_internals.validated_batches(trainer).update(self._batches_validated_before)
        copies_weights = not self._keeps_weights(trainer) and not trainer.sanity_checking
        self._training_before_validation = TrainingState(trainer, copies_weights)
        if trainer.sanity_checking:
            return
        snapshot = Snapshot("validation")
        self._set_epoch_is_over(trainer, "validation")
        snapshot.add(trainer, [part for part in self.parts if part.changes_in_validation])
        snapshot.shared["followed"] = self._followed
        snapshot.add_entries(trainer)
        self._before_validation = snapshot

    def _keeps_weights(self, trainer: Trainer) -> bool:
        """Whether no hook of the user's may validate other weights than are trained."""
        if self._validations_change_weights:
            return False
        everyone = (*trainer.callbacks, trainer.lightning_module)  # type: ignore[attr-defined]
        return all(keeps_trained_weights(part) for part in everyone)

    def evaluation_batch_ends(self, trainer: Trainer, batch_idx: int, dataloader_idx: int) -> None:
        """Stop inside a validation or test, if asked to; add up over the ranks what was logged."""
        ranks_agree = True
        if trainer.world_size > 1:
            loaders, is_last = lightning_internals.evaluated(trainer, batch_idx, dataloader_idx)
            # Only exact loaders are known to have equally many batches on all ranks.
            ranks_agree = all(has_equal_batches(loader) for loader in loaders)
            if ranks_agree and is_last and not trainer.sanity_checking:
                # Lightning computes the values before the epoch's end.
                share_sums(trainer)
        if ranks_agree:
            self._request = max(self._request, self._agree(signals.state.requested))
        if self._request > SAVE_DUE:
            if self._before_validation is not None:
                self._stop_in_validation(trainer)
            self._stop(trainer, self._request)

    def _stop_in_validation(self, trainer: Trainer) -> None:
        """Save the state as it was when the validation began: a resumed run begins it again."""
        snapshot = self._before_validation
        assert snapshot is not None
        module = trainer.lightning_module
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, callbacks.WeightAveraging):
                # Put the trained weights back before they are saved.
                callback.on_validation_epoch_end(trainer, module)
        assert self._training_before_validation is not None
        is_changed = self._changes_weights(trainer)
        if is_changed:
            say("this validation has changed weights: the run goes on from the checkpoint before.")
        self._training_before_validation.give_back(trainer)
        snapshot.add(trainer, [part for part in self.parts if not part.changes_in_validation])
        self._save_and_stop(trainer, snapshot, saves=not is_changed)

    def _changes_weights(self, trainer: Trainer) -> bool:
        """Whether this validation has changed weights of which there is no copy.

        Averaged weights are put in the place of the trained ones and back.
        """
        if self._training_before_validation is None or lightning_internals.averaged_models(trainer):
            return False
        return self._training_before_validation.has_changed_weights(trainer)

    def evaluation_ends(self, trainer: Trainer) -> None:
        """Compare the followed metric with the best so far."""
        self._of_rank_zero_alone.tell(trainer)
        if trainer.state.fn != "fit":
            return
        if self._resume is not None:
            trainer.fit_loop.epoch_loop.max_steps -= self._resume.steps_more
            self._resume.steps_more = 0
        if self._changes_weights(trainer):
            # From now on a copy is made for each validation.
            self._validations_change_weights = True
        self._training_before_validation = None
        self._before_validation = None
        self._batches_validated_before = {}
        share_buffers_in_next_pass(trainer)
        if trainer.sanity_checking:
            return
        self._validated = is_optimizer_step(trainer, trainer.fit_loop.epoch_loop.batch_idx)
        logged = self._logged(trainer)
        if self.best.take(logged, trainer.current_epoch):
            self._best_due = True
        self._followed = bool(self._followed) or self.best.monitor in logged

    # The save

    def _take(self, trainer: Trainer, place: Place) -> Snapshot:
        """Every part, as it is now."""
        snapshot = Snapshot(place)
        self._set_epoch_is_over(trainer, place)
        snapshot.add(trainer, self.parts)
        snapshot.shared["followed"] = self._followed
        snapshot.shared["was_validated"] = self._validated
        return snapshot

    def _set_epoch_is_over(self, trainer: Trainer, place: Place) -> None:
        after_the_last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        in_last_validation = place == "validation" and after_the_last
        self._positions.epoch_is_over = place == "epoch" or in_last_validation

    def _save_and_stop(
        self, trainer: Trainer, snapshot: Snapshot, saves: bool = True, is_end: bool = False
    ) -> None:
        """Save, unless ``saves`` is false, and stop if asked to. The last save of a run
        (``is_end``, or a stop) is on the disk when this returns.
        """
        stop = self._request if self._request > SAVE_DUE else 0
        with ExitStack() as pauses:
            for callback in trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, contract.PausesWhileSaving):
                    pauses.enter_context(callback.pause_while_saving())
            # Loaders that cannot start inside an epoch: save only at an epoch's end, and at a new
            # best.
            can_go_on = self._can_go_on(trainer, snapshot)
            is_wanted = self.saves and saves and not self._is_rehearsal
            if is_wanted and (can_go_on or self._best_due):
                self._save(trainer, snapshot, can_go_on)
                if stop or is_end:
                    self._settle(trainer, snapshot, can_go_on)
        self._request = 0
        self._best_due = False
        if stop:
            self._stop(trainer, stop)

    def _stop(self, trainer: Trainer, signum: int) -> NoReturn:
        """End the run as a signal asks. At SLURM's, the job is queued again first."""
        if signum == self.requeue_signal:
            if trainer.is_global_zero:
                self._leave_for_requeue(trainer)
                requeue_job()
            signum = signal.SIGTERM
        lightning_internals.release_child_processes()
        if signum == signal.SIGTERM:
            lightning_internals.note_sigterm(trainer)
        if signals.state.raised is not None:
            # The script's own handler has said how the run ends.
            raise signals.state.raised
        raise Terminated if signum == signal.SIGTERM else signals.Stopped(signum)

    def _leave_for_requeue(self, trainer: Trainer) -> None:
        """Put a copy of ``last.ckpt`` where Lightning looks as a queued script starts again.

        A command finds its own.
        """
        if self._id_was_given or not self.saves or not self.last_path.exists():
            return
        target = lightning_internals.next_requeue_checkpoint(trainer)
        try:
            copy_atomically(self.last_path, target)
        except NotWritten as error:
            say(f"{error} A queued script resumes with ckpt_path=keep.resume_from alone.")

    def _can_go_on(self, trainer: Trainer, snapshot: Snapshot) -> bool:
        """Whether a run that is resumed with this snapshot can start there."""
        if snapshot.place == "epoch":
            return not begins_averaged_batch_norms(trainer)
        return self.loading.anywhere

    def _save(self, trainer: Trainer, snapshot: Snapshot, can_go_on: bool) -> None:
        """Write the files. Lightning's save asks :meth:`write_state` for what it lacks.

        Where a resumed run cannot go on, a new best is saved alone, and last.ckpt stays as it is.
        """
        assert self.agreement is not None
        self._saving = snapshot
        try:
            step = trainer.global_step if can_go_on else None
            self.files.write(trainer, self._best_due, can_go_on, self.agreement.group, step)
        finally:
            self._saving = None
        self._last_save = time.monotonic()

    def _note_saved(self, step: int | None) -> None:
        """The files of a save are on the disk. ``step``: that of last.ckpt, if it was written."""
        if step is not None:
            self.saved_step = step
        if self.mirror is not None:
            # The mirror tells the step of last.ckpt.
            self.mirror.take(step)

    def _settle(self, trainer: Trainer, snapshot: Snapshot, can_go_on: bool) -> None:
        """Wait until the last save of a run is on the disk. One that has failed is tried once more.

        Raises:
            NotSaved: On all ranks, where that fails again.
        """
        if self._trouble_of_any_rank() is None:
            return
        self._save(trainer, snapshot, can_go_on)
        reason = self._trouble_of_any_rank()
        if reason is not None:
            raise NotSaved(f"the run has ended, and its last state is not saved: {reason}")

    def _trouble_of_any_rank(self) -> str | None:
        """Why the newest save is not on the disk; None where it is. Every rank calls it."""
        assert self.agreement is not None
        try:
            self.files.wait()
            mine = self.files.trouble
        except UserError as error:
            mine = str(error)
        return next((each for each in of_all_ranks(mine, self.agreement.group) if each), None)

    def add_facts(self, trainer: Trainer, result: Any) -> None:
        """Add to the summary what the saves of this start have cost (rank zero's)."""
        costs = self.files.costs
        seconds = max(time.monotonic() - self._began, costs.wait_seconds)
        if costs.bytes and seconds > 0:
            result.summary.metrics |= {
                "checkpoint/wait_pct": 100 * costs.wait_seconds / seconds,
                "checkpoint/seconds": costs.write_seconds,
                "checkpoint/gib": costs.bytes / 2**30,
            }

    def write_state(self, trainer: Trainer, checkpoint: dict[str, Any]) -> None:
        """Put the state into a checkpoint that is saved now, and what the run chose by itself."""
        record = checkpoint.setdefault(RUN_KEY, {})
        record[CHOSEN] = self.chosen.values
        snapshot = self._saving
        if snapshot is None:
            # A checkpoint of another callback, saved inside a hook: a resume from it is not exact.
            return
        assert self.agreement is not None
        clean_counters(checkpoint["loops"]["fit_loop"], snapshot.place, self._validated)
        schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
        checkpoint["lr_schedulers"] = [plain_state(schedule) for schedule in schedules]
        for part in self.parts:
            part.flush()
        # Hooks of the validation have changed callbacks' states and buffers since the snapshot.
        snapshot.put_entries_into(checkpoint)
        state = self._state_of(snapshot)
        inside = self._inside_epoch
        if inside is not None and snapshot.place == "epoch":
            state["inside_epoch"] = {
                "state": self._state_of(inside),
                "loops": inside.loops,
                "entries": inside.entries,
                "added": inside.added,
                "training": self._at_epochs_end.as_data(trainer) if self._at_epochs_end else {},
            }
        record["state"] = state
        record["run_id"] = self.run_id
        record["can_go_on"] = self._can_go_on(trainer, snapshot)
        record.setdefault("versions", {})[other_version.NAME] = __version__
        writer = trainer.strategy.checkpoint_io
        if isinstance(writer, AtomicCheckpointIO):
            # The user's hooks come after this one.
            writer.record = record

    def _state_of(self, snapshot: Snapshot) -> dict[str, Any]:
        """What a checkpoint holds of a snapshot: the parts of every rank, and those that are of
        all.
        """
        assert self.agreement is not None
        return {
            "place": snapshot.place,
            "ranks": of_all_ranks(snapshot.mine, self.agreement.group),
            "samples_per_batch": self.loading.samples_per_batch,
            "seed": self.loading.seed,
            "seeds": [list(each) for each in self.loading.seeds],
            **snapshot.shared,
        }

    # The end

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.files.wait()
        self._finish_mirror(None)
        self._put_everything_back(trainer)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        if isinstance(exception, SIGTERMException) and exception.code is None:
            # It comes from a plain Trainer inside a hook. Without a code it would end as a success.
            exception.code = signals.Stopped(signal.SIGTERM).exit_code
        # The error that ends the run is the one to be told.
        with suppress(UserError):
            self.files.wait()
        # Lightning calls no teardown then.
        self._finish_mirror(signals.seconds_left())
        self._put_everything_back(trainer)

    def _finish_mirror(self, seconds: float | None) -> None:
        """Bring the last save over, unless whoever made the folder does so."""
        if self._folder is not None and self.mirror is not None:
            say(*self.mirror.finish(seconds))

    def _put_everything_back(self, trainer: Trainer) -> None:
        self.files.let_go()
        if self._sanity_steps is not None:
            trainer.num_sanity_val_steps = self._sanity_steps
            self._sanity_steps = None
        if self._seams is not None:
            self._seams.put_back()
            self._seams = None
            lightning_internals.let_lightning_share(trainer, self.loading.shares)
        if self._folder is not None:
            self._folder.release()
            self._folder = None
        lightning_internals.let_lightning_handle_signals(trainer)
        self._signals.end()
        if self._watches_threads:
            waiting.end()
            self._watches_threads = False
        take_hooks_out(trainer)
        # Whoever copies the callbacks after a run copies no Trainer with them.
        self.loading.next_batch = None


class Hooks(Callback):
    """The hooks of :class:`ExactCheckpoint`, called before those of all other callbacks.

    Lightning moves checkpoint callbacks behind all others, and a module's own code finds the first
    of them in ``trainer.checkpoint_callback``. So the place of ``ExactCheckpoint`` is left to
    Lightning, and this callback stands in front. What happens when, in the order of a run:

    | hook | what happens |
    | --- | --- |
    | setup | loaders and signals are taken over, and two of the five seams (seams.py) |
    | on_load_checkpoint | the state is read; where training goes on in its loaders is set |
    | on_fit_start | what optimizers and schedules start with is noted; the other seams |
    | on_sanity_check_start, on_sanity_check_end | what this check changes is noted |
    | on_train_start | changed hyperparameters win; the user's hooks come after this |
    | (seam) after on_train_start | RESTORE: on_train_epoch_start again, then every part |
    | (seam) before each batch, on_train_batch_start | SAVE if one is due or asked for; the stop |
    | on_save_checkpoint | every part is put into the checkpoint that is saved |
    | on_train_batch_end | the ranks agree whether to save or stop before the next batch |
    | on_validation_start | a snapshot, for a stop inside the validation |
    | on_validation_batch_end, on_test_batch_end | the stop inside it; sums over ranks |
    | on_validation_end, on_test_end | the followed metric is compared with the best so far |
    | on_train_epoch_end | sums over ranks; a snapshot where the run ends inside the epoch |
    | on_train_epoch_start, on_train_end | SAVE between two epochs, and after the last |
    | on_fit_end | where nothing was left to train: on_train_start and on_train_end again |
    """

    def __init__(self, checkpoint: ExactCheckpoint) -> None:
        self.checkpoint = checkpoint

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self.checkpoint.read_state(trainer, pl_module, checkpoint)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self.checkpoint.write_state(trainer, checkpoint)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.checkpoint.fit_starts(trainer, pl_module)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.checkpoint.fit_ends(trainer)

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.checkpoint.sanity_check_starts(trainer)

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.checkpoint.sanity_check_ends(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.checkpoint.training_starts(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.checkpoint.training_ends(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.checkpoint.epoch_starts(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.checkpoint.epoch_ends(trainer)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # A training_step that reads its batches itself (dataloader_iter) passes no seam.
        self.checkpoint.before_batch(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.checkpoint.batch_ends(trainer, batch_idx)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.checkpoint.validation_starts(trainer, pl_module)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self.checkpoint.evaluation_batch_ends(trainer, batch_idx, dataloader_idx)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.checkpoint.evaluation_ends(trainer)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        signals.defer()

    on_test_batch_end = on_validation_batch_end

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.checkpoint.evaluation_ends(trainer)


def take_hooks_out(trainer: Trainer) -> None:
    """Leave no :class:`Hooks` among a Trainer's callbacks. Whoever walks their list keeps it."""
    everyone: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    others = [each for each in everyone if not isinstance(each, Hooks)]
    trainer.callbacks = others  # type: ignore[attr-defined]


def compare_sizes(trainer: Trainer, tensor: torch.Tensor, group: Any) -> None:
    """A UserError on every rank, where a step of an evaluation gathers tensors of other sizes.

    Each sample is evaluated once, so one rank may have a sample more than another. Gloo would abort
    the process, and NCCL would wait or gather something else. In training the ranks' batches are of
    one size, and nothing is asked.
    """
    if trainer.training:
        return
    sizes = of_all_ranks(list(tensor.shape), group)
    if all(size == sizes[0] for size in sizes):
        return
    told = " and ".join(map(str, sizes))
    raise UserError(
        f"--devices {trainer.world_size}: a step of the evaluation gathers tensors of the sizes"
        f" {told}, because each sample is evaluated once. Write"
        " torch.cat(torchmetrics.utilities.distributed.gather_all_tensors(tensor)) there."
    )


def start_of_anothers(checkpoint: dict[str, Any]) -> Start:
    """Where training goes on from a checkpoint that was saved from outside, such as by
    ``trainer.save_checkpoint`` or ModelCheckpoint.
    """
    loops = checkpoint["loops"]["fit_loop"]
    epochs = loops["epoch_progress"]["current"]
    if epochs["completed"] == epochs["ready"]:
        # No epoch had begun. The batches are those of the epoch before.
        return Start(checkpoint["epoch"])
    return Start(checkpoint["epoch"], loops["epoch_loop.batch_progress"]["current"]["ready"])


def has_equal_batches(loader: Any) -> bool:
    """Whether a loader has as many batches on every rank."""
    return isinstance(loader, ExactLoader) and loader.ranks_agree


def keeps_trained_weights(part: Any) -> bool:
    """Whether no hook of a module or callback puts other weights in for a validation."""
    if isinstance(part, contract.ValidatesTrainedWeights) and part.validates_trained_weights:
        return True
    hooks = (part.on_validation_start, part.on_validation_epoch_start)
    return all(hook.__module__.startswith(NOT_THE_USERS) for hook in hooks)


def refuse_another_lightning(trainer: Any) -> None:
    """A UserError for a Trainer of ``pytorch_lightning`` whose classes are not ``lightning``'s.

    It would train, and a resume would fail or not be exact.
    """
    if not isinstance(trainer, Trainer):
        package = type(trainer).__module__.partition(".")[0]
        raise UserError(
            f"ExactCheckpoint cannot resume a Trainer of {package}, which was imported before"
            " unbroken. Import unbroken first: then it is lightning.pytorch's."
        )


def refuse_what_is_not_found(trainer: Trainer) -> None:
    """A UserError for ``ckpt_path="last"`` where Lightning has found no checkpoint for it.

    It looks for those of a ModelCheckpoint alone. It would train anew, and replace what is in the
    folder, or test random weights.
    """
    if trainer.ckpt_path is None and lightning_internals.asked_checkpoint(trainer) == "last":
        raise UserError(
            'ckpt_path="last" finds checkpoints of a ModelCheckpoint alone. Write'
            " ckpt_path=keep.resume_from, where keep is the ExactCheckpoint: it is None the first"
            " time."
        )


def refuse_ranks_of_functions(trainer: Trainer) -> None:
    """A UserError for ranks that the Trainer starts in functions, and not as processes of their
    own: what the callback reaches there does not come back.
    """
    how = lightning_internals.start_method_of_ranks(trainer)
    if how is not None:
        raise UserError(
            f"ExactCheckpoint does not work where ranks are functions (ddp_{how}, ddp_notebook):"
            ' what they reach is lost. Use strategy="ddp" in a script, or one device.'
        )


def parse_interval(text: str) -> tuple[float, int | None]:
    """``"60s"`` → (60.0, None); ``"500"`` or ``"500steps"`` → (60.0, 500).

    Anything else is a UserError.
    """
    seconds = re.fullmatch(r"\s*(\d{1,9}\.?\d*|\.\d+)\s*s\s*", str(text))
    if seconds and 0 < float(seconds[1]) < math.inf:
        return float(seconds[1]), None
    steps = re.fullmatch(r"\s*(\d{1,9})\s*(?:steps?)?\s*", str(text))
    if steps and int(steps[1]) > 0:
        return 60.0, int(steps[1])
    must = "be optimizer steps (500) or seconds (60s), above 0"
    raise UserError(f"--checkpoint_every (in a script: every) must {must}, got {text}.")
