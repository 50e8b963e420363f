"""What decides how a training goes on, and is no data: the classes of layers and objects, functions
in attributes, and which callbacks take part.
"""

from __future__ import annotations

import functools
from types import BuiltinFunctionType, FunctionType
from typing import Any

from lightning.pytorch import Trainer
from unbroken.parts.held import Held, is_foreign_layer, not_kept_of
from unbroken.parts.plain_values import name_of
from unbroken.parts.users_callbacks import users_callbacks

FUNCTIONS = (FunctionType, BuiltinFunctionType)
# Where a layer keeps what is called before or behind it.
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
AGAIN = (
    "A resumed run has that only where a hook of its start, or of an epoch's start, does it again."
)


class Ways:
    """Tells where training puts another object, or function, in the place of one of the start. A
    checkpoint holds the values of objects, and not which ones they are.
    """

    def __init__(self) -> None:
        self._begun: dict[str, str] = {}
        # How many each layer has that has some.
        self._hooks: dict[str, int] = {}
        self._callbacks: list[str] = []

    def begin(self, trainer: Trainer, held: Held) -> None:
        """Note what there is when training starts, after all hooks of the start."""
        self._begun = ways_of(held)
        self._hooks = hooks_of(held)
        self._callbacks = names_of_callbacks(trainer)

    def lines(self, trainer: Trainer, held: Held) -> list[str]:
        """A line for each that is another one now. Each is told once."""
        found: list[str] = []
        for name, now in ways_of(held).items():
            before = self._begun.get(name) or function_of_class(held, name)
            if before not in (None, now):
                self._begun[name] = now
                found.append(
                    f"a resume may not be exact: training has put {now} in the place of {before} at"
                    f" {name}. {AGAIN}"
                )
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


def ways_of(held: Held) -> dict[str, str]:
    """The class of each layer and object, and the name of each function in an attribute of the
    user's own.
    """
    kinds: dict[str, Any] = {path: type(layer) for path, layer in held.layers.items()}
    found = {path: class_named(kind) for path, kind in kinds.items()}
    for path, owner in held.owners.items():
        if is_foreign_layer(owner):
            continue
        kind: Any = type(owner)
        found[path] = class_named(kind)
        not_kept = not_kept_of(owner)
        for name, value in vars(owner).items():
            if isinstance(value, FUNCTIONS) and name not in not_kept:
                found[f"{path}.{name}"] = value.__qualname__
    return found


def function_of_class(held: Held, name: str) -> str | None:
    """The function of a class that an attribute hides, by its name; None: it hides none."""
    path, _, attribute = name.rpartition(".")
    found = getattr(type(held.owners.get(path)), attribute, None)
    return found.__qualname__ if isinstance(found, FUNCTIONS) else None


@functools.cache
def class_named(kind: Any) -> str:
    """The name of a class. A lazy layer has another one from its first batch on."""
    return name_of(getattr(kind, "cls_to_become", None) or kind).partition(":")[2]


def hooks_of(held: Held) -> dict[str, int]:
    """How many hooks each layer has that has some. This is asked at each save."""
    found: dict[str, int] = {}
    for path, layer in held.layers.items():
        inside = vars(layer)
        if any(inside[name] for name in HOOKS):
            found[path] = sum(len(inside[name]) for name in HOOKS)
    return found


def names_of_callbacks(trainer: Trainer) -> list[str]:
    """The classes of the user's callbacks."""
    return [type(each).__qualname__ for each in users_callbacks(trainer)]
