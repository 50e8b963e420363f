"""Values as text, and text as values, so that what is written is read as the same value again.

jsonargparse reads YAML in another way than PyYAML writes it: PyYAML writes the text ``1e5`` without
quotes, and jsonargparse reads a number. It does so twice on the way to a run's record. And it reads
some texts as nothing: ``#ff0000`` is a comment in YAML, ``~`` is its null.
"""

import re
from typing import Any

import yaml
from jsonargparse import get_loader, set_dumper, set_loader
from lightning.fabric.utilities.enums import LightningEnum

# What jsonargparse reads as a number, and PyYAML as text
EXPONENT = re.compile(r"[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+$")
FLOAT = "tag:yaml.org,2002:float"
NOTHING = ("", "null")


class PlainDumper(yaml.SafeDumper):
    """Writes YAML that jsonargparse and PyYAML read as the same values."""


def _represent_enum(dumper: yaml.SafeDumper, value: LightningEnum) -> yaml.ScalarNode:
    return dumper.represent_str(value.value)


# A text that would be read as a number is written in quotes.
PlainDumper.add_implicit_resolver(FLOAT, EXPONENT, list("-+0123456789"))
# Lightning's Timer has such an enumeration, and YAML has none.
PlainDumper.add_multi_representer(LightningEnum, _represent_enum)


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
        value = read(text)
        if value is None and text.strip().lower() not in NOTHING and "\n" not in text.strip():
            return text
        return value

    return read_text


def put_into_mappings(words: list[str], settings: dict[str, Any]) -> list[str]:
    """Words of a command line, in which a value deep inside a mapping is the whole mapping with it.

    ``--model.extra.net.width 64`` changes one value of a mapping that a config file gives.
    jsonargparse would drop the mapping's other values, and take the value as text.

    Args:
        words: The command line. Names are full.
        settings: What config files and a resumed run give. It is not changed.
    """
    known = yaml.safe_load(dump_yaml(settings))
    result: list[str] = []
    place = 0
    while place < len(words):
        word = words[place]
        name, equals, text = word.partition("=")
        has_value = bool(equals) or place + 1 < len(words)
        found = None
        if name.startswith("--") and has_value and not name.endswith("+"):
            value = text if equals else words[place + 1]
            found = _mapping_with(known, name[2:].split("."), value)
        if found is None:
            result.append(word)
        else:
            option, mapping = found
            compact = yaml.dump(
                mapping, Dumper=PlainDumper, default_flow_style=True, width=10**9
            ).strip()
            result.append(f"--{option}={compact}")
            place += 0 if equals else 1
        place += 1
    return result


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
