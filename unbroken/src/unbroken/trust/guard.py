"""What a checkpoint's configuration may make. This file decides it alone;
:mod:`unbroken.storage.own_runs` says whose a file is, and
:mod:`unbroken.storage.checkpoint_files` reads it without running anything.

Whose file it is
    * *The user's own*: a run of this user on this machine wrote it, and no entry was changed since
      (a seal with a key that lies outside of the file). It says what the user once typed, and is
      trusted like what is typed now.
    * *A stranger's*: every other file. Its configuration is read under a :class:`Guard`.

What the guard does
    The configuration is given to the parser of the command line (jsonargparse), which imports what
    a text names, and makes it where the type of a parameter asks for a class. The guard stands at
    the two places where the parser acts, and looks at what the parser has resolved, not at how the
    file spells it:

    1. *Before a name is looked up* (``check_import_path``, which jsonargparse calls for each name
       that is a value). The name must lead to something trusted. Until that is known, no module is
       imported but those where trusted names are defined, and files of the user's own that define a
       class of that name.
    2. *Before something is made* (``get_class_instantiator``, by whose answer jsonargparse makes
       all classes and calls all factories). It must be trusted, also if no text named it, but the
       type hint of another class did. Of its arguments none may be a class that was not made (so
       nothing is made where any value is allowed), none may make a factory download, a text that is
       an import path to our own module is a name as in 1, and a part of the Trainer writes only
       into the run's folder.

What is trusted
    * The classes and factories of ``trusted.yaml``, one by one, by the name under which they are
      *defined*. An alias counts for what it leads to: ``torch.hub.os.system`` is ``posix.system``.
    * Classes of the user's own model and data code: ``project.model``, ``project.data``, and files
      beside the clone or in the working folder, but not ``tests`` and no other room of this
      package. Classes only, no functions.
    * Names that the user typed in this command line or its ``--config`` files.
    * Everything in the packages of ``--allow_imports``.

    The parser also asks that a class is a subclass of the parameter's type.

What is not defended
    * A user who passes ``--allow_imports``: it allows all that the packages hold.
    * What the user's own model and data code, or what is typed, does with its arguments.
    * Python files in the working folder: whoever unpacks a stranger's files and works beside them
      has made them his own, as Python itself does.
    * A stranger who can write into the user's home, clone or environment: he needs no checkpoint.
    * Numbers: a stranger's weights may be trained to answer wrongly.

A refusal is not an ``Exception``: the parser tries one type after another and takes errors as
answers, and nothing must be tried after a refusal. :func:`guarded` turns it into the one line that
the user reads.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import yaml
from jsonargparse import ArgumentParser, Namespace, set_parsing_settings
from lightning.pytorch import Callback
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import CheckpointIO, ClusterEnvironment, Precision
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import Strategy

from unbroken.errors import UserError, without_control_characters
from unbroken.lightning_internals import parser_asks
from unbroken.lightning_names import name_in_lightning
from unbroken.run_folder import RUN_FOLDER
from unbroken.storage.bounded_reading import BoundedMaking

# The folders in which the programs of this process lie
CLONES: set[Path] = set()
# Rooms of the library whose classes a task is configured from
TASKS = ("unbroken.tasks", "unbroken.data")
# Folders and files beside the clone that hold no model and no data
NO_MODELS = ("tests", "conftest", "setup")
# Options whose typed values may name classes
TYPED_SECTIONS = ("model", "data", "trainer")
# Values that have a name and are no classes; to look one up does nothing
PLAIN_VALUES = (torch.dtype, torch.layout, torch.memory_format)
# Arguments of project.model's modules that may hold an import path as text
IMPORT_PATHS = ("optimizer", "schedule", "loss")
# Arguments by which a factory or a data set fetches files
FETCHING = ("weights", "weights_backbone", "pretrained", "pretrained_backbone", "download")
# What the Trainer is made of, and writes files
TRAINER_PARTS = (
    Callback,
    Logger,
    Profiler,
    Strategy,
    Accelerator,
    CheckpointIO,
    ClusterEnvironment,
    Precision,
)
# A text that the parser takes for a name but is one of a file, where text is as welcome as a class
FILE_ENDING = re.compile(
    r"\.(csv|tsv|txt|json|jsonl|yaml|yml|npy|npz|parquet|pt|pth|ckpt|png|jpg)$", re.IGNORECASE
)
# What a text that a part of the Trainer formats into a file's name may hold in braces, such as
# {epoch} and {val/loss:.3f}: a metric's name and how its number is written. A point or a bracket in
# the name would lead to attributes, whose texts can become "..", and :c turns a number into any
# letter.
PLAIN_FIELD = re.compile(r"\{[\w-]+(/[\w-]+)*(:\d*(\.\d+)?[dfFeEgG%]?)?\}")
# A text that can only be the import path of something. The expression does not backtrack.
IMPORT_PATH = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)+")
# Python has a module ``test``, whose names look like those of metrics: test.loss
LOOKS_LIKE_TEXT = ("test",)
# More than any configuration holds. The parser reads YAML in texts, and takes long over a long one.
LONGEST_TEXT = 10_000
LONGEST_NAME = 1_000
MOST_BRACKETS = 1_000
MOST_VALUES = 100_000


class Refused(BaseException):
    """A name that a stranger's configuration must not use. It ends the parsing at once, see the
    head of this file.
    """


@dataclass
class Guard:
    """What may be looked up and made while a stranger's configuration is read."""

    path: Path
    # The words that the user typed, and packages of --allow_imports
    typed: frozenset[str] = frozenset()
    packages: tuple[str, ...] = ()
    # The size of the checkpoint, which bounds the memory that its network may take
    file_bytes: int = 0
    # The run's folder. None: no part of the Trainer is made.
    folder: Path | None = None
    # What typed names lead to
    _typed_objects: list[Any] = field(default_factory=list)
    # Where the things are defined that passed. The parser asks for that name as well.
    _passed: set[str] = field(default_factory=set)

    def check_name(self, name: str) -> None:
        """Return if the parser may look up ``name``; raise :class:`Refused`, or ImportError for
        what is no name.
        """
        if name in self._passed or self._is_in_allowed_package(name) or self._is_typed(name):
            return
        found = find_without_import(name_in_lightning(name))
        if found is None:
            self._refuse_unknown(name)
        if not self.is_trusted(found, name):
            home = defining_name(found) or name
            alias = "" if home == name else f" {home},"
            self._refuse(name, f"which is{alias} not on the list of trusted classes", home)
        self._passed.add(defining_name(found) or name)
        if isinstance(found, PLAIN_VALUES):
            # The parser asks for the class of a value.
            self._passed.add(defining_name(type(found)) or name)

    def check_texts(self, config: Any) -> None:
        """Raise :class:`Refused` if a text or key is the import path of something that is there and
        not trusted.

        The parser has not been asked yet. Where a parameter takes text as well as a class, it would
        take the name as text, and somebody else might look it up: the Trainer, or a module of the
        user's.
        """
        for item in values_in(config):
            if not isinstance(item, str) or not IMPORT_PATH.fullmatch(item):
                continue
            root = item.split(".")[0]
            if root not in LOOKS_LIKE_TEXT and can_be_imported(root):
                # An ImportError says that it is a file's name.
                with suppress(ImportError):
                    self.check_name(item)

    def check_made(self, kind: Any, arguments: Mapping[str, Any]) -> None:
        """Return if ``kind(**arguments)`` may be called, else raise :class:`Refused`."""
        name = defining_name(kind) or str(kind)
        is_allowed = self._is_in_allowed_package(name) or self._is_typed_object(kind)
        has_passed = is_allowed or name in self._passed
        if not has_passed and not self.is_trusted(kind, name):
            self._refuse(name, "which a type hint asks for", name)
        self.refuse_what_was_not_made(arguments)
        if not is_allowed and not is_own_module(name.rpartition(".")[0]):
            self._refuse_fetching(name, arguments)
        for key in IMPORT_PATHS:
            text = arguments.get(key)
            if isinstance(text, str) and "." in text:
                self.check_name(text)
        if inspect.isclass(kind) and issubclass(kind, TRAINER_PARTS) and self.folder is not None:
            self._refuse_writing_elsewhere(kind, arguments, self.folder)

    def is_trusted(self, found: Any, name: str) -> bool:
        """Whether something is on the list, or a class of the user's own model and data code."""
        if isinstance(found, PLAIN_VALUES):
            return True
        if is_listed(found, name) or self._is_typed_object(found):
            return True
        return (
            inspect.isclass(found) and is_own_module(found.__module__) and is_defined_there(found)
        )

    def refuse_what_was_not_made(self, arguments: Any) -> None:
        """Raise :class:`Refused` if a class stands in ``arguments`` where any value is allowed."""
        for item in values_in(arguments):
            if not isinstance(item, (Mapping, Namespace)):
                continue
            for key in item.keys():  # noqa: SIM118 - a Namespace is no mapping
                if str(key).split(".")[-1] != "class_path":
                    continue
                named = without_control_characters(str(item[key]))[:200]
                raise Refused(
                    f"--ckpt_path {self.path} names {named} where any value is allowed. There a"
                    " checkpoint makes nothing. Give another one."
                )

    def refusal_of_large_layers(self) -> Refused:
        """What is raised where the configuration makes larger layers than the file can fill."""
        return Refused(
            f"--ckpt_path {self.path}: its configuration makes larger layers than the file holds."
            " Give another checkpoint."
        )

    def _is_typed(self, name: str) -> bool:
        """Whether the user typed this name, or the last part of a class that is already there."""
        module, _, last = name.rpartition(".")
        is_short = last in self.typed and last[:1].isupper() and module in sys.modules
        if name not in self.typed and not is_short:
            return False
        try:
            found = getattr(importlib.import_module(module), last)
        except Exception:
            # The parser reports the reason.
            return True
        if is_short and not inspect.isclass(found):
            return False
        self._typed_objects.append(found)
        self._passed.add(defining_name(found) or name)
        return True

    def _is_typed_object(self, found: Any) -> bool:
        return any(thing is found for thing in self._typed_objects)

    def _is_in_allowed_package(self, name: str) -> bool:
        return any(f"{name}.".startswith(f"{package}.") for package in self.packages)

    def _refuse_fetching(self, name: str, arguments: Mapping[str, Any]) -> None:
        for key in FETCHING:
            if arguments.get(key):
                self._refuse(name, f"whose {key} would download files", name)

    def _refuse_writing_elsewhere(
        self, kind: type, arguments: Mapping[str, Any], folder: Path
    ) -> None:
        for key, value in arguments.items():
            for item in values_in(value):
                if not isinstance(item, (str, os.PathLike)):
                    continue
                text = str(item)
                if text in self.typed or text in (default_of(kind, key), RUN_FOLDER):
                    continue
                shown = without_control_characters(f"{key}: {text}")
                if is_place(key, text) and not is_inside(text, folder):
                    raise Refused(
                        f"--ckpt_path {self.path}: {shown} in its configuration is outside the"
                        " run's folder. Type that setting again if it is right."
                    )
                if "{" in PLAIN_FIELD.sub("", text):
                    raise Refused(
                        f"--ckpt_path {self.path}: {shown} in its configuration could become any"
                        " file's name. Type that setting again if it is right."
                    )

    def _refuse_unknown(self, name: str) -> None:
        """A name that leads to nothing trusted, and was not imported to find out what it is."""
        root = name.split(".")[0]
        if FILE_ENDING.search(name) or not can_be_imported(root):
            # Where text is allowed, too, it is taken as text; else the parser says that there is no
            # such class.
            raise ImportError(f"{name} is not known, and was not imported")
        reason = "which is neither on the list of trusted classes nor yours. Nothing was imported"
        self._refuse(name, reason, name)

    def _refuse(self, name: str, reason: str, home: str) -> None:
        shown = without_control_characters(name)[:200]
        package = without_control_characters(home.split(".")[0])[:80]
        raise Refused(
            f"--ckpt_path {self.path} names {shown}, {without_control_characters(reason)[:300]}."
            f" If you trust the file: --allow_imports {package}"
        )


