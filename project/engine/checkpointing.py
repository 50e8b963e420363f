"""Saves best.ckpt and last.ckpt at step boundaries, and resumes from them bit-exactly."""

from __future__ import annotations

import copy
import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer, callbacks
from lightning.pytorch.utilities.memory import recursive_detach

from project.data import BatchedDataModule
from project.engine import exact_resume, lightning_internals, signals
from project.engine.checkpoint_files import RUN_KEY, damage, read
from project.engine.cli import Configuration
from project.engine.exact_loading import Start
from project.engine.log_steps import is_optimizer_step
from project.engine.ranks import of_all_ranks, say
from project.engine.restore import Run, point_latest_at
from project.engine.stop import SAVE_DUE, GracefulStop, requeue_job
from project.engine.summary import versions, write_config
from project.engine.trainer import requeue_signal
from project.errors import UserError, require
from project.tables import flat, write_atomically

Mode = Literal["min", "max"]
FOLLOWED = ("val/accuracy", "val/loss", "val_loss")  # by default: the first of these that is logged
# In the name of a metric whose smallest value is the best; the short ones as words of their own
COSTS = r"loss|error|mae|mse|mape|perplexity|(?<![a-z])(nll|ppl|bpc|wer|cer|eer|ece|fid|kl|brier|lpips)(?![a-z])"
# Whose hooks change no weights for a validation; the rest of model/ is the user's
OURS = __name__.split(".")[0]
KEEP_WEIGHTS = ("lightning.", f"{OURS}.engine.", f"{OURS}.callbacks.", f"{OURS}.model.supervised")
NOT_EXACT: dict[
    type[callbacks.Callback], str
] = {  # Lightning's callbacks with which a resume is not exact, and why
    callbacks.BatchSizeFinder: "it searches again at every start",
    callbacks.LearningRateFinder: "it searches again at every start",
    callbacks.ModelPruning: "a checkpoint holds the pruned weights without their masks",
    callbacks.SpikeDetection: "Lightning cannot load its state, so its mean begins anew",
}


@dataclass
class Best:
    """The metric that a run follows, and its best value so far."""

    monitor: str | None = None  # None: not known yet, or nothing is logged that could be followed
    named_mode: Mode | None = None  # by the command line or the module
    asked: Literal["typed", "module"] | None = (
        None  # who named it: it must be logged; a module's after a validation
    )
    score: float | None = None
    epoch: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)  # logged by its validation

    @classmethod
    def of(cls, module: LightningModule, monitor: str | None, mode: Any) -> Best:
        """The metric named on the command line, else by the module."""
        theirs, direction = getattr(module, "monitor", None), getattr(module, "mode", None)
        is_theirs = (
            not monitor and isinstance(theirs, str) and bool(theirs)
        )  # not a thing of another kind
        if is_theirs:
            monitor, mode = theirs, mode or (direction if direction in ("min", "max") else None)
        require(mode in ("min", "max", None), "--mode", "be min or max", mode)
        return cls(monitor or None, mode, "module" if is_theirs else "typed" if monitor else None)

    @property
    def mode(self) -> Mode:
        """Whether the largest or the smallest value is the best. Where nobody says it, the metric's name does."""
        return self.named_mode or (
            "min" if re.search(COSTS, (self.monitor or "").lower()) else "max"
        )

    def take(self, logged: dict[str, Any], epoch: int) -> bool:
        """Note a value; returns whether it is the best so far. Of equal values the later wins, as more trained."""
        if self.monitor is None:
            self.monitor = next((name for name in FOLLOWED if name in logged), None)
        score = float(logged.get(self.monitor or "", "nan"))
        if score != score:  # not logged, or not a number
            return False
        better = self.score is None or (
            score >= self.score if self.mode == "max" else score <= self.score
        )
        if better:
            self.score, self.epoch = score, epoch
            self.metrics = {
                name: float(value) for name, value in logged.items() if name.startswith("val")
            }
        return better


