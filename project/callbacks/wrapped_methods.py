"""Methods of Lightning's objects wrapped for a while, where Lightning has no hook around what is to be timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class WrappedMethods:
    """Wraps methods on single objects, never on their classes, and gives them back."""

    def __init__(self) -> None:
        self._wrapped: list[tuple[object, str]] = []

    def wrap(self, owner: object, name: str, wrapper: Callable[[Any], Any]) -> None:
        """Put ``wrapper(owner.name)`` in the place of ``owner.name``."""
        setattr(owner, name, wrapper(getattr(owner, name)))
        self._wrapped.append((owner, name))

    def release(self) -> None:
        """Give back every method, the last one wrapped first."""
        while self._wrapped:
            owner, name = self._wrapped.pop()
            vars(owner).pop(name, None)
