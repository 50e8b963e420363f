"""Short trainings of Lightning's Trainer that leave nothing behind: no file, no line of output, no memory."""

from __future__ import annotations

import contextlib
import gc
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from project import hardware
from project.engine import signals
from project.engine.cli import Configuration
from project.engine.exact_loading import ExactLoading
from project.engine.lightning_internals import leave_signals_alone
from project.engine.summary import samples_of
from project.engine.trainer import build_trainer
from project.live_memory import LiveMemory, is_out_of_memory

WARM_UP_SECONDS = 1.0
# Of the free host memory: temporary memory inside operations is not counted, and other programs need memory, too.
CPU_SHARE = 0.6


class ShortTraining(Callback):
    """Base of the callbacks that measure a training from within and end it by ``trainer.should_stop``."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # Lightning's handlers would swallow SIGTERM: a try would end as if it had fitted.
        leave_signals_alone(trainer)
        ExactLoading().install(trainer)  # the loaders that fit trains with

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Learning-rate schedules rest: some wait for a validation that never comes, some end before the measurement.
        trainer.strategy.lr_scheduler_configs = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if asked := signals.requested():  # an exception raised while a tensor is freed would be lost
            raise signals.Stopped(asked)


@contextlib.contextmanager
def scratch_trainer(flags: dict[str, Any], callback: ShortTraining) -> Iterator[Trainer]:
    """A Trainer with the device, precision and accumulation of ``flags`` that trains until ``callback`` ends it."""
    without_end = {"max_epochs": 1_000_000, "max_steps": -1, "max_time": None, "min_epochs": None, "min_steps": None}
    all_batches = {"limit_train_batches": None, "overfit_batches": 0.0, "fast_dev_run": False}
    no_validation = {"limit_val_batches": 0, "num_sanity_val_steps": 0, "check_val_every_n_epoch": 1_000_000}
    silent = {"logger": False, "profiler": None, "enable_progress_bar": False, "enable_model_summary": False}
    scratch = {**without_end, **all_batches, **no_validation, **silent, "val_check_interval": 1.0}
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)  # dozens of trainings would print the same lines
    with tempfile.TemporaryDirectory(prefix="tune-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = build_trainer({**flags, **scratch, "callbacks": [callback], "default_root_dir": folder})
        try:
            yield trainer
        finally:
            logger.setLevel(level)
            # They refer to the trainer, which would keep all its tensors on the device.
            for attribute in ("log", "log_dict"):
                vars(callback).pop(attribute, None)
            for user in (getattr(trainer, "datamodule", None), getattr(trainer, "lightning_module", None)):
                if user is not None:
                    user.trainer = None


@dataclass
class Measured:
    """What steps at one batch size took."""

    batch_size: int
    step_ms: float
    spread_pct: float | None = None  # of the windows: (largest − smallest) / median
    peak_bytes: int | None = None  # None where the device does not tell
    steps_per_epoch: int | None = None  # optimizer steps; None where the data do not tell how many samples they have

    @property
    def samples_per_sec(self) -> float:
        """Of one device."""
        return 1000 * self.batch_size / self.step_ms


class TrainingSteps:
    """Trains a few steps at any batch size, each time with a new module.

    Lightning's batch-size finder keeps memory of failed tries and works with one trainer whose state it must restore
    (Lightning issues 19789, 20231).

    Args:
        config: The command line; its data module has an attribute ``batch_size``, which changes here.
        flags: The Trainer's arguments, for one device.
        memory_limit_gib: Pretend that the device has no more than this.
    """

    def __init__(self, config: Configuration, flags: dict[str, Any], memory_limit_gib: float | None = None) -> None:
        self.config = config
        self.flags = flags
        self.datamodule = cast(Any, config.datamodule)
        limits = [] if memory_limit_gib is None else [memory_limit_gib]
        if flags["accelerator"] == "cpu" or not torch.accelerator.is_available():
            limits.append(CPU_SHARE * hardware.memory()["available_gib"])
        self.memory_limit_bytes = int(min(limits) * hardware.GIB) if limits else None
        self.datamodule.prepare_data()
        self.datamodule.setup("fit")
        self.training_samples = samples_of(self.datamodule.train_dataloader())  # None if unknown

    def one_try(self, batch_size: int) -> Measured:
        """Two optimizer steps. On the CPU, counting memory slows them down.

        Raises:
            torch.OutOfMemoryError: They do not fit.
        """
        # The second step takes the most memory: gradients and optimizer state exist from the first one on.
        return self._train(batch_size, Clock(warm_up_steps=1, windows=1, seconds=0), count_memory=True)

    def timed(self, batch_size: int) -> Measured:
        """Steps for a second or two, at full speed.

        Raises:
            torch.OutOfMemoryError: They do not fit.
        """
        return self._train(batch_size, Clock(), count_memory=False)

    def _train(self, batch_size: int, clock: Clock, count_memory: bool) -> Measured:
        self.datamodule.batch_size = batch_size
        failure = peak_bytes = None
        try:
            with scratch_trainer(self.flags, clock) as trainer:
                peak_bytes = self._fit(trainer, count_memory)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failure = str(error)
        # Outside of the except clause: the error's traceback holds the frames that hold the tensors.
        del trainer
        free_memory()
        if failure is not None:
            raise torch.OutOfMemoryError(failure)
        median = statistics.median(clock.step_ms)
        spread = 100 * (max(clock.step_ms) - min(clock.step_ms)) / median if len(clock.step_ms) > 1 else None
        samples = batch_size * self.flags["accumulate_grad_batches"]  # of an optimizer step
        steps = None if self.training_samples is None else max(1, self.training_samples // samples)
        return Measured(batch_size, median, spread, peak_bytes, steps)

    def _fit(self, trainer: Trainer, count_memory: bool) -> int | None:
        """Train; returns the peak in bytes, None where it is not counted."""
        module, device = self.config.fresh_module(), trainer.strategy.root_device
        if device.type == "cpu":
            with LiveMemory(self.memory_limit_bytes) if count_memory else nullcontext() as memory:
                if memory is not None:
                    memory.count([*module.parameters(), *module.buffers()])
                trainer.fit(module, datamodule=self.datamodule)
            return memory.peak_bytes if memory is not None else None
        with device_memory_limit(device, self.memory_limit_bytes):
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            trainer.fit(module, datamodule=self.datamodule)
            return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def free_memory() -> None:
    """Free the memory of a finished or failed training."""
    gc.collect()  # Trainer, module and loops hold each other
    if torch.accelerator.is_available():  # its own empty_cache fails on MPS (PyTorch issue 186430)
        torch.get_device_module(torch.accelerator.current_accelerator()).empty_cache()


@contextlib.contextmanager
def device_memory_limit(device: torch.device, limit_bytes: int | None) -> Iterator[None]:
    """Let the device's own allocator refuse more than ``limit_bytes``."""
    if limit_bytes is None:
        yield
        return
    memory = torch.get_device_module(device)  # torch.cuda or torch.mps
    where = (device,) if device.type == "cuda" else ()
    total = torch.cuda.get_device_properties(device).total_memory if where else memory.recommended_max_memory()
    memory.set_per_process_memory_fraction(min(1.0, limit_bytes / total), *where)
    try:
        yield
    finally:
        memory.set_per_process_memory_fraction(1.0, *where)


