"""Short trainings of Lightning's Trainer that leave nothing behind: no file, no line of output, no memory."""

from __future__ import annotations

import contextlib
import gc
import logging
import re
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from project import hardware
from project.engine import signals
from project.engine.cli import Configuration
from project.engine.exact_loading import ExactLoading
from project.engine.lightning_internals import leave_signals_alone
from project.engine.log_steps import synchronize
from project.engine.ranks import launched_world
from project.engine.summary import samples_of
from project.engine.trainer import build_trainer, trainer_flags
from project.errors import UserError
from project.live_memory import LiveMemory, is_out_of_memory

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Of the free host memory: temporary memory inside operations is not counted, and other programs need memory, too.
CPU_SHARE = 0.6


def one_device_flags(config: Configuration) -> dict[str, Any]:
    """The Trainer's arguments for one process on one device; a UserError where that is not what was asked for."""
    asked, name = config.trainer, type(config.module).__name__
    devices, nodes, strategy = str(asked["devices"]), asked["num_nodes"], asked["strategy"]
    is_one = re.fullmatch(r"auto|-1|1|\d+,|\[\d+\]", devices)  # 2, and [2] name a device by its index
    if not is_one or nodes > 1 or strategy != "auto" or launched_world()[1] > 1:
        raise UserError(
            "tune measures one process on one device, and what it finds is per device: leave --devices, --num_nodes, "
            f"--strategy, torchrun and srun away, got --devices {devices} --num_nodes {nodes} --strategy {strategy}."
        )
    if not config.module.automatic_optimization:
        raise UserError(f"tune needs Lightning's automatic optimization, and {name} steps its optimizers itself.")
    asked["devices"] = 1 if devices in ("auto", "-1") else asked["devices"]
    return trainer_flags(config)


class ShortTraining(Callback):
    """Base of the callbacks that measure a training from within and end it by ``trainer.should_stop``."""

    steps_done = 0  # optimizer steps

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
        if trainer.global_step != self.steps_done:  # else gradients are being accumulated
            self.steps_done = trainer.global_step
            self.after_step(trainer)

    def after_step(self, trainer: Trainer) -> None:
        """Called after every optimizer step."""
        raise NotImplementedError


@contextlib.contextmanager
def scratch_trainer(flags: dict[str, Any], callback: ShortTraining) -> Iterator[Trainer]:
    """A Trainer with the device, precision and accumulation of ``flags`` that trains until ``callback`` ends it."""
    without_end = {"max_epochs": 1_000_000, "max_steps": -1, "max_time": None, "min_epochs": None, "min_steps": None}
    all_batches = {"limit_train_batches": None, "overfit_batches": 0.0, "fast_dev_run": False}
    no_validation = {"limit_val_batches": 0, "num_sanity_val_steps": 0, "check_val_every_n_epoch": 1_000_000}
    silent = {"logger": False, "profiler": None, "enable_progress_bar": False, "enable_model_summary": False}
    scratch = without_end | all_batches | no_validation | silent | {"callbacks": [callback], "val_check_interval": 1.0}
    logging.disable(logging.WARNING)  # there are dozens of trainings here, each with the same lines
    try:
        with tempfile.TemporaryDirectory(prefix="tune-") as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield build_trainer(flags | scratch | {"default_root_dir": folder})
    finally:
        logging.disable(logging.NOTSET)


