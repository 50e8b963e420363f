"""What a user is told when something they gave does not work: one line, exit code 2, no traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A user's mistake, or a condition only the user can mend (bad flag, damaged file, full disk).

    The message is one line that names the option, the value received, what is allowed and the fix, such as
    ``--data.batch_size must be at least 1, got 0.`` :func:`project.engine.command.run` prints it and exits with code 2.
    """


class BadImage(Exception):
    """A file that holds no usable image, or no usable input of another kind. The message is the reason alone."""


def nearest(name: str, known: Iterable[str]) -> str:
    """``" Did you mean X?"`` for the known name closest to ``name``, or ``""`` when none is close."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean {matches[0]}?" if matches else ""
