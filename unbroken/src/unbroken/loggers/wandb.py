"""Weights & Biases: one run per job. Online where an API key is configured, else offline: no
prompt, no network.

Nothing that W&B does or fails to do ends a run. W&B's own variables, such as ``WANDB_MODE``, are
honoured.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger, WandbLogger
from lightning.pytorch.loggers.logger import DummyExperiment
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from unbroken import contract
from unbroken.checkpoint.following import Best
from unbroken.errors import UserError, require
from unbroken.loggers.followers import Row, keep_name, last_steps, name_in_tracker
from unbroken.loggers.patience import failure_within
from unbroken.loggers.wandb_account import STEP, wandb_state
from unbroken.results.facts import parameter_count
from unbroken.results.run_result import RunResult
from unbroken.run_folder import RunFolder
from unbroken.stopping import signals
from unbroken.stopping.ranks import is_rank_zero, say
from unbroken.tables import columns_of

if TYPE_CHECKING:
    from unbroken.cli.cli import Configuration

# The last two are old names of the first two.
MODES = ("online", "offline", "disabled", "run", "dryrun")
REFUSED_IN_PROJECT = "/\\#?%:"
# Seconds that a run's start and its end wait for a server. A stopped run has ten for everything.
START_PATIENCE = 6.0
END_PATIENCE = 7.0
STOP_PATIENCE = 4.0
SETTINGS: dict[str, Any] = {
    # W&B would read the metadata of every installed package: half a second. The lock file has it.
    "x_save_requirements": False,
    "init_timeout": START_PATIENCE,
    # Also for W&B's own process.
    "finish_timeout": END_PATIENCE,
}
# The module in which W&B Launch keeps what it wants to give to the next run
LAUNCH_INPUTS = "wandb.sdk.launch.inputs.internal"
# What a run keeps once W&B has everything that it logged
ENDED = "W&B has all of"
# In a confusion matrix, whose table has a row per cell.
MOST_CLASSES = 50


def make_wandb_logger(
    config: Configuration, run: RunFolder, best: Best, chosen: Sequence[Logger] = ()
) -> WandbRunLogger | None:
    """A run's W&B logger, off on ranks above 0; None where ``--logger`` names other trackers or
    none, and where a WandbLogger of the user's is among the ``chosen`` loggers.

    A UserError where W&B would refuse what its variables ask for.
    """
    has_theirs = any(isinstance(each, WandbLogger) for each in chosen)
    if not has_theirs and "wandb" not in config.trackers:
        # A module's own wandb.log finds a run that does nothing.
        if "wandb" in sys.modules:
            disabled_run()
        return None
    # A WandbLogger of the user's reads what is set here, too.
    mode = checked_mode() if is_rank_zero() else "disabled"
    project = (
        os.environ.get("WANDB_PROJECT") or config.program.wandb_project or config.program.package
    )
    if mode != "disabled":
        is_fine = not set(project) & set(REFUSED_IN_PROJECT)
        require(is_fine, "WANDB_PROJECT", f"have none of {' '.join(REFUSED_IN_PROJECT)}", project)
        keep_wandb_quiet()
    if has_theirs:
        return None
    if mode != "disabled" and os.environ.get("WANDB_DIR"):
        say("WANDB_DIR is not used: the files of a W&B run lie in the run's own folder.")
    return WandbRunLogger(run, project, config.resolved, mode, best)


def checked_mode() -> str:
    """How runs log, online, offline or disabled; ``WANDB_MODE`` says so afterwards, spelled as W&B
    takes it.
    """
    asked = os.environ.get("WANDB_MODE", "")
    is_known = not asked or asked.lower() in MODES
    require(is_known, "WANDB_MODE", f"be one of {', '.join(MODES[:3])}", asked)
    finish_timeout()
    mode = wandb_state().mode
    if mode == "refused":
        raise UserError(
            "WANDB_MODE=online needs an API key, and none is configured. "
            "Run wandb login, or unset it."
        )
    os.environ["WANDB_MODE"] = mode
    return mode


class WandbRunLogger(WandbLogger, Callback):
    """Lightning's W&B logger with a row per step, as in metrics.csv, and an end that waits only a
    few seconds.

    The run starts when Lightning first asks for it, before any hook of the user's: ``wandb.log``,
    ``wandb.run`` and ``logger.experiment`` work in all of them. Where W&B is off, they get W&B's
    own disabled run.

    Args:
        run: Its folder gets W&B's files. Its name and id are the W&B run's, unless ``WANDB_NAME``
            and ``WANDB_RUN_ID`` say otherwise.
        project: W&B's project.
        config: The run's resolved configuration.
        mode: ``online``, ``offline`` or ``disabled``.
        best: W&B sums up the metric that it follows by its best value, other metrics by their last.
    """

    def __init__(
        self,
        run: RunFolder,
        project: str,
        config: dict[str, Any],
        mode: str,
        best: Best | None = None,
    ) -> None:
        super().__init__(
            name=run.name,
            save_dir=str(run.folder),
            id=run.run_id,
            project=project,
            offline=mode == "offline",
        )
        self.folder = run.folder
        self.run_name = run.name
        self.run_id = run.run_id
        self.project = project
        self.config = dict(config)
        self.mode = mode
        self.best = best
        # What the report shows: W&B gets its pictures at the end.
        self.record: RunResult | None = None
        # W&B's run, once it has started
        self._run: Any = None
        self._has_ended = False
        # The row of this step, which may still grow
        self._row: dict[str, Any] = {}
        # Metric → the last step of which W&B has a value
        self._known: dict[str, int] = {}
        # With which W&B refused a row
        self._error: Exception | None = None
        # Variables that were set for this run alone
        self._own_folders: list[str] = []

    @property
    def log_dir(self) -> str:
        """The run's folder: where a module's own code puts its files."""
        return str(self.folder)

    @property
    def experiment(self) -> Any:
        """The W&B run, started at the first call; a disabled one where W&B is off."""
        if self.mode != "disabled":
            return self.begin()
        # Lightning asks every logger for it before training, but perhaps nobody will use it, and
        # the import of W&B takes half a second. A module that has imported it may use wandb.log.
        if "wandb" in sys.modules:
            self.begin()
        return _DisabledRun(self)

    def begin(self) -> Any:
        """Start the W&B run, unless it has started; returns it."""
        if self._run is None:
            self._run = disabled_run() if self.mode == "disabled" else self._start()
        return self._run

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            # Lightning has put all loggers aside, and the run leaves nothing behind.
            self.mode = "disabled"
            _ = self.experiment

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Add what only a run that has started knows to W&B's configuration."""
        if self.mode == "disabled":
            return
        try:
            self.begin().config.update(found_by_the_run(trainer, pl_module), allow_val_change=True)
        except Exception as error:
            rank_zero_warn(f"W&B's configuration lacks what the run found ({described(error)}).")

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing: the resolved configuration holds them."""

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        if self.mode == "disabled":
            return
        if step is None:
            self._row |= metrics
            return
        if self._row.get(STEP, step) != step:
            self._send_row()
        new = {name: metrics[name] for name in metrics if step > self._known.get(name, -1)}
        if new:
            self._row |= {**new, STEP: step}

    def go_on_after(self, rows: Sequence[Row]) -> None:
        """Send what W&B lacks of these rows, and nothing that it has, if the run was killed."""
        has_all = name_in_tracker(self.folder, ENDED) is not None
        if has_all:
            # From here on it may lack something again.
            keep_name(self.folder, ENDED, None)
        if self.mode == "disabled" or has_all:
            return
        try:
            self._known = self._last_steps(rows)
        except Exception as error:
            rank_zero_warn(
                f"W&B does not tell which rows of before it has ({described(error)}): it gets none"
                " of them again."
            )
            return
        for row in rows:
            self.log_metrics({name: row[name] for name in row if name != "step"}, row["step"])

    def _last_steps(self, rows: Sequence[Row]) -> dict[str, int]:
        """Metric → the last step of which W&B has a value."""
        run = self.begin()
        if self.mode == "online":
            step = run.summary.get(STEP, -1)
            return dict.fromkeys(columns_of(rows), step)
        return last_steps_offline(self.folder, Path(run.dir).parent)

    def leave(self, trainer: Trainer, result: RunResult) -> None:
        """Send the report's pictures and tables, and end the W&B run."""
        self.record = result
        exit_code = 0
        if result.stopped_by is not None:
            exit_code = 128 + signal.Signals[result.stopped_by]
        self.finish(exit_code)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        # After a signal the run still leaves what it has reached.
        if not isinstance(exception, signals.Stopped):
            self.finish(1)

    def finish(self, exit_code: int) -> None:
        """End the W&B run with the process's exit code: W&B does not show a stopped run as
        finished.
        """
        if self._run is None or self._has_ended:
            return
        self._has_ended = True
        patience: float | None = finish_timeout()
        if self.mode != "online":
            # Files need no server.
            patience = None
        if exit_code:
            patience = STOP_PATIENCE
        if failure_within(patience, lambda: self._finish(exit_code)):
            self._tell_what_is_lost()
        # Later runs of this process have other folders.
        for name in self._own_folders:
            os.environ.pop(name, None)

    def _finish(self, exit_code: int) -> None:
        self._send_row()
        if self.record is not None and self.mode != "disabled":
            try:
                send_result(self._run, self.record, self.folder)
            except Exception as error:
                rank_zero_warn(
                    f"W&B got no pictures ({described(error)}). The run is not affected."
                )
        self._run.finish(exit_code=exit_code)
        if self.mode != "disabled" and self._error is None:
            keep_name(self.folder, ENDED, self.run_id)
        if self._error is not None:
            raise self._error

    def _tell_what_is_lost(self) -> None:
        import wandb

        place = shlex.quote(os.path.relpath(Path(self._run.dir).parent))
        rank_zero_warn(f"W&B did not take everything. To complete it: wandb sync {place}")
        # It takes W&B's exit hook back, which would wait for its server.
        failure_within(0.5, wandb.teardown)

    def _send_row(self) -> None:
        row = self._row
        self._row = {}
        if not row or self._error is not None:
            return
        try:
            self.begin().log(row)
        except Exception as error:
            # W&B's own process has died. Training goes on, and the end of the run tells.
            self._error = error

    def _start(self) -> Any:
        """W&B's run; a disabled one, and a warning, where it cannot start."""
        import wandb

        if wandb.run is not None and not wandb.run.disabled:
            # The user's own code has started one.
            return wandb.run
        self._keep_files_beside_the_run()
        try:
            with without_launch():
                run = self._init()
            # All panels are drawn over optimizer steps.
            run.define_metric(STEP, hidden=True)
            run.define_metric("epoch", hidden=True)
            run.define_metric("*", step_metric=STEP)
            if self.best is not None and self.best.monitor is not None:
                run.define_metric(self.best.monitor, step_metric=STEP, summary=self.best.mode)
        except Exception as error:
            rank_zero_warn(f"W&B could not start and records nothing ({described(error)}).")
            self.mode = "disabled"
            return disabled_run()
        return run

    def _keep_files_beside_the_run(self) -> None:
        """Have W&B keep its files in the run's folder, unless the user chose a place."""
        # Files for upload are copied there, not into the home folder.
        self._use_own_folder("WANDB_DATA_DIR", self.folder / "wandb")
        if not is_home_writable() and "WANDB_CACHE_DIR" not in os.environ:
            # W&B's process would print its log to the terminal.
            self._use_own_folder("WANDB_CACHE_DIR", self.folder / "wandb" / "cache")
            say("The home folder cannot be written: W&B's cache lies in the run's folder.")

    def _use_own_folder(self, variable: str, folder: Path) -> None:
        if variable not in os.environ:
            os.environ[variable] = str(folder)
            self._own_folders.append(variable)

    def _init(self) -> Any:
        import wandb

        options = self._options()
        if self.mode == "online":
            try:
                run = wandb.init(**options, mode="online")
            except Exception as error:
                # W&B's advice on its settings follows in further lines.
                why = str(error).partition("\n")[0]
                rank_zero_warn(f"W&B cannot be reached, this run is recorded offline ({why}).")
                self.mode = "offline"
                # W&B's process still holds the run that did not start.
                wandb.teardown()
            else:
                say(f"W&B: {run.url}")
                return run
        return wandb.init(**options, mode="offline")

    def _options(self) -> dict[str, Any]:
        """What ``wandb.init`` is told, without what the user says by W&B's own variables."""
        import wandb

        settings = dict(SETTINGS)
        for name in SETTINGS:
            if f"WANDB_{name.upper()}" in os.environ:
                del settings[name]
        options: dict[str, Any] = {
            "project": self.project,
            "dir": str(self.folder),
            "config": self.config,
            "settings": wandb.Settings(**settings),
            # An earlier run of this process may be open, such as a disabled one.
            "reinit": "finish_previous",
        }
        if not os.environ.get("WANDB_NAME"):
            options["name"] = self.run_name
        if not os.environ.get("WANDB_RUN_ID"):
            options["id"] = self.run_id
        if not os.environ.get("WANDB_RESUME"):
            # Also offline: else wandb sync of a resumed run's second folder erases the rows of its
            # first.
            options["resume"] = "allow"
        return options


