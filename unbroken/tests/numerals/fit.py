"""The main job: train, keep the best checkpoint, test it once at the end, print a summary.

python -m numerals.fit
python -m numerals.fit --precision 16-mixed
python -m numerals.fit --config configs/fast.yaml --data.root data
python -m numerals.fit --run_name mine --ckpt_path auto
torchrun --nproc_per_node 4 -m numerals.fit --strategy ddp
torchrun --nproc_per_node 4 -m numerals.fit -- --monitor val/loss

The two dashes keep torchrun from taking --monitor for an option of its own.
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

from numerals.callbacks import always_on
from numerals.data import MNISTDataModule
from numerals.model import MNISTClassifier


def callbacks(run: Run) -> list[Callback | None]:
    """Everything that takes part in a run, in this order. To leave something out, delete it."""
    return [
        RunTimer(),
        run.record,  # config.yaml, and what run it is, in each checkpoint
        *run.monitors(OptimizerMonitor(), ThroughputMonitor(), MemoryMonitor()),
        MemorySnapshot(run.options.memory_snapshot),
        TestPredictions(),  # confusion matrix and worst mistakes
        Report(run.folder) if run.options.report else None,
        SlowPrecision(),  # says where half precision is slow here
        WrongNumbers(run.options.monitor),  # says where a loss or metric is no number
        run.progress,  # a line for each epoch
        *always_on(),
        *run.typed_callbacks,  # --trainer.callbacks
        run.exact_checkpoint,  # best.ckpt and last.ckpt, exact resume, clean stop
        LogLastStep(),
    ]


def loggers(run: Run) -> list[Logger]:
    """Where the metrics of a run go: what --logger names, else W&B; and metrics.csv."""
    return [*run.trackers, run.metrics_csv]


job = Job(
    "numerals",
    model=MNISTClassifier,
    data=MNISTDataModule,
    callbacks=callbacks,
    loggers=loggers,
    wandb_project="mnist-lightning",
)

if __name__ == "__main__":
    job.run()
