"""Which callbacks count as the user's: those that a checkpoint keeps more of, and whose hooks are
called again or undone.
"""

import dis
import functools
from inspect import unwrap
from types import FunctionType
from typing import Any

from lightning.pytorch import Callback, Trainer

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
    """The callbacks that neither Lightning nor the engine brings, and Lightning's with hooks of the
    user's, such as a ``LambdaCallback``.
    """
    everyone: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return [each for each in everyone if _is_the_users(each)]


def _is_the_users(callback: Any) -> bool:
    is_brought = type(callback).__module__.startswith(NOT_THE_USERS)
    return not is_brought or any(hasattr(Callback, name) for name in vars(callback))


@functools.cache
def set_by_lightning(kind: type) -> frozenset[str]:
    """The attributes of a callback that methods of Lightning's set, where its class is derived from
    one of Lightning's: the best score of a ``ModelCheckpoint``. Lightning saves what it needs.
    """
    methods: list[Any] = []
    for each in kind.__mro__:
        if each.__module__.startswith("lightning."):
            methods += [unwrap(it) for it in vars(each).values() if isinstance(it, FunctionType)]
    # "self.wait_count = 0" stores an attribute.
    steps = [step for method in methods for step in dis.get_instructions(method)]
    return frozenset(step.argval for step in steps if step.opname == "STORE_ATTR")
