"""Every value that a user's objects hold, each by the name under which its user finds it.

Attributes, entries of lists and dictionaries, what functions keep in their closures, attributes of
classes, global variables that their methods use, generators of random numbers, iterators. Nothing
is asked whether it is part of a checkpoint.
"""

from __future__ import annotations

import functools
import inspect
import random
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torchmetrics import Metric
from unbroken.lightning_internals import version_of
from unbroken.verifying.digests import Entry, of_array, of_pickle, of_plain, of_tensor, sampled
from unbroken.verifying.facts import BARE, Facts, facts_of_object, form_of

# Values that a run ends with, however much its objects hold.
MOST_VALUES = 20_000
DEEPEST = 12
# Entries of a list or dictionary that are looked at one by one; of a longer one the last ones.
LONGEST = 256
PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, range, slice, Enum, PurePath),
    *(torch.dtype, torch.device, torch.Size, np.dtype, np.generic),
)
ROWS = (list, tuple, deque)
SETS = (set, frozenset)
# Objects of these packages belong to the machinery, or are no values.
MACHINERY = (
    *("lightning.", "lightning_", "unbroken.", "logging", "threading", "_thread", "weakref"),
    *("multiprocessing", "concurrent", "asyncio", "io", "_io", "tqdm", "socket", "subprocess"),
    *("torch._", "torch.distributed", "torch.cuda", "torch.autograd", "torch.fx", "torch.jit"),
    *("torch.utils.hooks", "torch.backends", "importlib", "_frozen_importlib", "argparse"),
)
# Packages whose classes keep no values for a user.
LIBRARIES = ("torch", "lightning", "torchmetrics", "unbroken", "numpy", "typing", "collections")
# What every module and optimizer has.
OF_EVERY_MODULE = set(vars(nn.Module()))
OF_LIGHTNINGS = {*vars(LightningModule()), *vars(LightningDataModule())} - {"training"}
OF_EVERY_OPTIMIZER = {*vars(SGD([nn.Parameter(torch.zeros(1))], lr=1.0)), "step", "_opt_called"}


