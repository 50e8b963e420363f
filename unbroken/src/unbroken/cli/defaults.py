"""The settings below everything that is typed: the program's default classes, and
``configs/default.yaml``.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from unbroken.cli.program import Program
from unbroken.cli.typed import CommandLine, merged, read_config

CLASS_PATH = "class_path"


def default_settings(program: Program, line: CommandLine) -> dict[str, Any]:
    """The defaults that a command line leaves standing, as a config file would hold them.

    A section that names a class counts only where no other class is named, because its arguments
    are those of its own class.
    """
    settings: dict[str, Any] = {
        part: {CLASS_PATH: path} for part, path in program.default_classes.items()
    }
    if program.defaults_file.is_file():
        settings = merged(settings, read_config(str(program.defaults_file)))
    return _without_other_classes(settings, "", line)


def _without_other_classes(
    settings: dict[str, Any], above: str, line: CommandLine
) -> dict[str, Any]:
    """The settings less each section whose class is another one on the command line."""
    kept: dict[str, Any] = {}
    for name, value in settings.items():
        # Options are named without init_args: --model.network
        full_name = above if name == "init_args" else f"{above}{name}."
        if not isinstance(value, dict):
            kept[name] = deepcopy(value)
        elif not _names_another(value.get(CLASS_PATH), full_name, line):
            kept[name] = _without_other_classes(value, full_name, line)
    return kept


def _names_another(class_path: str | None, section: str, line: CommandLine) -> bool:
    """Whether the line names a class for a section, and it is not the default one."""
    if class_path is None or f"{section}{CLASS_PATH}" not in line.given:
        return False
    named = str(line.given[f"{section}{CLASS_PATH}"])
    return named.rpartition(".")[2] != class_path.rpartition(".")[2]