@contextmanager
def guarded(guard: Guard | None) -> Iterator[None]:
    """Inside, the parser looks up and makes only what the guard lets pass. None: all, the file is
    the user's own.
    """
    if guard is None:
        yield
        return
    set_parsing_settings(instantiate_subclass_spec_in_any=False)
    try:
        with (
            parser_asks(guard.check_name, lambda function: partial(watched, guard, function)),
            BoundedMaking(guard.file_bytes, guard.refusal_of_large_layers()),
        ):
            yield
    except Refused as refusal:
        raise UserError(str(refusal)) from None
    except UserError as error:
        # The parser shows what it was given.
        raise UserError(without_control_characters(str(error))) from None
    finally:
        # The parser's own default
        set_parsing_settings(instantiate_subclass_spec_in_any=True)


def watched(guard: Guard, get_instantiator: Callable[[], Any]) -> Callable[..., Any]:
    """The function by which the parser makes a class or calls a factory, asking the guard first."""
    instantiate = get_instantiator()

    def make(kind: Any, /, *args: Any, **arguments: Any) -> Any:
        guard.check_made(kind, arguments)
        return instantiate(kind, *args, **arguments)

    return make


def refuse_endless_reading(config: Any, path: Path) -> None:
    """A UserError for a configuration over which the parser would take long: texts or keys that are
    very long, YAML in texts whose aliases multiply or that is nested deeply, more values than any
    configuration has.
    """
    try:
        for count, item in enumerate(values_in(config)):
            if count > MOST_VALUES:
                raise UserError(f"--ckpt_path {path}: its configuration has too many values.")
            if isinstance(item, str):
                _refuse_endless_text(item, path)
    except RecursionError:
        raise UserError(
            f"--ckpt_path {path}: its configuration is nested too deeply. Give another."
        ) from None


