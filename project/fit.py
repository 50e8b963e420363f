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

import yaml
from lightning.pytorch import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from project import threads
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
from project.engine.stop import failure_within  # feature: report
from project.engine.summary import Summary
from project.engine.trainer import build_trainer, final_test, lacks_for_test, refusals_as_errors, trainer_flags
from project.hardware import cpu
from project.loggers.metrics_csv import MetricsCSV
from project.loggers.wandb import make_wandb_logger, sync_command  # feature: wandb
from project.tables import write_atomically, write_rows

REPORT_PATIENCE = 4.0  # seconds for that of a stopped run, which has ten for everything  # feature: report
INPUTS = {"prepare_file", "prepare_image", "image_shape"}  # turn a file into an input  # feature: predict


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
            session = Session(config, job)
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


class Session:
    """A run's Trainer, callbacks and loggers. None is what is switched off. Callbacks in ``extra`` come last."""

    def __init__(self, config: Configuration, job: Run, extra: Sequence[Callback] = ()) -> None:
        flags, options = trainer_flags(config), config.options
        self.timer, best = summary.RunTimer(), Best.of(config.module, options.monitor, options.mode)
        self.csv, loggers = MetricsCSV(job.folder / "metrics.csv"), flags["logger"]
        loggers += [TensorBoardLogger(job.folder, name="tensorboard", version="")] if options.tensorboard else []
        self.wandb = make_wandb_logger(config, job, best)  # feature: wandb
        loggers += [] if self.wandb is None else [self.wandb]  # feature: wandb
        self.predictions = TestPredictions()  # feature: test_predictions
        self.checkpoint = RunCheckpoint(config, job, best, self.csv)
        self.memory = MemoryMonitor() if "memory" in config.monitors and is_measurable() else None  # feature: memory
        self.throughput = ThroughputMonitor() if "throughput" in config.monitors else None  # feature: throughput
        if self.throughput is not None:  # feature: throughput
            self.checkpoint.exclude = self.throughput.pause
            flags["profiler"] = self.throughput.profiler(flags["profiler"])
        callbacks: list[Callback | None] = [
            self.wandb,  # feature: wandb
            self.timer,
            self.checkpoint,
            OptimizerMonitor() if "optimizer" in config.monitors else None,  # feature: optimizer
            self.throughput,  # feature: throughput
            self.memory,  # feature: memory
            MemorySnapshot(options.memory_snapshot) if options.memory_snapshot else None,  # feature: memory
            self.predictions,  # feature: test_predictions
            summary.progress_callback(flags),
            *flags["callbacks"],
            CheckpointPaths(self.checkpoint) if self.checkpoint.saves else None,  # for the module's own code
            *extra,
        ]
        flags["callbacks"] = [callback for callback in callbacks if callback is not None]
        self.trainer = build_trainer(flags | {"logger": [*loggers, self.csv], "default_root_dir": job.folder})

    def close(self, exit_code: int) -> None:
        """Close the W&B run with the process's exit code, so that a stopped run is not shown as finished."""
        if self.wandb is not None:  # feature: wandb
            self.wandb.finish(exit_code)
        release_child_processes()


def train(config: Configuration, job: Run, session: Session) -> Summary:
    """Train, test the best once, publish, write the summary. :class:`signals.Stopped`: last.ckpt holds the step."""
    trainer, checkpoint, status, trained = session.trainer, session.checkpoint, 1, False
    try:
        with refusals_as_errors(job.checkpoint, session.timer):
            trainer.fit(config.module, datamodule=config.datamodule, ckpt_path=job.checkpoint, weights_only=True)
        facts = summarize(config, job, session)  # before the test's precision is set
        facts.metrics |= final_test(trainer, config, checkpoint.best_path if checkpoint.saves else None)
        trained = True
        signals.state.deferring = False  # every step is saved
        if trainer.is_global_zero:
            publish(config, job, session, facts)
            write_rows(job.folder / "summary.json", facts.to_plain())  # last: a run with a summary is complete
        status = 0
        return facts
    except signals.Stopped as stop:
        status = stop.exit_code
        release_child_processes()  # the other ranks end now
        if not trained and session.timer.begun and trainer.is_global_zero:
            if trainer.world_size == 1:  # torchrun signals the remaining ranks as soon as one has ended
                signals.state.deferring = False  # a second signal skips the report
            facts = summarize(config, job, session, finished=False)
            publish(config, job, session, facts, stopped_by=signal.Signals(stop.signum).name)
        say(*summary.stopped_lines(job.folder, trainer.global_step))
        raise
    finally:
        session.close(status)


