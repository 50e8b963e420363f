"""Real training steps at any batch size: forward, backward, optimizer step by Lightning's Trainer; then forgotten."""

from __future__ import annotations

import contextlib
import gc
import logging
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything

from project.callbacks.out_of_memory import is_out_of_memory
from project.checkpoints import AtomicCheckpointIO
from project.cli import ProjectCLI
from project.tuning.live_memory import LiveMemory

# Two: gradients and optimizer state exist from the first step on, so the second one takes the most memory.
STEPS_OF_A_TRY = 2
WARM_UP_STEPS, WARM_UP_SECONDS = 3, 1.0  # whichever comes first
WINDOWS, WINDOW_SECONDS = 3, 0.4


@dataclass
class Measured:
    """What steps at one batch size took."""

    batch_size: int
    step_ms: float
    spread_pct: float | None = None  # of the windows: (largest − smallest) / median
    peak_bytes: int | None = None  # None where the device does not tell

    @property
    def samples_per_sec(self) -> float:
        """Of one device."""
        return 1000 * self.batch_size / self.step_ms


class Clock(Callback):
    """Times windows of steps, waiting for the device at their edges only, and ends the training when it has enough.

    Args:
        seconds: Least length of a window; the number of steps in it grows until it is this long.
        windows: How many to time after the warm-up; 0 ends after ``STEPS_OF_A_TRY`` steps and times the last of them.
    """

    def __init__(self, windows: int = WINDOWS, seconds: float = WINDOW_SECONDS) -> None:
        self.windows, self.seconds = windows, seconds
        self.step_ms: list[float] = []
        self._steps = 0  # optimizer steps so far
        self._edge, self._edge_steps = 0.0, 0
        self._began = 0.0
        self._length: int | None = None  # steps of a window, None while warming up

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # Lightning's own handlers would swallow SIGTERM: a try would end as if it had fitted. Ours end the command.
        trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._steps:  # gradients are being accumulated
            return
        self._steps = trainer.global_step
        if self.windows == 0:
            self._time_last_step(trainer)
        elif self._length is None:
            warm = self._steps >= WARM_UP_STEPS or time.perf_counter() - self._began > WARM_UP_SECONDS
            if warm:
                self._length = 1
                self._start_window(trainer)
        elif self._steps - self._edge_steps == self._length:
            self._end_window(trainer)

    def _time_last_step(self, trainer: Trainer) -> None:
        synchronize(trainer.strategy.root_device)
        if self._steps == STEPS_OF_A_TRY:
            self.step_ms.append(1000 * (time.perf_counter() - self._edge))
            trainer.should_stop = True
        self._edge = time.perf_counter()

    def _start_window(self, trainer: Trainer) -> None:
        synchronize(trainer.strategy.root_device)
        self._edge, self._edge_steps = time.perf_counter(), self._steps

    def _end_window(self, trainer: Trainer) -> None:
        synchronize(trainer.strategy.root_device)
        assert self._length is not None
        seconds = time.perf_counter() - self._edge
        if seconds < self.seconds:  # too short to trust: a longer one
            self._length = max(self._length + 1, int(1.2 * self._length * self.seconds / max(seconds, 1e-6)))
        else:
            self.step_ms.append(1000 * seconds / self._length)
            trainer.should_stop = len(self.step_ms) >= self.windows
        self._start_window(trainer)


