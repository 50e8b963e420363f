"""Whose attributes a checkpoint keeps: the module's, its layers' and metrics', the data module's,
and those of objects of the user's own classes that these hold.

Callbacks and data sets are left out: what a callback keeps from one start to the next is what its
``state_dict`` says, as Lightning has it, and workers have their own copies of a data set.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from enum import Enum
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import nn
from torch.utils.data import Dataset, Sampler
from torchmetrics import Metric
from unbroken import contract
from unbroken.parts.plain_values import is_users_own
from unbroken.parts.users_callbacks import NOT_THE_USERS, users_callbacks

# What every module has. Other parts, and Lightning itself, see to it.
OF_EVERY_MODULE = {*vars(LightningModule()), *vars(LightningDataModule()), "track_running_stats"}
# A longer list or dictionary holds samples, and no objects that count.
LONGEST = 256
# An object lies at most so deep: in an object, in a list, in a dictionary of the module's.
DEEPEST = 8
CONTAINERS = (list, tuple, deque, dict, OrderedDict, defaultdict)


def owners_of(trainer: Trainer) -> Iterator[tuple[str, Any]]:
    """Everybody whose attributes are kept, each with its name in a checkpoint."""
    owners = dict(_modules(trainer))
    yield from owners.items()
    for path, value in _held_by(owners, trainer).items():
        if not is_module_or_weight(value):
            yield path, value


def hidden_modules(trainer: Trainer) -> dict[str, Any]:
    """Modules and parameters that the module, the data module or a callback holds and that are no
    layers of the trained module, such as a teacher in a list, each with its name in a checkpoint.
    """
    owners = dict(_modules(trainer))
    for number, callback in enumerate(users_callbacks(trainer)):
        owners[f"callbacks.{type(callback).__qualname__}.{number}"] = callback
    held = _held_by(owners, trainer)
    return {path: value for path, value in held.items() if is_module_or_weight(value)}


def _modules(trainer: Trainer) -> Iterator[tuple[str, Any]]:
    module = trainer.lightning_module
    metrics = [part for part in module.modules() if isinstance(part, Metric)]
    inside_metrics = {id(part) for metric in metrics for part in metric.modules()}
    for name, part in module.named_modules():
        if isinstance(part, Metric) or id(part) not in inside_metrics:
            yield f"module.{name}".rstrip("."), part
    data = trainer.datamodule  # type: ignore[attr-defined]
    if data is not None:
        yield "data", data


def _held_by(owners: dict[str, Any], trainer: Trainer) -> dict[str, Any]:
    """The objects and modules that owners hold in their attributes."""
    seen = {id(owner) for owner in owners.values()}
    seen |= {id(part) for part in trainer.lightning_module.modules()}
    found: dict[str, Any] = {}
    for path, owner in owners.items():
        for name, value in vars(owner).items():
            if name not in OF_EVERY_MODULE:
                found |= _objects_in(f"{path}.{name}", value, seen, 0)
    return found


def _objects_in(path: str, value: Any, seen: set[int], depth: int) -> dict[str, Any]:
    """The objects that a value is or holds, by their names in a checkpoint."""
    found: dict[str, Any] = {}
    if depth > DEEPEST or id(value) in seen:
        return found
    inside: list[tuple[Any, Any]] = []
    if type(value) in CONTAINERS:
        if len(value) <= LONGEST:
            is_row = isinstance(value, (list, tuple, deque))
            inside = list(enumerate(value) if is_row else value.items())
    elif is_module_or_weight(value):
        found[path] = value
    elif is_object(value):
        found[path] = value
        inside = list(vars(value).items())
    seen.add(id(value))
    for name, each in inside:
        found |= _objects_in(f"{path}.{name}", each, seen, depth + 1)
    return found


def is_module_or_weight(value: Any) -> bool:
    """Whether a value is a module, or a parameter that stands alone."""
    return isinstance(value, nn.Module | nn.Parameter)


def is_object(value: Any) -> bool:
    """Whether a value is an object whose attributes can be kept: of a class of the user's own, and
    neither a module, nor a part of the data, whose place belongs to other parts.
    """
    kind = type(value)
    if isinstance(value, type | FunctionType | nn.Module | tuple | Enum | torch.Tensor):
        return False
    if isinstance(value, Dataset | Sampler | Trainer | Callback):
        return False
    if isinstance(value, contract.HasState | contract.KeepsSums):
        return False
    if not hasattr(value, "__dict__") or is_frozen(kind):
        return False
    if kind.__module__.startswith(NOT_THE_USERS):
        # The engine's own, such as a loader that keeps its place.
        return False
    return kind is SimpleNamespace or is_users_own(kind)


def is_frozen(kind: type) -> bool:
    """Whether a class is a dataclass whose objects are replaced, and never changed."""
    return dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
