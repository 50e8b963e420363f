"""What changes in training and no checkpoint can hold: the run says so."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator, Mapping
from itertools import islice
from multiprocessing.sharedctypes import SynchronizedBase
from typing import Any

import numpy as np
import torch
from torch import Tensor
from unbroken.holding.bounds import LAST_ENTRIES, LONGEST, MOST_BYTES_COMPARED
from unbroken.holding.walk import ROWS, entries_of
from unbroken.lightning_internals import version_of
from unbroken.parts.held import (
    LOADERS,
    OF_MODULES,
    SHARED,
    Entries,
    Held,
    Identity,
    Length,
    Unkept,
    is_iterator,
    saves_itself,
)
from unbroken.parts.plain_values import copied, is_plain_tensor, is_single
from unbroken.tensors.same_values import is_same

# Python's clocks, and what they said when this process began.
CLOCKS = {clock: clock() for clock in (time.time, time.monotonic, time.perf_counter)}


class NotKept:
    """What the user's objects hold and a checkpoint cannot, and whether it has changed.

    One that changes is told once, by the name of the attribute that it is or belongs to. So are
    modules and objects that training makes: a resumed run has nothing to give their state to.
    Whoever saves by himself what he keeps is left alone.
    """

    def __init__(self) -> None:
        self._fresh: dict[str, Any] = {}
        self._there: set[str] = set()
        self._told: set[str] = set()
        # What workers that outlive an epoch have begun with.
        self._begun_with: set[str] = set()
        # The packages that something told is of.
        self.packages: set[str] = set()
        # The evidence of the training's start.
        self._first: dict[str, Any] = {}

    def begin(self, held: Held) -> None:
        """Note what there is when training starts."""
        self._fresh = {name: evidence_of(each.value) for name, each in held.unkept.items()}
        self._first = dict(self._fresh)
        self._there = made_by_users(held)

    def epoch_has_started(self, held: Held) -> None:
        """Note again what an epoch's start may set: a resumed run sets it, too. And note what
        workers that outlive an epoch begin with.
        """
        for name, each in held.unkept.items():
            since = each.told.since
            begins = since == "workers" and name not in self._begun_with
            if begins:
                self._begun_with.add(name)
            if since == "epoch" or begins:
                self._fresh[name] = evidence_of(each.value)

    def loaders_are_made(self, held: Held) -> None:
        """Note what loaders hold that were made anew: that is no change of the ones before."""
        for name, each in held.unkept.items():
            if name.startswith(LOADERS):
                self._fresh[name] = evidence_of(each.value)

    def lines(self, held: Held) -> list[str]:
        """A line for each owner of attributes that have changed, and were not told yet."""
        changed: dict[str, list[Unkept]] = {}
        for name, each in held.unkept.items():
            if each.attribute not in self._told and self._has_changed(name, each):
                self._told.add(each.attribute)
                if each.package:
                    self.packages.add(each.package)
                # A callback or data set has one advice for all of its attributes.
                owner = each.attribute.rpartition(".")[0]
                group = owner if each.told.since == "epoch" else each.attribute
                changed.setdefault(group, []).append(each)
        found = [line_of(held, *several) for several in changed.values()]
        found += self._lines_of_unreadable(held)
        for name in sorted(made_by_users(held) - self._there):
            if any(f"{name}.".startswith(f"{told}.") for told in self._told):
                # What it lies in was told.
                continue
            self._told.add(name)
            found.append(
                f"a resume may not be exact: training has made {name}, and a resumed run has"
                " nothing to give its state to. Make it in the constructor, or in"
                " on_load_checkpoint."
            )
        return found

    def _lines_of_unreadable(self, held: Held) -> list[str]:
        """A line for each object whose own code raises an error as it is looked at."""
        new = {name: why for name, why in held.unreadable.items() if name not in self._told}
        self._told |= new.keys()
        return [
            f"a resume may not be exact: to look at {name} raises a {why}. So nothing of it is"
            " kept, and no change of it is told."
            for name, why in new.items()
        ]

    def set_by_epochs(self, held: Held) -> dict[str, Any]:
        """Copies of numbers and texts that the starts of epochs have changed and nothing else has.

        No line tells of them, because a resumed run sets them, too. Whether it sets them alike is
        seen there.
        """
        found: dict[str, Any] = {}
        for name, each in held.unkept.items():
            if each.told.since != "epoch" or not is_single(each.value):
                continue
            now = evidence_of(each.value)
            is_set_then = self._fresh.get(name, now) == now and self._first.get(name, now) != now
            if is_set_then and not (isinstance(each.value, float) and is_of_a_clock(each.value)):
                found[name] = copied(each.value)
        return found

    def lines_of_set_by_epochs(self, held: Held, saved: Mapping[str, Any]) -> list[str]:
        """A line for each of these that this start's hooks have set to something else."""
        found: list[str] = []
        for name, value in saved.items():
            each = held.unkept.get(name)
            is_another = each is not None and not is_same(copied(each.value), value)
            if each is not None and is_another and name not in self._told:
                self._told.add(name)
                found.append(
                    f"the resume is not exact: {name} was {value} at the save and is {each.value}"
                    f" now, and a checkpoint does not hold it. {each.told.advice}"
                )
        return found

    def lines_of_changed(self, names: Iterator[str] | list[str]) -> list[str]:
        """A line for each undeclared state that has changed where none is kept."""
        found: list[str] = []
        for name in names:
            if name not in self._told:
                self._told.add(name)
                found.append(
                    f"a resume may not be exact: {name} changes in training, and undeclared=False"
                    f" keeps no state that is not declared. {OF_MODULES.advice}"
                )
        return found

    def lines_of_states(self, odd: dict[str, str]) -> list[str]:
        """A line for each declared state that could not be kept or given back, with the reason."""
        found: list[str] = []
        for name, reason in odd.items():
            if name not in self._told:
                self._told.add(name)
                found.append(
                    f"a resume may not be exact: the state of {name} is not kept, because {reason}."
                    " A checkpoint holds numbers, texts, tensors, and lists and dictionaries of"
                    " them."
                )
        return found

    def _has_changed(self, name: str, each: Unkept) -> bool:
        if is_iterator(each.value):
            return True
        if isinstance(each.value, float) and is_of_a_clock(each.value):
            return False
        now = evidence_of(each.value)
        if name in self._fresh and isinstance(now, Entries):
            return not self._fresh[name].by_key.items() <= now.by_key.items()
        if name in self._fresh:
            return bool(self._fresh[name] != now)
        # Lightning makes empty hyperparameters where it saves some.
        return each.told.of_new and now is not None and each.value != Length(0)


