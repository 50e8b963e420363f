"""Optimizer steps and log steps, found by public names of Lightning, and how monitors log there."""

from collections.abc import Mapping

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch import Tensor

# Strategies in which a rank has a part of a weight.
SHARDING = (DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy)


def is_optimizer_step(trainer: Trainer, batch_idx: int) -> bool:
    """Whether the optimizer steps at this batch of the epoch: not inside an accumulated step."""
    return (batch_idx + 1) % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch


def is_log_step(trainer: Trainer, batch_idx: int) -> bool:
    """Whether ``on_train_batch_end`` of this batch logs, the same on all ranks.

    That is every ``--log_every_n_steps``-th optimizer step. Lightning's own rule also logs once
    ``should_stop`` is set, which ranks learn at different times, and then one rank would wait for
    the others.
    """
    return is_optimizer_step(trainer, batch_idx) and is_due(trainer, trainer.global_step)


def is_due(trainer: Trainer, steps: int) -> bool:
    """Whether the run's optimizer step of this number, from 1, is logged."""
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    return every > 0 and counted(trainer, steps) % every == 0


def counted(trainer: Trainer, steps: int) -> int:
    """The number that Lightning logs a step under.

    Manual optimization may take several steps in a batch. There Lightning counts the batches.
    """
    if trainer.lightning_module.automatic_optimization:
        return steps
    return trainer.fit_loop.total_batch_idx + 1


def log_values(trainer: Trainer, values: Mapping[str, float | Tensor]) -> None:
    """Log scalars that are the same on every rank, in ``on_train_batch_end`` or
    ``on_train_epoch_end``.

    They go to all loggers at the step that the module's own values have, in one call for each
    monitor, as those of Lightning's monitors do. ``module.log`` takes a tenth of a millisecond for
    a value, and looks at each again at every later step.
    """
    numbers = {name: float(value) for name, value in values.items()}
    for name, number in numbers.items():
        trainer.callback_metrics[name] = torch.tensor(number, dtype=torch.float64)
    step = counted(trainer, trainer.global_step) - 1
    for logger in trainer.loggers:
        logger.log_metrics({**numbers, "epoch": trainer.current_epoch}, step)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
