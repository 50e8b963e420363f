"""Where a resumed run goes on: its place among the samples, its best checkpoint, and the values typed anew."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from project.callbacks.exact_state import restore_metric_states, restore_random_state
from project.checkpoints import RUN_KEY, damage, read


def find_place(trainer: Trainer, state: dict[str, Any]) -> str | None:
    """Start the sampler where the checkpoint left off, in samples: also for another batch size or rank count.

    Args:
        trainer: At the start of training, restored from the checkpoint.
        state: The checkpoint's ``run.state``.

    Returns:
        What to tell the user where the run cannot go on exactly.
    """
    sampler: Any = getattr(trainer.train_dataloader, "sampler", None)
    if not hasattr(sampler, "resume_at"):
        return None
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    world_size, global_batch_size = len(state["ranks"]), state["global_batch_size"]
    done = sampler.resume_at(trainer.current_epoch, batches.completed * global_batch_size)
    note = None
    if (world_size, global_batch_size) != (trainer.world_size, sampler.global_batch_size):
        note = (
            f"resumed with {trainer.world_size} device(s) and global batch {sampler.global_batch_size} instead of "
            f"{world_size} and {global_batch_size}: it goes on from the right sample, not exactly."
        )
        batches.ready = batches.started = batches.processed = batches.completed = done
    fetcher: Any = trainer.fit_loop._data_fetcher
    iter(fetcher)  # the iterator made before knew nothing of this
    return note


def restore_rank(trainer: Trainer, pl_module: LightningModule, ranks: list[dict[str, Any]]) -> None:
    """Give this rank its generators and unfinished metric sums back, where the job has as many ranks as it had."""
    if len(ranks) != trainer.world_size:
        return
    mine, device = ranks[trainer.global_rank], trainer.strategy.root_device
    restore_metric_states(pl_module, mine["metrics"])
    if mine["device"] == device.type:
        restore_random_state(mine["random"], device)


def apply_typed_hyperparameters(trainer: Trainer, pl_module: LightningModule) -> None:
    """The checkpoint's optimizer state brings its rate and weight decay along; this run's configuration wins."""
    for optimizer, scheduler in zip(trainer.optimizers, trainer.lr_scheduler_configs, strict=False):
        fresh = pl_module.configure_optimizers()
        fresh = fresh["optimizer"] if isinstance(fresh, dict) else fresh
        if not isinstance(fresh, torch.optim.Optimizer) or type(fresh) is not type(optimizer):
            continue
        schedule = scheduler.scheduler
        if not isinstance(schedule, torch.optim.lr_scheduler.LambdaLR):
            continue
        for group, wanted in zip(optimizer.param_groups, fresh.param_groups, strict=True):
            group.update({key: value for key, value in wanted.items() if key not in ("params", "lr")})
            _put_step_counts(optimizer, group)
        schedule.base_lrs = [group["initial_lr"] for group in optimizer.param_groups]
        schedule.last_epoch = trainer.global_step
        for group, base, factor in zip(optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
            group["lr"] = base * factor(trainer.global_step)


def _put_step_counts(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    """Where this kind of optimizer wants its step counts: fused kernels on the device, the others on the host.

    A checkpoint of 16-mixed, which is not fused, may go on in another precision, which is; and the other way round.
    """
    for parameter in group["params"]:
        step = optimizer.state[parameter].get("step") if parameter in optimizer.state else None
        if isinstance(step, torch.Tensor):
            on_device = group.get("fused") or group.get("capturable")
            optimizer.state[parameter]["step"] = step.to(parameter.device if on_device else "cpu")


def set_aside_unusable_best(trainer: Trainer, score: float | None, path: Path, run_id: Any) -> str | None:
    """A ``best.ckpt`` that is damaged, gone or of another run is no best: the file is kept under another name.

    Args:
        trainer: All ranks call this; rank 0 looks.
        score: The best score so far; None where there is none.
        path: Where ``best.ckpt`` should be.
        run_id: The run it should be of.

    Returns:
        What to tell the user, on every rank; None where ``best.ckpt`` is as it should be.
    """
    reason = None
    if score is not None and trainer.is_global_zero:
        reason = damage(path)
        if reason is None and read(path).get(RUN_KEY, {}).get("run_id") != run_id:
            reason = f"{path} belongs to another run"
        if reason and path.exists():
            os.replace(path, path.with_suffix(".ckpt.set-aside"))
    reason = trainer.strategy.broadcast(reason)
    return f"{reason} It was set aside; the best is looked for anew." if reason else None
