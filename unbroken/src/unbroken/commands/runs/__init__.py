"""The runs of a folder: what each has reached, how they differ, and their means over seeds."""

from unbroken.commands.runs.command import main as main
