"""The trackers that ``--logger`` knows by a word, and what is told of any other word.

Every command reads this file, so it imports nothing that takes long.
"""

import re
from collections.abc import Callable

from unbroken.errors import nearest

# Each tracker, and the package that it needs beside those of training
TRACKERS: dict[str, str | None] = {
    "wandb": "wandb",
    "tensorboard": "tensorboard",
    "mlflow": "mlflow",
    "trackio": "trackio",
    # metrics.csv, which every run writes
    "csv": None,
}

# What jsonargparse says of a name that leads to no class
NO_SUCH_CLASS = "dot import path|correspond to a subclass|No module named|has no attribute"


def told_as_words(option: str, message: str, given: Callable[[str], str]) -> str | None:
    """What is told of a ``--logger`` that is neither words nor a class; None for other errors."""
    if option != "--logger" or "TrackerWords" not in message:
        return None
    if not re.search(NO_SUCH_CLASS, message):
        return None
    allowed = f"any of {', '.join(TRACKERS)}, with commas between them, or false, or a class"
    got = given(message)
    hint = nearest(got.rpartition(",")[2], TRACKERS)
    return f"{option} must be {allowed} (package.module.Class), got {got}.{hint}"
