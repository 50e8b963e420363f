"""What lies below everything that is typed: ``configs/default.yaml``, a ``--config`` file that is
read first, and below it the program's default classes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pkgutil import resolve_name
from typing import Any

from jsonargparse import get_loader
from lightning.pytorch import LightningModule
from unbroken.cli.options import OF_THE_LAUNCH
from unbroken.cli.program import Program
from unbroken.cli.typed import CLASS_PATH, named, read_text, sets_a_length, settings_in, with_homes
from unbroken.errors import UserError

Settings = dict[str, Any]


def default_file(program: Program) -> Settings:
    """What ``configs/default.yaml`` holds, checked as a ``--config`` file is; nothing where it is
    missing, or where all of it is a comment.
    """
    path = str(program.defaults_file)
    shown = program.defaults_name
    if not os.path.lexists(path):
        return {}
    text = read_text(path, shown)
    # As the parser reads the values of a --config file. It takes 1e-3 for a number.
    if not re.sub(r"(?m)^\ufeff|#.*$", "", text).strip():
        return {}
    if "config" in settings_in(text, shown):
        raise UserError(f"{shown}: config names another file. Write its settings here.")
    return dict(with_homes(get_loader("yaml")(text)))


def of_the_launch(settings: Settings) -> Settings:
    """What counts of the file where a run is resumed: the run has settings of its own."""
    return {name: value for name, value in settings.items() if name in OF_THE_LAUNCH}


def left_standing(
    settings: Settings, above: Mapping[str, Any], below: Mapping[str, Any] | None = None
) -> Settings:
    """The settings of one level that those above it do not replace as a whole.

    A section counts only where no other class is named for it, because its arguments are those of
    its own class; the data count only where no module with loaders of its own is named; and
    ``max_epochs`` only where no other limit ends the training.

    Args:
        settings: As a config file holds them.
        above: Option → value of the levels above.
        below: Option → value of the levels below, which name the classes that are named nowhere
            else.
    """
    here = {**(below or {}), **named(settings)}
    replaced = [
        name.removesuffix(CLASS_PATH)
        for name, value in here.items()
        if name.endswith(f".{CLASS_PATH}") and _is_another(value, name, above)
    ]
    names_data = f"data.{CLASS_PATH}" in above
    if not names_data and _brings_its_loaders(above.get(f"model.{CLASS_PATH}")):
        replaced.append("data.")
    if sets_a_length(above):
        replaced.append("trainer.max_epochs.")
    return _without(settings, "", tuple(replaced))


def _without(settings: Settings, before: str, replaced: tuple[str, ...]) -> Settings:
    """The settings less those whose full names begin with one of ``replaced``."""
    kept: Settings = {}
    for name, value in settings.items():
        # Options are named without init_args: --model.network
        full_name = re.sub(r"(?<![^.])init_args\.", "", f"{before}{name}.")
        if full_name.startswith(replaced):
            continue
        kept[name] = _without(value, full_name, replaced) if isinstance(value, dict) else value
    return kept


def _is_another(class_path: Any, name: str, above: Mapping[str, Any]) -> bool:
    """Whether a class is named above, and it is not this one."""
    if name not in above:
        return False
    return str(above[name]).rpartition(".")[2] != str(class_path).rpartition(".")[2]


def _brings_its_loaders(model: Any) -> bool:
    """Whether a module's class has a ``train_dataloader`` of its own."""
    kind = None
    with suppress(Exception):  # there is no such model: the parser reports the reason
        kind = resolve_name(str(model))
    if not isinstance(kind, type) or not issubclass(kind, LightningModule):
        return False
    return kind.train_dataloader is not LightningModule.train_dataloader


def with_its_file(
    message: str, file: str, typed: Mapping[str, Any], settings: Mapping[str, Any]
) -> str:
    """An error about an option, with the name of the default file where the option stands there
    alone: nobody has typed it.

    Args:
        message: The error.
        file: The file's name.
        typed: Option → value of what is typed and of ``--config`` files.
        settings: Option → value of the default file.
    """
    found = re.search(r"--(?:trainer\.)?([\w.]+\w)", message)
    if found is None or _stands_in(found[1], typed) or not _stands_in(found[1], settings):
        return message
    return f"{file}: {message}"


def _stands_in(option: str, names: Mapping[str, Any]) -> bool:
    """Whether an option, or a part of what it holds, has one of these names."""
    shown = [str(name).removeprefix("trainer.").rstrip("+") for name in names]
    return any(f"{name}.".startswith(f"{option}.") for name in shown)