class HeldValues:
    """Looks through objects again and again, and remembers the digests of large tensors.

    Attributes:
        opaque: Name → class of objects that cannot be looked into.
        facts: Name → what matters to whoever wants to keep the value; of bare ones nothing.
    """

    def __init__(self) -> None:
        self.opaque: dict[str, str] = {}
        self.facts: dict[str, Facts] = {}
        self._large: dict[str, tuple[Any, Entry]] = {}
        self._found: dict[str, Entry] = {}
        # Id → object: an id is another object's as soon as its own is gone.
        self._seen: dict[int, Any] = {}
        # Id → the name under which the object was met first
        self._names: dict[int, str] = {}

    def of(self, roots: Mapping[str, Any], known: list[Any]) -> dict[str, Entry]:
        """The entry of each value that the roots hold, by its name.

        Args:
            roots: Objects by their names.
            known: Objects that are compared by themselves, such as the trained weights.
        """
        self._found = {}
        self._seen = {id(each): each for each in known}
        self._names = {}
        self.opaque = {}
        self.facts = {}
        for name, root in roots.items():
            self._visit(name, root, 0)
        return self._found

    def _visit(self, path: str, value: Any, depth: int) -> None:
        if depth > DEEPEST or len(self._found) >= MOST_VALUES:
            return
        if isinstance(value, PLAIN):
            self._found[path] = of_plain(value)
            self._note_form(path, value)
            return
        if isinstance(value, ModuleType | BuiltinFunctionType):
            return
        if id(value) in self._seen:
            # A resumed run may have two objects in the place of one that has two names.
            first = self._names.get(id(value), "")
            if first in self._found:
                self._found[path] = self._found[first]
            if first in self.facts:
                self.facts[path] = self.facts[first]
            return
        self._seen[id(value)] = value
        self._names[id(value)] = path
        try:
            self._look_into(path, value, depth)
        except Exception:  # an object of any class may answer in its own way
            self.opaque[path] = type(value).__name__

    def _look_into(self, path: str, value: Any, depth: int) -> None:
        leaf = self._leaf(path, value)
        if leaf is not None:
            self._found[path] = leaf
            self._note_form(path, value)
        elif isinstance(value, ROWS):
            self._note_form(path, value)
            self._visit_rows(path, list(value), depth)
        elif isinstance(value, Mapping):
            self._note_form(path, value)
            self._visit_mapping(path, value, depth)
        elif isinstance(value, type):
            self._visit_class(path, value, depth)
        elif not type(value).__module__.startswith(MACHINERY) or isinstance(value, nn.Module):
            self._visit_object(path, value, depth)

    def _note_form(self, path: str, value: Any) -> None:
        form = form_of(value)
        if form != BARE:
            self.facts[path] = Facts(form)

    def _leaf(self, path: str, value: Any) -> Entry | None:
        """The entry of a value that is compared as a whole; None for any other."""
        if isinstance(value, Tensor):
            return self._tensor(path, value)
        if isinstance(value, np.ndarray):
            return of_array(value)
        if is_generator(value):
            return generator_entry(value)
        if isinstance(value, SETS):
            # The text of any other object may hold its address.
            texts = sorted(repr(each) for each in value if isinstance(each, PLAIN))
            return Entry(of_plain([len(value), texts]).digest, f"{len(value)} entries")
        return None

    def _tensor(self, path: str, tensor: Tensor) -> Entry:
        try:
            place = (version_of(tensor), tensor.shape)
        except (RuntimeError, NotImplementedError):
            # A sparse or fake tensor, or one of an inference.
            return of_tensor(tensor)
        if tensor.numel() < 2**16:
            return of_tensor(tensor)
        before = self._large.get(path)
        if before is None or before[0] != place:
            before = (place, of_tensor(sampled(tensor)))
            self._large[path] = before
        return before[1]

    def _visit_rows(self, path: str, rows: list[Any], depth: int) -> None:
        if all(isinstance(each, PLAIN) for each in rows):
            whole = of_plain(rows)
            shown = whole.shown if len(rows) <= 3 else f"{len(rows)} entries"
            self._found[path] = Entry(whole.digest, shown)
            return
        self._found[f"len({path})"] = of_plain(len(rows))
        first = max(len(rows) - LONGEST, 0)
        for place, each in enumerate(rows[first:], first):
            self._visit(f"{path}[{place}]", each, depth + 1)

    def _visit_mapping(self, path: str, mapping: Mapping[Any, Any], depth: int) -> None:
        items = list(mapping.items())
        if all(isinstance(key, PLAIN) and isinstance(each, PLAIN) for key, each in items):
            whole = of_plain(items)
            shown = whole.shown if len(items) <= 1 else f"{len(items)} entries"
            self._found[path] = Entry(whole.digest, shown)
            return
        self._found[f"len({path})"] = of_plain(len(items))
        for key, each in items[-LONGEST:]:
            name = repr(key) if isinstance(key, PLAIN) else type(key).__name__
            self._visit(f"{path}[{name}]", each, depth + 1)

    def _visit_class(self, path: str, kind: type, depth: int) -> None:
        """The attributes of a class of the user's, and what its methods reach."""
        for base in kind.__mro__:
            if not is_users(base):
                continue
            for name, value in vars(base).items():
                of_object = f"{path}.{name}"
                is_hidden = name.startswith("__") or isinstance(value, property)
                # An object's own attribute stands before its class's.
                is_own = of_object in self._found or f"len({of_object})" in self._found
                if not is_hidden and not is_own:
                    # What is set in an object of it would hide it, and change nothing.
                    of_class = f"{base.__module__}.{base.__qualname__}.{name}"
                    self._visit(of_class, _unwrapped(value), depth + 1)

    def _visit_object(self, path: str, value: Any, depth: int) -> None:
        if isinstance(value, functools.partial):
            self._visit(path, [value.func, *value.args, value.keywords], depth + 1)
        elif isinstance(value, MethodType):
            self._visit(path, value.__func__, depth + 1)
            self._visit(f"{path}.__self__", value.__self__, depth + 1)
        elif isinstance(value, FunctionType):
            self._visit_function(path, value, depth)
        elif isinstance(value, GeneratorType):
            self._visit_running(path, value)
        elif isinstance(value, Optimizer):
            self._visit_optimizer(path, value, depth)
        else:
            self._visit_attributes(path, value, depth)

    def _visit_attributes(self, path: str, value: Any, depth: int) -> None:
        is_known = False
        kind = type(value).__qualname__
        keeps = " with state_dict" if has_state_dict(value) else ""
        self._found[f"class of {path}"] = Entry(kind, f"{kind}{keeps}")
        self.facts[path] = facts_of_object(value)
        for name, each in attributes_of(value):
            is_known = True
            self._visit(f"{path}.{name}", each, depth + 1)
        if is_users(type(value)):
            self._visit(path, type(value), depth + 1)
            is_known = is_known or not isinstance(value, Iterator)
        if is_known and not isinstance(value, Iterator):
            return
        may_have_attributes = hasattr(value, "__dict__") and not is_known
        if isinstance(value, nn.Module) or may_have_attributes:
            # None is set.
            return
        entry = of_pickle(value)
        if entry is not None:
            self._found[path] = entry
        elif not is_known:
            self.opaque[path] = type(value).__name__

    def _visit_optimizer(self, path: str, optimizer: Optimizer, depth: int) -> None:
        kind = type(optimizer).__qualname__
        self._found[f"class of {path}"] = Entry(kind, f"{kind} with state_dict")
        self.facts[path] = facts_of_object(optimizer)
        for name, value in vars(optimizer).items():
            if name not in OF_EVERY_OPTIMIZER:
                self._visit(f"{path}.{name}", value, depth + 1)
        for number, state in enumerate(optimizer.state.values()):
            self._visit(f"{path}.state[{number}]", state, depth + 1)
        for number, group in enumerate(optimizer.param_groups):
            plain = {key: value for key, value in group.items() if key != "params"}
            self._visit(f"{path}.param_groups[{number}]", plain, depth + 1)

    def _visit_function(self, path: str, function: FunctionType, depth: int) -> None:
        names = function.__code__.co_freevars
        for name, cell in zip(names, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:
                continue
            if name != "__class__":
                self._visit(f"{path}()'s {name}", value, depth + 1)
        if function.__defaults__:
            self._visit(f"{path}()'s defaults", function.__defaults__, depth + 1)
        if not is_users_module(function.__module__):
            return
        for name in function.__code__.co_names:
            value = function.__globals__.get(name)
            if isinstance(value, FunctionType):
                may_change = is_users_module(value.__module__)
            elif isinstance(value, PLAIN):
                may_change = f"global {name}" in _source(function)
            else:
                may_change = not isinstance(value, type | ModuleType)
            if may_change:
                self._visit(f"{function.__module__}.{name}", value, depth + 1)

    def _visit_running(self, path: str, running: GeneratorType[Any, Any, Any]) -> None:
        frame = running.gi_frame
        if frame is None:
            self._found[path] = of_plain("ended")
            return
        self._found[f"{path} (line)"] = of_plain(frame.f_lineno)
        self._visit(path, dict(inspect.getgeneratorlocals(running)), DEEPEST - 2)


def attributes_of(value: Any) -> Iterator[tuple[str, Any]]:
    """The attributes that an object's user has set, or a module's layers, weights and buffers."""
    if isinstance(value, Metric):
        yield from value.metric_state.items()
        own = {name: each for name, each in vars(value).items() if not name.startswith("_")}
        own = {name: each for name, each in own.items() if name not in value.metric_state}
        if is_users(type(value)):
            yield from own.items()
        return
    held: dict[str, Any] = dict(getattr(value, "__dict__", {}))
    if isinstance(value, nn.Module):
        yield from _weights_and_layers(value)
        is_torchs = type(value).__module__.startswith(("torch.nn", "torchvision"))
        names = OF_EVERY_MODULE - {"training"}
        held = {name: each for name, each in held.items() if name not in names}
        if is_torchs:
            held = {"training": value.training}
    if isinstance(value, LightningModule | LightningDataModule):
        held = {name: each for name, each in held.items() if name not in OF_LIGHTNINGS}
        if not held.get("_hparams"):
            # Lightning makes empty ones where it is asked for them.
            held.pop("_hparams", None)
    for base in type(value).__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                held.setdefault(name, getattr(value, name))
    yield from held.items()


def _weights_and_layers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)
    yield from module.named_children()


