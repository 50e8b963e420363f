"""Weights & Biases: one run per job. Training never waits for its server, and never fails with it. Online where an API
key is configured, else offline: no prompt, no network. W&B's own variables, such as ``WANDB_MODE``, are honoured.
"""

from __future__ import annotations

import os
import shlex
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.loggers.logger import DummyExperiment
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from project.engine.checkpointing import Best
from project.engine.cli import Configuration
from project.engine.ranks import is_rank_zero, say
from project.engine.restore import Run
from project.engine.stop import failure_within
from project.engine.summary import RunRecord, parameter_count
from project.engine.trainer import as_list
from project.errors import UserError, require
from project.loggers import STEP, wandb_state

DEFAULT_PROJECT = "mnist-lightning"
MODES = (
    "online",
    "offline",
    "disabled",
    "run",
    "dryrun",
)  # the last two are old names of the first two
REFUSED_IN_PROJECT = "/\\#?%:"
END_PATIENCE, STOP_PATIENCE = (
    7.0,
    4.0,
)  # seconds that the end of a run waits for a server; a stopped one has ten in all
SETTINGS: dict[str, Any] = {
    "x_save_requirements": False,  # reads the metadata of every installed package: half a second; the lock file has it
    "init_timeout": 15.0,  # seconds for the server to answer, while training goes on
    "finish_timeout": END_PATIENCE,  # also for W&B's own process
}
MOST_CLASSES = 50  # in a confusion matrix, whose table has a row per cell


def make_wandb_logger(config: Configuration, run: Run, best: Best) -> WandbRunLogger | None:
    """A run's W&B logger, idle on ranks above 0; None with ``--logger false`` and with a WandbLogger of the user's."""
    mode, project = "disabled", os.environ.get("WANDB_PROJECT") or DEFAULT_PROJECT
    if is_rank_zero():
        asked = os.environ.get("WANDB_MODE", "")
        require(
            not asked or asked.lower() in MODES,
            "WANDB_MODE",
            f"be one of {', '.join(MODES[:3])}",
            asked,
        )
        finish_timeout()
        mode = wandb_state().mode
        if mode == "refused":
            raise UserError(
                "WANDB_MODE=online needs an API key, and none is configured. Run wandb login, or unset it."
            )
        os.environ["WANDB_MODE"] = (
            mode  # W&B takes no other spelling; without it a user's WandbLogger asks for a key
        )
        fits = mode == "disabled" or not set(project) & set(REFUSED_IN_PROJECT)
        require(fits, "WANDB_PROJECT", f"have none of {' '.join(REFUSED_IN_PROJECT)}", project)
    logger = WandbRunLogger(
        run, project, config.resolved, mode, best
    )  # its settings serve the user's, too
    chosen = config.trainer["logger"]
    return (
        None
        if chosen is False or any(isinstance(each, WandbLogger) for each in as_list(chosen))
        else logger
    )


