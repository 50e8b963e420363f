"""The parser of the small commands: errors in one line with exit code 2, like those of ``fit``, and quick to start."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from typing import NoReturn

from project.cli_errors import explain
from project.errors import UserError


class CommandParser(argparse.ArgumentParser):
    """:class:`argparse.ArgumentParser` without abbreviations, whose errors are a :class:`UserError`.

    Args:
        prog: Module name, such as ``project.predict``.
        doc: The module's docstring: its first line says what the command does, the rest are examples.
    """

    def __init__(self, prog: str, doc: str | None) -> None:
        super().__init__(
            prog=f"python -m {prog}",
            description=doc,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        raise UserError(explain(message, [o for o in self._option_string_actions if o.startswith("--")]))


def take_word(argv: list[str], words: Collection[str], switches: tuple[str, ...] = ()) -> tuple[str | None, list[str]]:
    """The first of ``words`` on a command line that is not an option's value, or None; and the line without it.

    argparse would take the value of an option that it does not know, one of ``fit``'s, for the word.

    Args:
        argv: The command line.
        words: What is looked for, such as names of tables.
        switches: Options that take no value.
    """
    for place, word in enumerate(argv):
        before = argv[place - 1] if place else ""
        takes_value = before.startswith("--") and "=" not in before and before not in switches
        if word in words and not takes_value:
            return word, argv[:place] + argv[place + 1 :]
    return None, argv


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Add ``--ckpt_path``."""
    parser.add_argument(
        "--ckpt_path",
        metavar="best|last|PATH",
        help="the checkpoint: a file, or best or last of the newest run (default: best)",
    )


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add ``--output``."""
    parser.add_argument("--output", metavar="FILE", help="also write what is printed: .json or .csv")
