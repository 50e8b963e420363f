"""The one reader for the files of a run's folder, which may be a stranger's.

A file is read only if it is an ordinary file of that folder, and no larger than what a run writes:
in bytes, and in values, which are counted before they are made. A link is not read: what it leads
to would be shown, or published. A named pipe or a device would not end.
"""

from __future__ import annotations

import csv
import errno
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import yaml
from yaml.composer import Composer
from yaml.constructor import SafeConstructor
from yaml.nodes import MappingNode, Node, ScalarNode
from yaml.resolver import Resolver

# Where a system lacks one of these, it is done without: what is opened is looked at again.
FLAGS = ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY")
# Bytes, values, and levels of what stands in each other
MOST_TEXT = 2**18
MOST_JSON = 2**22
MOST_JSON_VALUES = 100_000
MOST_YAML = 2**18
MOST_YAML_VALUES = 10_000
MOST_LEVELS = 32
# A million rows of ten metrics take half of it.
MOST_CSV = 2**28
MOST_CELLS = 2**24
MOST_COLUMNS = 10_000
LONGEST_LINE = 2**20
# Characters of a setting's own name, and of a number. A longer number is a text.
LONGEST_KEY = 200
LONGEST_NUMBER = 100
CHUNK = 2**20

YAML = "tag:yaml.org,2002:"


class NotRead(ValueError):
    """Why a file is not read, such as ``is a link``."""


# What a system raises, and what damage is
UNREADABLE = (OSError, ValueError)


def opened(path: Path, most: int | None) -> BinaryIO:
    """An ordinary file, open for reading; a :class:`NotRead` for a link, and for anything else.

    Args:
        path: The file. Its folder may be reached by a link.
        most: Bytes. A larger file is not opened. None: it may have any size.
    """
    _check(os.lstat(path), most)
    flags = os.O_RDONLY
    for name in FLAGS:
        flags |= getattr(os, name, 0)
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        # What O_NOFOLLOW says of a link: Linux and macOS the first, BSD the others
        if error.errno in (errno.ELOOP, errno.EMLINK):
            raise NotRead("is a link") from None
        raise
    try:
        # Another file may have taken its place.
        _check(os.fstat(descriptor), most)
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _check(facts: os.stat_result, most: int | None) -> None:
    if stat.S_ISLNK(facts.st_mode):
        raise NotRead("is a link")
    if not stat.S_ISREG(facts.st_mode):
        raise NotRead("is no ordinary file")
    if most is not None and facts.st_size > most:
        raise NotRead(f"has more than {most:,} bytes")


def read_bytes(path: Path, most: int | None = MOST_TEXT) -> bytes:
    """The bytes of an ordinary file; a :class:`NotRead` where there are more than ``most``."""
    with opened(path, most) as file:
        data = file.read(-1 if most is None else most + 1)
    if most is not None and len(data) > most:
        raise NotRead(f"has more than {most:,} bytes")
    return data


def read_end(path: Path, most: int = MOST_TEXT) -> bytes:
    """The last bytes of an ordinary file, which may have any size."""
    with opened(path, None) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - most))
        return file.read(most)


def read_text(path: Path, most: int | None = MOST_TEXT) -> str:
    """The text of an ordinary file."""
    return read_bytes(path, most).decode()


def read_json(path: Path) -> dict[str, Any]:
    """The mapping in a JSON file; a ValueError where there is none, or where it is too much."""
    text = read_text(path, MOST_JSON)
    # Each value but the first comes after one of these. Some may stand in texts.
    if sum(map(text.count, ",[{")) > MOST_JSON_VALUES:
        raise NotRead(f"has more than {MOST_JSON_VALUES:,} values")
    try:
        content = json.loads(text, parse_int=_whole_number)
    except RecursionError:
        raise NotRead("is nested too deeply") from None
    if not isinstance(content, dict):
        raise ValueError("is no mapping")
    return content


def _whole_number(text: str) -> float:
    # To read very many digits takes long, and no text is made of them again.
    return int(text) if len(text) <= LONGEST_NUMBER else float(text)


class BoundedComposer(Composer):
    """Reads YAML in which nothing stands in several places, for a few bytes could name very much,
    and no more of it than a run writes. A run writes no aliases.
    """

    values = 0
    levels = 0

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        """One value, with all that is in it."""
        # The parser beside this class has it.
        if self.check_event(yaml.AliasEvent):  # type: ignore[attr-defined]
            raise yaml.YAMLError("an alias")
        self.values += 1
        if self.values > MOST_YAML_VALUES:
            raise NotRead(f"has more than {MOST_YAML_VALUES:,} values")
        self.levels += 1
        if self.levels > MOST_LEVELS:
            raise NotRead("is nested too deeply")
        node = super().compose_node(parent, index)
        self.levels -= 1
        is_key = isinstance(parent, MappingNode) and index is None
        if is_key and isinstance(node, ScalarNode) and len(node.value) > LONGEST_KEY:
            raise NotRead(f"has a name of {len(node.value):,} characters")
        return node