class WandbRunLogger(WandbLogger, Callback):
    """Lightning's W&B logger, which waits for the server at its start and its end, and sends a row per call. Here the
    run starts in a thread, rows wait until it is up, a step is one row, as in metrics.csv, and the end waits a few
    seconds. It is a callback, too, and begins with training: before, nothing is on disk. ``mode``: online, offline or
    disabled (a stand-in). W&B sums up the metric of ``best`` by its best value, others by their last.
    """

    def __init__(
        self, run: Run, project: str, config: dict[str, Any], mode: str, best: Best | None = None
    ) -> None:
        folder, self.offline = str(run.folder), mode == "offline"
        super().__init__(
            name=run.name, save_dir=folder, id=run.run_id, project=project, offline=self.offline
        )
        self.folder, self.config, self.best = run.folder, {**config}, best
        # Resume offline, too: else wandb sync of a resumed run's second folder erases the rows of its first.
        self.options = {
            "name": run.name,
            "project": project,
            "dir": folder,
            "id": run.run_id,
            "resume": "allow",
        }
        self.record: RunRecord | None = (
            None  # what the report shows: W&B gets its pictures at the end
        )
        self._run: Future[Any] = Future()
        self._begun, self._given_up = mode == "disabled", False
        self._rows: list[dict[str, Any]] = [
            {}
        ]  # wait for the run to be up; the last, of this step, may still grow
        if mode == "disabled":
            self._run.set_result(DummyExperiment())
            return
        os.environ.setdefault(
            "WANDB_SILENT", "true"
        )  # the run's last lines say where its files lie
        os.environ.setdefault(
            "WANDB_ERROR_REPORTING", "false"
        )  # offline, too, it would wait for a server at the exit
        os.environ.setdefault(
            "HOME", os.path.expanduser("~")
        )  # without it W&B's process prints its log
        import wandb  # noqa: F401 - here, so that the thread's part is short; never where W&B is disabled

    log_dir = property(lambda self: str(self.folder))  # where a module's own code puts its files

    @property
    def experiment(self) -> Any:
        """The W&B run. Lightning asks for it before training; what it gets waits for the run at its first use."""
        return self._run.result() if self._run.done() else _Awaited(self)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        source = getattr(trainer.datamodule, "data_source", None)  # type: ignore[attr-defined]
        self.config |= {
            "device": trainer.strategy.root_device.type,
            "parameters": parameter_count(trainer, pl_module),
        }
        self.config |= {
            "precision": trainer.precision,
            "world_size": trainer.world_size,
            "data_source": source,
        }
        self.begin()

    def begin(self) -> None:
        """Start the W&B run."""
        if not self._begun:
            self._begun = True
            # Files for upload are copied beside the run, not into the home folder, unless the user chose a place.
            os.environ.setdefault("WANDB_DATA_DIR", str(self.folder / "wandb"))
            threading.Thread(target=self._start, daemon=True).start()

    def wait(self) -> Any:
        """The W&B run, once it is up; a stand-in that does nothing where it could not start."""
        self.begin()
        return self._run.result()

    def log_hyperparams(self, params: Any) -> None:
        """Nothing: the resolved configuration holds them."""

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        if step is not None and self._rows[-1].get(STEP, step) != step:
            self._rows.append({})
        self._rows[-1] |= metrics if step is None else {**metrics, STEP: step}
        with suppress(
            Exception
        ):  # W&B's own process has died: the last row fails, too, and the end tells
            while self._run.done() and len(self._rows) > 1:
                self._run.result().log(self._rows.pop(0))

    def finish(self, exit_code: int) -> None:
        """Close the run with its pictures and the process's exit code: a stopped run is not shown as finished."""
        if not self._begun:
            return
        patience = (
            STOP_PATIENCE if exit_code else (None if self.offline else finish_timeout())
        )  # files need no server
        if failure_within(patience, lambda: self._finish(exit_code)):
            import wandb

            self._given_up = True
            lost = "W&B did not answer in time and has nothing of this run. metrics.csv has every value."
            if self._run.done():
                place = shlex.quote(os.path.relpath(Path(self._run.result().dir).parent))
                lost = f"W&B did not take everything. To complete it: wandb sync {place}"
            rank_zero_warn(lost)
            failure_within(
                0.5, wandb.teardown
            )  # takes back W&B's exit hook, which would wait for its server
        if os.environ.get("WANDB_DATA_DIR") == str(
            self.folder / "wandb"
        ):  # later runs of this process have others
            del os.environ["WANDB_DATA_DIR"]

    def _finish(self, exit_code: int) -> None:
        run = self.wait()
        for row in filter(None, self._rows):
            run.log(row)
        if self.record is not None and not isinstance(run, DummyExperiment):
            try:
                log_record(run, self.record, self.folder)
            except Exception as error:
                rank_zero_warn(
                    f"W&B got no pictures ({type(error).__name__}: {error}). The run is not affected."
                )
        run.finish(exit_code=exit_code)

    def _start(self) -> None:
        try:
            run = self._init()
            run.define_metric(STEP, hidden=True)  # all panels are drawn over optimizer steps
            run.define_metric("epoch", hidden=True)
            run.define_metric("*", step_metric=STEP)
            if self.best is not None and self.best.monitor is not None:
                run.define_metric(self.best.monitor, step_metric=STEP, summary=self.best.mode)
        except Exception as error:
            if not self._given_up:
                rank_zero_warn(
                    f"W&B could not start and records nothing ({type(error).__name__}: {error})."
                )
            run = DummyExperiment()
        self._run.set_result(run)

    def _init(self) -> Any:
        import wandb

        settings = {
            key: value
            for key, value in SETTINGS.items()
            if f"WANDB_{key.upper()}" not in os.environ
        }
        options: dict[str, Any] = {
            **self.options,
            "config": self.config,
            "settings": wandb.Settings(**settings),
        }
        if not self.offline:
            try:
                run = wandb.init(**options, mode="online")
                say(f"W&B: {run.url}")
                return run
            except Exception as error:
                if self._given_up:
                    raise
                rank_zero_warn(
                    f"W&B cannot be reached, this run is recorded offline ({' '.join(str(error).split())})."
                )
                wandb.teardown()  # its process still holds the run that did not start
        return wandb.init(**options, mode="offline")


