"""A command line and its config files, read before the parser is made: what was typed, and what it
names.
"""

import argparse
import os
import re
from collections.abc import Mapping
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml
from lightning.pytorch import LightningDataModule, LightningModule
from unbroken.cli.explain import explain, nearest_class, of_another_class
from unbroken.cli.options import FLAT
from unbroken.cli.words import with_home
from unbroken.errors import UserError, require
from unbroken.mirror.store import is_address, without_password
from unbroken.tables import flat, load_yaml

CLASS_PATH = "class_path"
# A section may be given as the name of its class alone.
CLASSES = {name: f"{name}.{CLASS_PATH}" for name in ("model", "data", "model.network")}


class CommandLine:
    """What was typed, and the settings of ``--config`` files. A UserError for a bad file.

    Args:
        argv: What was typed.
        networks: The module of the networks that may be named without it.
        below: The settings of the default file, which count where nothing else is given.

    Attributes:
        words: The command line for the parser: config files first, so that what is typed wins;
            every Trainer flag with its section.
        given: Option → value, of files and of what is typed; of several the last. Names are full,
            and without ``init_args``.
        settings: What config files give, as they hold it.
        below: Option → value of the default file.
        added: List → classes that the line adds to it with ``+=``.
        asks_for_help: Whether ``--help`` or ``-h`` is typed.
        sets_a_length: Whether ``max_steps`` or ``max_time`` ends the training.
    """

    def __init__(
        self,
        argv: list[str],
        networks: ModuleType | None = None,
        below: dict[str, Any] | None = None,
    ) -> None:
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        parser.add_argument("-c", "--config", action="append", default=[])
        try:
            found, others = parser.parse_known_args(argv)
        except argparse.ArgumentError as error:
            raise UserError(explain(str(error), [])) from None
        typed = [_full_name(before, word, networks) for before, word in pairwise(["", *others])]
        self.given: dict[str, Any] = {}
        self.below = named(below or {})
        self.added: dict[str, list[str]] = {}
        self.settings: dict[str, Any] = {}
        for file in found.config:
            option = f"--config {file}"
            content = settings_in(read_text(file, option), option)
            self.settings = merged(self.settings, content)
            self.given |= named(with_homes(content))
        files = [f"--config={file}" for file in found.config]
        self.words = [*files, *_words_with_home(self.settings), *typed]
        for word, following in pairwise([*typed, None]):
            self._take_word(str(word), following)
        _refuse_address(self.value("trainer.default_root_dir"))
        for option, name in CLASSES.items():
            _refuse_file_for_class(f"--{option}", self.value(name))
        self.asks_for_help = "--help" in typed or "-h" in typed
        self.sets_a_length = sets_a_length(self.given)

    def value(self, name: str) -> str | None:
        """An option's value as text: typed, else of the last file that has it; None if not given,
        or null.
        """
        return _text({**self.below, **self.given}, name)

    def _take_word(self, word: str, following: str | None) -> None:
        name, equals, value = word.partition("=")
        if not name.startswith("--"):
            return
        given = value if equals else following
        self.given |= named({name[2:]: given})
        if name.endswith("+"):
            self.added.setdefault(name[2:-1], []).append(str(given))


def named(settings: dict[str, Any]) -> dict[str, Any]:
    """Option → value of a config file's settings. A class has one name, however it is given."""
    return {CLASSES.get(name, name): value for name, value in flat(settings).items()}


def sets_a_length(given: Mapping[str, Any]) -> bool:
    """Whether options set ``max_steps`` or ``max_time``, which end the training."""
    limits = [_text(given, "trainer.max_steps"), _text(given, "trainer.max_time")]
    return any(limit not in (None, "-1") for limit in limits)


def _text(given: Mapping[str, Any], name: str) -> str | None:
    """An option's value as text; None where it is not given, or null."""
    found = given.get(name)
    if found is None or str(found) == "null":
        return None
    return str(found)


def _words_with_home(settings: dict[str, Any]) -> list[str]:
    """What is typed after config files for their paths that begin with ``~``."""
    values = flat(settings)
    homes = flat(with_homes(settings))
    return [f"--{name}={homes[name]}" for name in values if values[name] != homes[name]]


def with_homes(value: Any) -> Any:
    """A config file's settings, whose texts that begin with ``~/`` have the home folder there."""
    if isinstance(value, dict):
        return {key: with_homes(item) for key, item in value.items()}
    return with_home(value) if isinstance(value, str) and value != "~" else value


def _refuse_address(root: str | None) -> None:
    """A UserError for a remote folder. Lightning would make a folder of the name ``s3:``."""
    if root is not None and is_address(root):
        must = "be a folder of this machine, or one that is mounted here"
        hint = f" To keep runs there as well: --mirror {without_password(root)}"
        require(False, "--default_root_dir", must, without_password(root), hint)


def _refuse_file_for_class(option: str, value: str | None) -> None:
    """A UserError for a file in the place of a class: its code, or the data that it reads. The
    parser would take it for settings.
    """
    code = re.fullmatch(r"(?:\./)?([\w/]+)\.py(?:::?(\w+))?", value or "")
    if code is not None:
        module, name = code.groups("CLASS")
        hint = f" Name the class in it: {option} {module.replace('/', '.')}.{name}"
        require(False, option, "be a class", f"the file {value}", hint)
    holds_settings = (value or "").endswith((".yaml", ".yml", ".json"))
    if value is not None and os.path.isfile(value) and not holds_settings:
        hint = f" Name a class that reads it: {option} PACKAGE.CLASS"
        require(False, option, "be a class", f"the file {value}", hint)


