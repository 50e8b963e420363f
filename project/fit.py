"""The main job: train, keep the best checkpoint, test it once at the end, print a summary.

python -m project.fit
python -m project.fit --precision 16-mixed
python -m project.fit --config configs/fast.yaml --data.root data
python -m project.fit --run_name mine --ckpt_path auto
torchrun --nproc_per_node 4 -m project.fit --strategy ddp
"""

import os
import signal
import tempfile
from collections.abc import Sequence

from project.engine.command import prepare_process, run

prepare_process(__name__)  # threads and signals, before torch is imported

from lightning.pytorch import Callback
from lightning.pytorch.loggers import TensorBoardLogger

from project.callbacks.memory import MemoryMonitor, MemorySnapshot, is_measurable  # feature: memory
from project.callbacks.optimizer import OptimizerMonitor  # feature: optimizer
from project.callbacks.test_predictions import TestPredictions  # feature: test_predictions
from project.callbacks.throughput import ThroughputMonitor  # feature: throughput
from project.engine import signals, summary
from project.engine.checkpointing import Best, CheckpointPaths, RunCheckpoint
from project.engine.cli import Configuration
from project.engine.lightning_internals import release_child_processes
from project.engine.ranks import is_rank_zero, say
from project.engine.restore import Run, read_configuration, start_from
from project.engine.summary import Summary
from project.engine.trainer import build_trainer, final_test, refusals_as_errors, trainer_flags
from project.loggers.metrics_csv import MetricsCSV
from project.loggers.wandb import make_wandb_logger, sync_command  # feature: wandb
from project.publish import Session, next_commands
from project.tables import write_rows


def main(argv: list[str]) -> int:
    """Train as ``argv`` says; returns the exit code."""
    config, job = read_configuration(argv, "project.fit")
    say(
        *job.notes, *([f"resuming {job.name} with {', '.join(job.changes)}"] if job.changes else [])
    )
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
            facts = train(config, job, session)
        except BaseException as error:
            if not (isinstance(error, signals.Stopped) and signals.state.begun):
                job.discard()  # nothing was saved: the name is free again
            raise
        finally:
            job.release()
        if not config.trainer["fast_dev_run"]:
            say(summary.closing_lines(facts, job.folder, *next_commands(config)))
            say(*sync_command(job.folder))  # feature: wandb
    return 0


def build(config: Configuration, job: Run, extra: Sequence[Callback] = ()) -> Session:
    """The Trainer of a run with its callbacks and loggers; callbacks in ``extra`` come last."""
    session = Session()
    flags, options = trainer_flags(config), config.options
    session.timer, best = summary.RunTimer(), Best.of(config.module, options.monitor, options.mode)
    session.csv, loggers = MetricsCSV(job.folder / "metrics.csv"), flags["logger"]
    loggers += (
        [TensorBoardLogger(job.folder, name="tensorboard", version="")]
        if options.tensorboard
        else []
    )
    session.wandb = make_wandb_logger(config, job, best)  # feature: wandb
    loggers += [] if session.wandb is None else [session.wandb]  # feature: wandb
    session.predictions = TestPredictions()  # feature: test_predictions
    session.checkpoint = RunCheckpoint(config, job, best, session.csv)
    session.memory = (
        MemoryMonitor() if "memory" in config.monitors and is_measurable() else None
    )  # feature: memory
    session.throughput = (
        ThroughputMonitor() if "throughput" in config.monitors else None
    )  # feature: throughput
    if session.throughput is not None:  # feature: throughput
        session.checkpoint.exclude = session.throughput.pause
    callbacks: list[Callback | None] = [
        session.wandb,  # feature: wandb
        session.timer,
        session.checkpoint,
        OptimizerMonitor() if "optimizer" in config.monitors else None,  # feature: optimizer
        session.throughput,  # feature: throughput
        session.memory,  # feature: memory
        MemorySnapshot(options.memory_snapshot)
        if options.memory_snapshot
        else None,  # feature: memory
        session.predictions,  # feature: test_predictions
        summary.progress_callback(flags),
        *flags["callbacks"],
        CheckpointPaths(session.checkpoint)
        if session.checkpoint.saves
        else None,  # for the module's own code
        *extra,
    ]
    flags["callbacks"] = [callback for callback in callbacks if callback is not None]
    session.trainer = build_trainer(
        flags | {"logger": [*loggers, session.csv], "default_root_dir": job.folder}
    )
    return session


def train(config: Configuration, job: Run, session: Session) -> Summary:
    """Train, test the best once, publish, write the summary. :class:`signals.Stopped`: last.ckpt holds the step."""
    trainer, checkpoint, status, trained = session.trainer, session.checkpoint, 1, False
    try:
        with refusals_as_errors(job.checkpoint, session.timer):
            trainer.fit(
                config.module,
                datamodule=config.datamodule,
                ckpt_path=job.checkpoint,
                weights_only=True,
            )
        facts = session.summarize(config, job)  # before the test's precision is set
        facts.metrics |= final_test(
            trainer, config, checkpoint.best_path if checkpoint.saves else None
        )
        trained = True
        signals.state.deferring = False  # every step is saved
        if trainer.is_global_zero:
            session.publish(config, job, facts)
            write_rows(
                job.folder / "summary.json", facts.to_plain()
            )  # last: a run with a summary is complete
        status = 0
        return facts
    except signals.Stopped as stop:
        status = stop.exit_code
        release_child_processes()  # the other ranks end now
        if not trained and session.timer.begun and trainer.is_global_zero:
            if (
                trainer.world_size == 1
            ):  # torchrun signals the remaining ranks as soon as one has ended
                signals.state.deferring = False  # a second signal skips the report
            facts = session.summarize(config, job, finished=False)
            session.publish(config, job, facts, stopped_by=signal.Signals(stop.signum).name)
        say(*summary.stopped_lines(job.folder, trainer.global_step))
        raise
    finally:
        session.close(status)


if __name__ == "__main__":
    run(main)
