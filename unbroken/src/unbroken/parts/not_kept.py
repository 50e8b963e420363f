"""What changes in training and no checkpoint can hold: the run says so."""

from __future__ import annotations

import io
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from lightning.pytorch import Trainer
from torch import Tensor, nn
from unbroken.loading.own_generators import KINDS as GENERATORS
from unbroken.parts.attributes import is_foreign_layer, not_kept_of
from unbroken.parts.owners import LONGEST, is_object, owners_of
from unbroken.parts.plain_values import copied, is_plain, is_single

# The hooks by which somebody saves what he keeps himself.
SAVING_HOOKS = ("on_save_checkpoint", "state_dict", "get_extra_state")
# What these save says nothing of the user's attributes.
NOT_THE_USERS = ("lightning.", "torch.", "torchmetrics.")
# Other parts see to these.
KEPT_ELSEWHERE = (nn.Module, nn.Parameter, *GENERATORS)
# The outline of an empty list or dictionary
EMPTY = [0]
# A larger array is not looked at.
LARGEST_ARRAY_BYTES = 2**20


class NotKept:
    """Attributes of the user's that a checkpoint cannot hold, and whether they have changed.

    One that changes is told once, by name. Whoever saves by himself what he keeps is left alone.
    """

    def __init__(self) -> None:
        self._fresh: dict[str, Any] = {}
        self._told: set[str] = set()

    def begin(self, trainer: Trainer) -> None:
        """Note how such attributes are when training starts."""
        self._fresh = {name: outline_of(value) for name, value in attributes_not_kept(trainer)}

    def lines(self, trainer: Trainer) -> list[str]:
        """A line for each attribute that has changed, and was not told yet."""
        found: list[str] = []
        for name, value in attributes_not_kept(trainer):
            # Lightning makes empty hyperparameters where it saves some.
            before = self._fresh.get(name, EMPTY)
            has_changed = is_iterator(value) or before != outline_of(value)
            if has_changed and name not in self._told:
                self._told.add(name)
                found.append(
                    f"a resume may not be exact: {name} changes in training, and a checkpoint"
                    f" cannot hold it (its class is {type(value).__name__}). Save it in"
                    " on_save_checkpoint, or make it a part (see docs/how_it_works.md)."
                )
        return found


def attributes_not_kept(trainer: Trainer) -> Iterator[tuple[str, Any]]:
    """The attributes of the user's that a checkpoint leaves out, by their names."""
    for path, owner in owners_of(trainer):
        if is_foreign_layer(owner) or saves_itself(owner):
            continue
        not_kept = not_kept_of(owner)
        for name, value in vars(owner).items():
            if name in not_kept or isinstance(value, KEPT_ELSEWHERE) or is_object(value):
                continue
            if not is_plain(value) and not callable(value):
                yield f"{path}.{name}", value


def saves_itself(owner: Any) -> bool:
    """Whether somebody has a hook of his own that saves something."""
    for kind in type(owner).__mro__:
        is_own = not kind.__module__.startswith(NOT_THE_USERS)
        if is_own and any(hook in vars(kind) for hook in SAVING_HOOKS):
            return True
    return False


def is_iterator(value: Any) -> bool:
    """Whether a value goes on whenever it is asked, and cannot be told where it is."""
    return isinstance(value, Iterator) and not isinstance(value, io.IOBase) and not is_plain(value)


def outline_of(value: Any) -> Any:
    """What is compared of such a value: numbers and texts in it, lengths, and which objects there
    are.
    """
    if isinstance(value, (list, tuple, deque, set, frozenset)):
        entries = list(value)[-LONGEST:]
        return [len(value), *(outline_of(each) for each in entries)]
    if isinstance(value, Mapping | defaultdict):
        items = list(value.items())[-LONGEST:]
        return [len(value), *((repr(key), outline_of(each)) for key, each in items)]
    if isinstance(value, np.ndarray | np.generic):
        is_small = value.nbytes <= LARGEST_ARRAY_BYTES
        return value.tobytes() if is_small else value.shape
    if isinstance(value, Tensor):
        return (value.data_ptr(), value.shape)
    return copied(value) if is_single(value) else id(value)