class _DisabledRun(DummyExperiment):
    """W&B's disabled run, which starts when something of it is used.

    What W&B's run lacks does nothing: it is for another kind of logger, such as ``add_scalar``.
    """

    def __init__(self, logger: WandbRunLogger) -> None:
        self._logger = logger

    def __getattr__(self, name: str) -> Any:
        return getattr(self._logger.begin(), name, self.nop)


def disabled_run() -> Any:
    """A run of W&B's that takes everything and does nothing, also for ``wandb.log`` and
    ``wandb.run``.
    """
    try:
        import wandb

        # W&B's session, which a later run of this process uses as well, begins here.
        keep_wandb_quiet()
        # Whatever W&B says of a run that does nothing, nobody needs to read.
        with contextlib.redirect_stderr(io.StringIO()):
            return wandb.init(mode="disabled", reinit="finish_previous")
    except Exception:
        # W&B cannot even do nothing, such as where its settings are refused.
        return DummyExperiment()


@contextlib.contextmanager
def without_launch() -> Iterator[None]:
    """Let W&B start a run without its import of W&B Launch, which takes half a second.

    A run that starts takes the inputs that were staged for it in W&B's module ``LAUNCH_INPUTS``.
    Before anything has imported that module, none can be staged: W&B then gets a stand-in that
    holds none. Where something has imported it, and afterwards, it is W&B's own.
    """
    if LAUNCH_INPUTS in sys.modules:
        yield
        return
    stand_in = ModuleType(LAUNCH_INPUTS)
    stand_in.__dict__["StagedLaunchInputs"] = NoLaunchInputs
    sys.modules[LAUNCH_INPUTS] = stand_in
    try:
        yield
    finally:
        del sys.modules[LAUNCH_INPUTS]


