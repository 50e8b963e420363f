"""What decides how a training goes on, and is no data: the classes of layers and objects, what
attributes call (functions, methods, classes), and which callbacks take part.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any
from weakref import ReferenceType, ref

from lightning.pytorch import Trainer
from torch import nn
from unbroken.lightning_internals import HOOKS_OF_LAYERS
from unbroken.parts.held import LOADERS, Held, not_kept_of
from unbroken.parts.plain_values import is_users_own, lasting
from unbroken.parts.users_callbacks import users_callbacks

# The module of torch's lazy layers
LAZY = "torch.nn.modules.lazy"

# What an attribute may hold to be called: a function, a method of an object, or a class
CALLED = (FunctionType, BuiltinFunctionType, MethodType, type)
AGAIN = (
    "A resumed run has that only where a hook of its start, or of an epoch's start, does it again."
)


class Replaced:
    """Tells where training puts another object, or function, in the place of one of the start. A
    checkpoint holds the values of objects, and not which ones they are.
    """

    def __init__(self) -> None:
        self._of_start: dict[str, Any] = {}
        # The objects of the start by their names, as far as a weak reference can be had.
        self._objects: dict[str, ReferenceType[Any]] = {}
        self._first_names: dict[str, str] = {}
        # The names whose objects had moved before the hooks of the latest epoch's start.
        self._moved: set[str] = set()
        self._told: set[str] = set()
        # How many each layer has that has some.
        self._hooks: dict[str, int] = {}
        self._callbacks: list[str] = []

    def begin(self, trainer: Trainer, held: Held) -> None:
        """Note what there is when training starts, after all start-up hooks."""
        self._of_start = classes_and_functions(held)
        self._objects = references_to(held.objects)
        self._first_names = first_names(held.objects)
        self._hooks = hooks_of(held)
        self._callbacks = names_of_callbacks(trainer)

    def before_epoch_starts(self, held: Held) -> None:
        """Note what has moved before the user's hooks of an epoch's start, and before his
        ``train_dataloader``.
        """
        self._moved = set(self._moved_now(held))

    def epoch_has_started(self, held: Held) -> None:
        """What ``train_dataloader`` or a hook of an epoch's start has moved is no change: a resumed
        run moves it, too.
        """
        by_hooks = self._moved_now(held)
        for name in self._moved:
            by_hooks.pop(name, None)
        self._objects |= references_to(by_hooks)
        now = first_names(held.objects)
        self._first_names |= {name: now[name] for name in by_hooks}

    def lines(self, trainer: Trainer, held: Held) -> list[str]:
        """A line for each that is another one now. Each is told once."""
        found: list[str] = []
        of_now = classes_and_functions(held)
        # At most saves nothing has changed.
        changed = of_now.items() - self._of_start.items() if of_now != self._of_start else ()
        for name, now in sorted(changed, key=lambda each: each[0]):
            before = self._of_start.get(name) or function_of_class(held, name)
            if before is not None and what_runs(before) != what_runs(now):
                found.append(
                    f"a resume may not be exact: training has put {title_of(now)} in the place of"
                    f" {title_of(before)} at {name}. {AGAIN}"
                )
        self._of_start |= of_now
        found += self._line_of_moved(held)
        hooks = hooks_of(held)
        for name in sorted(hooks.keys() | self._hooks.keys()):
            count = hooks.get(name, 0)
            count_before = self._hooks.get(name, 0)
            if count != count_before:
                found.append(
                    f"a resume may not be exact: training has changed the number of hooks of {name}"
                    f" from {count_before} to {count}. {AGAIN}"
                )
        self._hooks = hooks
        callbacks = names_of_callbacks(trainer)
        if callbacks != self._callbacks:
            found.append(
                "a resume may not be exact: training has changed the callbacks from"
                f" {' '.join(self._callbacks) or 'none'} to {' '.join(callbacks) or 'none'}, and a"
                " resumed run has those of its start."
            )
            self._callbacks = callbacks
        return found

    def _moved_now(self, held: Held) -> dict[str, Any]:
        """The names that have an object which another name had at the start, each with it."""
        others: dict[str, Any] = {}
        for name, now in held.objects.items():
            before = self._objects.get(name)
            if before is not None and before() is not now:
                others[name] = now
        # At most saves there are none, or new objects alone.
        of_start = {id(each()) for each in self._objects.values()} if others else set()
        return {name: now for name, now in others.items() if id(now) in of_start}

    def _line_of_moved(self, held: Held) -> list[str]:
        """A line where objects have moved. The first is named."""
        moved = self._moved_now(held)
        now = first_names(held.objects) if moved else {}
        told = [
            name
            for name, value in moved.items()
            if name not in self._told and not self._is_kept_by_place(held, name, value, now[name])
        ]
        self._told |= set(told)
        if not told:
            return []
        first, *others = told
        names = {id(each()): name for name, each in self._objects.items()}
        further = f", and likewise at {len(others)} more names" if others else ""
        return [
            f"a resume may not be exact: training has put the object of"
            f" {names[id(moved[first])]} at {first}, where another one was{further}. A"
            f" checkpoint holds the values of objects, and not which ones they are. {AGAIN}"
        ]

    def _is_kept_by_place(self, held: Held, name: str, value: Any, first: str) -> bool:
        """Whether it does not matter which object this is: all that it holds is kept by its names,
        and those are one object's as they were at the start.
        """
        is_kept = first in held.owners and not isinstance(value, nn.Module)
        return is_kept and self._first_names.get(name) == first


def first_names(objects: Mapping[str, Any]) -> dict[str, str]:
    """Of each name the first one that has the same object."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(value), name) for name, value in objects.items()}


