# moved: delete this file after the merge
"""Moved to :mod:`project.command_line`."""

from project.command_line.cli import Configuration as Configuration
from project.command_line.cli import ProjectCLI as ProjectCLI
from project.command_line.cli import configure as configure
from project.command_line.cli import differences as differences
from project.command_line.shown_warnings import silence_unfounded_advice as silence_unfounded_advice
from project.command_line.typed import CommandLine as CommandLine