class NoLaunchInputs:
    """W&B's ``StagedLaunchInputs``, where nothing is staged."""

    def apply(self, run: Any) -> None:
        """Nothing: there is nothing to apply to the run."""


def keep_wandb_quiet() -> None:
    """Set what W&B reads when it starts, unless the user has, so that it prints nothing around a
    run's own lines.
    """
    # The run's last lines say where W&B's files lie.
    os.environ.setdefault("WANDB_SILENT", "true")
    # Also offline it would wait for a server at the exit.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    # Without it W&B's process prints its log.
    os.environ.setdefault("HOME", os.path.expanduser("~"))


def is_home_writable() -> bool:
    """Whether W&B's process can make its folder of logs, which lies in the home folder."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "wandb"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        return os.access(folder, os.W_OK)
    return False


def finish_timeout() -> float:
    """Seconds that the end of a run waits for W&B's server. A UserError where
    ``WANDB_FINISH_TIMEOUT`` is no such number.
    """
    chosen = os.environ.get("WANDB_FINISH_TIMEOUT", str(END_PATIENCE))
    try:
        seconds = float(chosen)
    except ValueError:
        seconds = math.nan
    require(0 <= seconds < math.inf, "WANDB_FINISH_TIMEOUT", "be seconds", chosen)
    return seconds


def described(error: Exception) -> str:
    """An error for the end of a sentence: its kind and what it says."""
    return f"{type(error).__name__}: {error}"


def found_by_the_run(trainer: Trainer, module: LightningModule) -> dict[str, Any]:
    """Facts that stand in no configuration, for W&B's."""
    datamodule = trainer.datamodule  # type: ignore[attr-defined]
    source = None
    if isinstance(datamodule, contract.NamesSource):
        source = datamodule.data_source
    return {
        "device": trainer.strategy.root_device.type,
        "parameters": parameter_count(trainer, module),
        "precision": trainer.precision,
        "world_size": trainer.world_size,
        "data_source": source,
    }


