"""What an exact resume needs and Lightning's checkpoint lacks: generators, unfinished sums, loop counters."""

import copy
import random
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.optim.lr_scheduler import LambdaLR

from project.engine import lightning_internals
from project.engine.exact_loading import ExactLoading

# Where in the loops a checkpoint is taken: before a batch, between two epochs (or after the last), inside validation.
Place = Literal["batch", "epoch", "validation"]
KERNELS = (
    "fused",
    "foreach",
    "capturable",
    "differentiable",
)  # of a parameter group; they change no result


def random_state(device: torch.device) -> dict[str, Any]:
    """The states of Python's, NumPy's, torch's CPU and the device's generator, as plain values and tensors."""
    (version, words, gauss), (name, keys, *rest) = random.getstate(), np.random.get_state()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [
            version,
            torch.tensor(words, dtype=torch.int64),
            gauss,
        ],  # a tensor is saved in µs, a list in ms
        "numpy": [name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
    }
    if device.type in ("cuda", "mps"):
        state[device.type] = torch.get_device_module(device).get_rng_state()
    return state


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore every generator to the state that :func:`random_state` returned."""
    torch.set_rng_state(state["torch"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    if device.type in state:
        torch.get_device_module(device).set_rng_state(state[device.type])


def note(trainer: Trainer, loading: ExactLoading, place: Place) -> dict[str, Any]:
    """What changes first: copies of generators, loaders and the sums of metrics, as this rank has them now."""
    module, batches = trainer.lightning_module, trainer.fit_loop.epoch_loop.batch_progress
    own = getattr(module, "metric_state", None)
    sums = own() if callable(own) else {}  # first: it may add uncounted batches to the metrics
    epoch_ends = place == "epoch" or (
        place == "validation" and batches.is_last_batch
    )  # the next epoch's start counts
    noted = {
        "random": random_state(trainer.strategy.root_device),
        "loaders": [
            loader.state_after(batches.current.completed, epoch_ends) for loader in loading.training
        ],
        "metrics": lightning_internals.metric_states(module),
        "validated": {**lightning_internals.validated_batches(trainer)},
        "module": sums,
    }
    return copy.deepcopy(noted)  # sums are changed in place


def gather(trainer: Trainer, place: Place) -> dict[str, Any]:
    """The rest of this rank's part of a checkpoint: plain values and tensors on the CPU."""
    module, done = (
        trainer.lightning_module,
        trainer.fit_loop.epoch_loop.batch_progress.current.completed,
    )
    inside_step = done % trainer.accumulate_grad_batches and done < trainer.num_training_batches
    inside_step = inside_step or not module.automatic_optimization  # whose steps nobody knows
    gradients = {
        name: p.grad.cpu()
        for name, p in module.named_parameters()
        if inside_step and p.grad is not None
    }
    return {
        "logged": lightning_internals.training_sums(trainer),
        "gradients": gradients,  # between the batches of one step
        "frozen": [
            name for name, parameter in module.named_parameters() if not parameter.requires_grad
        ],
        "eval": lightning_internals.parts_in_eval_mode(
            trainer, within_validation=place == "validation"
        ),
        "untracked": [
            n
            for n, part in module.named_modules()
            if not getattr(part, "track_running_stats", True)
        ],
        "device": trainer.strategy.root_device.type,
    }


def restore(trainer: Trainer, state: dict[str, Any]) -> None:
    """Restore a rank's part at the start of training. What an older checkpoint lacks stays as it is."""
    state, module = gather(trainer, "epoch") | state, trainer.lightning_module
    lightning_internals.validated_batches(trainer).update(state["validated"])
    lightning_internals.restore_metric_states(module, state["metrics"])
    if state["module"]:
        module.load_metric_state(state["module"])  # type: ignore[operator]
    lightning_internals.restore_training_sums(trainer, state["logged"])
    for name, gradient in state["gradients"].items():
        module.get_parameter(name).grad = gradient.to(trainer.strategy.root_device)
    for (
        name,
        parameter,
    ) in module.named_parameters():  # a callback or hook may have thawed them in an earlier epoch
        parameter.requires_grad = name not in state["frozen"]
    for name, part in module.named_modules():
        part.training = name not in state["eval"]
        if hasattr(part, "track_running_stats"):
            part.track_running_stats = name not in state["untracked"]
    if state["device"] == trainer.strategy.root_device.type:
        restore_random_state(state["random"], trainer.strategy.root_device)


def settle_place(trainer: Trainer, loading: ExactLoading, state: dict[str, Any]) -> None:
    """Where a run had other ranks or batches, make Lightning's count of batches agree with the loader's, and say so."""
    before = len(state["ranks"]), state["samples_per_batch"]
    now = trainer.world_size, loading.samples_per_batch
    if all(before) and all(now) and before != now:
        batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
        done = loading.training[0].start_batch  # type: ignore[attr-defined]
        batches.ready = batches.started = batches.processed = batches.completed = done
        what = f"resumed with {now[0]} device(s) and global batch {now[1]} instead of {before[0]} and {before[1]}"
        loading.notes.append(f"{what}: it goes on from the right sample, not exactly.")


