"""What an exact resume needs and Lightning's checkpoint lacks: generators, metric sums, a clean place in the loops."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from torchmetrics import Metric

from project.engine.checkpoint_files import RUN_KEY, damage, read
from project.model.classifier import ImageClassifier

# Where in the loops a checkpoint is taken: before a batch, between two epochs (or after the last), inside validation.
Place = Literal["batch", "epoch", "validation"]


def random_state(device: torch.device) -> dict[str, Any]:
    """The states of Python's, NumPy's, torch's CPU and the device's generator, as plain values and tensors."""
    name, keys, position, has_gauss, gauss = np.random.get_state()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        # Python's is 625 words; as a tensor they take microseconds to save instead of milliseconds
        "python": _python_state(),
        "numpy": [name, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss],
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    elif device.type == "mps":
        state["mps"] = torch.mps.get_rng_state()
    return state


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Put every generator back to where :func:`random_state` found it."""
    torch.set_rng_state(state["torch"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
    elif device.type == "mps" and "mps" in state:
        torch.mps.set_rng_state(state["mps"])


def metric_states(module: LightningModule) -> dict[str, Any]:
    """This rank's unfinished sums of every torchmetrics metric of a module, and of its window of losses."""
    states: dict[str, Any] = {}
    if isinstance(module, ImageClassifier) and module.window:
        module.count_window()  # first: it adds to a metric
        states["window"] = torch.stack([loss for loss, _, _ in module.window]).cpu()
    for name, metric in module.named_modules():
        if isinstance(metric, Metric):
            values = {key: _on_cpu(getattr(metric, key)) for key in metric._defaults}
            states[name] = {"values": values, "updates": metric._update_count}
    return states


def restore_metric_states(module: LightningModule, states: dict[str, Any]) -> None:
    """Continue the sums that :func:`metric_states` found."""
    for name, metric in module.named_modules():
        if isinstance(metric, Metric) and name in states:
            for key, value in states[name]["values"].items():
                setattr(metric, key, _on_device(value, metric.device))
            metric._update_count = states[name]["updates"]
    if "window" in states and isinstance(module, ImageClassifier):
        nothing = torch.empty(0, device=module.device)
        module.window = [(loss, nothing, nothing) for loss in states["window"].to(module.device)]


def clean_place(loops: dict[str, Any], place: Place) -> None:
    """Rewrite the fit loop's counters so that Lightning resumes exactly here.

    Saved from within a hook, Lightning's counters are between two states, and its restart logic then runs or skips a
    validation, an epoch or a logging step too many. Here everything begun counts as done or as not begun.

    Args:
        loops: The checkpoint's ``loops`` entry; changed in place.
        place: Where the checkpoint is taken.
    """
    fit = loops["fit_loop"]
    batches = fit["epoch_loop.batch_progress"]
    for counters in (batches["total"], batches["current"]):
        _set_all(counters, counters["completed"])
    if place == "epoch":
        for counters in fit["epoch_progress"].values():
            _set_all(counters, counters["completed"])
        optimizer = fit["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
        for progress in (batches, fit["epoch_loop.scheduler_progress"], optimizer["step"], optimizer["zero_grad"]):
            _set_all(progress["current"], 0)
    if place != "validation":
        batches["is_last_batch"] = False
        return
    # "in the middle of validation, nothing of it done": the resumed run starts it over
    validation = fit["epoch_loop.val_loop.batch_progress"]
    _set_all(validation["current"], 0)
    _set_all(validation["total"], 0)
    validation["total"].update(ready=1, started=1)


def _set_all(counters: dict[str, int], value: int) -> None:
    for key in counters:
        counters[key] = value


def _python_state() -> list[Any]:
    version, words, gauss = random.getstate()
    return [version, torch.tensor(words, dtype=torch.int64), gauss]


def _on_cpu(value: Any) -> Any:
    return [_on_cpu(item) for item in value] if isinstance(value, list) else value.detach().cpu().clone()


def _on_device(value: Any, device: torch.device) -> Any:
    return [_on_device(item, device) for item in value] if isinstance(value, list) else value.to(device)


def share_running_statistics(trainer: Trainer, pl_module: LightningModule) -> None:
    """Give all ranks rank 0's buffers before a validation.

    DDP does so before a forward pass, but not after one whose gradients only accumulate, nor for averaged weights: each
    rank would be validated with its own running statistics, and a resumed run with rank 0's.
    """
    if trainer.world_size > 1:
        averaged = [c._average_model for c in trainer.callbacks if isinstance(c, WeightAveraging)]  # type: ignore[attr-defined]
        for module in (pl_module, *(model for model in averaged if model is not None)):
            for buffer in module.buffers():
                torch.distributed.broadcast(buffer, src=0)


def facts_to_keep(trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
    """What a checkpoint says of the training that it was taken from: plain values."""
    datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]
    return {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "metrics": {key: float(value) for key, value in trainer.callback_metrics.items() if "/" in key},
        "data_source": getattr(datamodule, "data_source", None),
        "data": getattr(datamodule, "description", dict)(),
        "precision": trainer.precision,
        "world_size": trainer.world_size,
        "optimizer": pl_module.hparams.get("optimizer"),
    }


# Where a resumed run goes on: its place among the samples, its best checkpoint, and the values typed anew.


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
