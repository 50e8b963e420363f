"""Checkpoints of older versions of a program name classes where they were then."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any


def with_names_of_now(config: Any, moved: Mapping[str, str | dict[str, Any]]) -> Any:
    """A configuration whose classes have the names that they have now.

    Args:
        config: As a checkpoint holds it. It is not changed.
        moved: See :attr:`unbroken.cli.program.Program.moved`.
    """
    if isinstance(config, list):
        return [with_names_of_now(item, moved) for item in config]
    if not isinstance(config, dict):
        return config
    return section_of_now(
        {key: with_names_of_now(value, moved) for key, value in config.items()}, moved
    )


def section_of_now(
    section: dict[str, Any], moved: Mapping[str, str | dict[str, Any]]
) -> dict[str, Any]:
    """As :func:`with_names_of_now`, for one class and its arguments. What lies in these stays."""
    name = section.get("class_path")
    entry = _entry(name, moved) if isinstance(name, str) else None
    if entry is None or _still_takes(str(name), section.get("init_args")):
        return section
    if isinstance(entry, str):
        return section | {"class_path": entry}
    arguments = section.get("init_args") or {}
    given = {key: value for key, value in arguments.items() if value is not None}
    return section | {"class_path": entry["class_path"], "init_args": entry["init_args"] | given}


def _entry(name: str, moved: Mapping[str, str | dict[str, Any]]) -> str | dict[str, Any] | None:
    """What a name, or the module that it is in, has become."""
    if name in moved:
        return moved[name]
    module, _, last = name.rpartition(".")
    home = moved.get(module)
    return f"{home}.{last}" if isinstance(home, str) else None


def _still_takes(name: str, arguments: Any) -> bool:
    """Whether a class of this name is there, and takes these arguments."""
    module, _, last = name.rpartition(".")
    kind = None
    with suppress(ImportError):
        kind = getattr(import_module(module), last, None)
    if not inspect.isclass(kind):
        return False
    taken = inspect.signature(kind).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in taken.values())
    return takes_any or set(arguments or ()) <= taken.keys()
