"""Whose attributes a checkpoint keeps: the module's, its layers' and metrics', the data module's,
the user's callbacks', and those of objects of the user's own classes that these hold.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from enum import Enum
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from torchmetrics import Metric

from project.engine import contract
from project.engine.parts.plain_values import is_users_own
from project.engine.users_callbacks import NOT_THE_USERS, users_callbacks

# What every module has. Other parts, and Lightning itself, see to it.
OF_EVERY_MODULE = {*vars(LightningModule()), *vars(LightningDataModule()), "track_running_stats"}
# A longer list or dictionary holds samples, and no objects that count.
LONGEST = 256
# An object lies at most so deep: a data module, its data set, a transform, a list of transforms.
DEEPEST = 8
CONTAINERS = (list, tuple, deque, dict, OrderedDict, defaultdict)
# What a loader is given beside its data set that may count.
OF_A_LOADER = ("dataset", "collate_fn")
# Where torch's own data sets and samplers are, which hold others.
OF_TORCH = "torch.utils.data."


def owners_of(trainer: Trainer) -> Iterator[tuple[str, Any]]:
    """Everybody whose attributes are kept, each with its name in a checkpoint."""
    yield from _modules_and_callbacks(trainer)
    for path, value in _held_by_them(trainer).items():
        if not isinstance(value, nn.Module | nn.Parameter):
            yield path, value


def hidden_modules_of(trainer: Trainer) -> Iterator[tuple[str, Any]]:
    """Modules and parameters that somebody holds and that are no layers of the trained module, such
    as a teacher in a list, each with its name in a checkpoint.
    """
    for path, value in _held_by_them(trainer).items():
        if isinstance(value, nn.Module | nn.Parameter):
            yield path, value


def _held_by_them(trainer: Trainer) -> dict[str, Any]:
    """The objects and modules that owners hold in their attributes."""
    owners = dict(_modules_and_callbacks(trainer))
    seen = {id(owner) for owner in owners.values()}
    seen |= {id(part) for part in trainer.lightning_module.modules()}
    found: dict[str, Any] = {}
    for path, owner in owners.items():
        for name, value in vars(owner).items():
            if name not in OF_EVERY_MODULE:
                found |= _objects_in(f"{path}.{name}", value, seen, 0)
    every: int = trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]
    # A loader that is made anew has what its epoch gives it.
    if not every:
        found |= _objects_in("loaders", trainer.train_dataloader, seen, 0)
    return found


def _modules_and_callbacks(trainer: Trainer) -> Iterator[tuple[str, Any]]:
    module = trainer.lightning_module
    metrics = [part for part in module.modules() if isinstance(part, Metric)]
    inside_metrics = {id(part) for metric in metrics for part in metric.modules()}
    for name, part in module.named_modules():
        if isinstance(part, Metric) or id(part) not in inside_metrics:
            yield f"module.{name}".rstrip("."), part
    data = trainer.datamodule  # type: ignore[attr-defined]
    if data is not None:
        yield "data", data
    yield from callbacks_by_name(trainer)


def callbacks_by_name(trainer: Trainer) -> Iterator[tuple[str, Any]]:
    """The user's callbacks that may change a training, each with its name in a checkpoint.

    A callback is named by its class and its place among those of its class: another callback that
    is added or left out changes no name. One that inherits from a callback of Lightning's has the
    state that this one saves.
    """
    of_class: Counter[str] = Counter()
    for callback in users_callbacks(trainer):
        kind = type(callback)
        inherited = [each for each in kind.__mro__ if each.__module__.startswith("lightning.")]
        only_watches = isinstance(callback, contract.OnlyWatches) and callback.only_watches
        if inherited == [Callback] and not only_watches:
            yield f"callbacks.{kind.__qualname__}.{of_class[kind.__qualname__]}", callback
            of_class[kind.__qualname__] += 1


def _objects_in(path: str, value: Any, seen: set[int], depth: int) -> dict[str, Any]:
    """The objects that a value is or holds, by their names in a checkpoint."""
    found: dict[str, Any] = {}
    if depth > DEEPEST or id(value) in seen:
        return found
    inside: list[tuple[Any, Any]] = []
    is_of_torch = isinstance(value, Sampler | Dataset) and kind_is_of_torch(value)
    if type(value) in CONTAINERS:
        if len(value) <= LONGEST:
            is_row = isinstance(value, (list, tuple, deque))
            inside = list(enumerate(value) if is_row else value.items())
    elif isinstance(value, DataLoader):
        inside = [(name, getattr(value, name)) for name in OF_A_LOADER]
    elif isinstance(value, nn.Module | nn.Parameter):
        found[path] = value
    elif is_of_torch or is_object(value):
        found[path] = value
        inside = list(vars(value).items())
    seen.add(id(value))
    for name, each in inside:
        found |= _objects_in(f"{path}.{name}", each, seen, depth + 1)
    return found


def kind_is_of_torch(value: Any) -> bool:
    """Whether an object is of one of torch's own data sets and samplers."""
    return type(value).__module__.startswith(OF_TORCH)


def is_object(value: Any) -> bool:
    """Whether a value is an object whose attributes can be kept: of a class of the user's own, and
    neither a module, nor a stream or sampler, whose place in its data belongs to other parts.
    """
    kind = type(value)
    if isinstance(value, type | FunctionType | nn.Module | tuple | Enum | torch.Tensor):
        return False
    if isinstance(value, IterableDataset | Sampler | Trainer | Callback | contract.HasState):
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
