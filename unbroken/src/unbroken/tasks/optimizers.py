"""Optimizers by name, with weight decay where it belongs, fused where that can be."""

import inspect
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.optim import Optimizer
from unbroken.errors import require
from unbroken.tasks.by_name import make, named_class


def make_optimizer(
    module: LightningModule,
    name: str,
    lr: float,
    weight_decay: float,
    decays: Sequence[bool],
    arguments: dict[str, Any],
) -> Optimizer:
    """An optimizer of ``torch.optim`` by its name, or of elsewhere by its import path.

    It is fused where the class has a fused form that gives the right result under this Trainer.

    Args:
        module: Whose parameters are trained, all that need a gradient. The precision and clipping
            of its Trainer say whether the optimizer may be fused.
        name: Name or import path of the class.
        lr: Learning rate.
        weight_decay: Where the class takes one. A class that takes none has none.
        decays: What :func:`which_decay` has said of the module's parameters.
        arguments: Further ones of the class. They win over all that stands before.

    Raises:
        UserError: There is no such class, or it does not take these arguments.
    """
    cls = named_class("--model.optimizer", name, torch.optim, Optimizer)
    is_dense = cls is not torch.optim.SparseAdam
    require(is_dense, "--model.optimizer", "take dense gradients", cls.__name__)
    accepted = inspect.signature(cls).parameters
    given: dict[str, Any] = {"lr": lr}
    if "fused" in accepted and may_fuse(module.trainer):
        given["fused"] = True
    with_decay: dict[str, Any] = {"params": []}
    without_decay: dict[str, Any] = {"params": []}
    for parameter, decays_too in zip(module.parameters(), decays, strict=True):
        group = with_decay if decays_too else without_decay
        if parameter.requires_grad:
            group["params"].append(parameter)
    if "weight_decay" in accepted:
        given["weight_decay"] = weight_decay
        without_decay["weight_decay"] = 0.0
    groups = [group for group in (with_decay, without_decay) if group["params"]]
    return make("--model.optimizer", cls, {**given, **arguments}, groups)


def which_decay(parameters: Iterable[nn.Parameter]) -> list[bool]:
    """For each parameter, whether it has weight decay: all but biases and norms, which have less
    than two dimensions.

    Ask before training: a strategy such as FSDP makes every parameter flat.
    """
    return [parameter.ndim > 1 for parameter in parameters]


def check_rates(
    lr: float, weight_decay: float, warmup_fraction: float, label_smoothing: float = 0.0
) -> None:
    """A UserError for a rate or share that cannot be."""
    require(0 < lr < math.inf, "--model.lr", "be above 0", lr)
    require(0 <= weight_decay < math.inf, "--model.weight_decay", "be at least 0", weight_decay)
    shares = {"warmup_fraction": warmup_fraction, "label_smoothing": label_smoothing}
    for name, share in shares.items():
        require(0 <= share < 1, f"--model.{name}", "be at least 0 and below 1", share)


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
