"""Keeps a run: saves best.ckpt and last.ckpt between two steps, and resumes from them bit-exactly."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging

from project.engine import signals
from project.engine.checkpoint_files import RUN_KEY, damage, write_atomically
from project.engine.cli import Configuration, parse_interval
from project.engine.exact_resume import (
    Place,
    apply_typed_hyperparameters,
    clean_place,
    facts_to_keep,
    find_place,
    metric_states,
    random_state,
    restore_rank,
    set_aside_unusable_best,
    share_running_statistics,
)
from project.engine.run_folder import Run, clear_leftovers, point_latest_at
from project.engine.stop import SAVE_DUE, GracefulStop, release_child_processes
from project.engine.summary import versions, write_config
from project.errors import UserError
from project.loggers.metrics_csv import MetricsCSV


class RunCheckpoint(GracefulStop):
    """Saves, resumes and (see the base class) stops a run at the edges between two optimizer steps.

    Lightning's ModelCheckpoint saves from within hooks, where a resume repeats or skips validations and logging steps,
    forgets the best when its folder changes, and numbers its files (Lightning issues 17543, 21800, 11379). Here every
    checkpoint is taken at an edge: the last step, its validation and its logging are done, the next step has not
    begun. What comes due during a step waits for its end.

    Args:
        folder: The run's folder; ``best.ckpt`` and ``last.ckpt`` are written there.
        record: What every checkpoint says of its run (name, configuration, ...): plain values.
        every_seconds: ``last.ckpt`` is saved at least this often, besides every epoch's end and every new best.
        every_steps: The same, counted in optimizer steps; overrides ``every_seconds``.
        monitor: The metric whose maximum makes ``best.ckpt``; of equal values the latest.
        exclude: Context manager under which saving is done, so that throughput does not count it.
    """

    def __init__(
        self,
        folder: Path,
        record: dict[str, Any],
        every_seconds: float = 60.0,
        every_steps: int | None = None,
        monitor: str = "val/accuracy",
        exclude: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        super().__init__(requeue_path=folder / "last.ckpt")
        self.folder = folder
        self.record = record
        self.every_seconds = every_seconds
        self.every_steps = every_steps
        self.monitor = monitor
        self.exclude = exclude
        self.best_score: float | None = None
        self.best_epoch: int | None = None
        self.best_step: int | None = None
        self.notes: list[str] = []
        self._place: Place | None = None
        self._best_due = False
        self._random_state: dict[str, Any] | None = None
        self._resume: dict[str, Any] | None = None
        self._stepped: int | None = None
        self._last_save = time.monotonic()

    @classmethod
    def of(
        cls, config: Configuration, run: Run, exclude: Callable[[], AbstractContextManager[Any]] | None = None
    ) -> RunCheckpoint:
        """The checkpointing of a run."""
        seconds, steps = parse_interval(config.options.checkpoint_every)
        record = {"run_name": run.name, "run_id": run.run_id, "config": config.resolved, "versions": versions()}
        return cls(run.folder, record, seconds, steps, exclude=exclude or nullcontext)

    @property
    def best_path(self) -> Path:
        return self.folder / "best.ckpt"

    @property
    def last_path(self) -> Path:
        return self.folder / "last.ckpt"

    # Start and resume

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint.get(RUN_KEY) or {}
        self._resume = saved.get("state")
        if self._resume and self._resume["place"] != "validation":
            self._stepped = checkpoint["loops"]["fit_loop"]["epoch_loop.state_dict"]["_batches_that_stepped"]
        if saved.get("optimizer") not in (None, pl_module.hparams.get("optimizer")):
            self.notes.append(
                f"optimizer {saved['optimizer']} → {pl_module.hparams.get('optimizer')}: its state starts anew."
            )
            checkpoint["optimizer_states"] = []

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best_score, self.best_epoch, self.best_step = (
            state_dict["best_score"],
            state_dict["best_epoch"],
            state_dict["best_step"],
        )

    def state_dict(self) -> dict[str, Any]:
        return {"best_score": self.best_score, "best_epoch": self.best_epoch, "best_step": self.best_step}

    def _keep_rows(self, trainer: Trainer, count: int) -> None:
        for logger in trainer.loggers:
            if isinstance(logger, MetricsCSV):
                logger.keep_rows(count)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        signals.training_begins()
        self._last_save = time.monotonic()
        if trainer.is_global_zero:
            # not sooner: a run that cannot start is nobody's newest, and what it was resumed with not its settings
            point_latest_at(self.folder)
            write_config(self.folder, self.record["config"])
            if self._resume is None and trainer.global_step == 0:  # of a run that never saved
                self._keep_rows(trainer, 0)
                clear_leftovers(self.folder)
        if self._resume is not None:
            self._go_on(trainer, pl_module, self._resume)

    def _go_on(self, trainer: Trainer, pl_module: LightningModule, state: dict[str, Any]) -> None:
        self._keep_rows(trainer, state["metric_rows"])
        if note := set_aside_unusable_best(trainer, self.best_score, self.best_path, self.record.get("run_id")):
            self.notes.append(note)
            self.best_score = self.best_epoch = self.best_step = None
        if note := find_place(trainer, state):
            self.notes.append(note)
        apply_typed_hyperparameters(trainer, pl_module)
        restore_rank(trainer, pl_module, state["ranks"])
        for note in self.notes:
            if trainer.is_global_zero:
                print(note, flush=True)

    # Edges

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._stepped is not None:  # Lightning's restart logic counts one up at some places and not at others
            trainer.fit_loop.epoch_loop._batches_that_stepped = self._stepped
            self._stepped = None
        if self._request or self._best_due:
            self._edge(trainer, "batch")

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch > 0 and self._resume is None:
            self._edge(trainer, "epoch", save_last=True)
        self._resume = None

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._request = max(self._request, self._settle())
        if self.best_score is None:
            self._best_due = True  # never validated: the last is the best there is
        self._edge(trainer, "epoch", save_last=True)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._resume is None:
            return
        # nothing was left to train, and only the test comes again
        self._keep_rows(trainer, self._resume["metric_rows"])
        # resumed from the best of a run that had trained to its end: a damaged last.ckpt would stay so
        if trainer.is_global_zero and self.best_path.exists() and damage(self.last_path):
            write_atomically(self.best_path.read_bytes(), self.last_path)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._resume = None
        if trainer.fit_loop.epoch_loop._should_accumulate():
            return  # half an accumulated gradient cannot be saved
        request = signals.requested()
        if not request and trainer.is_global_zero and self.every_steps is None:
            request = SAVE_DUE if time.monotonic() - self._last_save >= self.every_seconds else 0
        assert self._agreement is not None
        self._request = max(self._request, self._agreement.latest(request))
        if self.every_steps is not None and trainer.global_step % self.every_steps == 0:
            self._request = max(self._request, SAVE_DUE)
        if self._request:
            self._note_random_state(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        share_running_statistics(trainer, pl_module)
        self._note_random_state(trainer)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self._stop_asked_in_evaluation(trainer):
            if not trainer.sanity_checking:
                for callback in trainer.callbacks:  # type: ignore[attr-defined]
                    if isinstance(callback, WeightAveraging):  # put the trained weights back before they are saved
                        callback.on_validation_epoch_end(trainer, pl_module)
                self._edge(trainer, "validation", save_last=True)
            raise signals.Stopped(self._request)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or self.monitor not in trainer.callback_metrics:
            return
        score = float(trainer.callback_metrics[self.monitor])
        if self.best_score is None or score >= self.best_score:  # of equals the one trained longer
            self.best_score, self.best_epoch, self.best_step = score, trainer.current_epoch, trainer.global_step
            self._best_due = True
        self._note_random_state(trainer)

    def _note_random_state(self, trainer: Trainer) -> None:
        self._random_state = random_state(trainer.strategy.root_device)

    def _edge(self, trainer: Trainer, place: Place, save_last: bool = False) -> None:
        stop = self._request if self._request > SAVE_DUE else 0
        with self.exclude():
            if place == "epoch":  # nothing has drawn a random number since the epoch ended
                self._note_random_state(trainer)
            if save_last or self._request or self._best_due:
                self._save(trainer, place)
            if stop and self._asks_to_requeue(trainer, stop):
                # Lightning's SLURM plugin: saves to last.ckpt (see setup) and asks for the job to be queued again
                self._place = place
                trainer._signal_connector._slurm_sigusr_handler_fn(stop, None)  # type: ignore[arg-type]
                stop = signal.SIGTERM
        self._request = 0
        if stop:
            release_child_processes()
            raise signals.Stopped(stop)

    def _save(self, trainer: Trainer, place: Place) -> None:
        self._place = place
        failure = None
        try:
            trainer.save_checkpoint(self.best_path if self._best_due else self.last_path)
        except UserError as error:  # on rank 0 alone, which the others wait for
            failure = str(error)
            trainer.strategy.barrier()
        finally:
            self._place = None
        if self._best_due and trainer.is_global_zero and failure is None:
            # last after best: killed in between, the run repeats what made the best. A copy, not a link: damage
            # to one file must not be damage to both.
            try:
                write_atomically(self.best_path.read_bytes(), self.last_path)
            except UserError as error:
                failure = str(error)
        assert self._agreement is not None
        if failure := next((reason for reason in self._agreement.gather(failure) if reason), None):
            raise UserError(failure)
        self._best_due = False
        self._last_save = time.monotonic()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint[RUN_KEY] = {**self.record, **facts_to_keep(trainer, pl_module)}
        if self._place is None:
            return  # somebody else's checkpoint, from within a hook: resumable, not exactly
        clean_place(checkpoint["loops"], self._place)
        assert self._agreement is not None
        mine = {
            "random": self._random_state,
            "metrics": metric_states(pl_module),
            "device": trainer.strategy.root_device.type,
        }
        sampler = getattr(trainer.train_dataloader, "sampler", None)
        checkpoint[RUN_KEY]["state"] = {
            "place": self._place,
            "ranks": self._agreement.gather(mine),
            "global_batch_size": getattr(sampler, "global_batch_size", 0),
            "metric_rows": next((x.flush_rows(to_disk=True) for x in trainer.loggers if isinstance(x, MetricsCSV)), 0),
        }
