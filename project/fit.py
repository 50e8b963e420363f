"""The main job: train, keep the best checkpoint, test it once at the end, print a summary.

python -m project.fit
python -m project.fit --precision 16-mixed
python -m project.fit --config configs/fast.yaml --data.root data
python -m project.fit --run_name mine --ckpt_path auto
torchrun --nproc_per_node 4 -m project.fit --strategy ddp
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

from project.engine.command import prepare_process, run

prepare_process(__name__)  # threads and signals, before torch is imported

from lightning.pytorch import Callback

from project.callbacks.memory import MemoryMonitor  # feature: memory
from project.callbacks.memory_use import MemorySnapshot  # feature: memory
from project.callbacks.optimizer import OptimizerMonitor  # feature: optimizer
from project.callbacks.test_predictions import TestPredictions
from project.callbacks.throughput import ThroughputMonitor  # feature: throughput
from project.engine import signals
from project.engine.checkpointing import Best, RunCheckpoint
from project.engine.cli import Configuration
from project.engine.progress import progress_callback
from project.engine.ranks import is_rank_zero
from project.engine.restore import init_weights, read_configuration
from project.engine.run_folder import Run
from project.engine.summary import RunTimer, Summary, closing_lines, stopped_lines
from project.engine.trainer import (
    build_trainer,
    loggers_of,
    own_callbacks,
    refusals_as_errors,
    requeue_signal,
    test_best,
    trainer_flags,
)
from project.errors import UserError
from project.loggers.metrics_csv import MetricsCSV
from project.loggers.wandb import WandbStart, make_wandb_logger, offline_folders
from project.publish import Session, close, publish, publish_stopped, summarize

MONITORS: dict[str, type[Callback]] = {
    "throughput": ThroughputMonitor,  # feature: throughput
    "memory": MemoryMonitor,  # feature: memory
    "optimizer": OptimizerMonitor,  # feature: optimizer
}


def main(argv: list[str]) -> int:
    """Train as ``argv`` says; returns the exit code."""
    config, job, changes = read_configuration(argv, "project.fit")
    told = [*job.notes, *([f"resuming {job.name} with {', '.join(changes)}"] if changes else [])]
    if job.finished and not any(line.startswith("trainer.max_") for line in changes):
        told.append(f"run {job.name} is already finished: see {os.path.relpath(job.folder)}/summary.json.")
        say(told)
        return 0
    if config.trainer["fast_dev_run"]:  # a rehearsal: no run is left behind
        with tempfile.TemporaryDirectory() as folder:
            return train_in(config, Run(Path(folder) / "fast_dev_run"), told)
    return train_in(config, job, told, changed=bool(changes))


def train_in(config: Configuration, job: Run, told: list[str], changed: bool = False) -> int:
    """Train in a run's folder; returns the exit code."""
    try:
        if is_rank_zero():
            job.create()
        if name := config.options.init_weights:
            told += init_weights(config.module, name)
        session = build(config, job, changed=changed)
        say(told)
        summary = train(config, job, session)
    except Exception:
        job.discard()  # nothing was saved: the name is free again
        raise
    advice = None
    advice = session.throughput.advice() if session.throughput else None  # feature: throughput
    say([closing_lines(summary, job.folder, offline_folders(job.folder), advice)])
    return 0


def build(
    config: Configuration,
    job: Run,
    extra: Sequence[Callback] = (),
    without: Collection[type] = (),
    changed: bool = False,
) -> Session:
    """The Trainer of a run, with everything that rides along on it.

    Args:
        config: What the command line means.
        job: The run's folder and where it starts.
        extra: Further callbacks, behind all others.
        without: Classes of callbacks and loggers to leave out.
        changed: Whether a resumed run's configuration differs from its checkpoint's.

    Raises:
        UserError: Lightning refuses a flag, or flags contradict the launcher or the machine.
    """
    flags, options = trainer_flags(config), config.options
    off = (*without, *(kind for kind in MONITORS.values() if kind not in chosen_monitors(options.monitors)))
    best = Best.of(config.module, options.monitor, options.mode)
    timer, csv, predictions = RunTimer(), MetricsCSV(job.folder / "metrics.csv"), TestPredictions()
    wandb = make_wandb_logger(job.folder, job.name, job.run_id, config.resolved) if is_rank_zero() else None
    checkpoint = RunCheckpoint(
        job, config.resolved, best, csv, options.checkpoint_every, changed, requeue_signal(config)
    )
    throughput = None if ThroughputMonitor in off else ThroughputMonitor()  # feature: throughput
    memory = None if MemoryMonitor in off else MemoryMonitor()  # feature: memory
    callbacks: list[Callback | None] = [
        timer,
        checkpoint,
        OptimizerMonitor(),  # feature: optimizer
        throughput,  # feature: throughput
        memory,  # feature: memory
        MemorySnapshot(options.memory_snapshot) if options.memory_snapshot else None,  # feature: memory
        WandbStart(wandb, best) if wandb is not None else None,
        predictions,
        progress_callback(flags),
        *own_callbacks(flags),
        *extra,
    ]
    # feature: throughput
    if throughput is not None:
        checkpoint.exclude = throughput.pause
        flags["profiler"] = throughput.profiler(flags["profiler"])
    # end feature: throughput
    flags["callbacks"] = [callback for callback in callbacks if callback is not None and not isinstance(callback, off)]
    loggers = loggers_of(flags, options, job.folder, [csv, wandb])
    flags["logger"] = [logger for logger in loggers if not isinstance(logger, off)]
    trainer = build_trainer(flags | {"default_root_dir": job.folder})
    return Session(
        trainer,
        checkpoint,
        timer,
        csv if csv in flags["logger"] else None,
        wandb if wandb in flags["logger"] else None,
        predictions,
        throughput=throughput,  # feature: throughput
        memory=memory,  # feature: memory
    )


def train(config: Configuration, job: Run, session: Session) -> Summary:
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
                ckpt_path=str(job.checkpoint) if job.checkpoint else None,
                weights_only=True,
            )
        summary = summarize(config, job, session)  # before the test's precision is set
        summary.metrics |= test_best(trainer, config, session.checkpoint.best_path)
        finished = True
        signals.resume_immediate()  # no step is left that could be lost
        publish(config, job, session, summary)
        if trainer.is_global_zero:  # last: a run that has a summary lacks nothing
            summary.write(job.folder / "summary.json")
        status = 0
        return summary
    except signals.Stopped as stop:
        status = stop.exit_code
        if not finished:
            publish_stopped(config, job, session, stop)
        say(stopped_lines(job.folder, trainer.global_step))
        raise
    finally:
        close(session, status)


def chosen_monitors(text: str) -> list[type[Callback]]:
    """The classes that ``--monitors`` names."""
    names = list(MONITORS) if text == "all" else [] if text == "none" else [part.strip() for part in text.split(",")]
    for name in names:
        if name not in MONITORS:
            raise UserError(f"--monitors must be any of {', '.join(MONITORS)}, or all, or none, got {name}.")
    return [MONITORS[name] for name in names]


def say(lines: list[str]) -> None:
    """Print lines on rank 0."""
    for line in lines if is_rank_zero() else ():
        print(line, flush=True)


if __name__ == "__main__":
    run(main)