def finish_timeout() -> float:
    """Seconds that the end of a run waits for W&B's server. A UserError where ``WANDB_FINISH_TIMEOUT`` is no number."""
    chosen = os.environ.get("WANDB_FINISH_TIMEOUT", str(END_PATIENCE))
    try:
        return float(chosen)
    except ValueError:
        raise UserError(f"WANDB_FINISH_TIMEOUT must be seconds, got {chosen}.") from None


class _Awaited:
    """Stands for the W&B run until it is up, and waits for it when it is used."""

    def __init__(self, logger: WandbRunLogger) -> None:
        self._logger = logger

    def __getattr__(self, name: str) -> Any:
        return getattr(self._logger.wait(), name)


def sync_command(folder: Path) -> list[str]:
    """The line that publishes a run's offline folders, if any: a resumed run has several, uploaded in their order."""
    found = list((folder / "wandb").glob("offline-run-*"))
    names = [path.name for path in found] if len(found) < 2 else ["offline-run-*"]
    place = shlex.quote(os.path.relpath(folder / "wandb"))
    return [f"  wandb sync {place}/{name}   # publish this run's dashboard" for name in names]


def log_record(run: Any, record: RunRecord, folder: Path) -> None:
    """Add the report's pictures and tables, the summary's facts and, of a finished run, best.ckpt to a W&B run."""
    import wandb

    pictures: dict[str, Any] = {}
    if (folder / "report.html").exists():
        pictures["report"] = wandb.Html(folder / "report.html", inject=False)
    if record.confusion is not None:
        names = record.names
        table = wandb.Table(
            columns=["class", "accuracy", "samples"], data=[*map(list, record.class_accuracy)]
        )
        pictures["test/class_accuracy"] = wandb.plot.bar(
            table, "class", "accuracy", title="Accuracy per class"
        )
        table = pictures["test/mistakes"] = wandb.Table(
            columns=["image", "label", "prediction", "probability"]
        )
        for each in record.mistakes:
            picture = wandb.Image(each.image.squeeze())
            table.add_data(picture, names[each.label], names[each.prediction], each.probability)
        if len(names) <= MOST_CLASSES:
            pairs = (
                np.indices(record.confusion.shape)
                .reshape(2, -1)
                .repeat(record.confusion.ravel(), axis=1)
            )
            labels, guesses = pairs.tolist()
            matrix = wandb.plot.confusion_matrix(
                None, labels, guesses, class_names=names, title="Confusion matrix"
            )
            pictures["test/confusion_matrix"] = matrix
    if record.breakdown:
        table = wandb.Table(columns=["use", "GiB"], data=[*map(list, record.breakdown.items())])
        pictures["memory/breakdown"] = wandb.plot.bar(table, "use", "GiB", title="Memory by use")
    run.log(pictures)
    facts = record.summary.to_plain()
    # what was logged over time has its last or best value there already
    run.summary.update({key: value for key, value in facts.items() if key not in record.series})
    best = folder / "best.ckpt"
    if record.stopped_by is None and best.exists():
        plain = {key: value for key, value in facts.items() if isinstance(value, (int, float, str))}
        artifact = wandb.Artifact(f"model-{run.id}", type="model", metadata=plain)
        artifact.add_file(
            str(best), policy="mutable"
        )  # a copy: a resumed run writes another best.ckpt before a sync
        run.log_artifact(artifact, aliases=["best"])
