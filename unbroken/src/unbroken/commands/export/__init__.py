"""Exporting: what a module's forward is traced with, the files, and their comparison with it."""

from unbroken.commands.export.command import main as main