def _refuse_endless_text(text: str, path: Path) -> None:
    shown = without_control_characters(text[:40])
    if len(text) > LONGEST_TEXT:
        raise UserError(
            f"--ckpt_path {path}: a text in its configuration has {len(text):,} characters,"
            f" {shown}..."
        )
    if re.search(rf"[\w.]{{{LONGEST_NAME}}}", text):
        raise UserError(f"--ckpt_path {path}: a name in its configuration is too long, {shown}...")
    if sum(text.count(mark) for mark in "[{?\n") + text.count("- ") > MOST_BRACKETS:
        raise UserError(
            f"--ckpt_path {path}: its configuration is nested too deeply. Give another."
        )
    # An anchor such as &a, and what refers to it
    if re.search(r"&\S", text) and re.search(r"\*\S", text) and re.search(r"[\[{:\n]", text):
        raise UserError(
            f"--ckpt_path {path}: a text in its configuration is YAML with aliases, {shown}"
        )


def words_typed(given: Mapping[str, Any]) -> frozenset[str]:
    """Every name, and every text as a whole, that a command line and its configuration files give
    to module, data and Trainer. Other options, such as ``--ckpt_path``, hold names of files, which
    a stranger may have chosen.
    """
    settings = {key: given[key] for key in given if key.startswith(TYPED_SECTIONS)}
    names = re.findall(r"[^\W\d][\w.]*", f"{settings}")
    texts = [item for item in values_in(settings) if isinstance(item, str)]
    return frozenset((*names, *texts))


