"""The main job: train, keep the best checkpoint, test it once at the end, print a summary.

python -m project.fit
python -m project.fit --precision 16-mixed
python -m project.fit --config configs/fast.yaml --data.root data
python -m project.fit --run_name mine --ckpt_path auto
torchrun --nproc_per_node 4 -m project.fit --strategy ddp
"""

from unbroken.start import prepare_process

prepare_process(__name__)  # threads and signals, before torch is imported

from lightning.pytorch import Callback
from lightning.pytorch.loggers import Logger
from unbroken.monitors import (
    LogLastStep,
    MemoryMonitor,
    MemorySnapshot,
    OptimizerMonitor,
    SlowPrecision,
    TestPredictions,
    ThroughputMonitor,
)
from unbroken.report import Report
from unbroken.run import Job, Run, RunTimer, WrongNumbers

from project.callbacks import always_on
from project.data import MNISTDataModule
from project.model import MNISTClassifier
from project.moved import MOVED


def callbacks(run: Run) -> list[Callback | None]:
    """What takes part in a run, in this order. To leave something out, delete its line: all but the
    three that every run needs.
    """
    return [
        RunTimer(),  # needed: times the run, and knows whether it has begun
        run.record,  # needed: writes config.yaml, and names the run in each checkpoint
        # those of the three that --monitors names
        *run.monitors(OptimizerMonitor(), ThroughputMonitor(), MemoryMonitor()),
        MemorySnapshot(run.options.memory_snapshot),  # off without --memory_snapshot
        TestPredictions(),  # confusion matrix and worst mistakes
        Report(run.folder) if run.options.report else None,
        SlowPrecision(),  # says where half precision is slow here
        WrongNumbers(run.options.monitor),  # says where a loss or metric is NaN or infinite
        run.progress,  # a line for each epoch
        *always_on(),
        *run.typed_callbacks,  # --trainer.callbacks
        run.exact_checkpoint,  # needed: best.ckpt and last.ckpt, exact resume, clean stop
        LogLastStep(),  # gives loggers an epoch's last step, also where it is no log step
    ]


def loggers(run: Run) -> list[Logger]:
    """Where the metrics of a run go: the trackers of --logger (default: W&B), and metrics.csv."""
    return [*run.trackers, run.metrics_csv]


job = Job(
    "project",
    model=MNISTClassifier,
    data=MNISTDataModule,
    callbacks=callbacks,
    loggers=loggers,
    wandb_project="mnist-lightning",
    moved=MOVED,
)

if __name__ == "__main__":
    job.run()
