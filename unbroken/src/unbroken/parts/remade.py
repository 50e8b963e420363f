"""How plain values become the same again, of what a checkpoint holds of them.

Two of the user's objects may hold one list: a data module, and the data set that it has made. It
stays one list where the one that is there is filled. It is filled where training has changed the
list that it began with. Where training has put another list in its place, another one is made: the
one that is there may be a constant of a file, which training has never changed.
"""

from __future__ import annotations

from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from enum import Enum, Flag
from typing import Any

import numpy as np
import torch
from torch import Tensor
from unbroken.errors import UserError
from unbroken.holding.walk import Place, held_by, label, walk
from unbroken.parts.plain_values import (
    ALWAYS_PLAIN,
    ARRAY,
    BY_NAME,
    DATACLASS,
    DEFAULTS,
    FACTORIES,
    FROZEN_SET,
    MAPPINGS,
    MEMBER,
    NAMED_TUPLE,
    NUMBER_OF_NUMPY,
    ON_ACCELERATOR,
    QUEUE,
    STACKED,
    WITH_GRADIENT,
    attributes_of,
    class_named,
    copied,
    is_named_tuple,
    is_plain,
    is_plain_dataclass,
    name_of,
    with_attributes,
)
from unbroken.tensors.same_values import is_same

# Kinds whose objects can be filled with what others hold.
ROWS = (list, bytearray, array)
MAPPINGS_AND_SETS = (*MAPPINGS, defaultdict, set)
FILLABLE = (*ROWS, deque, *MAPPINGS_AND_SETS, Tensor, np.ndarray)


class Remaking:
    """Makes values of what :func:`unbroken.parts.plain_values.copied` has made of others.

    A place is the name of an attribute, and then of entries in it, with dots between them.

    Args:
        device: The accelerator, for tensors that were on it.
        filled: The places of objects that are filled. At all others a new object is made.
    """

    def __init__(self, device: torch.device, filled: Collection[str] = ()) -> None:
        self.device = device
        self.filled = filled

    def like(self, now: Any, saved: Any, place: str) -> Any:
        """A saved value in the form that it had, on the device of the value there now.

        Args:
            now: The attribute's value, or what it holds in the same place.
            saved: What ``copied`` has made. The attribute gets it, or parts of it.
            place: Where the value is held.

        Raises:
            UserError: The class of a saved object is not there.
        """
        if is_plain(now) and is_same(copied(now), saved):
            # The same object, for it may share its memory with a weight.
            return now
        made = self._made(now, saved, place)
        return fill(now, made) if place in self.filled else made

    def _made(self, now: Any, saved: Any, place: str) -> Any:
        if isinstance(saved, Tensor):
            return saved.to(now.device if isinstance(now, Tensor) else saved.device)
        if type(saved) in (list, tuple):
            return type(saved)(self._entries(now, saved, place))
        if type(saved) not in MAPPINGS:
            return saved
        if type(saved) is dict and len(saved) == 1:
            ((name, held),) = saved.items()
            if name in MAKERS:
                return MAKERS[name](self, now, held, place)
            if name in BY_NAME:
                return BY_NAME[name].made(held)
        items = type(saved)(self._items(now, saved, place))
        return with_attributes(items, self._items({}, attributes_of(saved), place))

    def _entries(self, now: Any, saved: Any, place: str) -> list[Any]:
        """The entries of a saved list, tuple or queue."""
        is_row = isinstance(now, (list, tuple, deque))
        there = list(now) if is_row else []
        # The attribute may have fewer entries.
        there += [None] * len(saved)
        return [
            self.like(there[number], each, f"{place}.{number}") for number, each in enumerate(saved)
        ]

    def _items(self, now: Any, saved: Mapping[Any, Any], place: str) -> dict[Any, Any]:
        """The items of a saved dictionary."""
        there = now if isinstance(now, dict) else {}
        return {
            key: self.like(there.get(key), each, f"{place}.{label(key, number)}")
            for number, (key, each) in enumerate(saved.items())
        }

    # The kinds that are held by a name

    def tensor(self, now: Any, held: Any, place: str) -> Any:
        """A tensor that was on the accelerator."""
        return held.to(self.device)

    def trained_tensor(self, now: Any, held: Any, place: str) -> Any:
        """A tensor that requires a gradient."""
        return self._made(now, held, place).requires_grad_()

    def array(self, now: Any, held: Any, place: str) -> Any:
        """An array of NumPy's."""
        return held.numpy()

    def number(self, now: Any, held: Any, place: str) -> Any:
        """A number of NumPy's."""
        return held.numpy()[()]

    def row(self, now: Any, held: Any, place: str) -> Any:
        """A list of tensors, each with memory of its own."""
        return self._entries(now, [each.clone() for each in held.unbind()], place)

    def frozen_set(self, now: Any, held: Any, place: str) -> Any:
        """A set that does not change."""
        return frozenset(held)

    def queue(self, now: Any, held: Any, place: str) -> Any:
        """A queue."""
        entries, length = held
        if type(now) is deque:
            # The length that the constructor gives wins.
            length = now.maxlen
        return deque(self._entries(now, entries, place), length)

    def defaults(self, now: Any, held: Any, place: str) -> Any:
        """A dictionary with a factory."""
        name, items = held
        factory: Any = FACTORIES.get(name)
        if type(now) is defaultdict:
            # One of the user's own has no name.
            factory = now.default_factory
        return defaultdict(factory, self._items(now, items, place))

    def member(self, now: Any, held: Any, place: str) -> Any:
        """A member of an Enum."""
        name, member = held
        kind = class_of(now, name, lambda found: issubclass(found, Enum))
        if issubclass(kind, Flag) and type(member) is int:
            return kind(member)
        if member not in kind.__members__:
            raise UserError(f"a checkpoint holds {name}.{member}, which is not there any more.")
        return kind[member]

    def named_tuple(self, now: Any, held: Any, place: str) -> Any:
        """A named tuple."""
        name, entries = held
        kind = class_of(now, name, is_named_tuple)
        # Nothing of the class is called: a checkpoint is data.
        return tuple.__new__(kind, self._entries(now, entries, place))

    def dataclass(self, now: Any, held: Any, place: str) -> Any:
        """A dataclass."""
        name, fields = held
        kind = class_of(now, name, is_plain_dataclass)
        there = vars(now) if type(now) is kind else {}
        # Nothing of the class is called: a checkpoint is data.
        value = object.__new__(kind)
        vars(value).update(self._items(there, fields, place))
        return value


