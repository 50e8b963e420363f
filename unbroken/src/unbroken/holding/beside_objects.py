"""What the user's own code keeps beside the objects of a training: in global variables, in
attributes of classes, and in functions (variables of the function around one, a default that is a
list).
"""

from __future__ import annotations

import functools
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Set
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer
from unbroken.holding.users_modules import is_users_module
from unbroken.holding.walk import BUILTINS, LEAVES

# Of these a change is told: of the value itself, or of an entry that it holds.
KINDS = {*LEAVES, *BUILTINS, defaultdict, Counter}
# Of these a package's class counts as the user's own does.
STATES = (Tensor, np.ndarray, set, nn.Module, Optimizer, Iterator)


class Places(NamedTuple):
    """Where a module keeps something beside objects.

    Attributes:
        variables: Each with its name, whose it is (the module's, or a class's), and its key there.
            They are of :data:`KINDS`.
        objects: The same for what may have a state of its own.
        functions: Those that may keep something, with their names.
        further: The modules that it uses.
    """

    variables: list[tuple[str, Mapping[str, Any], str]]
    objects: list[tuple[str, Mapping[str, Any], str]]
    functions: list[tuple[str, FunctionType]]
    further: list[str]


def values_beside_objects(modules: Iterable[str], further: Set[type]) -> Iterator[tuple[str, Any]]:
    """Numbers, texts, lists and objects that modules of the user's, and his modules that these use,
    keep beside the training's; each with its name. In functions also what is of further classes.
    """
    waiting = list(modules)
    seen: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in seen or not is_users_module(name):
            continue
        seen.add(name)
        # A notebook goes on to fill its module. Others are asked at every save, and are as they
        # were imported.
        places = _places_in(name) if name == "__main__" else _places_in_imported(name)
        waiting += places.further
        yield from ((path, owner.get(key)) for path, owner, key in places.objects)
        found = [(path, owner.get(key)) for path, owner, key in places.variables]
        for path, function in places.functions:
            found += [(f"{path}.{key}", value) for key, value in held_by_function(function)]
        for path, value in found:
            if type(value) in KINDS or type(value) in further:
                yield path, value


def _places_in(name: str) -> Places:
    places = Places([], [], [], [])
    variables = vars(sys.modules[name])
    for variable, value in list(variables.items()):
        if type(value) in KINDS:
            if not variable.startswith("__"):
                places.variables.append((f"{name}.{variable}", variables, variable))
        elif isinstance(value, ModuleType):
            places.further.append(value.__name__)
        elif isinstance(value, type | FunctionType):
            if value.__module__ != name:
                places.further.append(str(value.__module__))
            elif isinstance(value, type):
                _add_class(places, f"{name}.{value.__qualname__}", value)
            else:
                places.functions.append((f"{name}.{variable}", value))
        elif _may_have_a_state(value):
            places.objects.append((f"{name}.{variable}", variables, variable))
    return places


_places_in_imported = functools.cache(_places_in)


def _add_class(places: Places, name: str, kind: type) -> None:
    for attribute, value in list(vars(kind).items()):
        path = f"{name}.{attribute}"
        if _may_keep_something(value):
            places.functions.append((path, value))
        elif type(value) in KINDS and not attribute.startswith("__"):
            places.variables.append((path, vars(kind), attribute))
        elif isinstance(value, Tensor | np.ndarray):
            places.objects.append((path, vars(kind), attribute))


def owner_beside_objects(path: str) -> Any:
    """The user's module of this name, or the class in one; None where there is none."""
    names = path.split(".")
    for end in range(len(names), 0, -1):
        name = ".".join(names[:end])
        if name not in sys.modules:
            continue
        found: Any = sys.modules[name] if is_users_module(name) else None
        for each in names[end:]:
            inner = vars(found).get(each) if found is not None else None
            found = inner if isinstance(inner, type) else None
        return found
    return None


def _may_have_a_state(value: Any) -> bool:
    """Whether a value may change without another one in its place, and is the user's own or of a
    kind that has a state by nature.
    """
    return isinstance(value, STATES) or is_users_module(type(value).__module__)


def held_by_function(value: Any) -> Iterator[tuple[str, Any]]:
    """What a function of the user's keeps, a ``partial``, or a method of an object."""
    if isinstance(value, functools.partial):
        yield "func", value.func
        yield from ((str(place), each) for place, each in enumerate(value.args))
        yield from value.keywords.items()
    elif isinstance(value, MethodType):
        yield "__self__", value.__self__
        yield "__func__", value.__func__
    elif isinstance(value, BuiltinMethodType):
        # A function of a module's written in C has that module there.
        if not isinstance(value.__self__, ModuleType | type):
            yield "__self__", value.__self__
    elif _may_keep_something(value) and is_users_module(value.__globals__.get("__name__", "")):
        yield from vars(value).items()
        code = value.__code__
        for variable, cell in zip(code.co_freevars, value.__closure__ or (), strict=True):
            try:
                yield variable, cell.cell_contents
            except ValueError:
                # It has no value yet.
                continue
        names = code.co_varnames[: code.co_argcount]
        defaults = value.__defaults__ or ()
        yield from zip(names[len(names) - len(defaults) :], defaults, strict=True)
        yield from (value.__kwdefaults__ or {}).items()


def _may_keep_something(value: Any) -> bool:
    """Whether a value is a function that may keep something. Few do."""
    if not isinstance(value, FunctionType):
        return False
    defaults = value.__defaults__ or value.__kwdefaults__
    return bool(value.__closure__ or defaults or value.__dict__)
