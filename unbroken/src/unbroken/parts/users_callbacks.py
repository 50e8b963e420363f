"""Which callbacks count as the user's: those that a checkpoint keeps more of, and whose hooks are
called again or undone.
"""

from typing import Any

from lightning.pytorch import Trainer

# The modules whose classes are neither the user's nor features of this project.
NOT_THE_USERS = ("lightning.", __name__.rpartition(".")[0])


def users_callbacks(trainer: Trainer) -> list[Any]:
    """The callbacks that neither Lightning nor the engine brings."""
    everyone: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return [each for each in everyone if not type(each).__module__.startswith(NOT_THE_USERS)]
