"""Short trainings that leave nothing behind, and that are measured from within by a callback."""

import contextlib
import logging
import re
import tempfile
import warnings
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from unbroken.cli.cli import Configuration
from unbroken.cli.trainer_flags import build_trainer, trainer_flags
from unbroken.errors import UserError
from unbroken.lightning_internals import leave_signals_alone
from unbroken.loading import RunLoaders
from unbroken.seams import Seams
from unbroken.stopping import signals
from unbroken.stopping.ranks import launched_world

# Values of --devices that mean one device. "2," and "[2]" name a device by its index.
ONE_DEVICE = re.compile(r"auto|-1|1|\d+,|\[\d+\]")

# The callback alone ends a short training.
ENDLESS = {
    "max_epochs": 1_000_000,
    "max_steps": -1,
    "max_time": None,
    "min_epochs": None,
    "min_steps": None,
    "limit_train_batches": None,
    "overfit_batches": 0.0,
    "fast_dev_run": False,
}
WITHOUT_VALIDATION = {
    "limit_val_batches": 0,
    "val_check_interval": 1.0,
    "check_val_every_n_epoch": 1,
}
SILENT = {
    "logger": False,
    "profiler": None,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def one_device_flags(config: Configuration) -> dict[str, Any]:
    """The Trainer's arguments for one process on one device.

    A UserError where that is not what was asked for.
    """
    asked = config.trainer
    devices = str(asked["devices"])
    nodes = asked["num_nodes"]
    strategy = asked["strategy"]
    has_launched_ranks = launched_world()[1] > 1
    is_one = ONE_DEVICE.fullmatch(devices) and nodes <= 1 and strategy == "auto"
    if not is_one or has_launched_ranks:
        raise UserError(
            "tune measures one process on one device, and what it finds is per device: "
            "remove --devices, --num_nodes, --strategy, torchrun and srun, "
            f"got --devices {devices} --num_nodes {nodes} --strategy {strategy}."
        )
    if not config.module.automatic_optimization:
        name = type(config.module).__name__
        raise UserError(
            "tune needs Lightning's automatic optimization, "
            f"and {name} steps its optimizers itself."
        )
    if devices in ("auto", "-1"):
        asked["devices"] = 1
    return trainer_flags(config)


class ShortTraining(Callback):
    """Base of the callbacks that measure a training and end it by ``trainer.should_stop``."""

    def __init__(self) -> None:
        # Optimizer steps.
        self.steps_done = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # Lightning's own handlers swallow SIGTERM: the size that was tried would seem to have
        # fitted.
        leave_signals_alone(trainer)
        # The loaders with which fit trains, in its order: the seed was set by --seed_everything.
        RunLoaders(torch.initial_seed() % 2**32).install(Seams(trainer), trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Some schedules wait for a validation, and some end too early.
        trainer.strategy.lr_scheduler_configs = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # An exception that the signal's handler raised while a tensor is freed would be lost.
        if signals.state.requested:
            raise signals.Stopped(signals.state.requested)
        # The step stays the same while gradients are accumulated.
        if trainer.global_step != self.steps_done:
            self.steps_done = trainer.global_step
            self.after_step(trainer)

    def after_step(self, trainer: Trainer) -> None:
        """Called after every optimizer step."""


def train_shortly(
    flags: dict[str, Any], callback: ShortTraining, module: LightningModule, datamodule: Any
) -> Trainer:
    """Train with the device, precision and accumulation of ``flags`` until ``callback`` ends it."""
    with (
        tempfile.TemporaryDirectory(prefix="tune-") as folder,
        warnings.catch_warnings(),
        logging_disabled(),
    ):
        # Dozens of trainings would each print the same lines.
        warnings.simplefilter("ignore")
        own = {"callbacks": [callback], "default_root_dir": folder}
        trainer = build_trainer(flags | ENDLESS | WITHOUT_VALIDATION | SILENT | own)
        trainer.fit(module, datamodule=datamodule)
        return trainer


@contextlib.contextmanager
def logging_disabled() -> Any:
    """No message below an error is logged inside."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
