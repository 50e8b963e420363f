"""Real training steps at any batch size: forward, backward, optimizer step by Lightning's Trainer; then forgotten."""

from __future__ import annotations

import statistics
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything

from project.callbacks.out_of_memory import is_out_of_memory
from project.cli import ProjectCLI
from project.tuning.live_memory import LiveMemory
from project.tuning.scratch import device_memory_limit, free_memory, quiet_lightning, scratch_trainer
from project.tuning.step_clock import Clock


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
