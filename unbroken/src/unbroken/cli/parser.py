"""The parser of commands that have options of their own; fit and test have LightningCLI's."""

import argparse
import re
from collections.abc import Collection, Sequence
from typing import NoReturn

from unbroken.cli.explain import explain
from unbroken.errors import UserError
from unbroken.tables import check_output


def option_names(parser: argparse.ArgumentParser) -> list[str]:
    """Every option that ``--help`` shows."""
    return re.findall(r"(?m)^\s+(?:-\w, )?(--[\w.]+)", parser.format_help())


class CommandParser(argparse.ArgumentParser):
    """Parser without abbreviations, whose errors are a :class:`UserError`.

    Args:
        package: Whose command it is, such as ``project``.
        command: Its name, such as ``tune``.
        doc: The docstring of the module, which its help shows with ``package`` for NAME.
    """

    def __init__(self, package: str, command: str, doc: str | None) -> None:
        super().__init__(
            f"python -m {package}.{command}",
            description=(doc or "").replace("NAME.", f"{package}."),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        raise UserError(explain(message, option_names(self)))


def take_word(
    argv: list[str], words: Collection[str], switches: tuple[str, ...] = ()
) -> tuple[str | None, list[str]]:
    """The first of ``words`` on a command line that is no option's value, or None; and the line
    without it.

    argparse does not know the options of ``fit``, and would take their values for the word.

    Args:
        argv: The command line.
        words: The words to look for.
        switches: Options that take no value.
    """
    for place, word in enumerate(argv):
        before = argv[place - 1] if place else ""
        takes_value = before.startswith("--") and "=" not in before and before not in switches
        if word in words and not takes_value:
            return word, argv[:place] + argv[place + 1 :]
    return None, argv


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Add ``--ckpt_path`` and ``--trust_checkpoint``."""
    which = "the checkpoint: a file, the address of one or of a run in a mirror, or best or last"
    which += " of the newest run (default: best)"
    parser.add_argument("--ckpt_path", metavar="best|last|PATH|URL", help=which)
    trust = "take the checkpoint as your own: it may name any class (default: false)"
    parser.add_argument("--trust_checkpoint", choices=["true", "false"], help=trust)


def trusting(args: argparse.Namespace) -> list[str]:
    """The words of ``--trust_checkpoint`` for :func:`unbroken.cli.read_checkpoint.load`."""
    return [f"--trust_checkpoint={args.trust_checkpoint}"] if args.trust_checkpoint else []


def add_output(
    parser: CommandParser,
    option: str = "--output",
    endings: Sequence[str] = (".json", ".csv"),
    what: str = "also write what is printed: .json or .csv",
) -> None:
    """Add an option for a file to write, whose path is checked as it is read."""
    parser.add_argument(
        option,
        metavar="FILE" if len(endings) > 1 else f"FILE{endings[0]}",
        type=lambda path: check_output(path, endings, option),
        help=what,
    )