def line_of(held: Held, first: Unkept, *others: Unkept) -> str:
    """What is said of attributes of one owner that have changed."""
    what = what_it_is(held, first)
    if others:
        names = [each.attribute.rpartition(".")[2] for each in others]
        what += f"; {', '.join(names)} as well"
    if first.told.since == "epoch":
        return (
            f"a resumed run begins anew with {first.attribute}, which changes in training and which"
            f" a checkpoint does not hold ({what}). {first.told.advice}"
        )
    return (
        f"a resume may not be exact: {first.attribute} changes in training, and a checkpoint does"
        f" not hold it ({what}). {first.told.advice}"
    )


def what_it_is(held: Held, each: Unkept) -> str:
    """The class of the attribute, in words."""
    top = held.unkept.get(each.attribute, each)
    value = top.value
    if isinstance(value, Length | Entries):
        return "it is a list or dictionary"
    if isinstance(value, Identity):
        value = value.value
    kind = value if isinstance(value, type) else type(value)
    return f"its class is {kind.__name__}"


def made_by_users(held: Held) -> set[str]:
    """The names of modules, of objects with a state, and of objects whose attributes are kept."""
    objects = held.owners.keys() - held.layers.keys()
    # A callback may make again what it saves.
    saved = tuple(f"{name}." for name, each in held.callbacks.items() if saves_itself(each))
    found = {*held.modules, *held.declared, *objects}
    return {name for name in found if not name.startswith(saved)}


def evidence_of(value: Any) -> Any:
    """What is compared of such a value: numbers and texts, lengths, some bytes, or which object it
    is.
    """
    if isinstance(value, np.ndarray | np.generic):
        return (value.shape, str(value.dtype), some_bytes_of(np.asarray(value)))
    if isinstance(value, Tensor):
        if not is_plain_tensor(value) or value.layout != torch.strided:
            return version_of(value)
        is_read = value.device.type == "cpu" and value.numel() <= MOST_BYTES_COMPARED
        if is_read and value.dtype.is_floating_point:
            return (value.shape, value.dtype, some_bytes_of(value.detach().double().numpy()))
        return (value.shape, value.dtype, *version_of(value))
    if isinstance(value, (*ROWS, dict)) and not isinstance(value, Length | Identity):
        entries = [each for _, each in entries_of(value)]
        return [len(entries), *map(evidence_of_entry, entries[-LAST_ENTRIES:])]
    if isinstance(value, (set, frozenset)):
        # The order of a set is another one in each process.
        return [len(value), sorted(map(repr, map(evidence_of_entry, islice(value, LONGEST))))]
    if isinstance(value, SHARED):
        inside: Any = value.get_obj() if isinstance(value, SynchronizedBase) else value
        return bytes(memoryview(inside))
    if isinstance(value, Identity):
        return id(value.value)
    if value is None or isinstance(value, Length | Entries | type):
        return value
    return copied(value) if is_single(value) else id(value)


def is_of_a_clock(value: float) -> bool:
    """Whether a number is a moment since this process began, by one of Python's clocks."""
    return any(begun <= value <= clock() for clock, begun in CLOCKS.items())


def evidence_of_entry(value: Any) -> Any:
    """The same of an entry of a long list. Those in it are not looked at."""
    is_list = isinstance(value, (*ROWS, dict))
    return len(value) if is_list else evidence_of(value)


def some_bytes_of(array: np.ndarray[Any, Any]) -> Any:
    """A number for the bytes of an array; of a large one for some of them, evenly spaced. Of an
    array of objects, what is compared of some.
    """
    flat = array.reshape(-1)
    most = max(1, MOST_BYTES_COMPARED // max(1, array.itemsize))
    step = max(1, flat.size // most)
    if array.dtype.hasobject:
        return [evidence_of_entry(each) for each in flat[::step].tolist()]
    return zlib.crc32(np.ascontiguousarray(flat[::step]).tobytes())
