"""Which values a checkpoint can hold, what it holds of them, and whether they have changed.

A checkpoint is data: numbers, texts, tensors, and lists and dictionaries of them. A value of
another kind, such as a queue or a date, is held as a dictionary of one key, the name of its kind.
How a value is made of it again stands in :mod:`unbroken.parts.remade`.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
import sys
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection
from contextlib import suppress
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, Flag
from fractions import Fraction
from pathlib import Path, PosixPath, WindowsPath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from unbroken.holding.bounds import LARGEST_ARRAY_BYTES, MOST_TEXTS
from unbroken.holding.users_modules import is_users_module
from unbroken.tensors.same_values import is_ordinary, is_same

# Of the layouts that are not strided, those that load again with ``weights_only=True``
SPARSE = (
    torch.sparse_coo,
    torch.sparse_csr,
    torch.sparse_csc,
    torch.sparse_bsr,
    torch.sparse_bsc,
)
# Types of numbers that are smaller than a byte. Torch copies none of them.
PARTS_OF_BYTES = {
    getattr(torch, f"{kind}{bits}") for kind in ("int", "uint") for bits in range(1, 8)
}
# A tensor that was on the accelerator
ON_ACCELERATOR = "torch.Tensor.on_accelerator"
# One that requires a gradient, and is not computed from others
WITH_GRADIENT = "torch.Tensor.requires_grad"
# NumPy's arrays and numbers become tensors.
ARRAY = "numpy.ndarray"
NUMBER_OF_NUMPY = "numpy.generic"
# A queue becomes a list and its length; a defaultdict a dictionary and the name of its factory.
QUEUE = "collections.deque"
DEFAULTS = "collections.defaultdict"
FROZEN_SET = "frozenset"
# Many tensors of one number, such as losses, are one tensor.
STACKED = "torch.stack"
# Objects of the user's own classes: the name of the class, and what the object holds.
MEMBER = "enum.Enum"
NAMED_TUPLE = "namedtuple"
DATACLASS = "dataclass"
# Stands for an attribute that training has deleted.
DELETED = "deleted"

# So deep lists and dictionaries may lie in each other. One may hold itself.
DEEPEST_PLAIN = 50
# Those of Python's own that a checkpoint holds as they are.
NUMBERS_AND_TEXTS = (bool, int, float, complex, str, bytes)
SINGLE = (*NUMBERS_AND_TEXTS, torch.dtype, torch.device, torch.Size)
IMMUTABLE = {type(None), *SINGLE}
ALWAYS_PLAIN = {Tensor, *IMMUTABLE}
MAPPINGS = (dict, OrderedDict, Counter)
# As many tensors in a list are copied together.
FEWEST_TOGETHER = 16
# Factories of a defaultdict that have a name; a queue may have another one.
FACTORIES = {kind.__name__: kind for kind in (int, float, bool, str, list, dict, set, tuple)}


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of single values: what a checkpoint holds of one, and how it is made again."""

    held: Callable[[Any], Any]
    made: Callable[[Any], Any]


def bytes_made_changeable(held: Any) -> bytearray:
    """A bytearray of bytes. Of a number it would be that long."""
    if not isinstance(held, bytes):
        raise TypeError("a bytearray is held as bytes")
    return bytearray(held)


def held_count(count: Any) -> list[Any]:
    """Where an ``itertools.count`` is, and its step. It tells them by its text alone."""
    numbers = ast.literal_eval(repr(count).removeprefix("count"))
    return list(numbers) if isinstance(numbers, tuple) else [numbers]


KINDS: dict[type, Kind] = {
    bytearray: Kind(bytes, bytes_made_changeable),
    range: Kind(lambda value: [value.start, value.stop, value.step], lambda held: range(*held)),
    slice: Kind(lambda value: [value.start, value.stop, value.step], lambda held: slice(*held)),
    Decimal: Kind(str, Decimal),
    # As a text it could be a power that takes hours.
    Fraction: Kind(
        lambda value: [value.numerator, value.denominator], lambda held: Fraction(*held)
    ),
    date: Kind(date.isoformat, date.fromisoformat),
    time: Kind(time.isoformat, time.fromisoformat),
    datetime: Kind(datetime.isoformat, datetime.fromisoformat),
    timedelta: Kind(
        lambda value: [value.days, value.seconds, value.microseconds],
        lambda held: timedelta(*held),
    ),
    PosixPath: Kind(str, Path),
    WindowsPath: Kind(str, Path),
    array: Kind(lambda value: [value.typecode, value.tolist()], lambda held: array(*held)),
    itertools.count: Kind(held_count, lambda held: itertools.count(*held)),
}
NAMES = {kind: f"{kind.__module__}.{kind.__qualname__}" for kind in KINDS}
BY_NAME = {name: KINDS[kind] for kind, name in NAMES.items()}


# Which values can be held


def is_single(value: Any) -> bool:
    """Whether a value is a number, of Python's or NumPy's, a text, or of another kind that holds no
    further values.
    """
    if isinstance(value, np.generic):
        return is_kept_by_torch(value.dtype)
    if isinstance(value, Enum):
        return is_found_by_name(type(value))
    return type(value) in SINGLE or type(value) in KINDS


