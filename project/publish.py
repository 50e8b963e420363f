"""What a run leaves at its end: its summary, ``report.html``, and the same pictures and tables in W&B."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from project.callbacks.memory import MemoryMonitor  # feature: memory
from project.callbacks.test_predictions import TestPredictions
from project.callbacks.throughput import ThroughputMonitor  # feature: throughput
from project.engine import signals
from project.engine.checkpointing import RunCheckpoint
from project.engine.cli import Configuration
from project.engine.lightning_internals import release_child_processes
from project.engine.run_folder import Run
from project.engine.summary import (
    RunRecord,
    RunTimer,
    Summary,
    command_line,
    device_name,
    git_state,
    read_series,
    samples_of,
    versions,
)
from project.hardware import cpu
from project.loggers.metrics_csv import MetricsCSV
from project.loggers.wandb import WandbRunLogger

# Seconds for the report of a stopped run, which has ten seconds for everything
REPORT_PATIENCE = 4.0


@dataclass
class Session:
    """A run's Trainer, callbacks and loggers. None is what is switched off."""

    trainer: Trainer
    checkpoint: RunCheckpoint
    timer: RunTimer
    csv: MetricsCSV | None
    wandb: WandbRunLogger | None
    predictions: TestPredictions | None
    throughput: ThroughputMonitor | None = None  # feature: throughput
    memory: MemoryMonitor | None = None  # feature: memory

    @property
    def advice(self) -> str | None:
        """What the run waited for, in one sentence; None where nothing was measured."""
        # feature: throughput
        if self.throughput is not None:
            return self.throughput.advice()
        # end feature: throughput
        return None


def summarize(config: Configuration, run: Run, session: Session, finished: bool = True) -> Summary:
    """The summary of a run whose training has ended."""
    trainer, best, timer = session.trainer, session.checkpoint.best, session.timer
    commit, dirty = git_state()
    metrics = dict(best.metrics)
    metrics |= session.throughput.summary() if session.throughput else {}  # feature: throughput
    metrics |= session.memory.summary() if session.memory else {}  # feature: memory
    return Summary(
        run_name=run.name,
        finished=finished,
        device=device_name(trainer),
        precision=str(trainer.precision),
        world_size=trainer.world_size,
        data_source=getattr(config.datamodule, "data_source", None),
        train_samples=samples_of(trainer.train_dataloader),
        parameters=sum(p.numel() for p in config.module.parameters()),
        epochs=trainer.current_epoch,
        steps=trainer.global_step,
        fit_seconds=timer.seconds_so_far(),
        start_seconds=timer.start_seconds,
        monitor=best.monitor if best.score is not None else None,
        mode=best.mode,
        best_epoch=best.epoch,
        best_score=best.score,
        git_commit=commit,
        git_dirty=dirty,
        versions=versions(),
        command=command_line(),
        date=time.strftime("%Y-%m-%d %H:%M:%S"),
        hardware=hardware_line(),
        metrics=metrics,
    )


def hardware_line() -> str:
    """The CPU in one line."""
    facts = cpu()
    return f"{facts['name']}, {facts['cores']} core{'s' if facts['cores'] > 1 else ''}"


def publish(config: Configuration, run: Run, session: Session, summary: Summary, stopped_by: str | None = None) -> None:
    """Write the report and complete the W&B run, on rank 0. A failure is a warning: the run itself is safe.

    Args:
        config: The run's configuration.
        run: Its folder.
        session: Its Trainer and callbacks.
        summary: Its facts.
        stopped_by: Name of the signal that ended it early.
    """
    if not session.trainer.is_global_zero:
        return
    record = gather(config, session, summary, stopped_by)
    if session.wandb is not None:
        session.wandb.record = record  # sent when the W&B run is closed
    # feature: report
    if config.options.report:
        try:
            from project.report import write_report  # matplotlib takes half a second to import

            with time_limit(REPORT_PATIENCE if stopped_by else None):
                write_report(run.folder / "report.html", record)
        except Exception as error:
            rank_zero_warn(f"report.html could not be written ({type(error).__name__}: {error}). The run is safe.")
    # end feature: report


def gather(config: Configuration, session: Session, summary: Summary, stopped_by: str | None = None) -> RunRecord:
    """What the report and W&B show about a run, from its callbacks and ``metrics.csv``."""
    record = RunRecord(
        summary,
        config=yaml.safe_dump(config.resolved, sort_keys=False),
        class_names=[str(name) for name in getattr(config.datamodule, "class_names", [])],
        stopped_by=stopped_by,
        max_epochs=session.trainer.max_epochs,
    )
    if session.csv is not None:
        session.csv.save()
        record.series = read_series(session.csv.path)
    if session.predictions is not None:
        record.confusion, record.mistakes = session.predictions.confusion, session.predictions.mistakes
    # feature: throughput
    if session.throughput is not None and (advice := session.throughput.advice()):
        record.remarks.append(advice)
    # end feature: throughput
    # feature: memory
    if session.memory is not None:
        record.breakdown, record.savings = session.memory.breakdown, session.memory.savings
        record.remarks += session.memory.leaks
    # end feature: memory
    return record


def publish_stopped(config: Configuration, run: Run, session: Session, stop: signals.Stopped) -> None:
    """Write the report of a stopped run within the time that is left. A second signal skips it."""
    release_child_processes()  # the other ranks end now
    if session.trainer.is_global_zero and session.timer.begun:
        if session.trainer.world_size == 1:  # torchrun signals the remaining ranks as soon as one has ended
            signals.resume_immediate()
        summary = summarize(config, run, session, finished=False)
        publish(config, run, session, summary, stopped_by=signal.Signals(stop.signum).name)


@contextlib.contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise TimeoutError if the block takes longer. Works in the main thread only: other threads get no signals."""
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: Any) -> None:
        raise TimeoutError(f"not done after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def close(session: Session, exit_code: int) -> None:
    """Close the W&B run with the process's exit code, so that a stopped run is not shown as finished."""
    if session.wandb is not None:
        session.wandb.finish(exit_code)
    release_child_processes()
