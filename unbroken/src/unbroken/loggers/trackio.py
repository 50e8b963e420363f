"""Trackio: its files in the run's folder, or in the folder that TRACKIO_DIR names."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import rank_zero_experiment
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn
from unbroken.errors import UserError
from unbroken.loggers.followers import Row, WholeRows, keep_name, last_steps, name_in_tracker
from unbroken.loggers.patience import failure_within
from unbroken.results.run_result import RunResult
from unbroken.run_folder import RunFolder
from unbroken.stopping.ranks import say
from unbroken.tables import flat

if TYPE_CHECKING:
    from unbroken.cli.cli import Configuration

FOLDER = "trackio"
# Seconds that a run waits for trackio at its end. A stopped run has ten for everything.
END_PATIENCE = 6.0


def make_trackio_logger(config: Configuration, run: RunFolder) -> TrackioRunLogger:
    """The run's logger, whose run in trackio has started. A UserError where that cannot start."""
    # Trackio reads the variable when it is imported.
    os.environ.setdefault("TRACKIO_DIR", str(run.folder / FOLDER))
    try:
        return TrackioRunLogger(run, config.resolved, config.program.package)
    # Whatever trackio, its database or its server has against it
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"--logger trackio cannot start a run: {reason}") from None


class TrackioRunLogger(Logger):
    """One run in trackio for a run and all that resume it, a row for each step.

    Args:
        run: Its name is that of the run in trackio.
        settings: The run's configuration.
        project: The name under which trackio groups runs.
    """

    def __init__(self, run: RunFolder, settings: dict[str, Any], project: str) -> None:
        super().__init__()
        import trackio

        self.folder = run.folder
        place = Path(trackio.utils.TRACKIO_DIR)
        if place != Path(os.environ["TRACKIO_DIR"]):
            say(f"trackio's files are in {place}, as those of this process' first run.")
        before = name_in_tracker(run.folder, "trackio")
        known = {}
        if before is not None:
            known = last_steps(trackio.SQLiteStorage.get_logs(project, before))
        # Whatever trackio prints, the run's last lines say.
        with contextlib.redirect_stdout(io.StringIO()):
            self._run = trackio.init(
                project=project,
                name=before or run.name,
                config=flat(settings),
                resume="never" if before is None else "allow",
                embed=False,
                # The run has monitors of its own.
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        if before is None:
            keep_name(run.folder, "trackio", run.name)
        self._rows = WholeRows(lambda step, row: self._run.log(dict(row), step=step), known)
        self._has_ended = False

    @property
    def name(self) -> str:
        return FOLDER

    @property
    def version(self) -> str:
        return str(self._run.name)

    @property
    def save_dir(self) -> str:
        """The run's folder: where a module's own code puts its files."""
        return str(self.folder)

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """Trackio's run."""
        return self._run

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing: the run's settings are there since its start."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        self._rows.add(metrics, step)

    def go_on_after(self, rows: Sequence[Row]) -> None:
        self._rows.go_on_after(rows)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Called by Lightning when training or a test has ended, or failed."""
        if status != "success":
            self._end()

    def leave(self, trainer: Trainer, result: RunResult) -> None:
        """End the run in trackio."""
        self._end()

    def _end(self) -> None:
        import trackio

        if self._has_ended:
            return
        self._has_ended = True

        def finish() -> None:
            self._rows.flush()
            self._run.finish()

        with contextlib.redirect_stdout(io.StringIO()):
            failure = failure_within(END_PATIENCE, finish)
        # Else trackio would end the run once more at the exit, and say so.
        trackio.context_vars.current_run.set(None)
        if failure is not None:
            rank_zero_warn(f"trackio did not take everything ({type(failure).__name__}).")
