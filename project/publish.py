"""What a run leaves at its end: its summary, ``report.html``, and the same pictures and tables in W&B."""

import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from project.callbacks.memory import MemoryMonitor  # feature: memory
from project.callbacks.test_predictions import TestPredictions  # feature: test_predictions
from project.callbacks.throughput import ThroughputMonitor  # feature: throughput
from project.engine import summary
from project.engine.checkpointing import RunCheckpoint
from project.engine.cli import Configuration
from project.engine.lightning_internals import release_child_processes
from project.engine.restore import Run
from project.engine.stop import failure_within  # feature: report
from project.engine.summary import Summary
from project.engine.trainer import lacks_for_test
from project.hardware import cpu
from project.loggers.metrics_csv import MetricsCSV
from project.loggers.wandb import WandbRunLogger  # feature: wandb
from project.tables import write_atomically  # feature: report
from project.waiting import waiting  # feature: waiting

REPORT_PATIENCE = (
    4.0  # seconds for that of a stopped run, which has ten for everything  # feature: report
)
INPUTS = {
    "prepare_file",
    "prepare_image",
    "image_shape",
}  # turn a file into an input  # feature: predict


class Session:
    """A run's Trainer, callbacks and loggers, which ``fit.build`` makes. None is what is switched off."""

    trainer: Trainer
    checkpoint: RunCheckpoint
    timer: summary.RunTimer
    csv: MetricsCSV
    predictions: TestPredictions  # feature: test_predictions
    wandb: WandbRunLogger | None  # feature: wandb
    throughput: ThroughputMonitor | None  # feature: throughput
    memory: MemoryMonitor | None  # feature: memory

    def summarize(self, config: Configuration, job: Run, finished: bool = True) -> Summary:
        """The summary of a run whose training has ended."""
        trainer, best, timer = self.trainer, self.checkpoint.best, self.timer
        (commit, dirty), processor = summary.git_state(), cpu()
        metrics = dict(best.metrics)
        metrics |= self.throughput.summary() if self.throughput else {}  # feature: throughput
        metrics |= self.memory.peaks if self.memory else {}  # feature: memory
        return Summary(
            run_name=job.name,
            finished=finished,
            device=summary.device_name(trainer),
            precision=str(trainer.precision),
            world_size=trainer.world_size,
            data_source=getattr(
                config.datamodule, "data_source", type(config.datamodule or config.module).__name__
            ),
            train_samples=summary.training_samples(trainer),
            parameters=summary.parameter_count(trainer, config.module),
            epochs=trainer.current_epoch,
            steps=trainer.global_step,
            fit_seconds=timer.fit_seconds,
            start_seconds=timer.start_seconds,
            busy_seconds=round(waiting.seconds_slept(), 1) or None,  # feature: waiting
            monitor=best.monitor if best.score is not None else None,
            mode=best.mode if best.score is not None else None,
            best_epoch=best.epoch,
            best_score=best.score,
            git_commit=commit,
            git_dirty=dirty,
            hardware=f"{processor['name']}, {processor['cores']} core{'s' if processor['cores'] > 1 else ''}",
            metrics=metrics,
            advice=self.throughput.advice(trainer)
            if self.throughput
            else None,  # feature: throughput
        )

    def publish(
        self, config: Configuration, job: Run, facts: Summary, stopped_by: str | None = None
    ) -> None:
        """Write the report and complete the W&B run; a failure is a warning. ``stopped_by``: the signal's name."""
        self.csv.save()
        record = summary.RunRecord(  # feature: report, wandb
            facts,
            config=yaml.safe_dump(config.resolved, sort_keys=False),
            series=summary.read_series(self.csv.path, facts.epochs),
            class_names=[str(name) for name in getattr(config.datamodule, "class_names", [])],
            stopped_by=stopped_by,
            max_epochs=self.trainer.max_epochs,
            confusion=self.predictions.confusion,  # feature: test_predictions
            mistakes=self.predictions.mistakes,  # feature: test_predictions
            breakdown=self.memory.breakdown if self.memory else {},  # feature: memory
            leaks=[*self.memory.leaks.values()] if self.memory else [],  # feature: memory
        )
        if self.wandb is not None:  # feature: wandb
            self.wandb.record = record  # sent when the W&B run is closed
        if config.options.report:  # feature: report

            def write() -> None:
                from project.report import render  # matplotlib takes half a second to import

                write_atomically(render(record), job.folder / "report.html")

            if error := failure_within(REPORT_PATIENCE if stopped_by else None, write):
                rank_zero_warn(
                    f"report.html could not be written ({type(error).__name__}: {error}). The run is safe."
                )

    def close(self, exit_code: int) -> None:
        """Close the W&B run with the process's exit code, so that a stopped run is not shown as finished."""
        if self.wandb is not None:  # feature: wandb
            self.wandb.finish(exit_code)
        release_child_processes()


def next_commands(config: Configuration) -> list[str]:
    """The commands that a checkpoint of this run can be used with."""
    can = {"test": lacks_for_test(config.module, config.datamodule) is None}
    can["predict IMAGE.png"] = bool(INPUTS & {*dir(config.datamodule)})  # feature: predict
    return [command for command, possible in can.items() if possible]
