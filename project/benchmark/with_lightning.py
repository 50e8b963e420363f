"""Real runs of this project, timed by the epoch: built as ``fit`` builds them, in a folder that is thrown away."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import Logger

from project.benchmark.by_hand import Epoch
from project.benchmark.timing import synchronize
from project.engine import signals, training
from project.engine.cli import ProjectCLI
from project.engine.run_folder import choose
from project.engine.trainer import build_trainer, make_trainer, trainer_flags


class EpochClock(Callback):
    """Times whole epochs. Comes last among the callbacks, so that what the others do counts."""

    def __init__(self) -> None:
        self.epochs: list[Epoch] = []
        self._began: float | None = None
        self._cpu_began = self._train_s = self._train_cpu_s = 0.0

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end_epoch(trainer)  # here, because what is saved of an epoch is saved when the next begins
        self._began, self._cpu_began = time.perf_counter(), time.process_time()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx + 1 == trainer.num_training_batches and self._began is not None:
            synchronize(trainer.strategy.root_device)
            self._train_s, self._train_cpu_s = time.perf_counter() - self._began, time.process_time() - self._cpu_began

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end_epoch(trainer)

    def _end_epoch(self, trainer: Trainer) -> None:
        if self._began is not None:
            synchronize(trainer.strategy.root_device)
            accuracy = trainer.callback_metrics.get("val/accuracy")
            seconds = time.perf_counter() - self._began
            known = None if accuracy is None else float(accuracy)
            self.epochs.append(Epoch(self._train_s, seconds, self._train_cpu_s, known))
            self._began = None


class HookClock:
    """Seconds spent inside the hooks of one callback."""

    def __init__(self, callback: Callback) -> None:
        self.seconds = 0.0
        for name in [name for name in dir(type(callback)) if name.startswith("on_")]:
            if getattr(type(callback), name) is not getattr(Callback, name, None):
                setattr(callback, name, self._timed(getattr(callback, name)))

    def _timed(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(hook)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return hook(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - began

        return timed


@dataclass
class Features:
    """What a run has switched off.

    Args:
        without: Classes of callbacks and loggers to take away.
        bare: Nothing of ours but the module and the data: Lightning's loop alone.
        extra: Further callbacks.
        watched: Classes of callbacks whose hooks are timed.
        inside: Filled by the run: class name → what its hooks took.
    """

    without: tuple[type, ...] = ()
    bare: bool = False
    extra: list[Callback] = field(default_factory=list)
    watched: tuple[type[Callback], ...] = ()
    inside: dict[str, HookClock] = field(default_factory=dict)


def run_epochs(cli: ProjectCLI, epochs: int, features: Features | None = None) -> tuple[list[Epoch], Trainer]:
    """Train the configured model afresh for some epochs. Nothing of it stays on disk.

    Args:
        cli: Its configuration. The data module is used again, the module is made anew.
        epochs: How many; the first one is the warm-up.
        features: What to leave out; everything is on by default.

    Returns:
        The times of every epoch, and the trainer, for what else is to be read from it.
    """
    features = features or Features()
    fresh_model(cli)
    clock = EpochClock()
    cli.config_init.trainer.max_epochs = epochs
    add_callbacks(cli, [*features.extra, clock])
    with scratch_folder() as folder, silenced():
        trainer = bare_trainer(cli, folder) if features.bare else full_trainer(cli, folder, features)
        try:
            trainer.fit(cli.model, datamodule=cli.datamodule)
        finally:
            training.finish_wandb(trainer, 0)
            signals.resume_immediate()  # between two runs there is no step to wait for
    return clock.epochs, trainer


def add_callbacks(cli: ProjectCLI, callbacks: list[Callback]) -> None:
    """Put callbacks behind those of the configuration (one, several, or none)."""
    chosen = cli.config_init.trainer.callbacks or []
    cli.config_init.trainer.callbacks = [*(chosen if isinstance(chosen, list) else [chosen]), *callbacks]


def fresh_model(cli: ProjectCLI, seed: int | None = None) -> None:
    """A new module (random weights by the seed) with the data module that has already read its files."""
    datamodule = cli.datamodule
    chosen = cli.config.seed_everything if seed is None else seed
    seed_everything(chosen if isinstance(chosen, int) and not isinstance(chosen, bool) else 42, verbose=False)
    cli.instantiate_classes()
    if datamodule.splits:
        cli.datamodule = datamodule


def full_trainer(cli: ProjectCLI, folder: Path, features: Features) -> Trainer:
    """The trainer of ``fit``, less what is switched off."""
    run = choose(folder, None, None)
    run.create()
    trainer = make_trainer(cli, run)
    kept: list[Any] = [x for x in trainer.callbacks if not isinstance(x, features.without)]  # type: ignore[attr-defined]
    trainer.callbacks = kept  # type: ignore[attr-defined]
    features.inside = {type(x).__name__: HookClock(x) for x in kept if isinstance(x, features.watched)}
    loggers: list[Logger] = [x for x in trainer.loggers if not isinstance(x, features.without)]
    trainer.loggers = loggers
    return trainer


def bare_trainer(cli: ProjectCLI, folder: Path) -> Trainer:
    """Lightning's Trainer with the same precision and limits, and nothing on."""
    flags = trainer_flags(cli)
    off = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    return build_trainer({**flags, **off, "default_root_dir": folder})


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A temporary folder for a run, with W&B offline: a benchmark uploads nothing."""
    before = os.environ.get("WANDB_MODE")
    os.environ["WANDB_MODE"] = "offline"
    try:
        with tempfile.TemporaryDirectory(prefix="benchmark-", ignore_cleanup_errors=True) as folder:
            yield Path(folder)
    finally:
        if before is None:
            del os.environ["WANDB_MODE"]
        else:
            os.environ["WANDB_MODE"] = before


class SilentTerminal(io.StringIO):
    """Claims to be a terminal, so that a run draws its progress bar, and keeps nothing."""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        return len(text)


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """What a run prints goes to a terminal that nobody reads; its bar costs what it costs."""
    with contextlib.redirect_stdout(SilentTerminal()):
        yield


def free_device_memory() -> None:
    """Give back what the runs before have left in the allocator's cache."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