def clean_place(loops: dict[str, Any], place: Place, validated: bool) -> None:
    """Rewrite the fit loop's counters, in place, so that all is done or not begun. ``validated``: the last step was.
    Inside a hook some counters are advanced, and Lightning's restart repeats or skips a validation, epoch or log step.
    """
    fit = loops["fit_loop"]
    fit.pop("combined_loader", None)  # its loaders may be a batch ahead; see note
    batches = fit["epoch_loop.batch_progress"]
    validation, epochs = fit["epoch_loop.val_loop.batch_progress"], fit["epoch_progress"]
    begun = [
        batches["total"],
        batches["current"],
        validation["total"],
        *(epochs.values() if place == "epoch" else ()),
    ]
    for counters in begun:
        counters.update(dict.fromkeys(counters, counters["completed"]))
    batches["is_last_batch"] &= place == "validation"
    if (
        place == "batch" and validated
    ):  # Lightning's restart finds a validation due, ends this batch again, counts it
        fit["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1
    if place == "validation":  # it has begun, with no batch done: the resumed run starts it again
        before = validation["total"]["completed"] - validation["current"]["completed"]
        validation["current"].update(dict.fromkeys(validation["current"], 0))
        validation["total"].update(
            ready=before + 1, started=before + 1, processed=before, completed=before
        )


def share_running_statistics(trainer: Trainer, module: LightningModule, cpu_group: Any) -> None:
    """Give all ranks rank 0's buffers before a validation, as a resumed run has them. DDP does so before a forward, but
    not while gradients accumulate, and not for averaged weights. NCCL takes nothing from the CPU: ``cpu_group`` does.
    """
    if trainer.world_size > 1:
        for part in (module, *lightning_internals.averaged_models(trainer)):
            for buffer in part.buffers():
                torch.distributed.broadcast(
                    buffer, src=0, group=cpu_group if buffer.device.type == "cpu" else None
                )


def configured(trainer: Trainer) -> dict[str, Any]:
    """What optimizers and schedules start with: parameter groups without parameters, and states."""
    groups = [optimizer.param_groups for optimizer in trainer.optimizers]
    return {
        "groups": [
            [{k: v for k, v in group.items() if k != "params"} for group in each] for each in groups
        ],
        "schedules": [
            copy.deepcopy(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs
        ],
    }


def apply_typed_hyperparameters(
    trainer: Trainer, fresh: dict[str, Any], before: dict[str, Any], changed: bool
) -> None:
    """Let typed hyperparameters win over those in the checkpoint's states of optimizers and schedules. What is typed
    differs between ``before``, :func:`configured` in the checkpoint's run, and ``fresh``, now; nothing is where the
    run is not ``changed``. Kernels are always chosen anew: a checkpoint of 16-mixed is not fused, another may be.
    """
    was = (changed and before["groups"]) or fresh["groups"]
    for optimizer, *groups in zip(trainer.optimizers, fresh["groups"], was, strict=False):
        for group, wanted, earlier in zip(optimizer.param_groups, *groups, strict=False):
            group.update(
                {
                    k: v
                    for k, v in wanted.items()
                    if k in KERNELS or (k != "lr" and v != earlier.get(k))
                }
            )
            if _first_rate(wanted) != _first_rate(earlier):
                group["lr"] *= _first_rate(wanted) / (_first_rate(earlier) or 1.0)
            on_device = group.get("fused") or group.get("capturable")
            for parameter in group["params"]:
                state: dict[str, Any] = optimizer.state.get(parameter, {})
                if isinstance(
                    step := state.get("step"), torch.Tensor
                ):  # fused kernels need it on the device
                    state["step"] = step.to(parameter.device if on_device else "cpu")
    schedules = [config.scheduler for config in trainer.lr_scheduler_configs] if changed else []
    for scheduler, wanted, earlier in zip(
        schedules, fresh["schedules"], before["schedules"], strict=False
    ):
        scheduler.load_state_dict(_with_changes(scheduler.state_dict(), wanted, earlier))
    for scheduler in schedules:
        if isinstance(
            scheduler, LambdaLR
        ):  # a function of the step: the run's length may have changed
            for group, factor in zip(
                scheduler.optimizer.param_groups, scheduler.lr_lambdas, strict=True
            ):
                group["lr"] = _first_rate(group) * factor(scheduler.last_epoch)


def _with_changes(now: Any, wanted: Any, was: Any) -> Any:
    """``now``, with what is ``wanted`` where that differs from what ``was`` wanted."""
    if type(now) is type(wanted) is type(was) is dict:
        return now | {key: _with_changes(now.get(key), wanted[key], was.get(key)) for key in wanted}
    if type(now) is type(wanted) is type(was) is list and len(now) == len(wanted) == len(was):
        return [_with_changes(*each) for each in zip(now, wanted, was, strict=True)]
    return now if wanted == was else wanted


def _first_rate(group: dict[str, Any]) -> float:
    """The learning rate that a parameter group was given, before any schedule; there are optimizers without one."""
    return group.get("initial_lr", group.get("lr", 1.0))
