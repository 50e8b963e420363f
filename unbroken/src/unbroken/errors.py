"""What a user is told when something that they gave does not work: one line, exit code 2."""

import difflib
import re
from collections.abc import Iterable
from typing import Any

# What moves a cursor, clears a screen or turns the reading direction; not tab and line feed. And
# the halves of pairs of UTF-16, which no file and no terminal in UTF-8 can hold.
CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


# What devices, the CPU, cuBLAS and cuDNN (in three ways) say.
NO_MEMORY = re.compile(
    "out of memory|t allocate memory|_STATUS_ALLOC_FAILED"
    "|CUDNN_STATUS_NOT_SUPPORTED|nable to find an engine"
)


class UserError(Exception):
    """A user's mistake, or a condition only the user can mend (bad flag, damaged file, full disk).

    The message is one line that names the option, the value received, what is allowed and the fix,
    such as ``--data.batch_size must be at least 1, got 0.`` :func:`unbroken.cli.start.run`
    prints it and exits with code 2.
    """


class NotSaved(Exception):
    """A run has ended, and its last state is not on the disk.

    :func:`unbroken.cli.start.run` prints the message in one line and exits with code 1.
    """


class BadImage(Exception):
    """A file that holds no usable image, or no usable input of another kind.

    The message is the reason alone.
    """


def require(fits: object, option: str, must: str, got: object, hint: str = "") -> None:
    """A UserError, such as the one above, unless the value that was ``got`` fits.

    A ``hint`` begins with a space.
    """
    if not fits:
        raise UserError(f"{option} must {must}, got {got}.{hint}")


def nearest(name: str, known: Iterable[str]) -> str:
    """``" Did you mean X?"`` for the shortest known name that begins with ``name``, else for the
    closest one; ``""`` where none is close.
    """
    names = list(known)
    longer = sorted((each for each in names if name and each.startswith(name)), key=len)
    matches = longer or difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f" Did you mean {matches[0]}?" if matches else ""


def without_control_characters(value: Any) -> Any:
    """A value whose texts cannot move a terminal's cursor, clear its screen or turn the reading
    direction, and can be written into any file. Mappings of any kind become dictionaries.
    """
    if isinstance(value, str):
        return CONTROL.sub("?", value)
    if isinstance(value, dict):
        return {
            without_control_characters(key): without_control_characters(item)
            for key, item in value.items()
        }
    if type(value) in (list, tuple):
        return type(value)(without_control_characters(item) for item in value)
    return value


def printable(text: str) -> str:
    r"""A text in one line, for the terminal, a table or a message. A control character becomes its
    code, such as ``\x1b``, and line feeds become spaces.

    Otherwise the name of a file or a run could clear the screen, change the terminal's title, or
    stand alone as a line that this program seems to say.
    """
    one_line = " ".join(text.split())
    if one_line.isprintable():
        return one_line
    return "".join(
        character if character.isprintable() else ascii(character)[1:-1] for character in one_line
    )


def in_a_cell(text: str) -> str:
    r"""A text as a file of a table holds it: whole, with the code of each character that is a
    command of the terminal, such as ``\x1b``.
    """
    return CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device's or the host's memory is used up."""
    # The second is torch's, which this file does not import.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and NO_MEMORY.search(str(error)) is not None
