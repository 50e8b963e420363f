"""Values as text, and text as values, so that what is written is read as the same value again.

jsonargparse reads YAML in another way than PyYAML writes it: PyYAML writes the text ``1e5`` without
quotes, and jsonargparse reads a number. It does so twice on the way to a run's record. And it reads
some texts as nothing: ``#ff0000`` is a comment in YAML, ``~`` is its null.
"""

import re
from copy import deepcopy
from itertools import pairwise
from typing import Any

import yaml
from jsonargparse import get_loader, set_dumper, set_loader
from lightning.fabric.utilities.enums import LightningEnum
from unbroken.tables import refuse_too_many_aliases

# What jsonargparse reads as a number, and PyYAML as text
EXPONENT = re.compile(r"[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+$")
FLOAT = "tag:yaml.org,2002:float"
NOTHING = ("", "null")
# Stands before a typed text that YAML would read as a mapping or a list. YAML allows no such
# character, so the parser keeps the text as it is.
MARK = "\x01"


class PlainDumper(yaml.SafeDumper):
    """Writes YAML that jsonargparse and PyYAML read as the same values, without aliases: the reader
    of runs takes none.
    """

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_enum(dumper: yaml.SafeDumper, value: LightningEnum) -> yaml.ScalarNode:
    return dumper.represent_str(value.value)


def _represent_text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_str(str(value))


# A text that would be read as a number is written in quotes.
PlainDumper.add_implicit_resolver(FLOAT, EXPONENT, list("-+0123456789"))
# Lightning's Timer has such an enumeration, and YAML has none.
PlainDumper.add_multi_representer(LightningEnum, _represent_enum)
# A text of a type that allows certain texts alone, as jsonargparse has them.
PlainDumper.add_multi_representer(str, _represent_text)


def dump_yaml(values: Any) -> str:
    """Values as YAML, in their order."""
    return yaml.dump(values, Dumper=PlainDumper, sort_keys=False, allow_unicode=True)


def use_for_parsing() -> None:
    """Let jsonargparse write and read values as the functions here do."""
    set_dumper("yaml", dump_yaml)
    read = get_loader("yaml")
    if read.__module__ != __name__:
        set_loader("yaml", _reader(read), (yaml.YAMLError,))


def _reader(read: Any) -> Any:
    """The parser's function, but for a text that YAML reads as nothing: it stays the text."""

    def read_text(text: str) -> Any:
        try:
            refuse_too_many_aliases(text)
        except ValueError as error:
            raise yaml.YAMLError(str(error)) from None
        value = read(text)
        if value is None and text.strip().lower() not in NOTHING and "\n" not in text.strip():
            return text
        return value

    return read_text


def mark_texts(words: list[str], options: set[str]) -> list[str]:
    """Words of a command line, in which each text that YAML would read as a mapping or a list is
    marked, so that it stays text. :func:`without_mark` takes the mark away.

    Args:
        words: The command line. Names are full.
        options: The options that take text alone.
    """
    result: list[str] = []
    before = ""
    for word in words:
        name, equals, text = word.partition("=")
        if before in options:
            result.append(_marked(word))
        elif equals and name in options:
            result.append(f"{name}={_marked(text)}")
        else:
            result.append(word)
        before = word
    return result


def without_mark(text: str) -> str:
    """A text as it was typed."""
    return text.removeprefix(MARK)


def _marked(text: str) -> str:
    try:
        value = get_loader("yaml")(text)
    except yaml.YAMLError:
        return text
    return MARK + text if isinstance(value, dict | list) else text


def put_into_mappings(words: list[str], settings: dict[str, Any]) -> list[str]:
    """Words of a command line, in which a value deep inside a mapping is the whole mapping with it.

    ``--model.extra.net.width 64`` changes one value of a mapping that a config file gives.
    jsonargparse would drop the mapping's other values, and take the value as text.

    Args:
        words: The command line. Names are full.
        settings: What config files and a resumed run give. It is not changed.
    """
    known = deepcopy(settings)
    result: list[str] = []
    is_taken = False  # the word was the value of the option before it
    for word, following in pairwise([*words, None]):
        if is_taken:
            is_taken = False
            continue
        name, equals, text = str(word).partition("=")
        value = text if equals else following
        found = None
        if name.startswith("--") and value is not None and not name.endswith("+"):
            found = _mapping_with(known, name[2:].split("."), value)
        if found is None:
            result.append(str(word))
        else:
            option, mapping = found
            result.append(f"--{option}={_on_one_line(mapping)}")
            is_taken = not equals
    return result


def _on_one_line(mapping: dict[str, Any]) -> str:
    text = yaml.dump(mapping, Dumper=PlainDumper, default_flow_style=True, width=10**9)
    return str(text).strip()


def _mapping_with(
    known: dict[str, Any], path: list[str], text: str
) -> tuple[str, dict[str, Any]] | None:
    """The option whose value is a mapping that ``path`` leads into by two keys or more, and that
    mapping with the new value; None where there is no such mapping.
    """
    here: Any = known
    for depth, key in enumerate(path[:-1]):
        if not isinstance(here, dict):
            return None
        if "class_path" in here and isinstance(here.get("init_args"), dict) and key not in here:
            here = here["init_args"]
        here = here.get(key)
        is_value = isinstance(here, dict) and not {"class_path", "init_args"} & here.keys()
        keys = path[depth + 1 :]
        if depth > 0 and is_value and len(keys) > 1:
            _put(here, keys, get_loader("yaml")(text))
            return ".".join(path[: depth + 1]), here
    return None


def _put(mapping: dict[str, Any], keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        following = mapping.get(key)
        if not isinstance(following, dict):
            following = {}
            mapping[key] = following
        mapping = following
    mapping[keys[-1]] = value
