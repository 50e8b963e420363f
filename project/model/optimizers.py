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
    """The subclass of ``base`` with this name in the module ``home``, or with this import path.

    ``option`` and ``also`` are for the error: the flag, and what it may be beside a class.
    """
    module_name, _, class_name = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name) if module_name else home, class_name, None)
    except (ImportError, TypeError, ValueError) as error:
        raise UserError(f"{option} {name}: {error}.") from None
    if inspect.isclass(found) and issubclass(found, base) and found is not base:
        return found
    known = [*also, *(n for n, c in vars(home).items() if inspect.isclass(c) and issubclass(c, base))]
    allowed = ", ".join([*also, f"a class of {home.__name__}"])
    raise UserError(f"{option} must be {allowed} or an import path, got {name}.{nearest(name, known)}")


def make(option: str, cls: Any, first: list[Any], arguments: dict[str, Any]) -> Any:
    """``cls(*first, **arguments)``, its refusals as a :class:`UserError`."""
    accepted = inspect.signature(cls).parameters
    for name in arguments:
        if name not in accepted:
            raise UserError(f"{option}_args.{name} is no argument of {cls.__name__}.{nearest(name, accepted)}")
    try:
        return cls(*first, **arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{option} {cls.__name__} refuses its arguments {arguments}: {error}.") from None


def make_optimizer(
    name: str, module: nn.Module, lr: float, arguments: dict[str, Any], fused: bool, undecayed: list[bool] | None = None
) -> Optimizer:
    """The optimizer for a module's parameters; weight decay spares biases and normalisation.

    ``weight_decay`` is dropped where the class has none; ``fused`` takes the class's fused kernel where it has one: one
    call instead of several per parameter. ``undecayed`` says for each of ``module.parameters()`` whether weight decay
    spares it; by default those of one dimension, which every parameter has once FSDP has wrapped the module.
    """
    cls = named_class("--model.optimizer", name, torch.optim, Optimizer)
    if cls is torch.optim.SparseAdam:
        raise UserError("--model.optimizer SparseAdam takes sparse gradients only, which layers do not give. Use Adam.")
    accepted = inspect.signature(cls).parameters
    arguments = {"lr": lr, **({"fused": True} if fused and "fused" in accepted else {}), **arguments}
    no_decay = {"weight_decay": 0.0} if "weight_decay" in accepted else {}
    if not no_decay:
        arguments.pop("weight_decay", None)
    parameters = list(module.parameters())
    if undecayed is None or len(undecayed) != len(parameters):
        undecayed = [parameter.ndim < 2 for parameter in parameters]
    trained = [(p, spared) for p, spared in zip(parameters, undecayed, strict=True) if p.requires_grad]
    decayed, rest = ([p for p, spared in trained if spared is wanted] for wanted in (False, True))
    groups = [group for group in ({"params": decayed}, {"params": rest, **no_decay}) if group["params"]]
    return make("--model.optimizer", cls, [groups], arguments)


def make_schedule(
    optimizer: Optimizer, name: str, arguments: dict[str, Any], mode: str, warmup_fraction: float, total_steps: float
) -> LRScheduler:
    """One of the four shapes over the run, or a class of ``torch.optim.lr_scheduler``, which alone has ``arguments``.

    A shape is a function of the share of the run that is done, not one of torch's stateful schedules: a resumed run may
    have another length or peak than the one that was saved, and a step past the end is no error. ``mode`` (``min``,
    ``max``) is what ReduceLROnPlateau's metric should do.
    """
    if name in SHAPES:
        return LambdaLR(optimizer, partial(rate_factor, name, warmup_fraction, total_steps))
    cls = named_class("--model.schedule", name, torch.optim.lr_scheduler, LRScheduler, SHAPES)
    if issubclass(cls, ReduceLROnPlateau):
        arguments = {"mode": mode, **arguments}
    return make("--model.schedule", cls, [optimizer], arguments)


def rate_factor(shape: str, warmup_fraction: float, total_steps: float, step: int) -> float:
    """Factor on the peak rate at ``step`` (0 is the first); 1 throughout a run without end."""
    if not 1 <= total_steps < math.inf:
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
