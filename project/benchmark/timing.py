"""How everything here is timed: alternating measurements, real runs by the epoch, and the conditions they hold for."""

from __future__ import annotations

import copy
import io
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from tqdm import tqdm  # type: ignore[import-untyped]

from project import fit, hardware
from project.benchmark import Row
from project.engine import signals
from project.engine.cli import Configuration
from project.engine.exact_loading import ExactLoading
from project.engine.log_steps import synchronize
from project.engine.run_folder import Run, choose
from project.engine.summary import command_line, device_name, git_state, samples_of, versions
from project.engine.trainer import as_list, build_trainer, trainer_flags
from project.errors import UserError

T = TypeVar("T")


def progress(table: str, items: Iterable[Any]) -> Any:
    """The items under a bar on stderr, so that the tables on stdout can be piped; no bar in a log file."""
    return tqdm(items, desc=table, leave=False, disable=None)


def alternate(
    table: str, variants: Mapping[str, Callable[[], T]], rounds: int, patience_s: float = math.inf
) -> dict[str, list[T]]:
    """Results of every variant (name → one measurement), ``rounds`` of each, one after the other in turn.

    In turn, and every other round backwards, so that a machine that grows slower or busier during the measurement
    does so for all variants alike. A variant that takes longer than ``patience_s`` is not repeated.
    """
    results: dict[str, list[T]] = {name: [] for name in variants}
    too_slow = set()
    bar = progress(table, [name for turn in range(rounds) for name in list(variants)[:: -1 if turn % 2 else 1]])
    for name in bar:
        bar.set_postfix_str(name)
        if name not in too_slow:
            began = time.perf_counter()
            results[name].append(variants[name]())
            too_slow |= {name} if time.perf_counter() - began > patience_s else set()
    return results


def median_and_spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """``name``: the median; ``n``; ``spread_pct``: (largest − smallest) / median, 0 or more; left out for one value."""
    row: dict[str, float] = {name: statistics.median(values), "n": len(values)}
    if len(values) > 1 and row[name]:
        row["spread_pct"] = 100 * (max(values) - min(values)) / row[name]
    return row


def wanted_devices(config: Configuration) -> list[str]:
    """The CPU and the kind of accelerator that is here, as far as ``--accelerator`` names them; the best comes last."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    found = ["cpu", *([accelerator.type] if accelerator is not None and accelerator.type in ("cuda", "mps") else [])]
    asked = config.trainer["accelerator"]
    wanted = [name for name in found if asked in ("auto", name) or (asked == "gpu" and name != "cpu")]
    if not wanted:
        raise UserError(f"--accelerator must be auto or what this machine has ({', '.join(found)}), got {asked}.")
    return wanted


# Real runs: built as ``fit`` builds them, timed by the epoch, in a folder that is thrown away.


@dataclass(frozen=True)
class Epoch:
    """One epoch's seconds."""

    train_s: float  # of its training steps
    epoch_s: float  # of the whole of it: training, validation, saving
    train_cpu_s: float  # CPU seconds of all threads in the training steps; a busy neighbour changes them far less


class RunClock(Callback):
    """Times whole epochs and validations. Comes last among the callbacks, so that what the others do counts."""

    def __init__(self) -> None:
        self.epochs: list[Epoch] = []
        self.validations: list[tuple[float, float]] = []  # (seconds since training began, val/accuracy in 0-1)
        self.inside_s: dict[str, float] = {}  # class of a watched callback → seconds inside its hooks
        self.peak_allocated_gib: float | None = None  # None where the device's allocator does not tell
        self.memory: dict[str, float] = {}  # GiB by use, of a training step
        self.batches = 0  # per epoch
        self.train_samples: int | None = None  # in the training set; None where its loader does not tell
        self.device = ""  # its name
        self._train_began = self._began = self._cpu_began = 0.0
        self._steps = (0.0, 0.0)  # seconds and CPU seconds of this epoch's training steps

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end_epoch(trainer)  # here, because what is saved of an epoch is saved when the next begins
        self._began, self._cpu_began = time.perf_counter(), time.process_time()
        self._train_began = self._train_began or self._began

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx + 1 == trainer.num_training_batches:
            synchronize(trainer.strategy.root_device)
            self._steps = (time.perf_counter() - self._began, time.process_time() - self._cpu_began)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if "val/accuracy" in trainer.callback_metrics and not trainer.sanity_checking:
            accuracy = float(trainer.callback_metrics["val/accuracy"])
            self.validations.append((time.perf_counter() - self._train_began, accuracy))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end_epoch(trainer)  # after every on_train_end, where the last epoch's checkpoint is saved
        self.batches, self.device = int(trainer.num_training_batches), device_name(trainer)
        self.train_samples = samples_of(trainer.train_dataloader)

    def _end_epoch(self, trainer: Trainer) -> None:
        if self._began:
            synchronize(trainer.strategy.root_device)
            train_s, train_cpu_s = self._steps
            self.epochs.append(Epoch(train_s, time.perf_counter() - self._began, train_cpu_s))


