"""A monitor only watches: whatever goes wrong in it, the run goes on."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from lightning.pytorch import Callback
from unbroken.stopping.ranks import gather_from_ranks

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
ThisMonitor = TypeVar("ThisMonitor", bound="Monitor")


class Monitor(Callback):
    """A callback that measures a run and changes nothing in it.

    Its hooks are decorated with :func:`never_ends_the_run`. After an error the monitor is off: it
    gives one warning and measures nothing more.
    """

    # By this word ``--monitors`` names it.
    word = ""
    is_off = False

    @property
    def is_measurable(self) -> bool:
        """Whether this machine tells what the monitor measures."""
        return True

    def switch_off(self, error: Exception) -> None:
        """Measure nothing more, and say why. ``error``: what went wrong."""
        self.is_off = True
        # Not Lightning's rank_zero_warn: the error may be of a further rank alone.
        warnings.warn(
            f"{type(self).__name__} is switched off, the run goes on "
            f"({type(error).__name__}: {' '.join(str(error).split())}).",
            stacklevel=2,
        )

    def gather_from_ranks(self, measured: Any) -> list[Any] | None:
        """What every rank has measured, in rank order; None where the monitor of any rank is off.

        Every rank must call it, also one whose monitor is off, which gives None: the others would
        wait for it.
        """
        ranks = gather_from_ranks(None if self.is_off else measured)
        if any(rank is None for rank in ranks):
            return None
        return ranks


def never_ends_the_run(
    hook: Callable[Concatenate[ThisMonitor, Arguments], Result],
) -> Callable[Concatenate[ThisMonitor, Arguments], Result | None]:
    """Let an error in a method of a monitor switch the monitor off. The method then does nothing
    and returns None.
    """

    @functools.wraps(hook)
    def careful(
        self: ThisMonitor, /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result | None:
        if self.is_off:
            return None
        try:
            return hook(self, *args, **kwargs)
        except Exception as error:
            self.switch_off(error)
            return None

    return careful
