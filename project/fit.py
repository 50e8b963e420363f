"""The main job: train, keep the best checkpoint, test it once at the end, print a summary.

python -m project.fit
python -m project.fit --precision 16-mixed
python -m project.fit --config configs/fast.yaml --data.root data
python -m project.fit --run_name mine --ckpt_path auto
torchrun --nproc_per_node 4 -m project.fit --strategy ddp
"""

import os
import tempfile
from collections.abc import Sequence

from project.engine.command import prepare_process, run

prepare_process(__name__)  # threads and signals, before torch is imported

from lightning.pytorch import Callback

from project.callbacks.memory import MemoryMonitor, MemorySnapshot, is_measurable  # feature: memory
from project.callbacks.optimizer import OptimizerMonitor  # feature: optimizer
from project.callbacks.test_predictions import TestPredictions  # feature: test_predictions
from project.callbacks.throughput import ThroughputMonitor  # feature: throughput
from project.engine import signals
from project.engine.checkpointing import Best, CheckpointPaths, RunCheckpoint
from project.engine.cli import Configuration
from project.engine.ranks import is_rank_zero, say
from project.engine.restore import Run, read_configuration, start_from
from project.engine.summary import RunTimer, Summary, closing_lines, progress_callback, stopped_lines
from project.engine.trainer import build_trainer, final_test, further_loggers, refusals_as_errors, trainer_flags
from project.loggers.metrics_csv import MetricsCSV
from project.loggers.wandb import make_wandb_logger, sync_command  # feature: wandb
from project.publish import Session, close, next_commands, publish, publish_stopped, summarize
from project.tables import write_rows


def main(argv: list[str]) -> int:
    """Train as ``argv`` says; returns the exit code."""
    config, job = read_configuration(argv, "project.fit")
    say(*job.notes, *([f"resuming {job.name} with {', '.join(job.changes)}"] if job.changes else []))
    if job.finished and not any(line.startswith("trainer.max_") for line in job.changes):
        say(f"run {job.name} is already finished: see {os.path.relpath(job.folder)}/summary.json.")
        return 0
    with tempfile.TemporaryDirectory() as rehearsal:  # a fast_dev_run leaves no run behind
        job = job.elsewhere(rehearsal) if config.trainer["fast_dev_run"] else job
        try:
            if is_rank_zero():
                job.create()
            say(*start_from(config.module, config.options.init_weights))
            session = build(config, job)
            summary = train(config, job, session)
        except BaseException as error:
            if not (isinstance(error, signals.Stopped) and signals.state.begun):
                job.discard()  # nothing was saved: the name is free again
            raise
        finally:
            job.release()
        if not config.trainer["fast_dev_run"]:
            say(closing_lines(summary, job.folder, *next_commands(config)))
            say(*sync_command(job.folder))  # feature: wandb
    return 0


def build(config: Configuration, job: Run, extra: Sequence[Callback] = ()) -> Session:
    """The Trainer of a run; callbacks in ``extra`` come last."""
    flags, options = trainer_flags(config), config.options
    timer, best = RunTimer(), Best.of(config.module, options.monitor, options.mode)
    csv, loggers = MetricsCSV(job.folder / "metrics.csv"), further_loggers(flags, options, job.folder)
    wandb = make_wandb_logger(config, job, best)  # feature: wandb
    loggers += [] if wandb is None else [wandb]  # feature: wandb
    predictions = TestPredictions()  # feature: test_predictions
    checkpoint = RunCheckpoint(config, job, best, csv)
    memory = MemoryMonitor() if "memory" in config.monitors and is_measurable() else None  # feature: memory
    throughput = None  # feature: throughput
    if "throughput" in config.monitors:  # feature: throughput
        throughput = ThroughputMonitor()
        checkpoint.exclude, flags["profiler"] = throughput.pause, throughput.profiler(flags["profiler"])
    callbacks: list[Callback | None] = [
        wandb,  # feature: wandb
        timer,
        checkpoint,
        OptimizerMonitor() if "optimizer" in config.monitors else None,  # feature: optimizer
        throughput,  # feature: throughput
        memory,  # feature: memory
        MemorySnapshot(options.memory_snapshot) if options.memory_snapshot else None,  # feature: memory
        predictions,  # feature: test_predictions
        progress_callback(flags),
        *flags["callbacks"],
        CheckpointPaths(checkpoint) if checkpoint.saves else None,  # for the module's own code
        *extra,
    ]
    flags["callbacks"] = [callback for callback in callbacks if callback is not None]
    return Session(
        build_trainer(flags | {"logger": [*loggers, csv], "default_root_dir": job.folder}),
        checkpoint,
        timer,
        csv,
        predictions=predictions,  # feature: test_predictions
        wandb=wandb,  # feature: wandb
        throughput=throughput,  # feature: throughput
        memory=memory,  # feature: memory
    )


def train(config: Configuration, job: Run, session: Session) -> Summary:
    """Train, test the best once, publish, write the summary. :class:`signals.Stopped`: last.ckpt holds the step."""
    trainer, checkpoint, status, trained = session.trainer, session.checkpoint, 1, False
    try:
        with refusals_as_errors(job.checkpoint, session.timer):
            trainer.fit(config.module, datamodule=config.datamodule, ckpt_path=job.checkpoint, weights_only=True)
        summary = summarize(config, job, session)  # before the test's precision is set
        summary.metrics |= final_test(trainer, config, checkpoint.best_path if checkpoint.saves else None)
        trained = True
        signals.state.deferring = False  # every step is saved
        publish(config, job, session, summary)
        if trainer.is_global_zero:  # last: a run with a summary is complete
            write_rows(job.folder / "summary.json", summary.to_plain())
        status = 0
        return summary
    except signals.Stopped as stop:
        status = stop.exit_code
        if not trained:
            publish_stopped(config, job, session, stop)
        say(*stopped_lines(job.folder, trainer.global_step))
        raise
    finally:
        close(session, status)


if __name__ == "__main__":
    run(main)
