"""What a run leaves for people to look at: ``report.html``, and the same pictures and tables in W&B."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from project.callbacks.memory import MemoryMonitor
from project.callbacks.test_predictions import TestPredictions
from project.callbacks.throughput import ThroughputMonitor

# Seconds for the report, and for W&B's pictures, of a run that was asked to stop, which has ten for everything
REPORT_PATIENCE, PICTURES_PATIENCE = 4.0, 1.0


def publish(
    trainer: Trainer, folder: Path, facts: dict[str, Any], config: dict[str, Any], stopped_by: str | None = None
) -> None:
    """Write the report and complete the W&B run, on rank 0. A failure here is a warning: the run itself is safe.

    Args:
        trainer: Of the run that has ended.
        folder: The run's folder.
        facts: Those of ``summary.json``, as far as they are known.
        config: The resolved configuration.
        stopped_by: Name of the signal that ended the run early.
    """
    if not trainer.is_global_zero:
        return
    try:
        from project.report import write_report

        with time_limit(REPORT_PATIENCE if stopped_by else None):
            record = gather(trainer, folder, facts, config, stopped_by)
            write_report(folder / "report.html", record)
    except Exception as error:
        rank_zero_warn(f"report.html could not be written ({type(error).__name__}: {error}). The run is not affected.")
        return
    try:
        from project.wandb_logging import WandbRunLogger
        from project.wandb_pictures import log_results

        for logger in trainer.loggers:
            if isinstance(logger, WandbRunLogger) and (logger.is_up or not stopped_by):
                with time_limit(PICTURES_PATIENCE if stopped_by else None):
                    log_results(logger, record, folder)
    except Exception as error:
        rank_zero_warn(f"W&B got no pictures ({type(error).__name__}: {error}). The run is not affected.")


def gather(
    trainer: Trainer, folder: Path, facts: dict[str, Any], config: dict[str, Any], stopped_by: str | None = None
) -> Any:
    """The :class:`project.report.RunRecord` of a run, from its callbacks and ``metrics.csv``."""
    import yaml

    from project.loggers import MetricsCSV
    from project.report.record import RunRecord, read_metrics

    record = RunRecord(
        facts={key: value for key, value in facts.items() if value is not None},
        config=yaml.safe_dump(config, sort_keys=False),
        class_names=[str(name) for name in getattr(trainer.datamodule, "class_names", [])],  # type: ignore[attr-defined]
        stopped_by=stopped_by,
        max_epochs=trainer.max_epochs,
    )
    for logger in trainer.loggers:
        if isinstance(logger, MetricsCSV):
            logger.save()
            record.metrics = read_metrics(logger.path)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, TestPredictions):
            record.confusion, record.mistakes = callback.confusion, callback.mistakes
        elif isinstance(callback, ThroughputMonitor):
            record.remarks += [advice] if (advice := callback.advice()) else []
        elif isinstance(callback, MemoryMonitor):
            record.breakdown, record.savings = callback.breakdown, callback.savings
            record.remarks += callback.leaks
    return record


@contextlib.contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise TimeoutError in the block where it takes longer; in the main thread only, the others get no signals."""
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
