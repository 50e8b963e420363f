# moved: delete this file after the merge
"""Moved to :mod:`project.command_line`."""

from project.command_line.parser import CommandParser as CommandParser
from project.command_line.parser import add_checkpoint as add_checkpoint
from project.command_line.parser import add_output as add_output
from project.command_line.parser import take_word as take_word
from project.command_line.start import exit_code as exit_code
from project.command_line.start import prepare_process as prepare_process
from project.command_line.start import quick_imports as quick_imports
from project.command_line.start import run as run
