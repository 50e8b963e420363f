"""What an object keeps in its attributes, those in slots among them."""

from collections.abc import Iterator
from typing import Any


def attributes_of(value: Any) -> Iterator[tuple[str, Any]]:
    """The attributes of an object, those in slots among them."""
    yield from getattr(value, "__dict__", {}).items()
    for name in names_of_slots(type(value)):
        if hasattr(value, name):
            yield name, getattr(value, name)


def names_of_slots(kind: type) -> list[str]:
    """The attributes that a class of the user's keeps in slots, instead of a dictionary."""
    names: list[str] = []
    for each in kind.__mro__:
        slots = vars(each).get("__slots__", ())
        own = [slots] if isinstance(slots, str) else [*slots]
        names += [_mangled(name, each) for name in own if name not in ("__dict__", "__weakref__")]
    return names


def _mangled(name: str, kind: type) -> str:
    """The name that Python gives to a private attribute of a class."""
    is_private = name.startswith("__") and not name.endswith("__")
    return f"_{kind.__name__.lstrip('_')}{name}" if is_private else name