MAKERS: dict[str, Callable[[Remaking, Any, Any, str], Any]] = {
    ON_ACCELERATOR: Remaking.tensor,
    WITH_GRADIENT: Remaking.trained_tensor,
    ARRAY: Remaking.array,
    NUMBER_OF_NUMPY: Remaking.number,
    STACKED: Remaking.row,
    FROZEN_SET: Remaking.frozen_set,
    QUEUE: Remaking.queue,
    DEFAULTS: Remaking.defaults,
    MEMBER: Remaking.member,
    NAMED_TUPLE: Remaking.named_tuple,
    DATACLASS: Remaking.dataclass,
}


def class_of(now: Any, name: str, is_right: Callable[[type], bool]) -> Any:
    """The class of a saved object, which is never imported for it."""
    found = type(now) if name_of(type(now)) == name else class_named(name)
    if found is None or not is_right(found):
        raise UserError(
            f"a checkpoint holds an object of {name}, which is not imported when training starts."
            " Import it, or save the attribute in on_save_checkpoint."
        )
    return found


# Objects that are filled


def fillable_in(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Lists, dictionaries, tensors and the like that attributes are or hold, by their places."""
    found: dict[str, Any] = {}

    def opened(place: Place) -> list[Place]:
        if is_fillable(place.value):
            found[place.name] = place.value
        if isinstance(place.value, Tensor | np.ndarray):
            return []
        inside = held_by(place.value)
        return [Place(f"{place.name}.{name}", each, place.depth + 1) for name, each in inside]

    def again(place: Place, first: Place) -> None:
        if is_fillable(place.value):
            found[place.name] = place.value

    walk((Place(name, value) for name, value in attributes.items()), opened, again=again)
    return found


def is_fillable(value: Any) -> bool:
    """Whether an object can be filled with what another one of its kind holds."""
    kind = type(value)
    if kind in ALWAYS_PLAIN or kind is tuple:
        return kind is Tensor
    if is_plain_dataclass(kind):
        return not kind.__dataclass_params__.frozen
    return kind in FILLABLE


def fill(now: Any, made: Any) -> Any:
    """The object that is there, with what another one of its kind holds; else that other one."""
    kind = type(now)
    if kind is not type(made) or not is_fillable(now):
        return made
    # Some cannot be filled: tensors whose numbers share a place, arrays that may only be read.
    with suppress(RuntimeError, ValueError, TypeError, BufferError):
        if isinstance(now, Tensor):
            return now if fill_tensor(now, made) else made
        if isinstance(now, np.ndarray):
            return now if fill_array(now, made) else made
        if kind in ROWS:
            now[:] = made
        elif kind is deque:
            now.clear()
            now.extend(made)
        elif kind in MAPPINGS_AND_SETS:
            now.clear()
            now.update(made)
            with_attributes(now, attributes_of(made))
        else:
            vars(now).clear()
            vars(now).update(vars(made))
        return now
    return made


def fill_tensor(now: Tensor, made: Tensor) -> bool:
    """Fill a tensor with another one's numbers; returns whether the two are of one form."""
    is_alike = now.shape == made.shape and now.dtype == made.dtype and now.device == made.device
    # One that was computed from others belongs to a graph.
    if not is_alike or not now.is_leaf:
        return False
    with torch.no_grad():
        now.copy_(made)
    now.requires_grad_(made.requires_grad)
    return True


def fill_array(now: Any, made: Any) -> bool:
    """The same for an array of NumPy's."""
    is_alike = now.shape == made.shape and now.dtype == made.dtype
    if is_alike:
        np.copyto(now, made)
    return is_alike
