"""MLflow: a database in the run's folder, or the server that MLFLOW_TRACKING_URI names."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import MLFlowLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn
from unbroken.errors import UserError, require
from unbroken.loggers.followers import Row, WholeRows, keep_name, name_in_tracker
from unbroken.loggers.patience import failure_within
from unbroken.results.run_result import RunResult
from unbroken.run_folder import RunFolder
from unbroken.tables import flat

if TYPE_CHECKING:
    from unbroken.cli.cli import Configuration

DATABASE = "mlflow.db"
ARTIFACTS = "mlflow-artifacts"
# Seconds between two writes. One costs some ten milliseconds in a local file.
INTERVAL = 5.0
# The most values that MLflow takes at once
MOST_VALUES = 1000
# MLflow allows no other characters in a name.
NOT_IN_NAMES = re.compile(r"[^\w/. :-]", re.ASCII)
# Seconds that a run waits for a server that does not answer. A stopped run has ten for everything.
END_PATIENCE = 6.0


def make_mlflow_logger(config: Configuration, run: RunFolder) -> MLFlowRunLogger:
    """The run's logger, whose run in MLflow has started. A UserError where that cannot start."""
    # MLflow would speak of its tables, and wait for minutes for a server that is not there.
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    logging.getLogger("lightning.pytorch.loggers.mlflow").setLevel(logging.ERROR)
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    if uri is None:
        require_a_path_in_an_address(run.folder)
    try:
        logger = MLFlowRunLogger(run, uri, config.program.package)
        logger.begin(config.resolved)
        if uri is None:
            # MLflow has set it to this run's database. The next run of this process has its own.
            os.environ.pop("MLFLOW_TRACKING_URI", None)
    # MLflow's own errors, those of its database, and those of the network
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"--logger mlflow cannot start a run in {uri or run.folder / DATABASE}: {reason}"
        ) from None
    return logger


def require_a_path_in_an_address(folder: Path) -> None:
    """A UserError for a folder that the address of a database cannot name."""
    is_plain = not re.search("[?#%]", str(folder))
    must = "be a folder without ? # and % in its path, for MLflow names its database by an address"
    require(is_plain, "with --logger mlflow the run's folder", must, folder)


def name_in_mlflow(name: str) -> str:
    """A metric's or a setting's name in MLflow. Every character that is not allowed there becomes
    its number, so that two names stay two: ``recall_x3c_0.5`` for ``recall<0.5``.
    """
    return NOT_IN_NAMES.sub(lambda found: f"_x{ord(found[0]):x}_", name)


class MLFlowRunLogger(MLFlowLogger):
    """Lightning's logger with one run in MLflow for a run and all that resume it.

    Values are written together, every five seconds. What MLflow lacks after a kill is written when
    the run is resumed.

    Args:
        run: Its name is that of the run in MLflow.
        uri: The server. None: a database in the run's folder.
        experiment: The name under which MLflow groups runs.
    """

    def __init__(self, run: RunFolder, uri: str | None, experiment: str) -> None:
        # A folder may be moved between two starts, and its database goes on.
        self.place = uri or DATABASE
        self.folder = run.folder
        # A mirror brings the run's id there, and not its database: the run begins anew in one.
        is_there = uri is not None or (run.folder / DATABASE).exists()
        known_id = name_in_tracker(run.folder, f"mlflow at {self.place}")
        self.had_id = known_id if is_there else None
        super().__init__(
            experiment_name=os.environ.get("MLFLOW_EXPERIMENT_NAME") or experiment,
            run_name=os.environ.get("MLFLOW_RUN_NAME") or run.name,
            tracking_uri=uri or f"sqlite:///{run.folder / DATABASE}",
            artifact_location=None if uri else str(run.folder / ARTIFACTS),
            run_id=self.had_id,
        )
        self._rows = WholeRows(self._take)
        self._waiting: list[Any] = []
        self._sent_at = 0.0
        self._failure: Exception | None = None

    def begin(self, settings: dict[str, Any]) -> None:
        """Start the run in MLflow, or go on with it. ``settings``: the run's configuration."""
        client = self.experiment
        run_id = str(self.run_id)
        if self.had_id is None:
            keep_name(self.folder, f"mlflow at {self.place}", run_id)
            named = {name_in_mlflow(key): value for key, value in flat(settings).items()}
            super().log_hyperparams(named)
            return
        client.update_run(run_id, status="RUNNING")
        self._rows = WholeRows(self._take, self._last_steps())

    def _last_steps(self) -> dict[str, int]:
        found = {}
        for name in self.experiment.get_run(self.run_id).data.metrics:
            history = self.experiment.get_metric_history(self.run_id, name)
            found[name] = max(value.step for value in history)
        return found

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing: the run's settings are there since its start."""

    @rank_zero_only
    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self._rows.add({name_in_mlflow(name): metrics[name] for name in metrics}, step)

    def go_on_after(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self.log_metrics(row, row["step"])

    def _take(self, step: int, row: Row) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._waiting += [Metric(name, value, now, step) for name, value in row.items()]
        if time.monotonic() - self._sent_at > INTERVAL:
            self._write()

    def _write(self) -> None:
        """Write what waits. After a failure nothing is written until the run is resumed."""
        values = self._waiting
        self._waiting = []
        if self._failure is not None:
            return
        try:
            for first in range(0, len(values), MOST_VALUES):
                part = values[first : first + MOST_VALUES]
                self.experiment.log_batch(run_id=self.run_id, metrics=part)
        except Exception as error:
            self._failure = error
            rank_zero_warn(
                f"MLflow does not take the metrics any more ({_in_a_line(error)}). The run goes on,"
                " and metrics.csv has them all. MLflow gets them when the run is resumed."
            )
        self._sent_at = time.monotonic()

    @rank_zero_only
    def finalize(self, status: str = "success") -> None:
        """Called by Lightning when training or a test has ended, or failed."""
        if status != "success":
            self._end("FAILED")

    def leave(self, trainer: Trainer, result: RunResult) -> None:
        """End the run in MLflow: finished, or killed where a signal has stopped it."""
        self._end("KILLED" if result.stopped_by else "FINISHED")

    def _end(self, status: str) -> None:
        def write_and_end() -> None:
            self._rows.flush()
            self._write()
            if self._failure is None:
                self.experiment.set_terminated(self.run_id, status)

        failure = failure_within(END_PATIENCE, write_and_end)
        if failure is not None:
            rank_zero_warn(f"MLflow does not know how the run has ended ({_in_a_line(failure)}).")


def _in_a_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
