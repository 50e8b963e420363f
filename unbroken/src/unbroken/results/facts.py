"""The facts of a run: its :class:`Summary`, which ``summary.json`` holds, and where each fact comes
from.
"""

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, DistributedSampler
from unbroken import contract
from unbroken.loading.samplers import cut_of, gives_a_share, is_stream, reads_all, source_of
from unbroken.machine.hardware import cpu
from unbroken.mirror.store import without_password
from unbroken.version import __version__

PACKAGES = ("torch", "torchvision", "lightning", "torchmetrics", "wandb", "numpy")
GIT_PATIENCE = 5  # seconds


@dataclass
class Summary:
    """The facts of a run, as ``summary.json`` holds them. What is None was not measured."""

    run_name: str
    finished: bool
    device: str
    precision: str  # the effective one
    world_size: int
    parameters: int
    epochs: int  # completed
    steps: int  # optimizer steps
    fit_seconds: float = 0.0
    command: str = field(default_factory=lambda: command_line())
    mode: str | None = None
    monitor: str | None = None  # the metric that best.ckpt follows
    best_score: float | None = None
    best_epoch: int | None = None  # from 0
    data_source: str | None = None
    train_samples: int | None = None
    start_seconds: float | None = None  # from process start to the first step
    # Seconds of training in which other processes took cores, so that threads slept as they waited
    busy_seconds: float | None = None
    git_commit: str | None = None
    git_dirty: bool | None = None  # whether files differ from the commit, or are not under git
    date: str = field(default_factory=lambda: time.strftime("%Y-%m-%d %H:%M:%S"))  # of its end
    hardware: str | None = None  # CPU model and cores, such as "AMD EPYC 9B14, 2 cores"
    versions: dict[str, str] = field(default_factory=lambda: versions())
    digest: str | None = None  # the end of the chain of digests
    # The optimizer steps at which a resumed run went on with the chain
    digest_resumed_at: list[int] | None = None
    # A line for each setting that a resume has changed, such as "step 20: model.lr: 0.1 → 0.02"
    resumed_with: list[str] | None = None
    # What the closing lines warn of, a sentence each
    notes: list[str] = field(default_factory=list)
    # val/* of the best epoch, test/*, throughput/*, memory/*
    metrics: dict[str, float] = field(default_factory=dict)
    # Not in the file: where the run's time went and what to try, in words;
    advice: str | None = None
    # whether the weights of best.ckpt are finite numbers
    best_is_sound: bool = True

    def to_plain(self) -> dict[str, Any]:
        """One flat dictionary, metrics beside the facts; what is None is left out."""
        facts = dict(vars(self))
        for name in ("metrics", "best_score", "advice", "best_is_sound"):
            del facts[name]
        values: dict[str, Any] = dict(self.metrics)
        if self.monitor is not None and self.best_score is not None:
            values[self.monitor] = self.best_score
        facts |= beside_facts(vars(self), values)
        return {name: value for name, value in facts.items() if value is not None}


