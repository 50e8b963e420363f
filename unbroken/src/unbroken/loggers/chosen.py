"""The loggers that ``--logger`` asks for, W&B and metrics.csv aside."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from lightning.pytorch.loggers import Logger
from unbroken.cli.cli import Configuration
from unbroken.cli.trackers import MadeInRunFolder
from unbroken.cli.trainer_flags import as_list
from unbroken.loggers.tensorboard import TensorBoardRunLogger
from unbroken.mirror.store import without_password
from unbroken.run_folder import RunFolder
from unbroken.stopping.ranks import is_rank_zero


def make_chosen_loggers(config: Configuration, run: RunFolder) -> list[Logger]:
    """The loggers that are named by their class, then those that are named by a word.

    A UserError where one cannot start.
    """
    loggers: list[Logger] = []
    for named in as_list(config.trainer["logger"]):
        if isinstance(named, MadeInRunFolder):
            loggers.append(named.make(run.folder))
        elif isinstance(named, Logger):
            loggers.append(named)
    # A rehearsal leaves nothing behind, and Lightning puts all loggers aside.
    if not config.trainer["fast_dev_run"]:
        loggers += _make_trackers(config, run)
    return loggers


def _make_trackers(config: Configuration, run: RunFolder) -> list[Logger]:
    loggers: list[Logger] = []
    if "tensorboard" in config.trackers:
        loggers.append(TensorBoardRunLogger(run))
    # The others start their run at once, which one process alone may do.
    if "mlflow" in config.trackers and is_rank_zero():
        from unbroken.loggers.mlflow import make_mlflow_logger

        loggers.append(make_mlflow_logger(config, run))
    if "trackio" in config.trackers and is_rank_zero():
        from unbroken.loggers.trackio import make_trackio_logger

        loggers.append(make_trackio_logger(config, run))
    return loggers


def commands_to_look(config: Configuration, folder: Path) -> list[str]:
    """The lines that show what trackers keep of a run."""
    shown = shlex.quote(os.path.relpath(folder))
    lines = []
    if "tensorboard" in config.trackers:
        lines.append(f"  tensorboard --logdir {shown}/tensorboard")
    lines += _ways_to_look_at_mlflow(config, folder)
    if "trackio" in config.trackers and (folder / "trackio").exists():
        package = config.program.package
        lines.append(f"  TRACKIO_DIR={shown}/trackio trackio show --project {package}")
    return lines


def _ways_to_look_at_mlflow(config: Configuration, folder: Path) -> list[str]:
    """For MLflow that is named by its word, or by the class of Lightning's logger."""
    if (folder / "mlflow.db").exists():
        shown = shlex.quote(os.path.relpath(folder))
        return [f"  mlflow ui --backend-store-uri sqlite:///{shown}/mlflow.db"]
    server = os.environ.get("MLFLOW_TRACKING_URI")
    places = [server] if "mlflow" in config.trackers else []
    places += [
        named.arguments.get("tracking_uri") or server
        for named in as_list(config.trainer["logger"])
        if isinstance(named, MadeInRunFolder) and named.kind.__name__ == "MLFlowLogger"
    ]
    lines = []
    for place in places:
        if place is not None and place.startswith(("http://", "https://")):
            lines.append(f"MLflow has this run: {without_password(place)}")
        elif place is not None:
            lines.append(f"  mlflow ui --backend-store-uri {shlex.quote(place)}")
    return list(dict.fromkeys(lines))
