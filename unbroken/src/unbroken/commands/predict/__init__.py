"""Labelling files: which files, how each becomes an input, and what the answers are called."""

from unbroken.commands.predict.command import main as main
