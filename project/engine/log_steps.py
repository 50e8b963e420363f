"""Optimizer steps and log steps, found by public names of Lightning, and how monitors log there."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch import Tensor

SHARDING = (DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy)  # strategies in which a rank has a part of a weight


def is_optimizer_step(trainer: Trainer, batch_idx: int) -> bool:
    """Whether the optimizer steps at this batch of the epoch: not in the midst of ``--accumulate_grad_batches``."""
    return (batch_idx + 1) % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch


def is_log_step(trainer: Trainer, batch_idx: int) -> bool:
    """Whether ``on_train_batch_end`` of this batch logs: every ``--log_every_n_steps``-th optimizer step, on all ranks.

    Lightning's own rule also logs once ``should_stop`` is set, which ranks learn at different times and would wait.
    """
    return is_optimizer_step(trainer, batch_idx) and _is_due(trainer, trainer.global_step)


def logs_next_step(trainer: Trainer) -> bool:
    """:func:`is_log_step` for the optimizer step that comes next: for use in ``on_before_optimizer_step``."""
    return _is_due(trainer, trainer.global_step + 1)


def _is_due(trainer: Trainer, steps: int) -> bool:
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    if not trainer.lightning_module.automatic_optimization:
        # manual optimization may take several steps in a batch; Lightning then counts batches
        steps = trainer.fit_loop.total_batch_idx + 1
    return every > 0 and steps % every == 0


def log_values(module: LightningModule, values: Mapping[str, float | Tensor], epoch_end: bool = False) -> None:
    """Log scalars that are the same on every rank, at a log step or in ``on_train_epoch_end``, with the module's own.

    Numbers go as float64 tensors on the CPU: Lightning would move plain ones to the device and round them to float32.
    """
    tensors = {
        name: value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
        for name, value in values.items()
    }
    module.log_dict(tensors, on_step=not epoch_end, on_epoch=epoch_end, batch_size=1)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