def references_to(objects: Mapping[str, Any]) -> dict[str, ReferenceType[Any]]:
    """Weak references to those that can have one. What a loader holds is made anew with it."""
    found: dict[str, ReferenceType[Any]] = {}
    for name, value in objects.items():
        if not name.startswith(LOADERS):
            with suppress(TypeError):
                found[name] = ref(value)
    return found


def classes_and_functions(held: Held) -> dict[str, Any]:
    """The class of each layer and object, and each function, method or class that an attribute or
    an entry holds.
    """
    found: dict[str, Any] = {path: type(layer) for path, layer in held.layers.items()}
    for path, owner in held.owners.items():
        if path in held.layers and not is_users_own(type(owner)):
            continue
        found[path] = type(owner)
        not_kept = not_kept_of(owner)
        for name, value in vars(owner).items():
            if isinstance(value, CALLED) and name not in not_kept:
                found[f"{path}.{name}"] = value
    for name, each in held.objects.items():
        # A method is told with its function.
        is_whole = not name.endswith(".__func__")
        if isinstance(each, CALLED) and is_whole and not name.startswith(LOADERS):
            found.setdefault(name, each)
    return found


def function_of_class(held: Held, name: str) -> Any:
    """The function of a class that an attribute hides; None: it hides none."""
    path, _, attribute = name.rpartition(".")
    found = getattr(type(held.owners.get(path)), attribute, None)
    return found if isinstance(found, CALLED) else None


def what_runs(called: Any) -> Any:
    """What tells two functions, methods or classes apart. One that is made anew in each epoch has
    the code of the one before.
    """
    code = getattr(getattr(called, "__func__", called), "__code__", None)
    return title_of(called) if code is None else code


def title_of(kind: Any) -> str:
    """The name of a class or function."""
    return str(lasting(kind).__qualname__)


def hooks_of(held: Held) -> dict[str, int]:
    """How many hooks each layer has that has some. This is asked at each save."""
    found: dict[str, int] = {}
    for path, layer in held.layers.items():
        inside = vars(layer)
        if any(inside[name] for name in HOOKS_OF_LAYERS):
            hooks = [hook for name in HOOKS_OF_LAYERS for hook in inside[name].values()]
            # A lazy layer's own one removes itself after the first batch.
            own = [each for each in hooks if getattr(each, "__module__", None) == LAZY]
            found[path] = len(hooks) - len(own)
    return found


def names_of_callbacks(trainer: Trainer) -> list[str]:
    """The classes of the user's callbacks."""
    return [type(each).__qualname__ for each in users_callbacks(trainer)]
