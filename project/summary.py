"""What a run says of itself: one line at the start, ``summary.json`` and a few lines at the end."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer

from project.checkpoints import write_atomically

PACKAGES = ("torch", "torchvision", "lightning", "torchmetrics", "wandb", "numpy")


class RunTimer(Callback):
    """Seconds from process start to the first step, and seconds of training over all parts of a resumed run."""

    def __init__(self) -> None:
        self.start_seconds: float | None = None
        self.fit_seconds = 0.0
        self._begun: float | None = None
        self._before = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begun = time.perf_counter()
        if trainer.is_global_zero:
            print(start_line(trainer, pl_module), flush=True)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.start_seconds is None:
            self.start_seconds = time.time() - psutil.Process().create_time()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.fit_seconds = self.seconds_so_far()
        self._begun = None

    def seconds_so_far(self) -> float:
        """Seconds of training, this process's and those before it."""
        now = time.perf_counter() - self._begun if self._begun is not None else 0.0
        return (self._before + now) if self._begun is not None else (self.fit_seconds or self._before)

    def state_dict(self) -> dict[str, float]:
        return {"seconds": self.seconds_so_far()}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        self._before = state_dict["seconds"]


def device_name(trainer: Trainer) -> str:
    """``cpu``, ``mps``, or the CUDA device's name."""
    device = trainer.strategy.root_device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def start_line(trainer: Trainer, module: LightningModule) -> str:
    """Device, precision, data, parameters and samples in one line."""
    datamodule = trainer.datamodule  # type: ignore[attr-defined]
    parameters = sum(p.numel() for p in module.parameters())
    ranks = f" × {trainer.world_size}" if trainer.world_size > 1 else ""
    parts = [f"{device_name(trainer)}{ranks}", f"precision {trainer.precision}"]
    if (source := getattr(datamodule, "data_source", None)) is not None:
        parts.append(f"data {source}")
    parts.append(f"{parameters:,} parameters")
    if "train" in getattr(datamodule, "splits", {}):
        parts.append(f"{datamodule.num_samples('train'):,} training samples")
    if trainer.global_step:
        parts.append(f"going on from step {trainer.global_step:,}")
    return " | ".join(parts)


def write_config(folder: Path, config: dict[str, Any]) -> None:
    """The resolved configuration: ``--config`` of it repeats the run."""
    text = yaml.safe_dump(config, sort_keys=False)
    write_atomically(f"# {command_line()}\n{text}".encode(), folder / "config.yaml")


def git_state() -> dict[str, Any]:
    """``git_commit`` of the code that runs and ``git_dirty``, whether files differ from it; {} outside a checkout."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        commit = subprocess.run(
            [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True, timeout=5
        ).stdout
        changed = subprocess.run(
            [*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, timeout=5
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return {"git_commit": commit.strip(), "git_dirty": bool(changed.strip())}


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that make a result."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def command_line() -> str:
    """The command as it could be typed again."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    program = f"python -m {module.name}" if module else f"python {sys.argv[0]}"
    return " ".join([program, *map(shlex.quote, sys.argv[1:])])


def write_summary(path: Path, facts: dict[str, Any]) -> None:
    """Write ``summary.json``; what could not be measured (None) is left out."""
    kept = {key: value for key, value in facts.items() if value is not None}
    write_atomically((json.dumps(kept, indent=2) + "\n").encode(), path)


def closing_lines(facts: dict[str, Any], folder: Path, wandb_folder: Path | None, advice: str | None) -> str:
    """What is printed at the end of a run."""
    shown = os.path.relpath(folder)
    lines = [""]
    if "test/accuracy" in facts:
        lines.append(f"test/accuracy {facts['test/accuracy']:.4f}   test/loss {facts['test/loss']:.4f}")
    if facts.get("val/accuracy") is not None:
        lines.append(
            f"val/accuracy  {facts['val/accuracy']:.4f}   (best, epoch {facts['best_epoch'] + 1} of {facts['epochs']})"
        )
    speed = facts.get("throughput/samples_per_sec")
    lines.append(f"trained {facts['fit_seconds']:.1f} s" + (f" at {speed:,.0f} samples/s" if speed else ""))
    if advice:
        lines.append(advice)
    lines += [f"everything in {shown}/", "next:"]
    lines.append(f"  python -m project.test --ckpt_path {shown}/best.ckpt")
    lines.append(f"  python -m project.predict IMAGE.png --ckpt_path {shown}/best.ckpt")
    if wandb_folder is not None:
        lines.append(f"  wandb sync {os.path.relpath(wandb_folder)}   # publish this run's dashboard")
    return "\n".join(lines)