def beside_facts(facts: Mapping[str, Any], metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics that may stand beside facts in one dictionary: one of the same name as a fact, such
    as ``precision``, is called ``metric/precision``.
    """
    named: dict[str, Any] = {}
    for name, value in metrics.items():
        shown = f"metric/{name}" if name in facts else name
        named[shown] = value
    return named


def summarize(trainer: Trainer, run_name: str, code: Path, finished: bool) -> Summary:
    """What Trainer, module and data module know of a run, when its training has ended.

    Call it before the final test, which changes the precision.

    Args:
        trainer: The Trainer that has trained.
        run_name: The name of the run's folder.
        code: The folder of the package that trains.
        finished: False for a run that was stopped.
    """
    module = trainer.lightning_module
    data: LightningDataModule | None = trainer.datamodule  # type: ignore[attr-defined]
    commit, is_dirty = git_state(code)
    return Summary(
        run_name=run_name,
        finished=finished,
        device=device_name(trainer),
        precision=str(trainer.precision),
        world_size=trainer.world_size,
        data_source=data_source(data, module),
        train_samples=training_samples(trainer),
        parameters=parameter_count(trainer, module),
        epochs=trainer.current_epoch,
        steps=trainer.global_step,
        git_commit=commit,
        git_dirty=is_dirty,
        hardware=processor_name(),
    )


def data_source(data: LightningDataModule | None, module: LightningModule) -> str | None:
    """Where the samples come from: what the data module says, else its class, or the module's."""
    if isinstance(data, contract.NamesSource):
        return data.data_source
    return type(data or module).__name__


def device_name(trainer: Trainer) -> str:
    """``cpu``, ``mps``, or the CUDA device's name."""
    device = trainer.strategy.root_device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def processor_name() -> str:
    """CPU model and cores of this machine, such as ``AMD EPYC 9B14, 2 cores``."""
    processor = cpu()
    plural = "s" if processor["cores"] > 1 else ""
    return f"{processor['name']}, {processor['cores']} core{plural}"


def samples_of(loader: Any) -> int | None:
    """Samples of a whole pass of a loader, on all ranks: as many as its sampler draws. A rest that
    ``drop_last`` leaves out is counted, too.

    None where nobody knows: several loaders, data without a length, batches that the user or the
    dataset cuts, a sampler of the user's own that gives a rank its share.
    """
    if not isinstance(loader, DataLoader) or cut_of(loader).batch_size is None:
        return None
    source = source_of(loader)
    if is_stream(loader.dataset) or isinstance(source, DistributedSampler):
        return sized_len(loader.dataset)
    return None if gives_a_share(source) else sized_len(source)


def training_samples(trainer: Trainer) -> int | None:
    """Samples of an epoch, also where ``--limit_train_batches`` or ``--overfit_batches`` makes it
    shorter. None where nobody knows.
    """
    loader = trainer.train_dataloader
    samples = samples_of(loader)
    batch_size = cut_of(loader).batch_size
    if samples is None or batch_size is None or reads_all(trainer.limit_train_batches):
        return samples
    return min(samples, int(trainer.num_training_batches) * batch_size * trainer.world_size)


def parameter_count(trainer: Trainer, module: LightningModule) -> int:
    """Parameters of a module, of the whole one where a strategy has cut it.

    Those of lazy layers, whose sizes come with the first batch, count from then on.
    """
    if isinstance(trainer.strategy, contract.CountsWholeModule):
        whole = trainer.strategy.whole_parameters
        if whole:
            return whole
    sized = [parameter for parameter in module.parameters() if not is_lazy(parameter)]
    return sum(parameter.numel() for parameter in sized)


def network_of(module: LightningModule) -> torch.nn.Module:
    """The network inside a module, or the module itself where it has none of that name."""
    if isinstance(module, contract.HasNetwork) and isinstance(module.network, torch.nn.Module):
        return module.network
    return module


# Of the code and its surroundings


def git(code: Path, *words: str) -> str | None:
    """What a git command prints of the repository that has ``code``; None where none has it.

    A repository above it that does not know it, such as one of dotfiles in a home, is none of its.
    """
    known = run_git(code, "ls-files", "--error-unmatch", ".")
    return None if known is None else run_git(code, *words)


def run_git(folder: Path, *words: str) -> str | None:
    """What a git command prints in a folder; None where it fails."""
    command = ["git", "-C", str(folder), *words]
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            check=True,
            timeout=GIT_PATIENCE,
        )
        return done.stdout
    return None


def git_state(code: Path) -> tuple[str | None, bool | None]:
    """The commit of the package in the folder ``code`` (outside git: ``GIT_COMMIT``), and whether
    files differ from it or are unknown to git.
    """
    commit = git(code, "rev-parse", "HEAD")
    changes = git(code, "status", "--porcelain")
    if commit is None or changes is None:
        return os.environ.get("GIT_COMMIT"), None
    return commit.strip(), bool(changes)


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that make a result."""
    found = {"python": platform.python_version(), "unbroken": __version__}
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def command_line() -> str:
    """The command line, ready to be typed again, but for passwords in addresses."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    program = f"python -m {module.name}" if module else f"python {sys.argv[0]}"
    words = [shlex.quote(without_password(word)) for word in sys.argv[1:]]
    return " ".join([program, *words])
