"""Goes over what objects hold in their attributes, lists and dictionaries, at any depth.

Everybody who looks for something in objects of the user's does so by :func:`walk`: who keeps state
for a resume (see :mod:`unbroken.parts.held`), and who seeds generators of random numbers (see
:mod:`unbroken.loading.own_generators`). What they look for, and what they open, differs. How far
they go stands in :mod:`unbroken.holding.bounds`.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from unbroken.holding.bounds import DEEPEST, LONGEST, MOST_OBJECTS

# What every module has. The walk goes on through a module's own attributes and its layers.
OF_EVERY_MODULE = {*vars(LightningModule()), *vars(LightningDataModule())}
# Values that hold nothing further, and are found in many places at once.
LEAVES = (type(None), bool, int, float, complex, str, bytes)
ROWS = (list, tuple, deque)
CONTAINERS = (dict, *ROWS)
# Of these a container is one. An OrderedDict keeps an order of its own.
BUILTINS = (OrderedDict, *CONTAINERS)
# Nothing of the user's is looked for in these.
FUNCTIONS = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)
CLOSED = (*LEAVES, *FUNCTIONS, Tensor, np.ndarray, Trainer)


class Place(NamedTuple):
    """An object, and where it was found.

    Attributes:
        name: The names of attributes and entries on the way to it, with dots between them.
        value: The object.
        depth: How many attributes and entries are on the way.
        inside: What whoever looks wants to know about the way.
    """

    name: str
    value: Any
    depth: int = 0
    inside: Any = None


def walk(
    places: Iterable[Place],
    opened: Callable[[Place], Iterable[Place]],
    seen: dict[int, Place] | None = None,
    again: Callable[[Place, Place], None] | None = None,
) -> None:
    """Open every object once, in the order in which they are held.

    Args:
        places: Where the walk begins.
        opened: Is called with each object, and returns what the walk is to open of what it holds.
        seen: The objects that were opened already, by id. A later walk leaves them out.
        again: Is called where an object is found in a second place: with that one and the first.
    """
    # The objects themselves are kept, for an id would be given to another one.
    seen = {} if seen is None else seen
    waiting = list(places)[::-1]
    most = len(seen) + MOST_OBJECTS
    while waiting and len(seen) < most:
        place = waiting.pop()
        if isinstance(place.value, LEAVES):
            continue
        first = seen.setdefault(id(place.value), place)
        if first is not place:
            if again is not None:
                again(place, first)
            continue
        inside = opened(place)
        if place.depth < DEEPEST:
            waiting += list(inside)[::-1]


def held_by(value: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds, each with a name: entries of a list or dictionary, else attributes."""
    if not isinstance(value, CONTAINERS):
        yield from attributes_of(value)
    elif base_class_of(value).__len__(value) <= LONGEST:
        for place, (key, each) in enumerate(entries_of(value)):
            yield label(key, place), each


def entries_of(value: Any) -> Iterator[tuple[Any, Any]]:
    """The entries of a list, dictionary or the like, each with its key or place.

    Methods of the builtin class are called. One that is derived from it may compute entries as it
    is asked for them, and draw random numbers or count.
    """
    kind = base_class_of(value)
    return iter(kind.items(value)) if isinstance(value, dict) else enumerate(kind.__iter__(value))


def base_class_of(value: Any) -> Any:
    """The builtin class of a list, dictionary or the like."""
    return next(kind for kind in BUILTINS if isinstance(value, kind))


def attributes_of(value: Any) -> Iterator[tuple[str, Any]]:
    """The attributes of an object, those in slots among them."""
    yield from getattr(value, "__dict__", {}).items()
    for name in names_of_slots(type(value)):
        if hasattr(value, name):
            yield name, getattr(value, name)


def label(key: Any, place: int) -> str:
    """The name of a dictionary's entry: its key, or its place where the key is an object."""
    is_text = isinstance(key, LEAVES) or type(key) is tuple
    return str(key) if is_text else f"#{place}"


def loaders_in(loaders: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The loaders in nested lists and dictionaries, by their names."""
    if isinstance(loaders, CONTAINERS):
        for key, each in held_by(loaders):
            yield from loaders_in(each, f"{name}.{key}".lstrip("."))
    elif loaders is not None:
        yield name, loaders


def names_of_slots(kind: type) -> list[str]:
    """The attributes that a class keeps in slots, instead of a dictionary or beside one."""
    names: list[str] = []
    for each in kind.__mro__:
        slots = vars(each).get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            is_private = name.startswith("__") and not name.endswith("__")
            # Python gives a private name another one.
            names.append(f"_{each.__name__.lstrip('_')}{name}" if is_private else name)
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def children_of(place: Place) -> Iterator[Place]:
    """What an object holds, as places. Of a module they are its own attributes and its layers."""
    value = place.value
    is_module = isinstance(value, nn.Module)
    for name, each in held_by(value):
        is_of_every = is_module and name in OF_EVERY_MODULE and name != "_modules"
        if not is_of_every and not isinstance(each, CLOSED):
            yield Place(f"{place.name}.{name}", each, place.depth + 1, place.inside)
