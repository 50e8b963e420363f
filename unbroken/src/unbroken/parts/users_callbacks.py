"""Which callbacks count as the user's: those that a checkpoint keeps more of, and whose hooks are
called again or undone.
"""

from typing import Any

from lightning.pytorch import Trainer

# Rooms of the library that keep a run's promises. Monitors, loggers and the like are somebody's
# choice and count as the user's.
ENGINE = (
    "checkpoint",
    "loading",
    "mirror",
    "parts",
    "seams",
    "stopping",
    "storage",
    "verifying",
)
# The modules whose classes are neither the user's nor chosen by him
NOT_THE_USERS = ("lightning.", *(f"unbroken.{room}" for room in ENGINE))


def users_callbacks(trainer: Trainer) -> list[Any]:
    """The callbacks that neither Lightning nor the engine brings."""
    everyone: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return [each for each in everyone if not type(each).__module__.startswith(NOT_THE_USERS)]