class RunCheckpoint(GracefulStop):
    """Saves, resumes and (see the base class) stops a run at the boundary between two optimizer steps.

    Lightning's ModelCheckpoint saves from within hooks, where a resume repeats or skips validations and logging steps,
    forgets the best when its folder changes, and numbers its files (Lightning issues 17543, 21800, 11379). Here every
    checkpoint is taken at a step boundary: the last step, its validation and its logging are done, the next step has
    not begun. It holds the run's whole configuration. A resumed run goes on with its ``rows`` of metrics.csv.
    """

    def __init__(self, config: Configuration, run: Run, best: Best, rows: Any) -> None:
        super().__init__(requeue_signal(config), run.discard)
        self.folder, self.best, self.rows, self.changed = run.folder, best, rows, bool(run.changes)
        self.best_path, self.last_path = self.folder / "best.ckpt", self.folder / "last.ckpt"
        self.record = dict[str, Any](
            run_name=run.name, run_id=run.run_id, config=config.resolved, versions=versions()
        )
        self.every_seconds, self.every_steps = parse_interval(config.options.checkpoint_every)
        self.exclude: Callable[[], AbstractContextManager[Any]] = (
            nullcontext  # around saving: throughput leaves it out
        )
        self.saves = config.trainer["enable_checkpointing"] is not False
        self._noted: dict[str, Any] = {}  # what a save that is due needs of an earlier moment
        self._place: exact_resume.Place | None = None
        self._best_due = False
        self._validated = (
            False  # whether a validation has followed the last batch, which ended a step
        )
        self._followed: bool | None = (
            None  # whether validations log the metric; None before the first
        )
        self._resume: dict[str, Any] | None = None
        self._trained: list[
            tuple[torch.Tensor, torch.Tensor]
        ] = []  # weights and buffers as a validation began
        self._validated_batches: dict[int, int] = {}  # before the resume
        self._steps_more = 0  # than there are, to end a validation that was begun after the last

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn != "fit":
            return
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, callbacks.SpikeDetection):
                checkpoint["callbacks"].pop(callback.state_key, None)
            if (
                isinstance(callback, callbacks.EarlyStopping)
                and callback.state_key in checkpoint["callbacks"]
            ):
                checkpoint["callbacks"][callback.state_key]["patience"] = (
                    callback.patience
                )  # which may have been typed
        saved = checkpoint.get(RUN_KEY) or {}
        state = saved.get("state")
        before, now = (
            flat(each).get("model.optimizer")
            for each in (saved.get("config", {}), self.record["config"])
        )
        if before != now:
            self.loading.notes.append(f"optimizer {before} → {now}: its state starts anew.")
            checkpoint["optimizer_states"] = []
        batches = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        if state is not None:
            loaders = (ranks := state["ranks"])[trainer.global_rank % len(ranks)][
                "loaders"
            ]  # else an earlier rank's
            done = batches["current"]["completed"] if state["place"] != "epoch" else 0
            place = done, state["samples_per_batch"], loaders, batches["is_last_batch"]
            self.loading.start = Start(checkpoint["epoch"], *place)
            self._resume = state | {
                "metrics": saved["metrics"],
                "groups": state["groups"] if before == now else None,
            }
            self._steps_more = int(
                state["place"] == "validation" and checkpoint["global_step"] == trainer.max_steps
            )
            trainer.should_stop = state["should_stop"] and not self.changed  # it had stopped early
        else:
            self.loading.start = Start(checkpoint["epoch"], batches["current"]["ready"])
            self.loading.notes.append(
                "that checkpoint was not saved between two steps: the resume is not exact."
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not isinstance(state_dict["score"], float | None) or state_dict["mode"] not in (
            "min",
            "max",
        ):
            raise TypeError("the best value so far is no number")
        kept = {name: state_dict[name] for name in ("monitor", "score", "epoch", "metrics")}
        best = replace(self.best, **kept)
        if (
            self.best.monitor in (None, best.monitor) and best.mode == state_dict["mode"]
        ):  # else another is named now
            vars(self.best).update(kept)

    def state_dict(self) -> dict[str, Any]:
        return {
            name: getattr(self.best, name)
            for name in ("monitor", "mode", "score", "epoch", "metrics")
        }

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._configured = exact_resume.configured(trainer)  # the checkpoint's come next
        lightning_internals.average_on_the_device(trainer)
        trainer.fit_loop.epoch_loop.max_steps += self._steps_more
        plugin, strategy = trainer.precision_plugin, trainer.strategy
        convert = plugin.convert_input

        def note_and_convert(batch: Any) -> Any:
            # the module's hooks of the step before are done, and its hooks for this batch may draw random numbers
            if trainer.training and (self._request or self._best_due):
                self._note(trainer, "batch")
            return convert(batch)

        plugin.convert_input = note_and_convert  # type: ignore
        strategy.on_train_start = partial(self._start, trainer, strategy.on_train_start)  # type: ignore

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        signals.defer()
        self._last_save, self._steps, notes = (
            time.monotonic(),
            trainer.global_step,
            self.loading.notes,
        )
        if self._resume is not None:
            self._followed = self._resume["followed"]
            for name, kind in self._resume[
                "kinds"
            ].items():  # a plateau scheduler may follow an earlier validation
                trainer.callback_metrics[name] = torch.tensor(
                    float(self._resume["metrics"][name]), dtype=kind
                )
            exact_resume.apply_typed_hyperparameters(
                trainer, self._configured, self._resume, self.changed
            )
        if self.best.asked and self.best.named_mode is None:
            notes.append(f"--mode {self.best.mode} is taken for {self.best.monitor}, by its name.")
        if trainer.is_global_zero:
            point_latest_at(
                self.folder
            )  # not earlier: a run that cannot start changes nothing of older ones
            write_config(self.folder, self.record["config"])
            if (
                self._resume is None and trainer.global_step == 0
            ):  # left by a run that saved nothing
                self.rows.keep_rows(0)
                for name in ("summary.json", "report.html"):
                    (self.folder / name).unlink(missing_ok=True)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            name = type(callback).__name__
            if isinstance(callback, callbacks.StochasticWeightAveraging):
                self.loading.anywhere = False  # it acts at an epoch's start, which is not repeated
                notes.append(f"with {name} a run resumes from its last epoch's end.")
            reasons = [reason for kind, reason in NOT_EXACT.items() if isinstance(callback, kind)]
            notes += [f"a resume is not exact with {name}: {reason}." for reason in reasons]
        if trainer.reload_dataloaders_every_n_epochs > 1:  # type: ignore[attr-defined]
            notes.append(
                "a resume is not exact with --reload_dataloaders_every_n_epochs above 1: it counts anew."
            )

    def _start(self, trainer: Trainer, further: Callable[[], None]) -> None:
        """Called as the last hook of its name: what the module's own hooks do must change nothing of this."""
        further()
        state = self._resume
        if state is not None and state["place"] == "epoch":
            lightning_internals.end_restart(trainer)
        elif state is not None:
            for loader in self.loading.training:
                loader.set_epoch(trainer.current_epoch)
            lightning_internals.begin_epoch_again(trainer)
        if not self.loading.read_early:  # a module's own hooks may have read whole epochs
            self.loading.begin()
        if state is not None:
            exact_resume.settle_place(trainer, self.loading, state)
            if len(state["ranks"]) == trainer.world_size:
                mine = state["ranks"][trainer.global_rank]
                exact_resume.restore(trainer, mine)
                self._validated_batches = mine["validated"]
            self._set_aside_unusable_best(
                trainer
            )  # files are changed last: what cannot be restored is refused before
            self.rows.keep_rows(state["metric_rows"])
        say(*dict.fromkeys(self.loading.notes))

    def _set_aside_unusable_best(self, trainer: Trainer) -> None:
        """Rename a ``best.ckpt`` that is damaged or belongs to another run, and look for the best anew."""
        reason, path = None, self.best_path
        if self.best.score is not None and trainer.is_global_zero:
            reason = damage(path) if path.exists() else f"{path} is missing;"
            if (
                reason is None
                and flat(read(path)).get(f"{RUN_KEY}.run_id") != self.record["run_id"]
            ):
                reason = f"{path} belongs to another run."
            if reason and path.exists():
                os.replace(path, path.with_suffix(".ckpt.set-aside"))
                reason += " It was set aside;"
        if reason := trainer.strategy.broadcast(reason):
            say(f"{reason} the best is looked for anew.")
            self.best.score, self.best.epoch, self.best.metrics = None, None, {}

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._steps_more:  # that validation is not wanted any more
            raise StopIteration  # which ends the epoch
        if self._request or self._best_due:
            self._boundary(trainer, "batch")

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.reload_dataloaders_every_n_epochs == 1:  # type: ignore[attr-defined] # as Lightning does, later
            lightning_internals.validated_batches(trainer).clear()
        if trainer.current_epoch > 0 and self._resume is None:
            self._follow_training(trainer)
            self._boundary(trainer, "epoch")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._resume = None  # also where it went on in the validation
        trainer.fit_loop.epoch_loop.max_steps -= self._steps_more
        self._steps_more = 0
        lightning_internals.share_sums(trainer)
        lightning_internals.end_restart(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._request = max(
            self._request, *of_all_ranks(signals.state.requested, self.agreement.group)
        )
        self._follow_training(trainer)
        if self.best.score is None:
            self._best_due = True  # no metric was followed: the last is the best
            if self.best.monitor is None and trainer.callback_metrics:
                say(
                    "nothing was logged that could be followed: best.ckpt is the last. Name a metric with --monitor."
                )
        self._boundary(trainer, "epoch")

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._resume is not None:  # nothing is left to train; only the test is repeated
            self.rows.keep_rows(self._resume["metric_rows"])
            # resumed from best.ckpt after the run's end: replace the damaged last.ckpt, which nothing else would do
            if trainer.is_global_zero and self.best_path.exists() and damage(self.last_path):
                write_atomically(self.best_path.read_bytes(), self.last_path)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._resume, self._validated = None, False
        if pl_module.automatic_optimization and not is_optimizer_step(trainer, batch_idx):
            return  # a partly accumulated gradient cannot be saved
        overdue = (
            self.every_steps is None and time.monotonic() - self._last_save >= self.every_seconds
        )
        request = signals.state.requested or (SAVE_DUE if overdue and trainer.is_global_zero else 0)
        before, self._steps = self._steps, trainer.global_step  # a batch may have several steps
        is_due = (
            self.every_steps is not None
            and before // self.every_steps < self._steps // self.every_steps
        )
        self._request = max(
            self._request, self.agreement.latest(request), SAVE_DUE if is_due else 0
        )

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        exact_resume.share_running_statistics(trainer, pl_module, self.agreement.group)
        lightning_internals.validated_batches(trainer).update(
            self._validated_batches
        )  # Lightning may have begun anew
        self._note(trainer, "validation")  # a resumed run begins it again
        parts, names = (
            (*trainer.callbacks, pl_module),
            ("on_validation_start", "on_validation_epoch_start"),
        )  # type: ignore[attr-defined]
        # the user's own may validate other weights than are trained
        if not all(
            getattr(part, name).__module__.startswith(KEEP_WEIGHTS)
            for part in parts
            for name in names
        ):
            self._trained = [
                (x, x.detach().clone()) for x in (*pl_module.parameters(), *pl_module.buffers())
            ]

    def save_in_validation(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(
                callback, callbacks.WeightAveraging
            ):  # put the trained weights back before they are saved
                callback.on_validation_epoch_end(trainer, pl_module)
        for tensor, value in self._trained:
            tensor.data = value
        self._boundary(trainer, "validation")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        trainer.fit_loop.epoch_loop.max_steps -= self._steps_more
        self._trained, self._noted, self._validated_batches, self._steps_more = [], {}, {}, 0
        if trainer.sanity_checking:
            return
        self._validated = is_optimizer_step(trainer, trainer.fit_loop.epoch_loop.batch_idx)
        self._best_due |= self.best.take(trainer.callback_metrics, trainer.current_epoch)
        self._followed = bool(self._followed) or self.best.monitor in trainer.callback_metrics

    def _follow_training(self, trainer: Trainer) -> None:
        """At an epoch's end: follow a metric that training logs; refuse one that nobody logs."""
        logged, best = trainer.callback_metrics, self.best
        if self._followed or not best.asked:
            return  # what is followed comes from validations, or nobody has named it
        must_be_there = self._followed is not None or (
            best.asked == "typed" and trainer.limit_val_batches == 0
        )
        if must_be_there and best.monitor not in logged:
            raise UserError(
                f"--monitor must be logged, got {best.monitor}. Logged: {', '.join(sorted(logged))}."
            )
        self._best_due |= best.take(logged, trainer.current_epoch - 1)

    def _boundary(self, trainer: Trainer, place: exact_resume.Place) -> None:
        """Save, and stop if asked to."""
        stop = self._request if self._request > SAVE_DUE else 0
        with self.exclude():
            if (
                place == "epoch" or not self._noted
            ):  # the last: before a step that reads its batches itself
                self._note(trainer, place)
            # loaders that cannot start inside an epoch: save only at an epoch's end, and at a new best
            if self.saves and (place == "epoch" or self.loading.anywhere or self._best_due):
                self._save(trainer, place)
            if stop and stop == self.requeue_signal:
                if trainer.is_global_zero:
                    requeue_job()
                stop = signal.SIGTERM
        self._request, self._best_due, self._noted = 0, False, {}
        if stop:
            lightning_internals.release_child_processes()
            raise signals.Stopped(stop)

    def _note(self, trainer: Trainer, place: exact_resume.Place) -> None:
        states: dict[str, Any] = {
            "callbacks": {each.state_key: each.state_dict() for each in trainer.callbacks}
        }  # type: ignore[attr-defined]
        states["state_dict"] = dict(trainer.lightning_module.named_buffers())
        states |= (
            {}
            if (data := trainer.datamodule) is None
            else {type(data).__qualname__: data.state_dict()}
        )  # type: ignore[attr-defined]
        noted = exact_resume.note(trainer, self.loading, place)
        self._noted = noted | {
            "rows": self.rows.save(),
            "states": copy.deepcopy(recursive_detach(states)),
        }

    def _save(self, trainer: Trainer, place: exact_resume.Place) -> None:
        path, failure, saved = self.best_path if self._best_due else self.last_path, None, False
        self._place = place
        try:
            trainer.save_checkpoint(path)
            saved = True
            if (
                self._best_due
                and trainer.is_global_zero
                and (place == "epoch" or self.loading.anywhere)
            ):
                # best first: if the run is killed in between, it repeats the steps to the best. A copy: damage to one
                # file must not damage the other
                write_atomically(self.best_path.read_bytes(), self.last_path)
        except (UserError, TypeError) as error:  # on rank 0 alone
            failure = str(error)
            if not saved:
                trainer.strategy.barrier()  # where the others wait, in save_checkpoint
        finally:
            self._place = None
        if failure := next(
            (reason for reason in of_all_ranks(failure, self.agreement.group) if reason), None
        ):
            raise UserError(
                f"{failure.rstrip('.')}. The run has stopped; go on with --ckpt_path auto."
            )
        self._last_save = time.monotonic()

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        checkpoint[RUN_KEY] = {
            **self.record,
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "metrics": {key: float(value) for key, value in trainer.callback_metrics.items()},
            "data_source": getattr(data, "data_source", None),
            "data": data.description()
            if isinstance(data, BatchedDataModule)
            else {},  # feature: images
            "precision": trainer.precision,
            "world_size": trainer.world_size,
        }
        if self._place is None:
            return  # a checkpoint of another callback, saved inside a hook: a resume from it is not exact
        exact_resume.clean_place(checkpoint["loops"], self._place, self._validated)
        self.rows.save(to_disk=True)
        rows, mine = self._noted.pop("rows"), exact_resume.gather(trainer, self._place)
        for key, before in self._noted.pop(
            "states"
        ).items():  # hooks of the next batch, or validation, have changed it
            now = checkpoint.get(key, {})
            now.update({name: value for name, value in before.items() if name in now})
        checkpoint[RUN_KEY]["state"] = {
            "place": self._place,
            "ranks": of_all_ranks(self._noted | mine, self.agreement.group),
            "samples_per_batch": self.loading.samples_per_batch,
            "metric_rows": rows,
            "followed": self._followed,
            **self._configured,
            "kinds": {
                k: getattr(x, "dtype", torch.float64) for k, x in trainer.callback_metrics.items()
            },
            "should_stop": trainer.should_stop,
        }


class CheckpointPaths(callbacks.Checkpoint):
    """What ``trainer.checkpoint_callback`` is to a module's own code: ModelCheckpoint's attributes, of this run.

    RunCheckpoint cannot be of this type: Lightning moves it behind the other callbacks, whose hooks come after a save.
    """

    def __init__(self, run: RunCheckpoint) -> None:
        self.run, self.dirpath = run, str(run.folder)

    best_model_path = property(
        lambda self: str(self.run.best_path) if self.run.best_path.exists() else ""
    )
    last_model_path = property(
        lambda self: str(self.run.last_path) if self.run.last_path.exists() else ""
    )
    best_model_score = property(
        lambda self: None if (x := self.run.best.score) is None else torch.tensor(x)
    )
    monitor = property(lambda self: self.run.best.monitor)
    mode = property(lambda self: self.run.best.mode)


def parse_interval(text: str) -> tuple[float, int | None]:
    """``"60s"`` → (60.0, None); ``"500"`` or ``"500steps"`` → (60.0, 500). Anything else is a UserError."""
    match = re.fullmatch(r"\s*(?:(\d{1,9}\.?\d*|\.\d+)\s*s|(\d{1,9})\s*(?:steps?)?)\s*", str(text))
    if match and float(match[1] or match[2]) > 0:
        return (float(match[1]), None) if match[1] else (60.0, int(match[2]))
    raise UserError(
        f"--checkpoint_every must be optimizer steps (500) or seconds (60s), above 0, got {text}."
    )
