"""The main job: train, keep the best checkpoint, test it once at the end, print a summary.

python -m project.fit
python -m project.fit --precision 16-mixed
python -m project.fit --config configs/fast.yaml --data.root data
python -m project.fit --run_name mine --ckpt_path auto
torchrun --nproc_per_node 4 -m project.fit --strategy ddp
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from project.engine.command import prepare_process, run
from project.errors import UserError

prepare_process(__name__)  # threads, before torch is imported

from lightning.pytorch import Callback, Trainer

from project.callbacks.memory import MemoryMonitor
from project.callbacks.memory_use import MemorySnapshot
from project.callbacks.optimizer import OptimizerMonitor
from project.callbacks.test_predictions import TestPredictions
from project.callbacks.throughput import ThroughputMonitor
from project.engine import signals
from project.engine.checkpointing import RunCheckpoint
from project.engine.cli import Configuration, read_configuration
from project.engine.progress import progress_callback
from project.engine.ranks import is_rank_zero
from project.engine.run_folder import Run
from project.engine.stop import release_child_processes
from project.engine.summary import RunTimer, Summary, closing_lines
from project.engine.trainer import build_trainer, own_callbacks, own_loggers, trainer_flags
from project.engine.training import (
    finish_wandb,
    publish,
    publish_stopped,
    refusals_as_errors,
    summarize,
    test_best,
)
from project.loggers.metrics_csv import MetricsCSV
from project.loggers.wandb import WandbRunLogger, WandbStart, make_wandb_logger, offline_folders


@dataclass
class Session:
    """A run's Trainer and what rides along on it. None is what is switched off."""

    trainer: Trainer
    checkpoint: RunCheckpoint
    timer: RunTimer
    csv: MetricsCSV | None
    wandb: WandbRunLogger | None
    throughput: ThroughputMonitor | None
    memory: MemoryMonitor | None
    predictions: TestPredictions | None


def main(argv: list[str]) -> int:
    """Train as ``argv`` says; returns the exit code."""
    config, run, changes = read_configuration(argv, "project.fit")
    for line in [*run.notes, *([f"resuming {run.name} with {', '.join(changes)}"] if changes else [])]:
        if is_rank_zero():
            print(line, flush=True)
    if run.finished and not any(line.startswith("trainer.max_") for line in changes):
        if is_rank_zero():
            print(f"run {run.name} is already finished: see {os.path.relpath(run.folder)}/summary.json.")
        return 0
    try:
        if is_rank_zero():
            run.create()
        session = build(config, run)
        summary = train(config, run, session)
    except UserError:
        run.discard()
        raise
    if session.trainer.is_global_zero:
        advice = session.throughput.advice() if session.throughput else None
        print(closing_lines(summary, run.folder, offline_folders(run.folder), advice))
    return 0


def build(config: Configuration, run: Run, extra: Sequence[Callback] = (), without: Collection[type] = ()) -> Session:
    """The Trainer of a run, with everything that rides along on it.

    Args:
        config: What the command line means.
        run: The run's folder and where it starts.
        extra: Further callbacks, behind all others.
        without: Classes of callbacks and loggers to leave out.

    Raises:
        UserError: Lightning refuses a flag, or flags contradict the launcher or the machine.
    """
    flags, options = trainer_flags(config), config.options
    off = tuple(without)
    throughput = None if ThroughputMonitor in off else ThroughputMonitor()
    memory = None if MemoryMonitor in off else MemoryMonitor()
    predictions = None if TestPredictions in off else TestPredictions()
    timer, csv = RunTimer(), None if MetricsCSV in off else MetricsCSV(run.folder / "metrics.csv")
    wandb = make_wandb_logger(run.folder, run.name, run.run_id, config.resolved) if is_rank_zero() else None
    wandb = None if WandbRunLogger in off else wandb
    checkpoint = RunCheckpoint.of(config, run, exclude=throughput.pause if throughput else None)
    callbacks: list[Callback | None] = [
        timer,
        None if RunCheckpoint in off else checkpoint,
        None if OptimizerMonitor in off else OptimizerMonitor(),
        throughput,
        memory,
        WandbStart(wandb, checkpoint) if wandb is not None else None,
        predictions,
        MemorySnapshot(options.memory_snapshot) if options.memory_snapshot else None,
        progress_callback(flags),
        *own_callbacks(flags),
        *extra,
    ]
    flags["callbacks"] = [callback for callback in callbacks if callback is not None and not isinstance(callback, off)]
    flags["logger"] = own_loggers(flags, options, run.folder, [csv, wandb])
    trainer = build_trainer(flags | {"default_root_dir": run.folder})
    return Session(trainer, checkpoint, timer, csv, wandb, throughput, memory, predictions)


def train(config: Configuration, run: Run, session: Session) -> Summary:
    """Train, test the best checkpoint once, write the summary, publish. Returns the summary.

    Raises:
        signals.Stopped: The run was asked to stop; last.ckpt holds the step it reached.
    """
    trainer, status, finished = session.trainer, 1, False
    try:
        with refusals_as_errors(session.timer):
            trainer.fit(
                config.module,
                datamodule=config.datamodule,
                ckpt_path=str(run.checkpoint) if run.checkpoint else None,
                weights_only=True,
            )
        summary = summarize(config, run, session)  # before the test's precision is set
        summary.metrics |= test_best(trainer, config, session.checkpoint.best_path)
        if trainer.is_global_zero:
            summary.write(run.folder / "summary.json")
        finished = True
        signals.resume_immediate()  # nothing is left that could be lost
        publish(config, run, session, summary)
        status = 0
        return summary
    except signals.Stopped as stop:
        status = stop.exit_code
        if not finished:
            publish_stopped(config, run, session, stop)
        raise
    finally:
        finish_wandb(session.wandb, status)
        release_child_processes()


if __name__ == "__main__":
    run(main)