class TrainingSteps:
    """Trains for moments with the model, data and Trainer flags of a command line.

    Each measurement has a module of its own, so nothing is learnt and nothing stays in memory; files go to a temporary
    folder. Lightning's batch-size finder keeps memory of failed tries and works with one trainer whose state it must
    restore (Lightning issues 19789, 20231).

    Args:
        cli: The command line, with its classes instantiated.
        flags: The Trainer's arguments, for one device.
        memory_limit_bytes: Pretend that the device has no more than this.
    """

    def __init__(self, cli: ProjectCLI, flags: dict[str, Any], memory_limit_bytes: int | None = None) -> None:
        self.cli = cli
        self.flags = flags
        self.datamodule = cli.datamodule
        self.memory_limit_bytes = memory_limit_bytes
        self.datamodule.prepare_data()
        self.datamodule.setup("fit")

    @property
    def training_samples(self) -> int:
        """Samples in the training set: no batch is larger."""
        return self.datamodule.num_samples("train")

    def one_try(self, batch_size: int) -> Measured:
        """Two optimizer steps. On the CPU, counting memory slows them down.

        Raises:
            torch.OutOfMemoryError: They do not fit.
        """
        return self._train(batch_size, Clock(windows=0), count_memory=True)

    def timed(self, batch_size: int) -> Measured:
        """Steps for a second or two, at full speed.

        Raises:
            torch.OutOfMemoryError: They do not fit.
        """
        return self._train(batch_size, Clock(), count_memory=False)

    def _train(self, batch_size: int, clock: Clock, count_memory: bool) -> Measured:
        failure = None
        try:
            peak_bytes = self._fit(batch_size, clock, count_memory)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failure = str(error)
        # Outside of the except clause: the error's traceback holds the frames that hold the tensors.
        free_memory()
        if failure is not None:
            raise torch.OutOfMemoryError(failure)
        median = statistics.median(clock.step_ms)
        spread = 100 * (max(clock.step_ms) - min(clock.step_ms)) / median if len(clock.step_ms) > 1 else None
        return Measured(batch_size, median, spread, peak_bytes)

    def _fit(self, batch_size: int, clock: Clock, count_memory: bool) -> int | None:
        seed = self.cli.config.seed_everything
        seed_everything(seed if isinstance(seed, int) and not isinstance(seed, bool) else 42, verbose=False)
        with quiet_lightning(), tempfile.TemporaryDirectory(prefix="tune-") as folder:
            self.cli.instantiate_classes()
            self.cli.datamodule = self.datamodule  # a fresh module, but the data module that has read its files
            self.datamodule.batch_size = batch_size
            trainer = scratch_trainer(self.flags, folder, [clock])
            device = trainer.strategy.root_device
            if device.type == "cpu":
                if not count_memory:
                    trainer.fit(self.cli.model, datamodule=self.datamodule)
                    return None
                memory = LiveMemory(self.memory_limit_bytes)
                with memory:
                    memory.count([*self.cli.model.parameters(), *self.cli.model.buffers()])
                    trainer.fit(self.cli.model, datamodule=self.datamodule)
                return memory.peak_bytes
            with device_memory_limit(device, self.memory_limit_bytes):
                if device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats(device)
                trainer.fit(self.cli.model, datamodule=self.datamodule)
                return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def scratch_trainer(flags: dict[str, Any], folder: str, callbacks: list[Callback]) -> Trainer:
    """A Trainer with the device, precision and accumulation of ``flags`` that trains on and on and keeps nothing."""
    from project.training import build_trainer

    return build_trainer(
        {
            **flags,
            "default_root_dir": folder,
            "callbacks": callbacks,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "profiler": None,
            "plugins": [AtomicCheckpointIO()],
            "max_epochs": 1_000_000,
            "max_steps": -1,
            "max_time": None,
            "limit_train_batches": None,
            "limit_val_batches": 0,
            "num_sanity_val_steps": 0,
            "check_val_every_n_epoch": 1_000_000,
            "overfit_batches": 0.0,
            "fast_dev_run": False,
        }
    )


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what was asked of it: only then may a clock be read."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def free_memory() -> None:
    """Give back what a finished or failed training held."""
    gc.collect()  # Trainer, module and loops hold each other
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


@contextlib.contextmanager
def device_memory_limit(device: torch.device, limit_bytes: int | None) -> Iterator[None]:
    """Let the device's own allocator refuse more than ``limit_bytes``."""
    if limit_bytes is None:
        yield
        return
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), device)
    else:
        torch.mps.set_per_process_memory_fraction(min(1.0, limit_bytes / torch.mps.recommended_max_memory()))
    try:
        yield
    finally:
        if device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0, device)
        else:
            torch.mps.set_per_process_memory_fraction(1.0)


@contextlib.contextmanager
def quiet_lightning() -> Iterator[None]:
    """Without Lightning's lines at the start of every training; there are dozens of trainings here."""
    import warnings

    logger = logging.getLogger("lightning.pytorch")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
