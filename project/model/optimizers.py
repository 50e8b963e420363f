"""Loss, optimizer and learning-rate schedule by name, from plain values that a checkpoint can hold."""

import importlib
import inspect
import math
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from project.errors import UserError, nearest

SHAPES = ("constant", "cosine", "linear", "onecycle")


def named_class(option: str, name: str, home: ModuleType, base: type, also: tuple[str, ...] = ()) -> Any:
    """The class ``name`` of the module ``home``, or the class at the import path ``name`` (``package.module.Class``).

    Args:
        option: The flag, for the error.
        name: As typed.
        home: Where a name without dots is looked up.
        base: What the class must inherit from.
        also: Names that are allowed beside those of ``home``, for the error.

    Raises:
        UserError: There is no such class.
    """
    module_name, _, class_name = str(name).rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name) if module_name else home, class_name, None)
    except (ImportError, TypeError, ValueError) as error:
        raise UserError(f"{option} {name}: {error}.") from None
    if inspect.isclass(found) and issubclass(found, base) and found is not base:
        return found
    known = [*also, *(n for n, c in vars(home).items() if inspect.isclass(c) and issubclass(c, base))]
    allowed = ", ".join([*also, f"a class of {home.__name__}"])
    raise UserError(f"{option} must be {allowed} or an import path, got {name}.{nearest(str(name), known)}")


def make(option: str, cls: Any, first: Any, arguments: dict[str, Any]) -> Any:
    """``cls(*first, **arguments)``; what it refuses becomes a :class:`UserError`."""
    accepted = inspect.signature(cls).parameters
    for name in arguments:
        if name not in accepted:
            raise UserError(f"{option}_args.{name} is no argument of {cls.__name__}.{nearest(name, accepted)}")
    try:
        return cls(*first, **arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{option} {cls.__name__} refuses its arguments {arguments}: {error}.") from None


def make_optimizer(
    name: str,
    module: nn.Module,
    lr: float,
    arguments: dict[str, Any],
    fused: bool,
    undecayed: list[bool] | None = None,
) -> Optimizer:
    """The optimizer for a module's parameters; weight decay spares biases and normalisation (one dimension).

    Args:
        name: A class of ``torch.optim`` or an import path.
        module: Whose parameters to optimize.
        lr: Learning rate.
        arguments: Further arguments of the class. ``weight_decay`` is dropped where the class has none.
        fused: Use the class's fused kernel where it has one: one call instead of several per parameter.
        undecayed: For each of ``module.parameters()``, whether weight decay leaves it out. Default: if it has one
            dimension. Wrapped by FSDP, every parameter has one, so the list must be made before.
    """
    cls = named_class("--model.optimizer", name, torch.optim, Optimizer)
    if cls is torch.optim.SparseAdam:
        raise UserError("--model.optimizer SparseAdam takes sparse gradients only, which layers do not give. Use Adam.")
    accepted = inspect.signature(cls).parameters
    extra = {k: v for k, v in arguments.items() if k in accepted or k != "weight_decay"}
    if fused and "fused" in accepted:
        extra.setdefault("fused", True)
    parameters = list(module.parameters())
    if undecayed is None or len(undecayed) != len(parameters):
        undecayed = [parameter.ndim < 2 for parameter in parameters]
    groups: list[dict[str, Any]] = [{"params": []}, {"params": []}]
    for parameter, spared in zip(parameters, undecayed, strict=True):
        if parameter.requires_grad:
            groups[spared]["params"].append(parameter)
    if "weight_decay" in accepted:
        groups[1]["weight_decay"] = 0.0
    first = [group for group in groups if group["params"]]
    return make("--model.optimizer", cls, [first], {"lr": lr, **extra})


def make_schedule(
    optimizer: Optimizer, name: str, arguments: dict[str, Any], mode: str, warmup_fraction: float, total_steps: int
) -> LRScheduler:
    """One of the four shapes over the run, or a class of ``torch.optim.lr_scheduler``.

    A shape is a function of the share of the run that is done, not one of torch's stateful schedules. So a resumed run
    may have another length or peak rate, and a step past the end is no error.

    Args:
        optimizer: Whose rate to set.
        name: A shape, a class of ``torch.optim.lr_scheduler`` or an import path.
        arguments: Of the class; a shape has none.
        mode: ``min`` or ``max``: what ReduceLROnPlateau's metric should do.
        warmup_fraction: Share of the run in which a shape climbs.
        total_steps: Optimizer steps of the run; below 1 (no end) a shape is constant without warm-up.
    """
    if name in SHAPES:
        return LambdaLR(optimizer, partial(rate_factor, name, warmup_fraction, total_steps))
    cls = named_class("--model.schedule", name, torch.optim.lr_scheduler, LRScheduler, SHAPES)
    if issubclass(cls, ReduceLROnPlateau):
        arguments = {"mode": mode, **arguments}
    return make("--model.schedule", cls, [optimizer], arguments)


def rate_factor(shape: str, warmup_fraction: float, total_steps: int, step: int) -> float:
    """Factor on the peak rate at ``step`` (0 is the first)."""
    if total_steps < 1:
        return 1.0
    done = min(1.0, step / total_steps)
    if done < warmup_fraction:
        climbed = done / warmup_fraction
        if shape == "onecycle":
            return 0.04 + 0.96 * (1 - math.cos(math.pi * climbed)) / 2
        return max(climbed, 1 / max(1, warmup_fraction * total_steps))
    left = (1 - done) / (1 - warmup_fraction)
    if shape == "constant":
        return 1.0
    return left if shape == "linear" else (1 - math.cos(math.pi * left)) / 2