def summarize(config: Configuration, job: Run, session: Session, finished: bool = True) -> Summary:
    """The summary of a run whose training has ended."""
    trainer, best, timer = session.trainer, session.checkpoint.best, session.timer
    (commit, dirty), processor = summary.git_state(), cpu()
    metrics = dict(best.metrics)
    metrics |= session.throughput.summary() if session.throughput else {}  # feature: throughput
    metrics |= session.memory.summary() if session.memory else {}  # feature: memory
    return Summary(
        run_name=job.name,
        finished=finished,
        device=summary.device_name(trainer),
        precision=str(trainer.precision),
        world_size=trainer.world_size,
        data_source=getattr(config.datamodule, "data_source", type(config.datamodule or config.module).__name__),
        train_samples=summary.training_samples(trainer),
        parameters=summary.parameter_count(trainer, config.module),
        epochs=trainer.current_epoch,
        steps=trainer.global_step,
        fit_seconds=timer.fit_seconds,
        start_seconds=timer.start_seconds,
        busy_seconds=round(threads.waiting.seconds_slept(), 1) or None,
        monitor=best.monitor if best.score is not None else None,
        mode=best.mode if best.score is not None else None,
        best_epoch=best.epoch,
        best_score=best.score,
        git_commit=commit,
        git_dirty=dirty,
        hardware=f"{processor['name']}, {processor['cores']} core{'s' if processor['cores'] > 1 else ''}",
        metrics=metrics,
        advice=session.throughput.advice(trainer) if session.throughput else None,  # feature: throughput
    )


def publish(config: Configuration, job: Run, session: Session, facts: Summary, stopped_by: str | None = None) -> None:
    """Write the report and complete the W&B run, on rank 0; a failure is a warning. ``stopped_by`` names the signal."""
    session.csv.save()
    # feature: report, wandb
    record = summary.RunRecord(
        facts,
        config=yaml.safe_dump(config.resolved, sort_keys=False),
        series=summary.read_series(session.csv.path, facts.epochs),
        class_names=[str(name) for name in getattr(config.datamodule, "class_names", [])],
        stopped_by=stopped_by,
        max_epochs=session.trainer.max_epochs,
        remarks=[facts.advice] if facts.advice else [],
        confusion=session.predictions.confusion,  # feature: test_predictions
        mistakes=session.predictions.mistakes,  # feature: test_predictions
    )
    if session.memory is not None:  # feature: memory
        record.breakdown = session.memory.breakdown
        record.remarks += session.memory.leaks.values()
    # end feature: report, wandb
    if session.wandb is not None:  # feature: wandb
        session.wandb.record = record  # sent when the W&B run is closed
    if config.options.report:  # feature: report

        def write() -> None:
            from project.report import render  # matplotlib takes half a second to import

            write_atomically(render(record).encode(), job.folder / "report.html")

        if error := failure_within(REPORT_PATIENCE if stopped_by else None, write):
            rank_zero_warn(f"report.html could not be written ({type(error).__name__}: {error}). The run is safe.")


def next_commands(config: Configuration) -> list[str]:
    """The commands that a checkpoint of this run can be used with."""
    can = {"test": lacks_for_test(config.module, config.datamodule) is None}
    can["predict IMAGE.png"] = bool(INPUTS & {*dir(config.datamodule)})  # feature: predict
    return [command for command, possible in can.items() if possible]


if __name__ == "__main__":
    run(main)
