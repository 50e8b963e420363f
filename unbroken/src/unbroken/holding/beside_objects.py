"""What the user's own code keeps beside objects: in global variables, in attributes of classes, and
in functions (variables of the function around one, a default that is a list).
"""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from types import FunctionType, MethodType, ModuleType, NoneType
from typing import Any

from unbroken.holding.users_modules import is_users_module

# A dictionary there is a cache or a registry more often than a state.
KINDS = {NoneType, bool, int, float, complex, str, bytes, list, deque}


def values_beside_objects(modules: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Numbers, texts and lists that modules of the user's, and his modules that these use, keep
    beside objects; each with its name.
    """
    waiting = list(modules)
    seen: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in seen or not is_users_module(name):
            continue
        seen.add(name)
        for variable, value in list(vars(sys.modules[name]).items()):
            if type(value) in KINDS:
                if not variable.startswith("__"):
                    yield f"{name}.{variable}", value
            elif isinstance(value, ModuleType):
                waiting.append(value.__name__)
            elif isinstance(value, type | FunctionType):
                if value.__module__ == name:
                    yield from _values_of(value, f"{name}.{value.__qualname__}")
                elif value.__module__ not in seen:
                    waiting.append(str(value.__module__))


def _values_of(value: type | FunctionType, name: str) -> Iterator[tuple[str, Any]]:
    """The same of a class, with its methods, or of a function."""
    is_function = isinstance(value, FunctionType)
    for attribute, each in held_by_function(value) if is_function else list(vars(value).items()):
        if type(each) in KINDS:
            if not attribute.startswith("__"):
                yield f"{name}.{attribute}", each
        elif type(each) is FunctionType and not is_function and _keeps_something(each):
            yield from _values_of(each, f"{name}.{attribute}")


def _keeps_something(function: FunctionType) -> bool:
    """Whether a function may keep something: few do, and each is asked at every save."""
    defaults = function.__defaults__ or function.__kwdefaults__
    return bool(function.__closure__ or defaults or function.__dict__)


def held_by_function(value: Any) -> Iterator[tuple[str, Any]]:
    """What a function of the user's keeps, a ``partial``, or a method of an object."""
    if isinstance(value, functools.partial):
        yield "func", value.func
        yield from ((str(place), each) for place, each in enumerate(value.args))
        yield from value.keywords.items()
    elif isinstance(value, MethodType):
        yield "__self__", value.__self__
        yield "__func__", value.__func__
    elif isinstance(value, FunctionType) and is_users_module(value.__globals__.get("__name__", "")):
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
