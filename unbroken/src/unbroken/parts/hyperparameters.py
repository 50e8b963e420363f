"""Hyperparameters of optimizers and schedules: what the user has changed wins over a checkpoint."""

import copy
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from unbroken.parts.declared import plain_state
from unbroken.parts.part import Part

# Of a parameter group: they choose a kernel and change no result.
KERNELS = ("fused", "foreach", "capturable", "differentiable")


class StartingHyperparameters(Part):
    """What optimizers and schedules start with: parameter groups without parameters, and states.

    A resumed run makes them anew and then loads the checkpoint's states over them. What differs
    between the start then and the start now is what the user has changed, and that wins over the
    checkpoint. What optimizers there are at the save is kept as well (:func:`kinds_of`).
    """

    name = "start"
    of_each_rank = False
    changes_in_validation = False

    def __init__(self) -> None:
        self.now: dict[str, Any] = {}

    def begin(self, trainer: Trainer) -> None:
        """Note what has been made, before a checkpoint's states are loaded over it."""
        groups = [plain_groups(optimizer.param_groups) for optimizer in trainer.optimizers]
        schedules = [plain_state(config.scheduler) for config in trainer.lr_scheduler_configs]
        self.now = copy.deepcopy({"groups": groups, "schedules": schedules})

    def take(self, trainer: Trainer) -> dict[str, Any]:
        return self.now | {"optimizers": kinds_of(trainer)}

    def give_back(self, trainer: Trainer, value: dict[str, Any]) -> None:
        """They are applied earlier, as training starts. See :func:`apply_changes`."""


def kinds_of(trainer: Trainer) -> list[list[Any]]:
    """The class of each optimizer, and the names of its options."""
    found: list[list[Any]] = []
    for optimizer in trainer.optimizers:
        kind = type(optimizer)
        # Lightning's stand-in, where configure_optimizers returns None, has no group.
        first_group = next(iter(optimizer.param_groups), {})
        options = first_group.keys() - {"params", "initial_lr"}
        found.append([f"{kind.__module__}.{kind.__qualname__}", sorted(options)])
    return found


def plain_groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The parameter groups of an optimizer without their parameters."""
    plain = [dict(group) for group in groups]
    for group in plain:
        del group["params"]
    return plain


def apply_changes(
    trainer: Trainer, now: dict[str, Any], before: dict[str, Any] | None, changed: bool
) -> None:
    """Let changed hyperparameters win over those that a checkpoint's states have brought.

    Args:
        trainer: Its optimizers and schedules have the checkpoint's states.
        now: What they started with in this process.
        before: What they started with in the checkpoint's run. None: the optimizer is another one
            now.
        changed: Whether the user has changed a setting. If not, nothing but the choice of kernels
            is applied.
    """
    earlier_groups = now["groups"]
    if changed and before is not None and before["groups"]:
        earlier_groups = before["groups"]
    pairs = zip(trainer.optimizers, now["groups"], earlier_groups, strict=False)
    for optimizer, wanted, earlier in pairs:
        apply_to_optimizer(optimizer, wanted, earlier)
    if not changed:
        return
    schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
    if before is not None:
        for schedule, wanted, earlier in zip(
            schedules, now["schedules"], before["schedules"], strict=False
        ):
            if isinstance(wanted, dict) and isinstance(earlier, dict):
                state = with_changes(schedule.state_dict(), wanted, earlier)
                schedule.load_state_dict(state)
    for schedule in schedules:
        if isinstance(schedule, LambdaLR):
            apply_function_of_the_step(schedule)


def apply_to_optimizer(
    optimizer: Optimizer, wanted: list[dict[str, Any]], earlier: list[dict[str, Any]]
) -> None:
    """Change the parameter groups of one optimizer."""
    for group, mine, theirs in zip(optimizer.param_groups, wanted, earlier, strict=False):
        for name, value in mine.items():
            # Kernels are always chosen anew: a checkpoint of 16-mixed is not fused, another may be.
            is_changed = name != "lr" and value != theirs.get(name)
            if name in KERNELS or is_changed:
                group[name] = value
        if first_rate(mine) != first_rate(theirs):
            # The schedule has scaled the rate since the start, so a change scales it as well.
            group["lr"] *= first_rate(mine) / (first_rate(theirs) or 1.0)
        put_steps_where_kernels_want_them(optimizer, group)


def put_steps_where_kernels_want_them(optimizer: Optimizer, group: dict[str, Any]) -> None:
    """Fused and capturable kernels need the count of steps on the device, the others on the CPU."""
    on_device = group.get("fused") or group.get("capturable")
    for parameter in group["params"]:
        state: dict[str, Any] = optimizer.state.get(parameter, {})
        step = state.get("step")
        if isinstance(step, torch.Tensor):
            state["step"] = step.to(parameter.device if on_device else "cpu")


def apply_function_of_the_step(schedule: LambdaLR) -> None:
    """Set the rates that a function of the step gives now: the run's length may have changed."""
    groups = schedule.optimizer.param_groups
    for group, factor in zip(groups, schedule.lr_lambdas, strict=True):
        group["lr"] = first_rate(group) * factor(schedule.last_epoch)


def with_changes(current: Any, wanted: Any, earlier: Any) -> Any:
    """The current state, but each value that the user has changed since the checkpoint is the new
    one.
    """
    if type(current) is type(wanted) is type(earlier) is dict:
        changed = dict(current)
        for key in wanted:
            changed[key] = with_changes(current.get(key), wanted[key], earlier.get(key))
        return changed
    are_lists = type(current) is type(wanted) is type(earlier) is list
    if are_lists and len(current) == len(wanted) == len(earlier):
        triples = zip(current, wanted, earlier, strict=True)
        return [with_changes(*triple) for triple in triples]
    return current if wanted == earlier else wanted


def first_rate(group: dict[str, Any]) -> float:
    """The learning rate that a group was given, before any schedule.

    There are optimizers without one.
    """
    return group.get("initial_lr", group.get("lr", 1.0))
