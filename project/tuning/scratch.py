"""Trainings that leave nothing behind: no file, no line of output, no memory."""

from __future__ import annotations

import contextlib
import gc
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

from project.checkpoints import AtomicCheckpointIO
from project.trainer import build_trainer


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