def is_plain(value: Any, depth: int = DEEPEST_PLAIN) -> bool:
    """Whether a value is None, single, a tensor, an array, or a list, set, queue, dictionary, named
    tuple or dataclass of them, no deeper than so many in each other.
    """
    if value is None or is_single(value):
        return True
    if isinstance(value, Tensor):
        return is_plain_tensor(value)
    if type(value) is np.ndarray:
        return is_kept_by_torch(value.dtype) and value.nbytes <= LARGEST_ARRAY_BYTES
    inside = values_inside(value)
    if inside is None or depth == 0:
        return False
    # Python gathers the classes of a long list many times faster than it calls a function for each
    # entry.
    kinds = set(map(type, inside))
    if Tensor in kinds and not all(map(is_plain_tensor, filter(is_tensor, inside))):
        return False
    return kinds <= ALWAYS_PLAIN or all(is_plain(each, depth - 1) for each in inside)


def is_tensor(value: Any) -> bool:
    """Whether a value is a tensor and no subclass of one."""
    return type(value) is Tensor


def is_plain_tensor(value: Tensor) -> bool:
    """Whether a checkpoint can hold a tensor: a dense or sparse one with numbers of its own. What
    is detached from one of a subclass may be of the subclass again.
    """
    is_weight = isinstance(value, nn.Parameter)
    if is_weight or value.is_meta or not is_ordinary(value) or value.layout is torch.jagged:
        return False
    if value.dtype in PARTS_OF_BYTES:
        return False
    return type(value) is Tensor or type(value.detach()) is Tensor


def can_be_kept(buffer: Any) -> bool:
    """Whether a checkpoint can hold a buffer: a dense or sparse tensor that has its size."""
    if not isinstance(buffer, Tensor) or is_lazy(buffer) or not is_plain_tensor(buffer):
        return False
    return buffer.layout == torch.strided or buffer.layout in SPARSE


def values_inside(value: Any) -> Collection[Any] | None:
    """The values that a container holds; None where a checkpoint cannot hold such a container."""
    kind = type(value)
    if kind in (set, frozenset):
        are_held = len(value) <= MOST_TEXTS and all(map(is_key, value))
        return () if are_held else None
    if kind in (list, tuple, deque):
        return None if holds_many_texts(value) else value
    if kind in (*MAPPINGS, defaultdict):
        are_held = all(map(is_key, value)) and not holds_many_texts(value.values())
        return [*value.values(), *attributes_of(value).values()] if are_held else None
    if is_named_tuple(kind):
        return value if is_found_by_name(kind) else None
    if is_plain_dataclass(kind):
        return vars(value).values() if is_found_by_name(kind) else None
    return None


def is_key(value: Any) -> bool:
    """Whether a checkpoint holds a key, or an entry of a set, as it is."""
    if type(value) is tuple:
        return all(is_key(each) for each in value)
    return value is None or type(value) in NUMBERS_AND_TEXTS


def is_kept_by_torch(kind: np.dtype[Any]) -> bool:
    """Whether a tensor can hold NumPy's values of a kind: numbers in this machine's byte order."""
    return kind.isnative and kind.char in np.typecodes["AllInteger"] + "?efdFD"


def holds_many_texts(values: Collection[Any]) -> bool:
    """Whether a long list begins with a text, or with a short list that has one."""
    if len(values) <= MOST_TEXTS:
        return False
    first = next(iter(values))
    if type(first) in (list, tuple):
        return any(type(each) is str for each in first)
    return type(first) is str


def is_named_tuple(kind: type) -> bool:
    """Whether a class is one of ``namedtuple`` or ``NamedTuple``."""
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def is_plain_dataclass(kind: type) -> bool:
    """Whether a class is a dataclass of the user's own, and nothing else."""
    if not dataclasses.is_dataclass(kind) or hasattr(kind, "__slots__"):
        return False
    return kind.__bases__ == (object,) and is_users_own(kind)


def is_users_own(kind: type) -> bool:
    """Whether a class is neither Python's nor of an installed package.

    Of the library, wherever it is installed, the tasks alone count as the user's: he configures
    them and inherits from them.
    """
    return is_users_module(kind.__module__)


def is_found_by_name(kind: type) -> bool:
    """Whether a class can be looked up where it was made: a class in a function cannot."""
    return class_named(name_of(kind)) is kind


def name_of(kind: type) -> str:
    """The name by which a checkpoint knows a class."""
    return f"{kind.__module__}:{kind.__qualname__}"


def lasting(kind: Any) -> Any:
    """The class that an object of this class is of when training is on. A lazy layer has another
    one from its first batch on.
    """
    return getattr(kind, "cls_to_become", None) or kind


