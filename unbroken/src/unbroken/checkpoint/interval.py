"""How often a run is saved by time or steps: as it was asked for, or less often where a save by
time costs too much, or the disk is still busy with the one before.
"""

from __future__ import annotations

import math
import re

from unbroken.errors import UserError
from unbroken.stopping.ranks import say
from unbroken.storage.run_files import Costs

# The part of a run's time that saves by time may take, to copy and to write them
LARGEST_SHARE = 0.02


class Interval:
    """The time between two saves.

    Args:
        seconds: As they are wished for.
        steps: Optimizer steps between two saves. If they are given, the seconds do not count.
    """

    def __init__(self, seconds: float = 60.0, steps: int | None = None) -> None:
        self.seconds = seconds
        self.steps = steps
        self._has_told = False

    @classmethod
    def of(cls, text: str) -> Interval:
        """``60s`` is a minute; ``500`` or ``500steps`` are optimizer steps.

        Raises:
            UserError: It is anything else.
        """
        seconds = re.fullmatch(r"\s*(\d{1,9}\.?\d*|\.\d+)\s*s\s*", str(text))
        if seconds and 0 < float(seconds[1]) < math.inf:
            return cls(float(seconds[1]))
        steps = re.fullmatch(r"\s*(\d{1,9})\s*(?:steps?)?\s*", str(text))
        if steps and int(steps[1]) > 0:
            return cls(steps=int(steps[1]))
        must = "be optimizer steps (500) or seconds (60s), above 0"
        raise UserError(f"--checkpoint_every (in a script: every) must {must}, got {text}.")

    def is_due_between(self, before: int, now: int) -> bool:
        """Whether a save is due at one of the steps after ``before``, up to ``now``."""
        return self.steps is not None and before // self.steps < now // self.steps

    def tell_of_waiting(self) -> None:
        """Say once that a save which is due waits for the disk."""
        if not self._has_told:
            self._has_told = True
            say(
                f"{self.steps} steps take less time than the disk needs for a save: the next one"
                " waits until the file before is written. Training does not wait."
            )

    def seconds_are_over(self, passed: float, costs: Costs) -> bool:
        """Whether so many seconds after a save the next one is due."""
        return self.steps is None and passed >= self.seconds_with(costs)

    def is_too_soon(self, passed: float, costs: Costs) -> bool:
        """Whether the last save, if a thread has written it, is so recent that another one now
        would take more than :data:`LARGEST_SHARE` of the time.
        """
        return costs.last_background_seconds > 0 and passed < costs.usual_seconds / LARGEST_SHARE

    def seconds_with(self, costs: Costs) -> float:
        """The seconds between two saves: the wish, or more where saves cost too large a share. Then
        a line says so, once.
        """
        needed = costs.usual_seconds / LARGEST_SHARE
        if needed <= self.seconds:
            return self.seconds
        if not self._has_told:
            self._has_told = True
            say(
                f"a save takes {costs.usual_seconds:.1f} s of writing and waiting: every"
                f" {needed:.0f} s in the place of every {self.seconds:g} s."
            )
        return needed