@contextmanager
def adds_time(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Add to ``seconds[name]`` what passes inside; also decorates a function."""
    began = time.perf_counter()
    yield
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - began


def run_epochs(
    config: Configuration,
    epochs: int,
    *,
    without: Collection[type] = (),  # classes of callbacks and loggers to leave out
    trainer: Mapping[str, Any] | None = None,  # arguments in the place of the configured ones
    bare: bool = False,  # only the module, the data and the user's callbacks: Lightning's loop alone
    extra: Sequence[Callback] = (),  # further callbacks
    watched: tuple[type, ...] = (),  # classes of callbacks whose hooks are timed
) -> RunClock:
    """Train a new module on the configured data for some epochs, the first to warm up. Nothing of it stays on disk."""
    config = afresh(config, trainer={"max_epochs": epochs, "max_steps": -1, "max_time": None, **(trainer or {})})
    clock, session = RunClock(), None
    torch.cuda.empty_cache()  # of the run before
    with scratch_run() as run:
        if bare:
            flags = trainer_flags(config)
            flags |= {"callbacks": [*as_list(flags["callbacks"]), *extra, clock], "default_root_dir": run.folder}
            lightning = build_trainer({**flags, "logger": False, "enable_progress_bar": False})
            ExactLoading().install(lightning)  # the loaders that all the others train with
        else:
            session = fit.build(config, run, extra=[*extra, clock], without=without)
            lightning = session.trainer
        for callback in lightning.callbacks:  # type: ignore[attr-defined]
            kind = type(callback)
            for name in dir(Callback) if isinstance(callback, watched) else ():
                if name.startswith("on_") and getattr(kind, name) is not getattr(Callback, name):
                    setattr(callback, name, adds_time(clock.inside_s, kind.__name__)(getattr(callback, name)))
        try:
            lightning.fit(config.module, datamodule=config.datamodule)
        finally:
            if session is not None and session.wandb is not None:
                session.wandb.finish(0)
            signals.resume_immediate()  # between two runs there is no step to wait for
    if not all(epoch.train_s for epoch in clock.epochs):
        raise UserError("the benchmark times whole epochs, and --data has no end. Set --limit_train_batches 100.")
    if session is not None and session.memory is not None:  # feature: memory
        clock.memory = session.memory.breakdown  # feature: memory
        clock.peak_allocated_gib = session.memory.summary().get("memory/peak_allocated_gib")  # feature: memory
    return clock


def afresh(config: Configuration, seed: int | None = None, trainer: Mapping[str, Any] | None = None) -> Configuration:
    """The configuration with a new module and callbacks that have seen no run; ``trainer`` replaces arguments of it."""
    callbacks = copy.deepcopy(config.trainer["callbacks"])  # the originals are never run
    arguments = {**config.trainer, "callbacks": callbacks, **(trainer or {})}
    return replace(config, module=config.fresh_module(seed), trainer=arguments)


class SilentTerminal(io.StringIO):
    """Claims to be a terminal, so that a run draws its progress bar, which is part of its cost."""

    def isatty(self) -> bool:
        return True


@contextmanager
def scratch_run() -> Iterator[Run]:
    """A run in a temporary folder, whose lines nobody reads."""
    folder = tempfile.TemporaryDirectory(prefix="benchmark-", ignore_cleanup_errors=True)
    with folder as root, redirect_stdout(SilentTerminal()):
        run = choose(Path(root), None, None)
        run.create()
        yield run


def conditions() -> Row:
    """What a result means nothing without, of this moment and this process; what cannot be known is left out."""
    cpu, gpus, (commit, dirty) = hardware.cpu(), hardware.accelerators(), git_state()
    machine = {"cpu": cpu["name"], "cpu_cores": cpu["cores"], "memory_gib": round(hardware.memory()["total_gib"], 1)}
    if gpus:
        machine |= {"gpus": [gpu["name"] for gpu in gpus], "cuda": torch.version.cuda, "driver": gpus[0].get("driver")}
    load = round(os.getloadavg()[0], 2)  # of others: nothing has begun here
    facts = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command_line().replace(".__main__", "", 1),
        "git_commit": commit,
        "git_dirty": dirty,
        "hardware": {name: fact for name, fact in machine.items() if fact is not None},
        "versions": versions(),
        "cpu_threads": torch.get_num_threads(),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "default"),
        "omp_spin_count": os.environ.get("GOMP_SPINCOUNT", "default"),
        "load_average": load,
        "quiet": load < 0.5,  # whether nothing else was running
    }
    return {name: fact for name, fact in facts.items() if fact is not None}


def line_of(facts: Row) -> str:
    """The conditions for a person, above the tables."""
    machine, found = facts["hardware"], facts["versions"]
    parts = [f"{machine['cpu']}, {machine['cpu_cores']} cores", *machine.get("gpus", [])]
    parts += [f"{name} {found[name]}" for name in ("torch", "lightning")]
    line = " | ".join([*parts, f"commit {facts.get('git_commit', 'unknown')[:7]}", facts["date"]])
    busy = f"\nthe machine was busy (load average {facts['load_average']}): compare ratios, not seconds"
    return line if facts["quiet"] else line + busy
