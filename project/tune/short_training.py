"""Real training steps at any batch size: forward, backward, optimizer step by Lightning's Trainer; then forgotten."""

from __future__ import annotations

import contextlib
import gc
import logging
import statistics
import tempfile
import time
import warnings
import weakref
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from project.callbacks.memory_use import is_out_of_memory
from project.engine import signals
from project.engine.checkpoint_files import AtomicCheckpointIO
from project.engine.cli import ProjectCLI
from project.engine.trainer import build_trainer
from project.hardware import GIB


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
        self.datamodule.batch_size = batch_size
        with quiet_lightning(), tempfile.TemporaryDirectory(prefix="tune-") as folder:
            trainer = scratch_trainer(self.flags, folder, [clock])
            try:
                return self._fit_and_measure(trainer, self._fresh_module(), count_memory)
            finally:  # what Lightning hangs on them would keep trainer and module, and all they have on the device
                self.datamodule.trainer = None
                for method in ("log", "log_dict"):
                    vars(clock).pop(method, None)

    def _fit_and_measure(self, trainer: Trainer, module: LightningModule, count_memory: bool) -> int | None:
        device = trainer.strategy.root_device
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

    def _fresh_module(self) -> LightningModule:
        """A module with random weights; the command line keeps its own, and the data module that has read its files."""
        kept, kept_init = self.cli.model, self.cli.config_init
        seed = self.cli.config.seed_everything
        seed_everything(seed if isinstance(seed, int) and not isinstance(seed, bool) else 42, verbose=False)
        self.cli.instantiate_classes()
        module, self.cli.model, self.cli.datamodule = self.cli.model, kept, self.datamodule
        self.cli.config_init = kept_init  # it holds the module, too
        return module


# Trainings that leave nothing behind: no file, no line of output, no memory.


def scratch_trainer(flags: dict[str, Any], folder: str, callbacks: list[Callback]) -> Trainer:
    """A Trainer with the device, precision and accumulation of ``flags`` that trains on and on and keeps nothing."""
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
    logger = logging.getLogger("lightning.pytorch")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


# Times a training's steps from within, at full speed.


# Two: gradients and optimizer state exist from the first step on, so the second one takes the most memory.
STEPS_OF_A_TRY = 2
WARM_UP_STEPS, WARM_UP_SECONDS = 3, 1.0  # whichever comes first
WINDOWS, WINDOW_SECONDS = 3, 0.4


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
        if asked := signals.requested():  # raised where nobody could hear it, such as while a tensor was freed
            raise signals.Stopped(asked)
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


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what was asked of it: only then may a clock be read."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


# Memory of tensors on the CPU, counted as they come and go, with a limit that raises as a GPU's allocator does.


class LiveMemory(TorchDispatchMode):
    """Counts the bytes of every tensor that is made while this is active and still alive. Costs microseconds per call.

    What one operation needs only inside itself is not seen. A compiled network runs eagerly meanwhile.

    Args:
        limit_bytes: Raise ``torch.OutOfMemoryError`` when more than this is alive; None for no limit.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        super().__init__()
        self.limit_bytes = limit_bytes
        self.live_bytes = 0
        self.peak_bytes = 0
        self._storages: dict[int, tuple[weakref.ref[Any], int]] = {}

    def count(self, tensors: Iterable[Any]) -> None:
        """Count tensors that were made before, such as weights; one that is counted already is not counted again.

        Raises:
            torch.OutOfMemoryError: More than ``limit_bytes`` are alive.
        """
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu":
                self._count_storage(tensor.untyped_storage())
        if self.limit_bytes is not None and self.live_bytes > self.limit_bytes:
            raise torch.OutOfMemoryError(
                f"{self.live_bytes / GIB:.3f} GiB of tensors, the limit is {self.limit_bytes / GIB:.3f} GiB"
            )

    def _count_storage(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)  # PyTorch keeps one Python object per storage for as long as the storage lives
        if key in self._storages:
            return
        size = storage.nbytes()
        self._storages[key] = (weakref.ref(storage, lambda _: self._forget(key)), size)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _forget(self, key: int) -> None:
        self.live_bytes -= self._storages.pop(key)[1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count(tree_leaves(result))
        return result
