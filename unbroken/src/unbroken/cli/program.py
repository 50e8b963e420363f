"""Whose commands these are: a template's package, its default classes, and its default settings."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch import LightningDataModule, LightningModule

# Read without being named, from the folder in which the package lies
DEFAULTS = "configs/default.yaml"


@dataclass(frozen=True)
class Program:
    """The package that a person owns and runs, such as ``project``.

    Attributes:
        package: Its import name. ``python -m PACKAGE.fit`` is the main job.
        model: The class that is trained where none is named. None: one must be named.
        data: The data module where none is named. None: none is used.
        wandb_project: The W&B project of its runs. Default: the package's name.
        own_code: Further packages and modules that are the user's own. A stranger's checkpoint may
            name the classes that are defined there, and in ``package``.
        moved: What older checkpoints name → its import path now: a class, or a module with all that
            is in it; or a class with arguments, as a configuration has it, that are used where a
            checkpoint gives none. A name that still leads to a class with these arguments has not
            moved.
    """

    package: str
    model: type[LightningModule] | None = field(default=None, kw_only=True)
    data: type[LightningDataModule] | None = field(default=None, kw_only=True)
    wandb_project: str = field(default="", kw_only=True)
    own_code: tuple[str, ...] = field(default=(), kw_only=True)
    moved: Mapping[str, str | dict[str, Any]] = field(default_factory=dict, kw_only=True)

    @property
    def code(self) -> Path:
        """The folder of the package."""
        return folder_of(self.package)

    @property
    def defaults_file(self) -> Path:
        """The config file that is read before all others. It may be missing."""
        return self.code.parent / DEFAULTS

    @property
    def defaults_name(self) -> str:
        """That file as a person names it who stands above it, else its whole path."""
        file = self.defaults_file
        here = Path.cwd()
        return str(file.relative_to(here) if file.is_relative_to(here) else file)

    @cached_property
    def default_classes(self) -> dict[str, str]:
        """``model`` and ``data`` → the import path of their default class, where there is one."""
        classes = {"model": self.model, "data": self.data}
        return {part: import_path(kind) for part, kind in classes.items() if kind is not None}

    @property
    def networks(self) -> ModuleType | None:
        """The module or package beside the default model whose classes may be named without it."""
        if self.model is None:
            return None
        return sys.modules.get(self.model.__module__.rpartition(".")[0])

    def command(self, name: str, *words: str) -> str:
        """A command of this package as a person types it, such as ``python -m project.fit``."""
        return " ".join(["python -m", f"{self.package}.{name}", *words])


def folder_of(package: str) -> Path:
    """The folder of a package. In a clone the repository is the folder above it."""
    file = import_module(package).__file__
    assert file is not None, f"{package} must be a package with an __init__.py"
    return Path(file).resolve().parent


def import_path(kind: type[Any]) -> str:
    """The shortest path by which a class can be imported: a package often offers what its files
    define.
    """
    parts = kind.__module__.split(".")
    for count in range(1, len(parts)):
        package = ".".join(parts[:count])
        if getattr(sys.modules.get(package), kind.__name__, None) is kind:
            return f"{package}.{kind.__name__}"
    return f"{kind.__module__}.{kind.__qualname__}"