# What the names of a file lead to


@cache
def trusted_names() -> frozenset[str]:
    """The names of ``trusted.yaml``, each as MODULE.NAME."""
    file = Path(__file__).with_name("trusted.yaml")
    lists: dict[str, list[str]] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return frozenset(f"{module}.{name}" for module, names in lists.items() for name in names)


@cache
def trusted_modules() -> frozenset[str]:
    """The modules that define trusted names, and the packages around them."""
    modules = set()
    for name in trusted_names():
        module = name.rpartition(".")[0]
        while module:
            modules.add(module)
            module = module.rpartition(".")[0]
    return frozenset(modules)


def is_listed(found: Any, name: str) -> bool:
    """Whether a class or function is on the list, by the name under which it is defined."""
    if not (inspect.isclass(found) or inspect.isroutine(found)):
        return False
    if inspect.isbuiltin(found) and not is_defined_there(found):
        # A builtin function does not say where it is from. It is on the list by the name that is
        # used.
        return name in trusted_names()
    defined = defining_name(found)
    return (
        defined is not None
        and name_in_lightning(defined) in trusted_names()
        and is_defined_there(found)
    )


def defining_name(found: Any) -> str | None:
    """MODULE.NAME where a class or function is defined, by its own account. None: it gives none."""
    module = getattr(found, "__module__", None)
    name = getattr(found, "__qualname__", None)
    return f"{module}.{name}" if isinstance(module, str) and isinstance(name, str) else None


