"""The parser of the small commands: errors in one line with exit code 2, like those of ``fit``, and quick to start."""

from __future__ import annotations

import argparse
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
