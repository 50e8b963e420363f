"""A clone under a name of its own, and the library that it takes along."""

from unbroken.commands.rename.command import main as main