def class_named(name: str) -> Any:
    """The class of a name, of a module that is imported already; None where there is none."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    return found if isinstance(found, type) else None


# What a checkpoint holds of them


def copied(value: Any) -> Any:
    """A copy on the CPU, without graphs, that a checkpoint can hold."""
    if isinstance(value, Tensor):
        on_cpu = value.detach().to("cpu", copy=True)
        held = on_cpu if value.device.type == "cpu" else {ON_ACCELERATOR: on_cpu}
        return {WITH_GRADIENT: held} if gets_gradient(value) else held
    if isinstance(value, np.ndarray):
        return {ARRAY: torch.from_numpy(value.copy())}
    if isinstance(value, np.generic):
        return {NUMBER_OF_NUMPY: torch.from_numpy(np.array(value))}
    kind = type(value)
    if kind in KINDS:
        return {NAMES[kind]: KINDS[kind].held(value)}
    if kind in IMMUTABLE:
        return value
    if kind is list and are_immutable(value):
        return list(value)
    if kind is list:
        together = stacked(value)
        return copied_entries(value) if together is None else {STACKED: together}
    if kind is tuple:
        return value if are_immutable(value) else tuple(copied_entries(value))
    if kind in MAPPINGS:
        items = kind(copied_items(value))
        return with_attributes(items, copied_items(attributes_of(value)))
    return copied_by_name(value)


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes of an OrderedDict. A state dict keeps versions and sizes in one."""
    return vars(value) if type(value) is OrderedDict else {}


def with_attributes(items: Any, attributes: dict[str, Any]) -> Any:
    """A dictionary that has got such attributes."""
    if attributes:
        vars(items).update(attributes)
    return items


def copied_by_name(value: Any) -> Any:
    """The same for containers that are held by the name of their kind; other values stay as they
    are.
    """
    kind = type(value)
    if kind is set:
        return set(value)
    if kind is frozenset:
        return {FROZEN_SET: sorted(value, key=repr)}
    if kind is deque:
        return {QUEUE: [copied_entries(value), value.maxlen]}
    if kind is defaultdict:
        factory = getattr(value.default_factory, "__name__", "")
        return {DEFAULTS: [factory, copied_items(value)]}
    if isinstance(value, Enum):
        # Flags that are set together have no name.
        return {MEMBER: [name_of(kind), value.value if isinstance(value, Flag) else value.name]}
    if is_named_tuple(kind):
        return {NAMED_TUPLE: [name_of(kind), copied_entries(value)]}
    if is_plain_dataclass(kind):
        return {DATACLASS: [name_of(kind), copied_items(vars(value))]}
    return value


def gets_gradient(tensor: Tensor) -> bool:
    """Whether a tensor is trained itself, and not computed from others."""
    return tensor.requires_grad and tensor.is_leaf


def are_immutable(values: Collection[Any]) -> bool:
    """Whether all entries of a list or tuple are numbers, texts and the like."""
    return IMMUTABLE.issuperset(map(type, values))


def copied_entries(values: Any) -> list[Any]:
    """Copies of what a list, tuple or queue holds."""
    return [copied(each) for each in values]


def stacked(values: list[Any]) -> Tensor | None:
    """A copy of many tensors of one number, such as losses, as one tensor; None where they differ.

    To copy and save each by itself takes many times as long.
    """
    if len(values) < FEWEST_TOGETHER or set(map(type, values)) != {Tensor}:
        return None
    first = next(iter(values))
    if first.device.type != "cpu" or first.layout != torch.strided or first.numel() > 1:
        return None
    if len({each.dtype for each in values}) > 1 or any(map(gets_gradient, values)):
        return None
    # Of other sizes, layouts or devices they cannot be put together.
    with torch.no_grad(), suppress(RuntimeError):
        return torch.stack(values)
    return None


def copied_items(values: Any) -> dict[Any, Any]:
    """Copies of what a dictionary holds."""
    return {key: copied(each) for key, each in values.items()}


# Whether they have changed


def is_unchanged(now: Any, held: Any) -> bool:
    """Whether a value is still what a checkpoint holds of it. Nothing is copied to tell."""
    if now is held:
        return True
    kind = type(now)
    if kind in IMMUTABLE:
        return is_same(now, held)
    if kind is Tensor and type(held) is Tensor:
        return now.device.type == "cpu" and is_same(now.detach(), held)
    if kind is np.ndarray and type(held) is dict and held.keys() == {ARRAY}:
        is_whole = now.flags.c_contiguous and now.flags.writeable
        array = torch.from_numpy(now if is_whole else now.copy())
        return is_same(array, held[ARRAY])
    if kind in (list, tuple) and type(held) is kind:
        if len(now) != len(held):
            return False
        # Long lists of numbers are mostly equal, and that is seen soonest at once. 0.0 equals -0.0.
        is_equal = are_immutable(now) and list(map(type, now)) == list(map(type, held))
        return (is_equal and now == held and 0 not in now) or all(map(is_unchanged, now, held))
    if kind in MAPPINGS and type(held) is kind:
        is_alike = len(now) == len(held) and list(now) == list(held)
        return is_alike and all(map(is_unchanged, now.values(), held.values()))
    return is_plain(now) and is_same(copied(now), held)
