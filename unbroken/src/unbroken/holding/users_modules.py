"""Which modules are the user's own: his project and his script, and no installed package."""

import functools
import sys
from pathlib import Path

LIBRARY = "unbroken"
# The rooms of the library whose classes a task is made of
TASKS = ("unbroken.tasks.", "unbroken.data.")


def users_modules() -> tuple[str, ...]:
    """The names of all modules of the user's own that are imported, sorted."""
    return _users_among(tuple(sys.modules))


# They are asked for at every save, and thousands of modules are imported, nearly all before
# training.
@functools.lru_cache(maxsize=1)
def _users_among(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted(filter(is_users_module, names)))


@functools.cache
def is_users_module(name: str) -> bool:
    """Whether a module of this name, which is imported, is the user's own."""
    package = name.partition(".")[0]
    if package == LIBRARY:
        return name.startswith(TASKS)
    module = sys.modules.get(name)
    if package in sys.stdlib_module_names or module is None:
        return False
    file = getattr(module, "__file__", None)
    if file is None:
        # What was typed into an interpreter or a notebook has no file, as have built-in classes.
        return name == "__main__"
    return not {"site-packages", "dist-packages"}.intersection(Path(file).parts)
