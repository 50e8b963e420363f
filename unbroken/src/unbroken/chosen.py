"""What a run chose by itself, where nobody typed it.

Such a choice may come out differently at the next start: a measurement on a busy machine, the cores
or devices of another one. If it can change a number, it belongs to the run like a typed setting.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unbroken.stopping.ranks import decided_by_rank_zero


class Chosen:
    """A run's own choices: each is made once, by rank zero, and kept by every rank and resume.

    Args:
        kept: The choices that the run's checkpoint holds. None: the run is new.

    Attributes:
        values: Name → plain value, as every checkpoint of the run holds them.
    """

    def __init__(self, kept: dict[str, Any] | None = None) -> None:
        self.values = dict(kept or {})

    def once(self, name: str, decide: Callable[[], Any]) -> Any:
        """The run's choice of that name; where it has none yet, ``decide()`` of rank zero.

        Every rank must call it, before or after the ranks have met.
        """
        if name not in self.values:
            self.values[name] = decided_by_rank_zero(name, decide)
        return self.values[name]
