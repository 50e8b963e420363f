"""What a run has reached, and the two hooks by which a feature takes part in it.

A callback or logger may have ``add_facts``, which is called on every rank as training and test have ended, and
``leave``, which is called on rank zero when all facts are known. Both are optional. See :class:`AddsFacts` and
:class:`LeavesSomething`.
"""

from typing import Protocol, runtime_checkable

from lightning.pytorch import Trainer

from project.engine.summary import Mistake as Mistake
from project.engine.summary import RunRecord as RunResult


@runtime_checkable
class AddsFacts(Protocol):
    """A callback or logger that knows something for ``summary.json``, the closing lines, the report or W&B."""

    def add_facts(self, trainer: Trainer, result: RunResult) -> None:
        """Write what is known into ``result``: ``result.summary.metrics``, ``result.breakdown`` and the like."""
        ...


@runtime_checkable
class LeavesSomething(Protocol):
    """A callback or logger that leaves something behind when a run has ended or was stopped, such as a page."""

    def leave(self, trainer: Trainer, result: RunResult) -> None:
        """Write it. An error here never ends the run: it becomes a warning."""
        ...
