"""The commands beside the main job."""

from unbroken.commands.list_of_commands import print_commands as print_commands
from unbroken.commands.run_command import run_command as run_command
