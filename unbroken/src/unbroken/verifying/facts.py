"""What a value is, as far as it matters to whoever wants to keep it in a checkpoint."""

from __future__ import annotations

import dataclasses
import dis
import functools
import json
import random
from collections import deque
from itertools import islice
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, Sampler
from unbroken.parts.plain_values import is_plain, is_users_own

# Every checkpoint holds a value of this form as it is.
BARE = "bare"
# Only the state of a stream or a sampler holds it.
HELD_BY_ENGINE = "held by the engine"
ARRAY = "array"
QUEUE = "queue"
TORCH_GENERATOR = "torch's generator"
NUMPY_GENERATOR = "NumPy's generator"
PYTHON_GENERATOR = "Python's generator"
OBJECT = "object"
# Nothing holds it: an iterator, a set of objects, a function.
ODD = "odd"

BARE_SINGLES = {type(None), bool, int, float, complex, str, bytes}
BARE_ROWS = {list, tuple, set}
BARE_LEAVES = {*BARE_SINGLES, Tensor, np.float64}

# Entries of a list or dictionary that are looked at.
MOST_ENTRIES = 1000

# The methods by which an object saves something.
TAKING = ("state_dict", "on_save_checkpoint")
GIVING_BACK = ("load_state_dict", "on_load_checkpoint")
# What these packages' classes save is nothing of the user's.
EMPTY_HOOKS_OF = ("lightning.",)
# Lightning calls these after a checkpoint has been given back.
HOOKS_OF_THE_START = (
    "configure_optimizers",
    "on_fit_start",
    "on_sanity_check_start",
    "on_sanity_check_end",
    "on_train_start",
    "on_train_epoch_start",
    "train_dataloader",
)

STREAM = "stream"
SAMPLER = "sampler"
ROWS = "rows"


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is known of a value.

    Attributes:
        form: In which form it can be held, such as :data:`BARE`.
        kind: The name of an object's class, with those that it lies in.
        is_users: Whether that class is the user's own.
        own_hooks: Which of :data:`TAKING` and :data:`GIVING_BACK` the class itself defines.
        all_hooks: Those that it or a base class of it defines, but for empty ones.
        state_names: Names that its :data:`TAKING` methods read, but for those of every module.
        set_at_start: Attributes that its start-up hooks set.
        family: Whether it is a stream, a sampler or a dataset of rows; empty: none of them.
    """

    form: str
    kind: str = ""
    is_users: bool = False
    own_hooks: tuple[str, ...] = ()
    all_hooks: tuple[str, ...] = ()
    state_names: tuple[str, ...] = ()
    set_at_start: tuple[str, ...] = ()
    family: str = ""

    @functools.cached_property
    def text(self) -> str:
        """What :func:`facts_from` reads."""
        return json.dumps(dataclasses.asdict(self))

    @property
    def declares_state(self) -> bool:
        """Whether an object gives its state and takes it back."""
        return {"state_dict", "load_state_dict"} <= set(self.all_hooks)


def facts_from(text: str) -> Facts:
    """The facts that a text tells."""
    content: dict[str, Any] = json.loads(text)
    for name, each in content.items():
        # JSON knows no tuples.
        if isinstance(each, list):
            content[name] = tuple(each)
    return Facts(**content)


def form_of(value: Any) -> str:
    """In which form a value that is no object can be held."""
    value = beginning_of(value)
    if is_bare(value):
        return BARE
    for kind, form in (
        (torch.Generator, TORCH_GENERATOR),
        (np.random.Generator, NUMPY_GENERATOR),
        (random.Random, PYTHON_GENERATOR),
    ):
        if isinstance(value, kind):
            return form
    if type(value) is np.ndarray and is_plain(value):
        return ARRAY
    if type(value) is deque and all(map(is_bare, value)):
        return QUEUE
    return HELD_BY_ENGINE if is_plain(value) else ODD


def beginning_of(value: Any) -> Any:
    """The first entries of a very long list or dictionary, which tell its form; any other value."""
    kind = type(value)
    if kind not in (list, dict, deque) or len(value) <= MOST_ENTRIES:
        return value
    entries = value.items() if kind is dict else value
    return kind(islice(entries, MOST_ENTRIES))


def is_bare(value: Any) -> bool:
    """Whether a value is a number, a text, a tensor, or a list, set or dictionary of them."""
    kind = type(value)
    if kind in BARE_LEAVES:
        return True
    if isinstance(value, np.generic):
        return bool(is_plain(value))
    if kind in BARE_ROWS:
        return set(map(type, value)) <= BARE_LEAVES or all(map(is_bare, value))
    if kind is dict:
        return set(map(type, value)) <= BARE_SINGLES and all(map(is_bare, value.values()))
    return False


def facts_of_object(value: Any) -> Facts:
    """The facts of an object with attributes."""
    kind: Any = type(value)
    return facts_of_class(kind)


@functools.lru_cache(maxsize=1024)
def facts_of_class(kind: Any) -> Facts:
    """The facts of all objects of a class."""
    hooks = (*TAKING, *GIVING_BACK)
    return Facts(
        form=OBJECT,
        kind=kind.__name__,
        is_users=is_users_own(kind),
        own_hooks=tuple(name for name in hooks if name in vars(kind)),
        all_hooks=tuple(name for name in hooks if _is_defined(kind, name)),
        state_names=_names_saved_by(kind),
        set_at_start=_set_by_hooks_of_the_start(kind),
        family=_family_of(kind),
    )


def _is_defined(kind: type, hook: str) -> bool:
    for base in kind.__mro__:
        if hook in vars(base) and not base.__module__.startswith(EMPTY_HOOKS_OF):
            return True
    return False


def _names_saved_by(kind: type) -> tuple[str, ...]:
    left_out = (*EMPTY_HOOKS_OF, "torch.") if issubclass(kind, nn.Module) else EMPTY_HOOKS_OF
    found: set[str] = set()
    for hook in TAKING:
        function = getattr(kind, hook, None)
        is_empty = (getattr(function, "__module__", None) or "").startswith(left_out)
        if isinstance(function, FunctionType) and not is_empty:
            found.update(function.__code__.co_names)
    return tuple(sorted(found))


def _set_by_hooks_of_the_start(kind: type) -> tuple[str, ...]:
    """Attributes that a class's own code sets when a training starts."""
    found = set()
    for base in kind.__mro__:
        for name in HOOKS_OF_THE_START:
            function = vars(base).get(name)
            is_lightnings = base.__module__.startswith(EMPTY_HOOKS_OF)
            if isinstance(function, FunctionType) and not is_lightnings:
                instructions = dis.get_instructions(function)
                found |= {each.argval for each in instructions if each.opname == "STORE_ATTR"}
    return tuple(sorted(found))


def _family_of(kind: type) -> str:
    if issubclass(kind, IterableDataset):
        return STREAM
    if issubclass(kind, Sampler):
        return SAMPLER
    return ROWS if issubclass(kind, Dataset) else ""