def refuse_class_that_is_not_there(message: str, line: CommandLine) -> None:
    """A UserError where an option is not known because its class is given by a path that leads to
    nothing, or to a class of another kind.
    """
    unknown = re.match(r"unknown option --(model|data)\.", message)
    given = line.value(f"{unknown[1]}.class_path") if unknown else None
    module, dot, name = (given or "").rpartition(".")
    if unknown is None or not dot or os.path.isfile(str(given)):
        return
    try:
        found = getattr(import_module(module), name)
    # A module of the user's raises whatever it meets.
    except Exception as error:
        must = "be an import path (package.module.Class)"
        require(False, f"--{unknown[1]}", must, f"{given}: {error}", nearest_class(str(given)))
    kind = LightningModule if unknown[1] == "model" else LightningDataModule
    if isinstance(found, type) and not issubclass(found, kind):
        raise UserError(of_another_class(f"--{unknown[1]}", kind.__name__, str(given)))


def merged(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """The settings of two config files. A section of the later one adds to that of the earlier one;
    any other value takes the place of the earlier one.
    """
    result = dict(before)
    for name, value in after.items():
        is_section = name in ("model", "data", "trainer", "init_args")
        earlier = result.get(name)
        if is_section and isinstance(value, dict) and isinstance(earlier, dict):
            result[name] = merged(earlier, value)
        else:
            result[name] = value
    return result


def leave_out_added(settings: dict[str, Any], added: dict[str, list[str]]) -> None:
    """Take out of a resumed run's lists what its command line added and, typed again, adds again.

    Args:
        settings: The configuration of the resumed run. It is changed.
        added: List → classes, of :attr:`CommandLine.added`.
    """
    for name, classes in added.items():
        *path, last = name.split(".")
        section: Any = settings
        for part in path:
            section = section.get(part) or {}
            section = section.get("init_args") or section
        there = section[last] if isinstance(section.get(last), list) else []
        before = [_class_name(each) for each in there]
        now = [_class_name(each) for each in classes]
        again = _overlap(before, now)
        if again:
            section[last] = there[:-again]


def _class_name(entry: Any) -> str:
    """The last part of a class's import path; ``entry``: the path, or a section with it."""
    path = entry.get("class_path") if isinstance(entry, dict) else entry
    return str(path).rpartition(".")[2]


def _overlap(before: list[str], now: list[str]) -> int:
    """How many of the last names before are the first ones now. A line may add further ones."""
    for count in range(len(now), 0, -1):
        if before[-count:] == now[:count]:
            return count
    return 0


def _full_name(before: str, word: str, networks: ModuleType | None) -> str:
    """A word of a command line, with the section of a Trainer flag, or the module of a network that
    stands beside the default model.
    """
    flag = re.match(r"--(\w+)(?=$|[=.+])", word)
    if flag and flag[1] in FLAT:
        return f"--trainer.{word[2:]}"
    option, _, name = word.rpartition("=")
    # The class of the network has these names, and with init_args others.
    names = {each.replace(".init_args", "") for each in (before, option)}
    names_network = names & {f"--model.network{end}" for end in ("", ".help", f".{CLASS_PATH}")}
    if names_network and name.isidentifier() and isinstance(getattr(networks, name, None), type):
        # torchvision, too, has a class MLP.
        assert networks is not None
        return f"{word.removesuffix(name)}{networks.__name__}.{name}"
    return word


def read_text(name: str, option: str) -> str:
    """The text of a config file, or a UserError."""
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{option} cannot be read: {reason or error}.") from None


def settings_in(text: str, option: str) -> dict[str, Any]:
    """The settings in the text of a config file. A UserError for what is no such file, or belongs
    elsewhere.

    Args:
        text: What the file holds.
        option: What an error calls the file, such as ``--config FILE``.
    """
    try:
        content = load_yaml(text)
        repeated = _repeated_key(yaml.compose(text, yaml.SafeLoader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UserError(f"{option} is not valid YAML{place}.") from None
    except (yaml.YAMLError, RecursionError):
        raise UserError(f"{option} is not valid YAML.") from None
    except ValueError as error:
        raise UserError(f"{option} is not valid YAML: {error}.") from None
    got = str(content)[:40]
    require(isinstance(content, dict), option, "hold sections (trainer:, model:, data:)", got)
    if repeated is not None:
        key, line = repeated
        raise UserError(f"{option}, line {line}: {key} stands there twice. Write it once.")
    for key in content:
        require(isinstance(key, str), f"{option}: a key", "be text", key)
        if key in FLAT:
            raise UserError(
                f"{option}: write {key} under trainer:, as in `trainer: {{{key}: ...}}`."
            )
    unused = {"optimizer", "lr_scheduler"} & content.keys()
    if unused:
        own = "a module makes its own (configure_optimizers; those of unbroken.tasks take"
        own += " model.init_args.optimizer)"
        raise UserError(f"{option}: {min(unused)} is LightningCLI's automatic one; here {own}.")
    flags = content.get("trainer", {})
    must = "hold flags and values"
    require(isinstance(flags, dict), f"{option}: trainer", must, str(flags)[:40])
    return dict(content)


def _repeated_key(root: yaml.Node | None) -> tuple[str, int] | None:
    """A key that a mapping has twice, and the line of the second. YAML would drop the first."""
    waiting = [] if root is None else [root]
    seen = set()
    while waiting:
        node = waiting.pop()
        # An alias is the node that it names.
        if id(node) in seen or not isinstance(node, yaml.CollectionNode):
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
            continue
        keys = set()
        for key, value in node.value:
            name = str(key.value)
            if name in keys:
                return name, key.start_mark.line + 1
            keys.add(name)
            waiting.append(value)
    return None