def last_steps_offline(folder: Path, without: Path) -> dict[str, int]:
    """Metric → the last step of which W&B's offline files in a run's folder have a value.

    A process that was killed has not written its last rows. The folder ``without`` is left out: it
    is that of the run that goes on.
    """
    rows = []
    for place in sorted((folder / "wandb").glob("offline-run-*")):
        if place == without:
            continue
        reader = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(place)]
        done = subprocess.run(reader, capture_output=True, text=True, check=True, timeout=60)
        for line in done.stdout.splitlines():
            record = json.loads(line)
            item = record.get("history", {}).get("item", {})
            if STEP in item:
                rows.append({**item, "step": item[STEP]})
    return last_steps(rows)


def sync_command(folder: Path) -> list[str]:
    """The line that publishes a run's offline folders, if any: a resumed run has several, uploaded
    in their order.
    """
    names = [path.name for path in (folder / "wandb").glob("offline-run-*")]
    if not names:
        return []
    name = names[0] if len(names) == 1 else "offline-run-*"
    place = shlex.quote(os.path.relpath(folder / "wandb"))
    return [f"  wandb sync {place}/{name}   # publish this run's dashboard"]


def send_result(run: Any, result: RunResult, folder: Path) -> None:
    """Send what the report shows, the summary's facts and, of a finished run, best.ckpt to a W&B
    run.
    """
    pictures: dict[str, Any] = {}
    add_report(pictures, folder)
    if result.confusion is not None:
        add_predictions(pictures, result, result.confusion)
    add_memory(pictures, result)
    run.log(pictures)
    facts = result.summary.to_plain()
    # What was logged over time has its last value there already.
    new = {name: value for name, value in facts.items() if name not in result.series}
    followed = result.summary.monitor
    # Where its name was known as the run began, W&B keeps the best itself, as {"max": ...}.
    if followed in facts and not hasattr(run.summary.get(followed), "keys"):
        new[followed] = facts[followed]
    run.summary.update(new)
    best = folder / "best.ckpt"
    if result.stopped_by is None and best.exists():
        send_checkpoint(run, best, facts)


