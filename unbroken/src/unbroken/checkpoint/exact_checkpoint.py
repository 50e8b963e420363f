"""The engine's callback: exact resume, clean stop, whole files and exact evaluation in any
Trainer.

    keep = ExactCheckpoint("checkpoints/mine", monitor="val_loss", mode="min", every="60s")
    trainer = Trainer(max_epochs=10, callbacks=[keep])
    trainer.fit(module, datamodule, ckpt_path=keep.resume_from)

Lightning's ModelCheckpoint saves from within hooks, where a resume repeats or skips validations and
logging steps. It forgets the best when its folder changes, and numbers its files (Lightning issues
17543, 21800, 11379). Here every checkpoint is taken between two batches: the batch before, its
validation and its logging are done, and no hook of the next one has been called. A stop inside a
validation saves the state of its start.

Which hook does what stands in hooks.py. The objects that do it have a file each. engine.py makes
them for one training. What the ranks agree on, the ending, the folder and the best are of the
callback, and serve all its trainings:

- kept.py: the parts of a checkpoint, and how they are taken
- saving.py: what is due to be saved, and the one place that saves it
- restoring.py: what a resumed run still has to get back, and the one place that gives it back
- following.py: the metric that is followed, and its best
- validation.py: the validation that a stop may cut
- cut_epoch.py: the epoch that a limit has cut
- windows.py: the digests of what the run trains on and becomes
- stopping/agreement.py: what the ranks agree on
- ending.py: the signals, and how a run ends when it is asked to stop
- own_folder.py: the folder of the run
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, callbacks
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision
from unbroken import lightning_internals
from unbroken.checkpoint.digests_csv import write_digests
from unbroken.checkpoint.ending import Ending
from unbroken.checkpoint.engine import Engine, Settings
from unbroken.checkpoint.following import Best
from unbroken.checkpoint.hooks import Hooks, put_in_front, take_hooks_out
from unbroken.checkpoint.interval import Interval
from unbroken.checkpoint.own_folder import OwnFolder
from unbroken.checkpoint.refusals import (
    compare_sizes,
    refuse_another_lightning,
    refuse_checkpoints_in_parts,
    refuse_ranks_of_functions,
    refuse_what_is_not_found,
)
from unbroken.chosen import Chosen
from unbroken.loading import users_own
from unbroken.machine import threads
from unbroken.machine.waiting import waiting
from unbroken.mirror.mirror import Mirror
from unbroken.parts.part import Part
from unbroken.parts.users_callbacks import users_callbacks
from unbroken.seams import Seams
from unbroken.stopping.agreement import Agreement
from unbroken.stopping.ranks import decided_by_rank_zero, take_rank_of_the_trainer
from unbroken.stopping.signals import Asked
from unbroken.storage.weights import fill_in_what_was_left_out, make_room_for_buffers


class ExactCheckpoint(callbacks.Checkpoint):
    """Saves ``last.ckpt`` and ``best.ckpt``, resumes from them bit for bit, and ends a run cleanly
    when it is asked to stop.

    With the Trainer's ``fast_dev_run`` a script saves nothing.

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
        run_id: Identifies the run in its checkpoints. Whoever gives one has made and locked the
            folder. None: this callback does both.
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
        self.best = Best.of(monitor, mode)
        copied_to = Mirror(mirror) if isinstance(mirror, str) else mirror
        self.own_folder = OwnFolder(folder, run_id, copied_to)
        self.agreement = Agreement()
        self.ending = Ending(self.own_folder, requeue_signal)
        self._settings = Settings(
            Interval.of(every),
            list(parts),
            changed,
            seed,
            chosen or Chosen(),
            undeclared,
            best_key=self.state_key,
        )
        self.engine = self._new_engine()
        # Whether the watch over waiting threads is this run's, and ends with it.
        self._watches_threads = False
        self._seams: Seams | None = None

    def _new_engine(self) -> Engine:
        """New objects, so that nothing of an earlier training is left."""
        return Engine(self.own_folder, self.agreement, self.ending, self.best, self._settings)

    def __getstate__(self) -> dict[str, Any]:
        """A copy has the same folder and best, and no training: one that is on holds its
        Trainer.
        """
        return vars(self) | {"engine": None, "_seams": None, "_watches_threads": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.engine = self._new_engine()

    # What others ask for, by the names of ModelCheckpoint

    @property
    def saves(self) -> bool:
        """Whether there is a folder to save in. With ``fast_dev_run`` nothing is saved there."""
        return self.own_folder.has_path

    @property
    def folder(self) -> Path:
        return self.own_folder.path

    @property
    def mirror(self) -> Mirror | None:
        return self.own_folder.mirror

    @property
    def best_path(self) -> Path:
        return self.own_folder.files.best

    @property
    def last_path(self) -> Path:
        return self.own_folder.files.last

    @property
    def dirpath(self) -> str:
        return str(self.folder)

    @property
    def best_model_path(self) -> str:
        self.own_folder.files.wait()
        return str(self.best_path) if self.saves and self.best_path.exists() else ""

    @property
    def last_model_path(self) -> str:
        self.own_folder.files.wait()
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
    def saved_step(self) -> int | None:
        """The optimizer step of the newest ``last.ckpt`` of this training (known on rank zero);
        before there is one, that of the checkpoint from which it was resumed. None: neither.
        """
        written = self.engine.saving.saved_step
        return self.engine.restoring.loaded_step if written is None else written

    @property
    def resume_from(self) -> str | None:
        """The checkpoint to resume from, for ``trainer.fit(..., ckpt_path=...)``: ``last.ckpt``,
        or ``best.ckpt`` where that is missing or damaged (a line says so). None the first time, and
        where nothing is saved.

        With a mirror, its newest whole save is brought here first, if it is ahead of what is here.
        """
        if not self.saves:
            return None
        if self.mirror is not None and not self.mirror.was_asked:
            # One rank asks the mirror, and the others wait for it.
            decided_by_rank_zero("mirror", self.own_folder.bring_from_mirror)
        path = self.own_folder.files.checkpoint_to_resume()
        return None if path is None else str(path)

    def state_dict(self) -> dict[str, Any]:
        return self.best.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best.load_state_dict(state_dict)

    def add_facts(self, trainer: Trainer, result: Any) -> None:
        """Add to the summary what the saves of this start have cost (rank zero's), and the end of
        the chain of digests.
        """
        result.summary.metrics |= self.engine.saving.facts()
        chain = self.engine.kept.chain
        result.summary.digest = chain.end
        result.summary.digest_resumed_at = chain.resumed_at or None

    def leave(self, trainer: Trainer, result: Any) -> None:
        """Write the chain of digests for others to read."""
        write_digests(self.engine.kept.chain.links, result.folder)

    # The start of a stage: what is taken over

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        refuse_another_lightning(trainer)
        refuse_what_is_not_found(trainer, self.own_folder.files)
        take_rank_of_the_trainer(trainer)
        if stage == "predict":
            return
        refuse_ranks_of_functions(trainer)
        lightning_internals.check()
        # The previous stage may have ended without a teardown.
        self._put_everything_back(trainer)
        if stage == "fit":
            if self.saves:
                refuse_checkpoints_in_parts(trainer)
            self.engine = self._new_engine()
            self.best.take_names_of(pl_module)
            self.own_folder.begin(trainer)
        seams = Seams(trainer)
        self._seams = seams
        put_in_front(trainer, Hooks(self.engine, seams))
        self.agreement.begin(trainer.world_size)
        self.ending.take_over_signals(trainer)
        self._take_over_loaders(trainer, seams)
        if not self.own_folder.is_managed_by_caller:
            # A command has seen to its threads before it imported torch.
            threads.configure_later()
        self._watches_threads = waiting.start()

    def _take_over_loaders(self, trainer: Trainer, seams: Seams) -> None:
        loading = self.engine.loading
        loading.shares.agree_on_next_batch = partial(
            self.engine.saving.agree_on_next_batch, trainer
        )
        loading.shares.are_ours = lightning_internals.take_over_sharing(trainer)
        loading.install(seams, trainer)
        if trainer.world_size > 1:
            group = self.agreement.group
            seams.before_gathering(lambda tensor, of: compare_sizes(trainer, tensor, of or group))
        seams.around_loading(
            partial(self.own_folder.files.reading, trainer),
            lambda checkpoint: self._fill_in(trainer, checkpoint),
        )

    def _fill_in(self, trainer: Trainer, checkpoint: dict[str, Any]) -> None:
        """Convert the module to this run's precision, and make room for the checkpoint's buffers.
        Of what the user's ``on_save_checkpoint`` adds, a checkpoint lacks the objects that no file
        can hold: the hook is called here, and gives the loaded checkpoint those of this process.
        """
        module = trainer.lightning_module
        plugin = trainer.precision_plugin
        if isinstance(plugin, DoublePrecision | HalfPrecision):
            # Lightning converts what setup has made after a checkpoint was loaded. Loaded into
            # another type, numbers are rounded, and those that are not a number get other bits.
            plugin.convert_module(module)
        of_callbacks = [
            partial(callback.on_save_checkpoint, trainer, module)
            for callback in users_callbacks(trainer)
        ]
        fill_in_what_was_left_out(checkpoint, [module.on_save_checkpoint, *of_callbacks])
        make_room_for_buffers(module, checkpoint)

    # Its end: what is put back

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.own_folder.files.wait()
        self.own_folder.finish_mirror(None)
        # Not after an error: then Lightning still needs our loaders, to end their workers.
        lightning_internals.exchange_loaders(trainer, users_own)
        asked = self._put_everything_back(trainer)
        self.ending.stop_if_asked_late(trainer, asked)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        # Lightning calls no teardown then. Hooks.on_exception, in front of all other callbacks, has
        # given the signals back already; this is the rest.
        self._put_everything_back(trainer)

    def _put_everything_back(self, trainer: Trainer) -> Asked:
        """The signals last: what the script was asked until it had them back is returned."""
        lightning_internals.call_empty_hooks_again()
        self.engine.restoring.put_back(trainer)
        if self._seams is not None:
            self._seams.put_back()
            self._seams = None
            lightning_internals.let_lightning_share(trainer, self.engine.loading.shares.are_ours)
        self.own_folder.release()
        if self._watches_threads:
            waiting.end()
            self._watches_threads = False
        take_hooks_out(trainer)
        self.engine.loading.let_go()
        return self.ending.give_signals_back(trainer)
