# goes with the merge: delete this file, and in fit.py the lines that are marked so
"""Stands in for the hooks of features whose ``add_facts`` and ``leave`` are on their way."""

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from project.callbacks.memory import MemoryMonitor  # feature: memory
from project.callbacks.test_predictions import TestPredictions  # feature: test_predictions
from project.callbacks.throughput import ThroughputMonitor  # feature: throughput
from project.engine.stop import failure_within  # feature: report
from project.loggers.wandb import WandbRunLogger  # feature: wandb
from project.run_result import AddsFacts, RunResult, parts_of
from project.tables import write_atomically  # feature: report

# Seconds for the report of a stopped run, which has ten for everything
REPORT_PATIENCE = 4.0  # feature: report


class Report(Callback):  # feature: report
    """Writes ``report.html``."""

    def leave(self, trainer: Trainer, result: RunResult) -> None:
        def write() -> None:
            from project.report import render  # matplotlib takes half a second to import

            assert result.folder is not None
            write_atomically(render(result), result.folder / "report.html")

        error = failure_within(REPORT_PATIENCE if result.stopped_by else None, write)
        if error:
            reason = f"{type(error).__name__}: {error}"
            rank_zero_warn(f"report.html could not be written ({reason}). The run is safe.")


def add_facts(trainer: Trainer, result: RunResult) -> None:
    """What callbacks without a hook of ours know."""
    for part in parts_of(trainer):
        if isinstance(part, AddsFacts):
            continue
        if isinstance(part, ThroughputMonitor):  # feature: throughput
            result.summary.metrics |= part.summary()
            result.summary.advice = part.advice(trainer)
        if isinstance(part, MemoryMonitor):  # feature: memory
            result.summary.metrics |= part.peaks
            result.breakdown = part.breakdown
            result.leaks = [*part.leaks.values()]
        if isinstance(part, TestPredictions):  # feature: test_predictions
            result.confusion = part.confusion
            result.mistakes = part.mistakes


def leave(trainer: Trainer, result: RunResult) -> None:
    """What W&B sends when it is closed."""
    for part in parts_of(trainer):  # feature: wandb
        if isinstance(part, WandbRunLogger):
            part.record = result


def close(trainer: Trainer, exit_code: int) -> None:
    """Close the W&B run with the process's exit code, so that a stopped run is not shown as
    finished.
    """
    for part in parts_of(trainer):  # feature: wandb
        if isinstance(part, WandbRunLogger):
            part.finish(exit_code)
