"""Optimizers by name, with weight decay where it belongs, fused where that can be."""

import inspect
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.optim import Optimizer

from unbroken.errors import require
from unbroken.tasks.by_name import make, named_class


def make_optimizer(
    name: str,
    arguments: dict[str, Any],
    lr: float,
    weight_decay: float,
    decayed: list[nn.Parameter],
    spared: list[nn.Parameter],
    may_fuse: bool,
) -> Optimizer:
    """An optimizer of ``torch.optim`` by its name, or of elsewhere by its import path.

    Args:
        name: Name or import path of the class.
        arguments: What the user has typed for it. It wins over all that follows.
        lr: Learning rate.
        weight_decay: For ``decayed``, where the class takes one. A class that takes none has none.
        decayed: Parameters with weight decay.
        spared: Parameters without.
        may_fuse: Use the fused implementation, where the class has one.

    Raises:
        UserError: There is no such class, or it does not take these arguments.
    """
    cls = named_class("--model.optimizer", name, torch.optim, Optimizer)
    is_dense = cls is not torch.optim.SparseAdam
    require(is_dense, "--model.optimizer", "take dense gradients", cls.__name__)
    accepted = inspect.signature(cls).parameters
    given: dict[str, Any] = {"lr": lr}
    if "fused" in accepted and may_fuse:
        given["fused"] = True
    with_decay: dict[str, Any] = {"params": decayed}
    without_decay: dict[str, Any] = {"params": spared}
    if "weight_decay" in accepted:
        given["weight_decay"] = weight_decay
        without_decay["weight_decay"] = 0.0
    groups = [group for group in (with_decay, without_decay) if group["params"]]
    return make("--model.optimizer", cls, {**given, **arguments}, groups)


def may_fuse(trainer: Trainer) -> bool:
    """Whether a fused optimizer gives the right result under this Trainer.

    A fused optimizer unscales the gradients by itself. That is too late for clipping and for the
    gradient norm, which would see scaled ones. Lightning's mixed precision refuses to clip for a
    fused optimizer, also where it has no scaler.
    """
    plugin = trainer.precision_plugin
    if getattr(plugin, "scaler", None) is not None:
        return False
    clips = bool(trainer.gradient_clip_val)
    return not (isinstance(plugin, MixedPrecision) and clips)
