"""The commands beside the main job.

Names are imported when they are asked for: the list of commands is there at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unbroken.commands.entry import run_command as run_command
    from unbroken.commands.list_of_commands import print_commands as print_commands

PLACES = {"print_commands": "list_of_commands", "run_command": "entry"}


def __getattr__(name: str) -> Any:
    if name not in PLACES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(f"{__name__}.{PLACES[name]}"), name)
