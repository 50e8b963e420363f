"""How long a training step takes at a batch size, and how much memory."""

import contextlib
import gc
import math
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any, cast

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import LightningModule, Trainer
from unbroken.cli.cli import Configuration
from unbroken.commands.tune.short_training import ShortTraining, train_shortly
from unbroken.errors import UserError, is_out_of_memory
from unbroken.loading.batch_size import set_batch_size
from unbroken.loading.log_steps import synchronize
from unbroken.machine import hardware
from unbroken.machine.live_memory import LiveMemory
from unbroken.monitors.throughput import samples_in

# The steps in which the CPU's memory is counted. A compiled network runs eagerly in them.
COUNTED_STEPS = 2
WARM_UP_STEPS = 3
WINDOWS = 3
WINDOW_SECONDS = 0.4
# The part of the free host memory that may be used: operations need temporary memory that is not
# counted, and other programs need theirs.
CPU_SHARE = 0.6
LONGEST_REASON = 120


class CannotTrain(Exception):
    """A batch size with which this training fails, for another reason than memory."""


@dataclass
class Measured:
    """What training at one batch size took."""

    batch_size: int
    # Of an optimizer step, which has several batches where gradients are accumulated.
    step_ms: float
    # Of one device: the samples that were seen, also where the last batch of an epoch is smaller.
    samples_per_sec: float
    # Of the speeds of the windows: (largest − smallest) / median.
    spread_pct: float = 0.0
    # None where the device does not tell.
    peak_allocated_gib: float | None = None
    # Optimizer steps; None for data of unknown length.
    steps_per_epoch: int | None = None


class Clock(ShortTraining):
    """Measures the peak of memory, times windows of several steps, and ends the training after the
    last window.

    The warm-up steps are windows of one step that do not count. Memory peaks in the second step,
    when gradients and optimizer state exist. From then on the CPU's memory is no longer counted,
    because counting slows steps down.

    Args:
        limit_bytes: The memory that may be used; None: all.
        batch_size: Samples of a batch that does not tell how many it has.
    """

    def __init__(self, limit_bytes: int | None, batch_size: int) -> None:
        super().__init__()
        self.memory = LiveMemory(limit_bytes)
        self.batch_size = batch_size
        # Of each window: milliseconds per step, and samples per second.
        self.step_ms: list[float] = []
        self.samples_per_sec: list[float] = []
        # The window that is under way: when it began, the steps before it, the steps in it, and the
        # samples that it has seen.
        self._began = 0.0
        self._first = 0
        self._length = 1
        self._samples = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        device = trainer.strategy.root_device
        limit = self.memory.limit_bytes
        if device.type == "cpu":
            self.memory.__enter__()
            self.memory.count([*pl_module.parameters(), *pl_module.buffers()])
        elif limit is not None:
            gpu = hardware.accelerators()[device.index or 0]
            share = limit / (hardware.GIB * gpu["memory_total_gib"])
            # A GPU's allocator keeps to it until the process ends.
            torch.get_device_module(device).set_per_process_memory_fraction(min(1.0, share))
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._samples += samples_in(batch) or self.batch_size
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def after_step(self, trainer: Trainer) -> None:
        if self.steps_done == COUNTED_STEPS:
            self.memory.close()
        if self.steps_done < self._first + self._length:
            return
        synchronize(trainer.strategy.root_device)
        now = time.perf_counter()
        # This means nothing in the first window, where it is not used.
        step_seconds = (now - self._began) / self._length
        if self.steps_done > WARM_UP_STEPS:
            self.step_ms.append(1000 * step_seconds)
            self.samples_per_sec.append(self._samples / (now - self._began))
            trainer.should_stop = len(self.step_ms) == WINDOWS
        if self.steps_done >= WARM_UP_STEPS:
            self._length = max(1, int(WINDOW_SECONDS / step_seconds))
        self._began = now
        self._first = self.steps_done
        self._samples = 0


class TrainingSteps:
    """Trains a new module for some steps at any batch size, which it sets on the data module.

    Lightning's batch-size finder keeps memory of failed tries, and restores the state of one
    trainer (Lightning issues 19789, 20231).
    """

    def __init__(
        self, config: Configuration, flags: dict[str, Any], memory_limit_gib: float | None = None
    ) -> None:
        self.config = config
        self.flags = flags
        self.datamodule = cast(Any, config.datamodule)
        self.memory_limit_bytes = self._limit_bytes(memory_limit_gib)
        self.datamodule.prepare_data()
        self.datamodule.setup("fit")
        # None if unknown.
        loader = self.datamodule.train_dataloader()
        self.training_samples = sized_len(getattr(loader, "dataset", None))

    def _limit_bytes(self, typed_gib: float | None) -> int | None:
        limits = [] if typed_gib is None else [typed_gib]
        if self.flags["accelerator"] == "cpu" or not torch.accelerator.is_available():
            limits.append(CPU_SHARE * hardware.memory()["available_gib"])
        if not limits:
            return None
        return int(min(limits) * hardware.GIB)

    def measure(self, batch_size: int) -> Measured | None:
        """Train for a second or two and print the result on stderr; None: this size does not fit.

        :class:`CannotTrain` where the training fails for another reason.
        """
        # A size that could not train has left its tensors in the frames of its error.
        self._free_memory()
        set_batch_size(self.datamodule, batch_size)
        told = "out of memory"
        try:
            # The training has a frame of its own, whose tensors are free when it has returned.
            found = self._train(batch_size)
        except CannotTrain as error:
            print(f"batch size {batch_size:,}: cannot train ({error})", file=sys.stderr)
            raise
        self._free_memory()
        if found is not None:
            told = f"{found.step_ms:,.1f} ms per step, {found.samples_per_sec:,.0f} samples/s"
        print(f"batch size {batch_size:,}: {told}", file=sys.stderr)
        return found

    def _free_memory(self) -> None:
        # The data module holds the Trainer, and with it what the training has left.
        self.datamodule.trainer = None
        # Trainer, module and loops hold each other.
        gc.collect()
        if torch.accelerator.is_available():
            # torch.accelerator's own empty_cache fails on MPS (PyTorch issue 186430).
            device = torch.accelerator.current_accelerator()
            torch.get_device_module(device).empty_cache()

    def _train(self, batch_size: int) -> Measured | None:
        clock = Clock(self.memory_limit_bytes, batch_size)
        module = self.config.fresh_module()
        try:
            with contextlib.closing(clock.memory):
                trainer = train_shortly(self.flags, clock, module, self.datamodule)
        except UserError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                return None
            words = " ".join(f"{type(error).__name__}: {error}".split())
            raise CannotTrain(words[:LONGEST_REASON]) from error
        speeds = clock.samples_per_sec
        median = statistics.median(speeds)
        return Measured(
            batch_size=batch_size,
            step_ms=statistics.median(clock.step_ms),
            samples_per_sec=median,
            spread_pct=100 * (max(speeds) - min(speeds)) / median,
            peak_allocated_gib=peak_gib(trainer.strategy.root_device, clock.memory),
            steps_per_epoch=steps_per_epoch(trainer),
        )


def steps_per_epoch(trainer: Trainer) -> int | None:
    """Optimizer steps of an epoch, the last one too; None for data of unknown length."""
    batches = trainer.num_training_batches
    if not math.isfinite(batches):
        return None
    return math.ceil(batches / trainer.accumulate_grad_batches)


def peak_gib(device: torch.device, memory: LiveMemory) -> float | None:
    """The peak of a training's memory; None where the device does not tell."""
    if device.type == "cpu":
        return memory.peak_bytes / hardware.GIB
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / hardware.GIB
    return None
