"""What is used of a stranger's configuration: plain values of ``model`` and ``data``, and classes
that this file allows.

The configuration is read here before the command line's parser sees it, and what comes out is a new
one. It holds numbers, texts that the parser takes for nothing else, and classes.

Whether a text names a class is known to who takes it: one and the same text may be a metric's name
or a class. So the texts are kept, and who imports what one of them names asks here before, see
:mod:`~unbroken.trust.imports`. A short name is found among what is imported already. So what the
parser makes of it is judged once more, before any of it is made.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import sys
import unicodedata
from argparse import Namespace
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch
import yaml
from jsonargparse import get_loader
from lightning.pytorch import LightningDataModule
from torch import nn
from unbroken.errors import UserError, without_control_characters
from unbroken.trust.places import is_place

# Where the library's own modules, networks, layers and data modules are
TASKS = ("unbroken.tasks", "unbroken.data")
FACTORIES = "torchvision.models"
# Sections that are used
SECTIONS = ("model", "data")
OF_A_CLASS = {"class_path", "init_args", "dict_kwargs"}
# How a data module loads is a matter of this machine, as the Trainer's flags are.
OF_THE_MACHINE = {"num_workers", "prefetch_factor", "pin_memory", "persistent_workers"}
# More than any configuration holds. The parser takes long over a long text.
LONGEST_TEXT = 1000
DEEPEST = 40
MOST_VALUES = 2_000
# What the parser does is counted before it does it. It copies a list once for each element, and
# reads a class three times for each class around it. A class takes as long as 400 values, and a
# text as long as one value for each 20 letters. All steps take about four seconds on a core.
MOST_STEPS = 120_000
LETTERS_OF_VALUE = 20
STEPS_OF_CLASS = 400
READ_AGAIN = 3


def is_allowed(name: str, packages: Collection[str]) -> bool:
    """Whether a stranger's file may name a class, or a factory of networks, by its import path.

    Nothing is imported to find out, but the modules of ``packages`` and of the library.

    Args:
        name: MODULE.NAME.
        packages: The user's own, and the modules in them.
    """
    module, _, last = name.rpartition(".")
    root = name.partition(".")[0]
    if last.startswith("_"):
        return False
    if root in packages:
        found = _found_in_own(module, last)
        return inspect.isclass(found) and found.__module__.partition(".")[0] in packages
    if root not in ("torch", "torchvision", "unbroken"):
        return False
    if _is_below(module, FACTORIES) and importlib.util.find_spec("torchvision") is not None:
        models = importlib.import_module(FACTORIES)
        return last in models.list_models() and _found(module, last) is models.get_model_builder(
            last
        )
    if any(_is_below(module, home) for home in TASKS):
        importlib.import_module(".".join(module.split(".")[:2]))
    found = _found(module, last)
    if isinstance(found, torch.dtype):
        return module == "torch"
    if not inspect.isclass(found) or found.__qualname__ != found.__name__:
        return False
    home = found.__module__
    if _is_below(home, "torch.nn.modules"):
        return issubclass(found, nn.Module)
    if _is_below(home, "torch.optim"):
        return issubclass(found, torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler)
    is_ours = any(_is_below(home, task) for task in TASKS)
    return is_ours and issubclass(found, nn.Module | LightningDataModule)


def _is_below(module: str, package: str) -> bool:
    return f"{module}.".startswith(f"{package}.")


def _found(module: str, name: str) -> Any:
    """What an imported module holds under a name, or None."""
    there = sys.modules.get(module)
    # Not getattr: a module may import more where it is asked for a name that it lacks.
    return vars(there).get(name) if isinstance(there, ModuleType) else None


def _found_in_own(module: str, name: str) -> Any:
    """What a module of the user's own holds under a name, or None. It is imported if it is a
    package, or defines a class of that name: a script is not run to find out.
    """
    if module not in sys.modules and not _defines(module, name):
        return None
    importlib.import_module(module)
    return _found(module, name)


def _defines(module: str, name: str) -> bool:
    parts = module.split(".")
    above = sys.modules.get(parts[0]) or importlib.import_module(parts[0])
    for folder in map(Path, getattr(above, "__path__", [])):
        file = folder.joinpath(*parts[1:])
        if (file / "__init__.py").is_file():
            return True
        if file.with_suffix(".py").is_file():
            tree = ast.parse(file.with_suffix(".py").read_text(encoding="utf-8"))
            return any(isinstance(node, ast.ClassDef) and node.name == name for node in tree.body)
    return False


@dataclass
class Stranger:
    """A stranger's configuration as it is read.

    Attributes:
        path: His file.
        packages: The packages whose classes are the user's own.
        typed: What the user has typed, by the full name without ``init_args``. It wins, so that
            what the file says there is not looked at.
        renamed: Gives a class and its arguments the name that an older one has now.
        left_out: The plain values that are not used, by their full names.
    """

    path: Path
    packages: Collection[str]
    typed: Mapping[str, Any]
    renamed: Callable[[dict[str, Any]], dict[str, Any]] = dict
    left_out: dict[str, Any] = field(default_factory=dict)
    _count: int = 0
    _steps: int = 0
    # How many classes are around what is read
    _level: int = 0
    # His texts, and the first place of each
    _texts: dict[str, str] = field(default_factory=dict)
    _is_judging: bool = False

    def settings(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """What is used of a configuration.

        Raises:
            UserError: It names a class that is not allowed, or is no configuration of plain values.
        """
        return {
            part: self._value(part, part, config[part], 0)
            for part in SECTIONS
            if config.get(part) is not None
        }

    def allows(self, name: str) -> bool:
        """Whether what has this import path may be imported: it is typed, or is allowed."""
        return name in map(str, self.typed.values()) or self._is_allowed(name)

    def refuse_import(self, name: str) -> None:
        """Refuse to import what has this import path, where one of his texts names it and it is not
        allowed. What no text of his names is the user's: a default, or typed.

        Raises:
            UserError: It is refused.
        """
        parts = unicodedata.normalize("NFKC", name).split(".")
        for text, place in self._texts.items():
            # A type such as "list[a.B]" names a class as well.
            if all(part in text for part in parts) and not self.allows(name):
                self._refuse_named(place, name)

    def refuse_module(self, module: str) -> None:
        """Refuse to import a module, or the package that it is in, for a name that is not allowed.

        Raises:
            UserError: It is refused.
        """
        if self._is_judging:
            # To judge a name of the user's own code, its module is imported.
            return
        for text, place in self._texts.items():
            if text.startswith(f"{module}.") and not self.allows(text):
                self._refuse_named(place, text)

    def judge(self, place: str, given: Any, parsed: Any) -> None:
        """Refuse a class that the parser has made of what the file gives, and that is not allowed.

        A class that the file does not ask for is an argument's default, or typed: the user's.

        Args:
            place: The option of the value.
            given: The value as :meth:`settings` has given it.
            parsed: What the parser has made of it.

        Raises:
            UserError: There is such a class.
        """
        if given is None or self._is_typed(place):
            return
        if isinstance(parsed, list | tuple):
            # What is typed with ``+=`` stands behind.
            elements = given if isinstance(given, list) else [given] * len(parsed)
            for element, made in zip(elements, parsed, strict=False):
                self.judge(place, element, made)
            return
        if not isinstance(parsed, dict | Namespace):
            return
        entries = dict(vars(parsed)) if isinstance(parsed, Namespace) else parsed
        values = given if isinstance(given, dict) else {}
        if "class_path" in entries and f"{place}.class_path" not in self.typed:
            if isinstance(given, dict) and "class_path" not in given:
                self._refuse(place, "is no class with arguments")
            self._refuse_name(place, str(entries["class_path"]))
        for key, made in entries.items():
            full = place if key in OF_A_CLASS else f"{place}.{key}"
            # Only arguments have defaults. All entries of a mapping are the file's.
            other = None if isinstance(parsed, Namespace) else given
            self.judge(full, values.get(key, other), made)

    def _value(self, place: str, name: str, value: Any, depth: int) -> Any:
        self._count += 1
        self._refuse_much(depth)
        if value is None or type(value) in (bool, int, float):
            return value
        if type(value) is str:
            self._refuse_text(place, value)
            if _is_below(value, FACTORIES):
                # Some download by default, also where their name stands alone.
                return self._class(place, {"class_path": value}, depth)
            return value
        if type(value) is list:
            before = self._count
            values = [self._value(place, name, item, depth + 1) for item in value]
            self._steps += len(values) * (self._count - before)
            self._refuse_much(depth)
            return values
        if type(value) is not dict:
            self._refuse(place, f"is a {type(value).__name__}, which is no plain value")
        if OF_A_CLASS & value.keys():
            return self._class(place, value, depth)
        before = self._count
        entries = self._entries(place, value, depth)
        self._steps += len(entries) * (self._count - before)
        self._refuse_much(depth)
        return entries

    def _refuse_much(self, depth: int) -> None:
        if depth > DEEPEST or self._count > MOST_VALUES or self._steps > MOST_STEPS:
            raise UserError(
                f"--ckpt_path {self.path}: its configuration is too large or too deep. To use it,"
                " add --trust_checkpoint true if you trust who made the file."
            )

    def _entries(self, place: str, values: dict[Any, Any], depth: int) -> dict[str, Any]:
        """The entries of a mapping, less those that are typed, and those that are places."""
        kept: dict[str, Any] = {}
        for key, value in values.items():
            # To the parser "transforms+" adds to a list, which is then no value of the file's.
            if type(key) is not str or "." in key or key.startswith("__") or key.endswith("+"):
                self._refuse(place, "has a key that is no name")
            self._refuse_text(place, key)
            full = f"{place}.{key}"
            if self._is_typed(full) or _holds_place(key, value):
                if value is None or type(value) in (bool, int, float, str):
                    self.left_out[full] = value
                continue
            kept[key] = self._value(full, key, value, depth + 1)
        return kept

    def _is_typed(self, place: str) -> bool:
        """Whether the user typed a value, or a class with its arguments in one text."""
        named = self.typed.get(f"{place}.class_path")
        return place in self.typed or not re.fullmatch(r"[\w.]+", str(named))

    def _refuse_no_class(self, place: str, value: dict[Any, Any]) -> None:
        if value.keys() - OF_A_CLASS or type(value.get("class_path")) is not str:
            self._refuse(place, "is no class with arguments")
        for key in ("init_args", "dict_kwargs"):
            if type(value.get(key, {})) not in (dict, type(None)):
                self._refuse(place, "has arguments without names")

    def _class(self, place: str, value: dict[Any, Any], depth: int) -> dict[str, Any]:
        self._refuse_no_class(place, value)
        value = self.renamed(value)
        name = value["class_path"]
        typed = self.typed.get(f"{place}.class_path")
        if typed is None:
            self._keep_text(place, name)
            self._refuse_name(place, name)
        elif str(typed).rpartition(".")[2] != name.rpartition(".")[2]:
            # The arguments are those of another class.
            return {"class_path": str(typed)}
        self._steps += STEPS_OF_CLASS * READ_AGAIN**self._level
        self._refuse_much(depth)
        self._level += 1
        made: dict[str, Any] = {"class_path": name if typed is None else str(typed)}
        for key in ("init_args", "dict_kwargs"):
            arguments = value.get(key)
            if arguments is not None:
                made[key] = self._entries(place, arguments, depth)
        self._level -= 1
        arguments = made.setdefault("init_args", {})
        if place == "data":
            for key in arguments.keys() & OF_THE_MACHINE:
                self.left_out[f"data.{key}"] = arguments.pop(key)
        elif _is_below(name, FACTORIES):
            taken = inspect.signature(_found(*name.rpartition(".")[::2])).parameters
            weights = [key for key in (*taken, *arguments) if key.startswith(("weights", "pretr"))]
            made["init_args"] = arguments | dict.fromkeys(weights)
            made.pop("dict_kwargs", None)
        return made

    def _refuse_text(self, place: str, text: str) -> None:
        if len(text) > LONGEST_TEXT:
            self._refuse(place, f"has a text of {len(text):,} characters")
        self._count += len(text) // LETTERS_OF_VALUE
        if not _is_plain(text):
            self._refuse(place, f"is no plain text: {text[:80]}")
        self._keep_text(place, text)

    def _keep_text(self, place: str, text: str) -> None:
        # Python reads the letters of a name in this form.
        self._texts.setdefault(unicodedata.normalize("NFKC", text), place)

    def _is_allowed(self, name: str) -> bool:
        if not all(part.isidentifier() for part in name.split(".")):
            return False
        was_judging = self._is_judging
        self._is_judging = True
        try:
            return is_allowed(name, self.packages)
        except Exception:
            # A module of the user's own does not run.
            return False
        finally:
            self._is_judging = was_judging

    def _refuse_name(self, place: str, name: str) -> None:
        if not self._is_allowed(name):
            self._refuse_named(place, name)

    def _refuse_named(self, place: str, name: str) -> NoReturn:
        named = f"names {name[:200]}, which is no class of yours, of a task or of torch.nn"
        self._refuse(place, named, f"type --{place} CLASS, or")

    def _refuse(self, place: str, what: str, way: str = "") -> NoReturn:
        shown = without_control_characters(f"{place[:100]} in its configuration {what}")
        way = f"{without_control_characters(way[:100])} " if way else ""
        raise UserError(
            f"--ckpt_path {self.path}: {shown}. Nothing was imported. To use it, {way}add"
            " --trust_checkpoint true if you trust who made the file."
        )


def _holds_place(key: str, value: Any) -> bool:
    items = value if type(value) is list else [value]
    return any(type(each) is str and is_place(key, each) for each in items)


def _is_plain(text: str) -> bool:
    """Whether the parser takes a text for this text, or for a number or the like, and so for no
    mapping that names a class.
    """
    try:
        value = get_loader("yaml")(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return False
    return value is None or type(value) in (bool, int, float) or value == text