class Clock(ShortTraining):
    """Times windows of steps, waiting for the device at their edges only, and ends the training when it has enough.

    Every step of the warm-up is a window; the following ones take about ``seconds``, as the window before them says.
    """

    def __init__(self, warm_up_steps: int = 3, windows: int = 3, seconds: float = 0.4) -> None:
        self.warm_up_steps, self.windows, self.seconds = warm_up_steps, windows, seconds
        self.step_ms: list[float] = []
        self._began, self._first, self._next = 0.0, 0, 1  # the window: when it began, after and up to which step

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._began = time.perf_counter()

    def after_step(self, trainer: Trainer) -> None:
        if self.steps_done < self._next:
            return
        synchronize(trainer.strategy.root_device)  # a clock tells nothing before the device has done its work
        now, steps = time.perf_counter(), self.steps_done - self._first
        step_seconds, length = (now - self._began) / steps, 1
        if self.steps_done > self.warm_up_steps:
            self.step_ms.append(1000 * step_seconds)
            trainer.should_stop = len(self.step_ms) >= self.windows
        if self.steps_done >= self.warm_up_steps:
            length = max(1, int(self.seconds / max(step_seconds, 1e-6)))
        self._began, self._first, self._next = now, self.steps_done, self.steps_done + length


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
    """Trains for moments at any batch size, each time with a new module; the data module's ``batch_size`` changes.

    Lightning's batch-size finder keeps memory of failed tries and works with one trainer whose state it must restore
    (Lightning issues 19789, 20231). With ``memory_limit_gib`` the device is taken to have no more than this.
    """

    def __init__(self, config: Configuration, flags: dict[str, Any], memory_limit_gib: float | None = None) -> None:
        self.config, self.flags, self.datamodule = config, flags, cast(Any, config.datamodule)
        limits = [] if memory_limit_gib is None else [memory_limit_gib]
        if flags["accelerator"] == "cpu" or not torch.accelerator.is_available():
            limits.append(CPU_SHARE * hardware.memory()["available_gib"])
        self.memory_limit_bytes = int(min(limits) * hardware.GIB) if limits else None
        self.datamodule.prepare_data()
        self.datamodule.setup("fit")
        self.training_samples = samples_of(self.datamodule.train_dataloader())  # None if unknown

    def measure(self, batch_size: int, full_speed: bool = False) -> Measured:
        """Train for a second or two at full speed, or two optimizer steps; on the CPU only these count memory.

        A batch that does not fit raises ``torch.OutOfMemoryError``.
        """
        # The second step takes the most memory: gradients and optimizer state exist from the first one on.
        clock = Clock() if full_speed else Clock(warm_up_steps=1, windows=1, seconds=0)
        self.datamodule.batch_size, failure, peak_bytes = batch_size, None, None
        try:
            with scratch_trainer(self.flags, clock) as trainer:
                peak_bytes = self._fit(trainer, count_memory=not full_speed)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failure = str(error)
        # Outside of the except clause: the error's traceback holds the frames that hold the tensors. So do the trainer
        # and what Lightning has put on the callback.
        times, self.datamodule.trainer = clock.step_ms, None
        del trainer, clock
        free_memory()
        if failure is not None:
            raise torch.OutOfMemoryError(failure)
        median = statistics.median(times)
        spread = 100 * (max(times) - min(times)) / median if len(times) > 1 else None
        step_samples = batch_size * self.flags["accumulate_grad_batches"]
        steps = None if self.training_samples is None else max(1, self.training_samples // step_samples)
        return Measured(batch_size, median, spread, peak_bytes, steps)

    def _fit(self, trainer: Trainer, count_memory: bool) -> int | None:
        """Train within the memory limit; returns the peak in bytes, None where it is not counted."""
        module, device, limit = self.config.fresh_module(), trainer.strategy.root_device, self.memory_limit_bytes
        if device.type == "cpu":
            memory = LiveMemory(limit)
            with memory if count_memory else contextlib.nullcontext():
                memory.count([*module.parameters(), *module.buffers()])
                trainer.fit(module, datamodule=self.datamodule)
            return memory.peak_bytes if count_memory else None
        backend = torch.get_device_module(device)  # torch.cuda or torch.mps, whose allocator keeps to the limit
        where = (device,) if device.type == "cuda" else ()
        total = torch.cuda.get_device_properties(device).total_memory if where else backend.recommended_max_memory()
        try:
            if limit is not None:
                backend.set_per_process_memory_fraction(min(1.0, limit / total), *where)
            if where:
                torch.cuda.reset_peak_memory_stats(device)
            trainer.fit(module, datamodule=self.datamodule)
            return torch.cuda.max_memory_allocated(device) if where else None
        finally:
            if limit is not None:
                backend.set_per_process_memory_fraction(1.0, *where)


def free_memory() -> None:
    """Free the memory of a finished or failed training."""
    gc.collect()  # Trainer, module and loops hold each other
    if torch.accelerator.is_available():  # its own empty_cache fails on MPS (PyTorch issue 186430)
        torch.get_device_module(torch.accelerator.current_accelerator()).empty_cache()


@contextlib.contextmanager
def picture(path: Path, config: Configuration, flags: dict[str, Any], panels: int) -> Iterator[list[Axes]]:
    """A row of axes to draw on in the block, under network, optimizer, precision and device; a PNG at its end."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 + 2.6 * panels, 3.8), layout="constrained")
    row = list(figure.subplots(1, panels, squeeze=False)[0])
    yield row
    for axes in row:
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8, frameon=False)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    on_cpu = flags["accelerator"] == "cpu" or not (gpus := hardware.accelerators())
    device = "{name}, {cores} cores".format(**hardware.cpu()) if on_cpu else gpus[0]["name"]
    network = type(getattr(config.module, "network", config.module)).__name__
    optimizer = config.module.hparams.get("optimizer")
    parts = [network, *([optimizer] if isinstance(optimizer, str) else []), flags["precision"] or "32-true"]
    figure.suptitle(f"{', '.join(parts)} on {device}", fontsize=9)
    figure.savefig(path, dpi=130)
