"""The main job: a run from its first step to its summary. ``fit`` is its thin command."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer

from project import signals, summary
from project.callbacks.checkpoint import RunCheckpoint
from project.callbacks.memory import MemoryMonitor
from project.callbacks.stop import release_child_processes
from project.callbacks.throughput import ThroughputMonitor
from project.cli import ProjectCLI
from project.errors import UserError
from project.final_test import test_best
from project.results import publish
from project.runs import Run
from project.trainer import find
from project.wandb_logging import STOP_PATIENCE, WandbRunLogger


def train(cli: ProjectCLI, run: Run, trainer: Trainer) -> dict[str, Any]:
    """Train, test the best checkpoint once, and write the summary. Returns the summary's facts.

    Raises:
        signals.Stopped: The run was asked to stop; last.ckpt holds the step it reached.
    """
    status, finished = 1, False
    try:
        with refusals_as_errors(trainer):
            trainer.fit(
                cli.model,
                datamodule=cli.datamodule,
                ckpt_path=str(run.checkpoint) if run.checkpoint else None,
                weights_only=True,
            )
        facts = gather_facts(cli, run, trainer)  # before the test's precision is set
        facts |= test_best(trainer, cli, find(trainer, RunCheckpoint))
        if trainer.is_global_zero:
            summary.write_summary(run.folder / "summary.json", facts)
        finished = True
        signals.resume_immediate()  # nothing is left that could be lost
        publish(trainer, run.folder, facts, cli.resolved())
        status = 0
        return facts
    except signals.Stopped as stop:
        status = stop.exit_code
        if not finished:
            publish_stopped(cli, run, trainer, stop)
        raise
    finally:
        finish_wandb(trainer, status)
        release_child_processes()


@contextmanager
def refusals_as_errors(trainer: Trainer) -> Iterator[None]:
    """What Lightning itself refuses before the first step is a mistake in the flags: a :class:`UserError`."""
    try:
        yield
    except (MisconfigurationException, ValueError) as error:
        raised_in = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)][-1]
        started = find(trainer, summary.RunTimer).start_seconds is not None
        if started or not raised_in.startswith("lightning."):
            raise
        raise UserError(f"the Trainer refuses a flag: {' '.join(str(error).split())}") from None


def gather_facts(cli: ProjectCLI, run: Run, trainer: Trainer) -> dict[str, Any]:
    """The summary's facts that are known when training has ended."""
    keeper, timer = find(trainer, RunCheckpoint), find(trainer, summary.RunTimer)
    datamodule = cli.datamodule
    return {
        "run_name": run.name,
        "finished": True,
        "device": summary.device_name(trainer),
        "precision": trainer.precision,
        "world_size": trainer.world_size,
        "data_source": datamodule.data_source,
        "train_samples": datamodule.num_samples("train"),
        "parameters": sum(p.numel() for p in cli.model.parameters()),
        "epochs": trainer.current_epoch,
        "steps": trainer.global_step,
        "fit_seconds": timer.seconds_so_far(),
        "start_seconds": timer.start_seconds,
        "best_epoch": keeper.best_epoch,
        "val/accuracy": keeper.best_score,
        **find(trainer, ThroughputMonitor).summary(),
        **find(trainer, MemoryMonitor).summary(),
        **summary.git_state(),
        "versions": summary.versions(),
        "command": summary.command_line(),
    }


def publish_stopped(cli: ProjectCLI, run: Run, trainer: Trainer, stop: signals.Stopped) -> None:
    """The report of what a stopped run has reached, within the time it has; a second signal skips it."""
    release_child_processes()  # ranks that have nothing to report end now, as they should
    if trainer.is_global_zero and find(trainer, summary.RunTimer).start_seconds is not None:
        if trainer.world_size == 1:  # torchrun signals the ranks that are left as soon as one has ended
            signals.resume_immediate()
        facts = {**gather_facts(cli, run, trainer), "finished": False}
        publish(trainer, run.folder, facts, cli.resolved(), stopped_by=signal.Signals(stop.signum).name)


def finish_wandb(trainer: Trainer, exit_code: int) -> None:
    """Close the W&B run with the process's exit code, so that a stopped run is not shown as finished."""
    for logger in trainer.loggers:
        if isinstance(logger, WandbRunLogger):
            logger.finish(exit_code, patience=STOP_PATIENCE if exit_code else None)


def wandb_folder(run: Run) -> Path | None:
    """The newest offline W&B folder of a run, None where there is none."""
    found = sorted((run.folder / "wandb").glob("offline-run-*"), key=os.path.getmtime)
    return found[-1] if found else None
