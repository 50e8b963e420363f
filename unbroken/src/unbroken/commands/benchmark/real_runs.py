"""Runs as ``fit`` makes them, timed epoch by epoch, in a folder that is deleted."""

import copy
import io
import tempfile
import time
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from unbroken.cli.cli import Configuration
from unbroken.cli.trainer_flags import build_trainer, trainer_flags
from unbroken.errors import UserError, require
from unbroken.loading import RunLoaders
from unbroken.loading.batch_size import batch_size_of
from unbroken.loading.log_steps import synchronize
from unbroken.monitors.memory import MemoryMonitor
from unbroken.monitors.throughput import samples_in
from unbroken.results.facts import device_name, network_of, samples_of
from unbroken.run.job import Job
from unbroken.run_folder import RunFolder
from unbroken.seams import Seams
from unbroken.stopping import signals


def wanted_devices(config: Configuration) -> list[str]:
    """The CPU and this machine's kind of accelerator, as far as ``--accelerator`` names them.

    The best comes last.
    """
    found = ["cpu"]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and accelerator.type in ("cuda", "mps"):
        found.append(accelerator.type)
    asked = config.trainer["accelerator"]
    if asked == "auto":
        return found
    wanted = [name for name in found if name == asked]
    if asked == "gpu":
        wanted = found[1:]
    must = f"be auto or what this machine has ({', '.join(found)})"
    require(bool(wanted), "--accelerator", must, asked)
    return wanted


class Epoch(NamedTuple):
    """One epoch's seconds."""

    # Training steps.
    train_s: float
    # Training, validation and saving.
    epoch_s: float


class RunClock(Callback):
    """Times whole epochs. Comes last among the callbacks, so that the time of the others counts."""

    def __init__(self, turn: Connection | None = None) -> None:
        # With a connection, an epoch waits for a message on it, and sends its seconds.
        self.turn = turn
        self.epochs: list[Epoch] = []
        # None where the device's allocator does not tell.
        self.peak_allocated_gib: float | None = None
        # GiB by use, of a training step.
        self.memory: dict[str, float] = {}
        # The names of device and network.
        self.names: dict[str, str] = {}
        # Samples that this epoch has trained on.
        self.samples = 0
        # None where the loader does not tell.
        self.train_samples: int | None = None
        # 0-1, of the last validation; None where it was not logged.
        self.accuracy: Tensor | None = None
        # When this epoch began (0: none has), and the seconds of its training steps.
        self._began = 0.0
        self._train_s = 0.0

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # An epoch's checkpoint is saved when the next epoch begins.
        self._end_epoch(trainer)
        if self.turn is not None:
            self.turn.recv()
        self.samples = 0
        self._began = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # A batch of another kind does not tell how many it has.
        self.samples += samples_in(batch) or batch_size_of(trainer.datamodule) or 0  # type: ignore[attr-defined]
        if batch_idx + 1 == trainer.num_training_batches:
            synchronize(trainer.strategy.root_device)
            self._train_s = time.perf_counter() - self._began

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # This comes after on_train_end, which saves the last checkpoint.
        self._end_epoch(trainer)
        self.names = {
            "device": device_name(trainer),
            "network": type(network_of(pl_module)).__name__,
        }
        self.train_samples = samples_of(trainer.train_dataloader)
        self.accuracy = trainer.callback_metrics.get("val/accuracy")

    def _end_epoch(self, trainer: Trainer) -> None:
        if self._began:
            synchronize(trainer.strategy.root_device)
            epoch = Epoch(self._train_s, time.perf_counter() - self._began)
            self.epochs.append(epoch)
            if self.turn is not None:
                self.turn.send(epoch)


def run_epochs(
    config: Configuration, epochs: int, *, bare: bool = False, turn: Connection | None = None
) -> RunClock:
    """Train a new module as ``fit`` does; ``bare``: without its callbacks."""
    asked = config.trainer | {
        "max_epochs": epochs,
        "max_steps": -1,
        "max_time": None,
        # The originals are never run: they would begin the next run with their state of this one.
        "callbacks": copy.deepcopy(config.trainer["callbacks"]),
    }
    config = replace(config, module=config.fresh_module(), trainer=asked)
    clock = RunClock(turn)
    terminal = io.StringIO()
    # The progress bar is part of a run's cost, and is shown on a terminal only.
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    # The memory is that of the run before.
    torch.cuda.empty_cache()
    folder = tempfile.TemporaryDirectory(prefix="benchmark-", ignore_cleanup_errors=True)
    with folder as root, redirect_stdout(terminal), redirect_stderr(terminal), ExitStack() as ends:
        # Between two runs there is no step for which a signal would wait.
        ends.callback(signals.raise_from_now_on)
        if bare:
            trainer = bare_trainer(config, root, clock)
            trainer.fit(config.module, datamodule=config.datamodule)
        else:
            job = config.program
            assert isinstance(job, Job)
            place = RunFolder(Path(tempfile.mkdtemp(dir=root)))
            trainer = job.build(config, place, extra=[clock])
            trainer.fit(config.module, datamodule=config.datamodule)
            take_memory(trainer, clock)
    if not all(epoch.train_s for epoch in clock.epochs):
        raise UserError(
            "the benchmark times whole epochs, and --data has no end. "
            "Set --limit_train_batches 100."
        )
    return clock


def take_memory(trainer: Trainer, clock: RunClock) -> None:
    """What the memory monitor of a run has found."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, MemoryMonitor):
            clock.memory = callback.breakdown
            clock.peak_allocated_gib = callback.peaks.get("memory/peak_allocated_gib")


def bare_trainer(config: Configuration, root: str, clock: RunClock) -> Trainer:
    """Lightning with nothing of ours but the loaders, with which all others train, too."""
    flags = trainer_flags(config)
    flags |= {
        "logger": False,
        "enable_progress_bar": False,
        "default_root_dir": root,
        "callbacks": [*flags["callbacks"], clock],
    }
    trainer = build_trainer(flags)
    RunLoaders(config.seed).install(Seams(trainer), trainer)
    return trainer
