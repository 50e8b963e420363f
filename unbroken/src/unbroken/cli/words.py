"""What was typed, made ready for every command: a home folder, and a file that can be read once."""

import re
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

from unbroken.errors import UserError

# A shell puts the home folder in the place of ~ at a word's start, and not behind the = of a word.
HOME_AS_VALUE = re.compile(r"(--[\w.]+\+?=)(~(?:/.*)?)", re.DOTALL)
HOME = re.compile(r"~(?:/.*)?", re.DOTALL)
CONFIG = ("-c", "--config")
# Holds the contents of pipes as long as this process lives, and the name that was typed of each.
COPIES: list[tuple[tempfile.TemporaryDirectory[str], str]] = []


def settled(argv: list[str]) -> list[str]:
    """A command line whose ``~`` is the home folder, and whose ``--config`` files are files.

    ``--config <(...)`` and ``/dev/stdin`` can be read once. A command reads its line several times,
    and so do the ranks that it starts.

    Raises:
        UserError: Such a pipe cannot be read, or an option lacks its value.
    """
    if argv[:1] == ["--"]:
        # `torchrun -m project.fit -- --monitor x`: without it torchrun takes --monitor for its own
        # --monitor-interval. Some versions of Python hand it on.
        argv = argv[1:]
    words = []
    for before, word in pairwise(["", *argv]):
        # argparse would make an empty list of it.
        if re.match("--.+=--$", word):
            raise UserError(f"{word[:-3]} needs a value, got --.")
        option, equals, value = word.partition("=")
        if equals and option in CONFIG:
            words.append(f"{option}={_as_file(with_home(value))}")
        elif before in CONFIG:
            words.append(_as_file(with_home(word)))
        else:
            in_word = HOME_AS_VALUE.fullmatch(word)
            is_value = before.startswith("--") and "=" not in before
            if in_word is not None:
                word = in_word[1] + with_home(in_word[2])
            words.append(with_home(word) if is_value else word)
    return words


def with_home(value: str) -> str:
    """A value whose ``~`` or ``~/`` at its start is the home folder."""
    return str(Path(value).expanduser()) if HOME.fullmatch(value) else value


def _renamed(word: str, name: str, copy: str) -> str:
    """A word in which a config file's name is that of its copy."""
    option, equals, value = word.partition("=")
    if equals and option in CONFIG and value == name:
        return f"{option}={copy}"
    return copy if word == name else word


def as_typed(text: str) -> str:
    """A text that names what was typed in the place of the copies of pipes."""
    for folder, name in COPIES:
        copy = re.escape(folder.name) + r"/[^\s/]*\.yaml"
        # As a replacement, a backslash in a name would be a command.
        text = name.join(re.split(copy, text))
    return text


def _as_file(name: str) -> str:
    """The name of a file with the contents of a pipe or a device; a file's own name."""
    if not name:
        raise UserError("--config must be a file, got nothing.")
    path = Path(name)
    if not path.exists() or path.is_file() or path.is_dir():
        return name
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"--config {name} cannot be read: {error.strerror}.") from None
    folder = tempfile.TemporaryDirectory(prefix="config-")
    COPIES.append((folder, name))
    copy = Path(folder.name, f"{path.name}.yaml")
    copy.write_bytes(content)
    # The ranks that Lightning starts are given this process' words.
    sys.argv = [_renamed(word, name, str(copy)) for word in sys.argv]
    return str(copy)
