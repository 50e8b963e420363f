"""Which objects attributes hold: those that training began with, or one that several hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from unbroken.parts.remade import fillable_in, is_fillable


class Objects:
    """The lists, dictionaries, tensors and the like that attributes held when training began.

    What training has changed is filled at a resume, and what it has replaced is made anew (see
    :mod:`unbroken.parts.remade`).
    """

    def __init__(self) -> None:
        # By their places. The objects themselves are kept: an id would be given to another one.
        self._first: dict[str, Any] = {}
        # The attributes that were looked at.
        self._noted: set[str] = set()

    @property
    def places(self) -> set[str]:
        """Where there were such objects when training began."""
        return set(self._first)

    def first(self, place: str, now: Any) -> Any:
        """The object that training began with; ``now`` where none was noted."""
        return self._first.get(place, now)

    def note(self, attributes: Mapping[str, Any]) -> None:
        """Note what attributes hold, each once: before the sanity check, or training, has changed
        it.
        """
        new = {name: value for name, value in attributes.items() if name not in self._noted}
        self._first |= fillable_in(new)
        self.pass_by(new)

    def pass_by(self, names: Iterable[str]) -> None:
        """Note nothing of attributes from now on, because they get what training has made."""
        self._noted.update(names)

    def unreplaced(self, attributes: Mapping[str, Any]) -> list[str]:
        """The places where attributes hold what training began with."""
        now = fillable_in(attributes)
        return sorted(place for place, value in now.items() if self._first.get(place) is value)


def held_by_several(attributes: Mapping[str, Any]) -> dict[str, str]:
    """The names of attributes that hold the object of another one, each with that other's name."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for name, value in attributes.items():
        if not is_fillable(value):
            continue
        other = first.setdefault(id(value), name)
        if other != name:
            names[name] = other
    return names