def add_report(pictures: dict[str, Any], folder: Path) -> None:
    """Add ``report.html``, where the run has one."""
    import wandb

    if (folder / "report.html").exists():
        pictures["report"] = wandb.Html(folder / "report.html", inject=False)


def add_predictions(pictures: dict[str, Any], result: RunResult, confusion: np.ndarray) -> None:
    """Add the accuracy of each class, the surest mistakes and the confusion matrix."""
    import wandb

    names = result.names
    accuracies = wandb.Table(
        columns=["class", "accuracy", "samples"], data=[list(row) for row in result.class_accuracy]
    )
    pictures["test/class_accuracy"] = wandb.plot.bar(
        accuracies, "class", "accuracy", title="Accuracy per class"
    )
    mistakes = wandb.Table(columns=["image", "label", "prediction", "probability"])
    for each in result.mistakes:
        picture = wandb.Image(each.image.squeeze())
        mistakes.add_data(picture, names[each.label], names[each.prediction], each.probability)
    pictures["test/mistakes"] = mistakes
    if len(names) <= MOST_CLASSES:
        # W&B counts for itself: it wants the label and the prediction of every sample.
        labels, predictions = np.indices(confusion.shape).reshape(2, -1)
        counts = confusion.ravel()
        pictures["test/confusion_matrix"] = wandb.plot.confusion_matrix(
            None,
            labels.repeat(counts).tolist(),
            predictions.repeat(counts).tolist(),
            class_names=names,
            title="Confusion matrix",
        )


def add_memory(pictures: dict[str, Any], result: RunResult) -> None:
    """Add memory by use, where it is known."""
    import wandb

    if result.breakdown:
        uses = wandb.Table(
            columns=["use", "GiB"], data=[list(part) for part in result.breakdown.items()]
        )
        pictures["memory/breakdown"] = wandb.plot.bar(uses, "use", "GiB", title="Memory by use")


def send_checkpoint(run: Any, best: Path, facts: dict[str, Any]) -> None:
    """Send best.ckpt as an artifact with the alias ``best``."""
    import wandb

    # W&B takes no artifact whose facts hold an infinite number.
    plain = {
        key: value
        for key, value in facts.items()
        if isinstance(value, str) or (isinstance(value, int | float) and math.isfinite(value))
    }
    artifact = wandb.Artifact(f"model-{run.id}", type="model", metadata=plain)
    # A copy: a resumed run writes another best.ckpt, perhaps before a sync.
    artifact.add_file(str(best), policy="mutable")
    run.log_artifact(artifact, aliases=["best"])
