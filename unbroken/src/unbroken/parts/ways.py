"""What decides how a training goes on, and is no data: the classes of layers and objects, functions
in attributes, and which callbacks take part.
"""

from __future__ import annotations

from types import BuiltinFunctionType, FunctionType
from typing import Any

from lightning.pytorch import Trainer
from unbroken.parts.held import Held, is_foreign_layer, not_kept_of
from unbroken.parts.plain_values import name_of
from unbroken.parts.users_callbacks import users_callbacks

FUNCTIONS = (FunctionType, BuiltinFunctionType)
# Where a layer keeps what is called before or behind it.
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class Ways:
    """Tells where training puts another object, or function, in the place of one of the start. A
    checkpoint holds the values of objects, and not which ones they are.
    """

    def __init__(self) -> None:
        self._begun: dict[str, str] = {}
        self._callbacks: list[str] = []

    def begin(self, trainer: Trainer, held: Held) -> None:
        """Note what there is when training starts, after all hooks of the start."""
        self._begun = ways_of(held)
        self._callbacks = names_of_callbacks(trainer)

    def lines(self, trainer: Trainer, held: Held) -> list[str]:
        """A line for each that is another one now. Each is told once."""
        found: list[str] = []
        for name, now in ways_of(held).items():
            before = self._begun.get(name, function_of_class(held, name))
            if before not in (None, now):
                self._begun[name] = now
                found.append(
                    f"a resume may not be exact: training has put {now} in the place of {before} at"
                    f" {name}. A resumed run has it only where a hook of its start, or of an"
                    " epoch's start, puts it there again."
                )
        callbacks = names_of_callbacks(trainer)
        if callbacks != self._callbacks:
            before, now = (" ".join(each) or "none" for each in (self._callbacks, callbacks))
            found.append(
                f"a resume may not be exact: training has changed the callbacks from {before} to"
                f" {now}, and a resumed run has those of its start."
            )
            self._callbacks = callbacks
        return found


def ways_of(held: Held) -> dict[str, str]:
    """The class of each layer and object, how many hooks a layer has, and the name of each function
    in an attribute of the user's own.
    """
    found = {path: class_of(owner) for path, owner in {**held.layers, **held.owners}.items()}
    for path, layer in held.layers.items():
        found[f"the hooks of {path}"] = str(sum(len(vars(layer)[name]) for name in HOOKS))
    for path, owner in held.owners.items():
        if is_foreign_layer(owner):
            continue
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


def class_of(owner: Any) -> str:
    """The name of an object's class. A lazy layer has another one from its first batch on."""
    kind = type(owner)
    return name_of(getattr(kind, "cls_to_become", None) or kind).partition(":")[2]


def names_of_callbacks(trainer: Trainer) -> list[str]:
    """The classes of the user's callbacks."""
    return [type(each).__qualname__ for each in users_callbacks(trainer)]