class PlainConstructor(SafeConstructor):
    """Makes the plain values that JSON has; of a set a list, and of a date its text."""

    def number_or_text(self, node: Any) -> Any:
        """A number; a text where it is so long that no text could be made of the number again."""
        text = self.construct_scalar(node)
        if len(text) > LONGEST_NUMBER:
            return text
        is_int = node.tag == f"{YAML}int"
        return self.construct_yaml_int(node) if is_int else self.construct_yaml_float(node)

    def text(self, node: Any) -> Any:
        """The text of a value."""
        return self.construct_scalar(node)

    def list_of_set(self, node: Any) -> Any:
        """The elements of a set."""
        return list(self.construct_mapping(node, deep=True))


MAKERS: dict[str, Any] = {
    "int": PlainConstructor.number_or_text,
    "float": PlainConstructor.number_or_text,
    "timestamp": PlainConstructor.text,
    "binary": PlainConstructor.text,
    "set": PlainConstructor.list_of_set,
    "omap": PlainConstructor.construct_undefined,
    "pairs": PlainConstructor.construct_undefined,
}
for _kind, _maker in MAKERS.items():
    PlainConstructor.add_constructor(f"{YAML}{_kind}", _maker)


def _make_loader() -> Any:
    """The class of a loader; the part of it in C, where PyYAML has it, is ten times as fast."""
    if not yaml.__with_libyaml__:

        class PythonLoader(BoundedComposer, PlainConstructor, yaml.SafeLoader):
            pass

        return PythonLoader

    from yaml import cyaml

    parser: Any = cyaml.CParser  # type: ignore[attr-defined]

    class CLoader(BoundedComposer, parser, PlainConstructor, Resolver):
        def __init__(self, text: str) -> None:
            parser.__init__(self, text)
            BoundedComposer.__init__(self)
            PlainConstructor.__init__(self)
            Resolver.__init__(self)

    return CLoader


Loader = _make_loader()


def yaml_in(text: str) -> Any:
    """What a YAML text holds, as plain values; a ValueError where it is damaged or too much."""
    try:
        return yaml.load(text, Loader=Loader)
    except RecursionError:
        raise NotRead("is nested too deeply") from None
    # PyYAML raises the last four where a tag, such as !!int, stands before what is none.
    except (yaml.YAMLError, LookupError, AttributeError, TypeError, ArithmeticError) as error:
        raise ValueError("is damaged") from error


class Cells:
    """The rows of a CSV file of numbers or plain words, one after the other.

    A row has as many cells as the heading. A last one without a line feed that has fewer is left
    out: a run that is killed leaves half a line.

    Args:
        path: The file.
        is_bounded: Whether the file may be a stranger's. Of one's own run all is read.
        most_cells: How many a stranger's may have.
        longest_line: In bytes.
    """

    def __init__(
        self,
        path: Path,
        is_bounded: bool = True,
        most_cells: int = MOST_CELLS,
        longest_line: int = LONGEST_LINE,
    ) -> None:
        self.is_bounded = is_bounded
        self.longest_line = longest_line if is_bounded else -1
        self._file = opened(path, MOST_CSV if is_bounded else None)
        try:
            if is_bounded:
                self._count(most_cells)
            self.names = next(csv.reader([self._line().rstrip("\r\n")]), [])
            if is_bounded and len(self.names) > MOST_COLUMNS:
                raise NotRead(f"has more than {MOST_COLUMNS:,} columns")
        except csv.Error as error:
            self._file.close()
            raise ValueError(str(error)) from None
        except BaseException:
            self._file.close()
            raise

    def _count(self, most: int) -> None:
        cells = 0
        size = 0
        while chunk := self._file.read(CHUNK):
            cells += chunk.count(b",") + chunk.count(b"\n")
            size += len(chunk)
            if cells > most:
                raise NotRead(f"has more than {most:,} cells")
            if size > MOST_CSV:
                raise NotRead(f"has more than {MOST_CSV:,} bytes")
        self._file.seek(0)

    def _line(self) -> str:
        line = self._file.readline(self.longest_line)
        if len(line) == self.longest_line and not line.endswith(b"\n"):
            raise NotRead("has a line that is too long")
        return line.decode()

    def __iter__(self) -> Iterator[list[str]]:
        with self._file:
            while line := self._line():
                if line.count(",") == len(self.names) - 1:
                    yield line.rstrip("\r\n").split(",")
                elif line.endswith("\n") and line.strip():
                    raise ValueError("has a row with more or fewer cells than the heading")
