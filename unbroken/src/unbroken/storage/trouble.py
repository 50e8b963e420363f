"""A disk that does not take what a run writes: told as it begins, and as it ends."""

from __future__ import annotations

import time

from unbroken.stopping.ranks import say


class Trouble:
    """Whether something cannot be written at the moment, and why.

    Args:
        begins: What a line says as it begins, such as ``saves fail``.
        ends: What a line says as it ends, such as ``the run is saved again``.

    Attributes:
        reason: None: everything is written.
    """

    def __init__(self, begins: str, ends: str) -> None:
        self.reason: str | None = None
        self._begins = begins
        self._ends = ends

    def note(self, reason: str) -> None:
        """Something could not be written. The first of several is told."""
        if self.reason is None:
            now = time.strftime("%H:%M:%S")
            # It may be the run's last save, after which it does not go on.
            say(f"since {now} {self._begins}: {reason} The run tries again.")
        self.reason = reason

    def end(self) -> None:
        """Everything is written."""
        if self.reason is not None:
            say(f"{self._ends}, since {time.strftime('%H:%M:%S')}.")
        self.reason = None