def is_defined_there(found: Any) -> bool:
    """Whether the name under which something says that it is defined leads to it."""
    module = sys.modules.get(found.__module__ or "")
    return module is not None and vars(module).get(found.__qualname__) is found


def find_without_import(name: str) -> Any:
    """What a name leads to, or None. Imports nothing but modules of trusted names, and the user's
    own files.
    """
    module_name, _, last = name.rpartition(".")
    module = sys.modules.get(module_name)
    if module is None:
        may_import = name_in_lightning(module_name) in trusted_modules() or own_file_defines(
            module_name, last
        )
        if not may_import:
            return None
        try:
            module = importlib.import_module(module_name)
        except Exception:
            # The parser says that there is no such class.
            return None
    # Not getattr: a module may import more where it is asked for a name that it lacks.
    return vars(module).get(last) if isinstance(module, ModuleType) else None


def own_folders() -> list[Path]:
    """Where the user's own files lie: in the working folder, and in a clone beside this package."""
    beside = [folder for folder in CLONES if "site-packages" not in folder.parts]
    return [Path.cwd().resolve(), *beside]


def is_own_module(name: str) -> bool:
    """Whether a module is model or data code of the user's own. Nothing is imported."""
    root = name.split(".")[0]
    if root == "unbroken":
        return any(f"{name}.".startswith(f"{room}.") for room in TASKS)
    return root not in NO_MODELS and own_place(root) is not None


def own_place(root: str) -> Path | None:
    """The file or folder of a top-level module of the user's own. An installed package of that name
    comes first.
    """
    try:
        spec = importlib.util.find_spec(root)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    places = list(spec.submodule_search_locations or [])
    if not places and spec.origin:
        places = [spec.origin]
    if not places:
        return None
    paths = [Path(place).resolve() for place in places]
    if any(path.parent not in own_folders() for path in paths):
        return None
    return paths[0]


def own_file_defines(module: str, name: str) -> bool:
    """Whether a file of the user's own binds ``name`` at its top level to a class or an import. It
    is read, not run.
    """
    if not is_own_module(module):
        return False
    root, *parts = module.split(".")
    place = own_place(root)
    if place is None:
        return False
    base = place.joinpath(*parts) if parts else place
    candidates = [base.with_name(f"{base.name}.py"), base / "__init__.py", base]
    for file in candidates:
        if file.suffix == ".py" and file.is_file():
            return name in top_level_names(file)
    return False


def top_level_names(file: Path) -> set[str]:
    """The classes that a Python file defines, and the names that it imports."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError, RecursionError):
        return set()
    names = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in node.names)
    return names


def can_be_imported(root: str) -> bool:
    """Whether there is a top-level module of this name. Nothing is imported."""
    try:
        return root in sys.modules or importlib.util.find_spec(root) is not None
    except (ImportError, ValueError):
        return False


# What arguments hold


def values_in(value: Any) -> Iterator[Any]:
    """A value, and every key and value in it."""
    yield value
    if isinstance(value, Namespace):
        value = vars(value)
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from values_in(key)
            yield from values_in(item)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from values_in(item)


def is_place(key: str, text: str) -> bool:
    """Whether an argument is a place in the file system: by its name, or as text that leads out of
    a folder.
    """
    if re.search("dir|path|root|folder", key):
        return True
    return re.search(r"^[/~\\]|:/|:\\|(^|[/\\])\.\.([/\\]|$)", text) is not None


def is_inside(text: str, folder: Path) -> bool:
    """Whether a path lies in a folder, after all links."""
    if "\0" in text:
        return False
    resolved = Path(os.path.realpath(os.path.expanduser(text)))
    return resolved.is_relative_to(folder.resolve())


def default_of(kind: type, name: str) -> Any:
    """The default of a class's argument, also of one that it hands on. None where there is none."""
    parser = ArgumentParser()
    try:
        parser.add_class_arguments(kind, fail_untyped=False)
        default = parser.get_default(name)
    except (ImportError, AttributeError, KeyError, TypeError, ValueError):
        return None
    return None if default is None else str(default)
