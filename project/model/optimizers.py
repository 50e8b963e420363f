"""Optimizer by name and learning-rate schedule by shape, both from plain values that a checkpoint can hold."""

import importlib
import inspect
import math
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from project.errors import UserError, nearest

Schedule = Literal["constant", "cosine", "linear", "onecycle"]


def optimizer_class(name: str) -> type[Optimizer]:
    """The class ``name`` of ``torch.optim``, or the class at the import path ``name`` (``package.module.Class``)."""
    module_name, _, class_name = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name or "torch.optim"), class_name, None)
    except ImportError as error:
        raise UserError(f"--model.optimizer {name}: {error}.") from None
    if not (inspect.isclass(found) and issubclass(found, Optimizer)):
        known = [n for n, c in vars(torch.optim).items() if inspect.isclass(c) and issubclass(c, Optimizer)]
        raise UserError(
            f"--model.optimizer must be a class of torch.optim or an import path, got {name}.{nearest(name, known)}"
        )
    return found


def make_optimizer(
    name: str,
    network: nn.Module,
    lr: float,
    arguments: dict[str, Any],
    fused: bool,
    undecayed: set[str] | None = None,
) -> Optimizer:
    """The optimizer for a network's parameters; weight decay spares biases and normalisation (one dimension).

    Args:
        name: As for :func:`optimizer_class`.
        network: Whose parameters to optimize.
        lr: Learning rate.
        arguments: Further arguments of the class.
        fused: Use the class's fused kernel where it has one: one call instead of several per parameter.
        undecayed: Names of the parameters that weight decay spares; default: those of one dimension, which is every
            parameter once FSDP has wrapped the network.
    """
    cls = optimizer_class(name)
    accepted = inspect.signature(cls).parameters
    for argument in arguments:
        if argument not in accepted and argument != "weight_decay":
            raise UserError(f"--model.optimizer_args.{argument} is no argument of {name}.{nearest(argument, accepted)}")
    extra = {k: v for k, v in arguments.items() if k in accepted}
    if fused and "fused" in accepted:
        extra.setdefault("fused", True)
    groups: list[dict[str, Any]] = [{"params": []}, {"params": []}]
    for path, parameter in network.named_parameters():
        if parameter.requires_grad:
            spared = parameter.ndim < 2 if undecayed is None else path.replace("_fsdp_wrapped_module.", "") in undecayed
            groups[spared]["params"].append(parameter)
    if "weight_decay" in accepted:
        groups[1]["weight_decay"] = 0.0
    try:
        return cls([group for group in groups if group["params"]], lr=lr, **extra)  # type: ignore[call-arg]
    except (TypeError, ValueError) as error:
        raise UserError(f"--model.optimizer {name} refuses its arguments {extra}: {error}.") from None


def make_schedule(optimizer: Optimizer, shape: Schedule, warmup_fraction: float, total_steps: int) -> LambdaLR:
    """Learning rate over the run as a function of the share of it that is done.

    A function, not one of torch's stateful schedules: a resumed run may have another length or peak than the one that
    was saved, and a step past the end is no error.

    Args:
        optimizer: Whose rate to set, once per optimizer step.
        shape: See :class:`project.model.ImageClassifier`.
        warmup_fraction: Share of the run in which the rate climbs.
        total_steps: Optimizer steps of the run; below 1 (no end): constant after no warm-up.
    """
    return LambdaLR(optimizer, partial(rate_factor, shape, warmup_fraction, total_steps))


def rate_factor(shape: Schedule, warmup_fraction: float, total_steps: int, step: int) -> float:
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
