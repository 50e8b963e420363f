"""When and how the monitors log: on Lightning's log steps, straight to the loggers, as Lightning's own monitors do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

# What Lightning calls at every training or evaluation step. Each costs two microseconds a step, overridden or not.
STEP_HOOKS = (
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_test_batch_start",
    "on_test_batch_end",
)


def is_log_step(trainer: Trainer) -> bool:
    """Whether the optimizer step under way, or just done, is one of every ``--log_every_n_steps``. Same on all ranks.

    Lightning's ``should_update_logs`` is also true once ``should_stop`` is set, which ranks may learn at different
    times; what is logged here may wait for the other ranks, so it must not depend on that.
    """
    stepped: int = trainer.fit_loop.epoch_loop._batches_that_stepped
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    return every > 0 and (stepped + 1) % every == 0 and not trainer.fit_loop._should_accumulate()


def row_step(trainer: Trainer, epoch_end: bool = False) -> int:
    """The step that Lightning's own metrics are logged at; at an epoch's end, that of its last step."""
    stepped: int = trainer.fit_loop.epoch_loop._batches_that_stepped
    return stepped - 1 if epoch_end else stepped


def log_metrics(trainer: Trainer, metrics: Mapping[str, float], epoch_end: bool = False) -> None:
    """Send scalars to every logger, at :func:`row_step`."""
    for logger in trainer.loggers:
        logger.log_metrics(dict(metrics), step=row_step(trainer, epoch_end))


def gather_over_ranks(trainer: Trainer, values: Sequence[float]) -> list[list[float]]:
    """``values`` of every rank, in rank order. Every rank must call it, with equally many values."""
    if trainer.world_size == 1:
        return [list(values)]
    mine = torch.tensor(values, dtype=torch.float64, device=trainer.strategy.root_device)
    gathered: list[list[float]] = trainer.strategy.all_gather(mine).tolist()  # (ranks, values)
    return gathered


def is_default(listener: Callback | LightningModule, hook: str) -> bool:
    """Whether nobody has written a hook of this name, for the class or for this one object.

    Lightning's ``is_overridden`` looks through ``functools.wraps``, and so misses a wrapper around the default.
    """
    base = Callback if isinstance(listener, Callback) else LightningModule
    return hook not in vars(listener) and getattr(type(listener), hook) is getattr(base, hook)


def skip_idle_hooks(callback: Callback) -> None:
    """Take the per-step hooks that a callback does not override off Lightning's call list.

    Lightning calls whatever is callable under a hook's name, inside a profiler section: about 14 microseconds a
    step for a callback without any code, a hundredth of a small network's step. It passes over None.
    """
    for name in STEP_HOOKS:
        if is_default(callback, name):
            setattr(callback, name, None)