class Clock(ShortTraining):
    """Times windows of steps, waiting for the device at their edges only, and ends the training when it has enough.

    Args:
        warm_up_steps: Optimizer steps before the first window; fewer where they take long.
        windows: How many to time.
        seconds: Least length of a window; the number of steps in it grows until it is this long.
    """

    def __init__(self, warm_up_steps: int = 3, windows: int = 3, seconds: float = 0.4) -> None:
        self.warm_up_steps, self.windows, self.seconds = warm_up_steps, windows, seconds
        self.step_ms: list[float] = []
        self._steps = self._edge_steps = 0  # optimizer steps so far, and at the start of the window
        self._began = self._edge = 0.0
        self._length: int | None = None  # steps of a window, None while warming up

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._began = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if trainer.global_step == self._steps:  # gradients are being accumulated
            return
        self._steps = trainer.global_step
        if self._length is None:
            if self._steps >= self.warm_up_steps or time.perf_counter() - self._began > WARM_UP_SECONDS:
                self._length = 1
                self._start_window(trainer)
        elif self._steps - self._edge_steps == self._length:
            began = self._edge
            self._start_window(trainer)
            seconds = self._edge - began
            if seconds < self.seconds:  # too short to trust: a longer one
                self._length = max(self._length + 1, int(1.2 * self._length * self.seconds / max(seconds, 1e-6)))
            else:
                self.step_ms.append(1000 * seconds / self._length)
                trainer.should_stop = len(self.step_ms) >= self.windows

    def _start_window(self, trainer: Trainer) -> None:
        device = trainer.strategy.root_device
        if device.type != "cpu":  # wait until the device has finished before the clock is read
            torch.accelerator.synchronize(device)
        self._edge, self._edge_steps = time.perf_counter(), self._steps