def has_state_dict(value: Any) -> bool:
    """Whether an object can give its state and take it back."""
    methods = ("state_dict", "load_state_dict")
    return all(callable(getattr(value, name, None)) for name in methods)


def is_generator(value: Any) -> bool:
    """Whether a value draws random numbers."""
    kinds = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
    return isinstance(value, kinds)


def generator_entry(generator: Any) -> Entry:
    """The state of a generator of random numbers."""
    if isinstance(generator, torch.Generator):
        state: Any = generator.get_state().numpy().tobytes()
    elif isinstance(generator, np.random.Generator):
        state = generator.bit_generator.state
    elif isinstance(generator, np.random.RandomState):
        # A name, an array and three numbers
        legacy: Any = generator.get_state()
        name, keys, *numbers = legacy
        state = [name, keys.tolist(), *numbers]
    else:
        state = generator.getstate()
    return Entry(of_plain(state).digest, "a generator of random numbers")


def is_users(kind: type) -> bool:
    """Whether a class is the user's own, and not of an installed package."""
    return is_users_module(kind.__module__)


@functools.cache
def is_users_module(name: str) -> bool:
    """Whether a module is the user's own file."""
    root = name.partition(".")[0]
    if root == "__main__":
        return True
    if root in LIBRARIES or root in sys.stdlib_module_names:
        return False
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return "site-packages" not in file and "dist-packages" not in file


@functools.cache
def _source(function: FunctionType) -> str:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return ""


def _unwrapped(value: Any) -> Any:
    if isinstance(value, staticmethod | classmethod):
        return value.__func__
    return inspect.unwrap(value) if isinstance(value, FunctionType) else value
