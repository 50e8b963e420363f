"""What a resume says where another version of this library has saved the checkpoint.

Versions are MAJOR.MINOR.PATCH, and CHANGELOG.md says what each has changed. A patch resumes
exactly. A minor version resumes, and it is not promised that it is bit for bit. A major version may
keep other things in a checkpoint, so that a resume is refused.
"""

import re
from collections.abc import Mapping
from typing import Any

from unbroken.errors import UserError
from unbroken.version import __version__

# The library's entry in the ``versions`` of a checkpoint and of summary.json
NAME = "unbroken"


def note_of_version(record: Mapping[str, Any], now: str = __version__) -> str | None:
    """The line for the user; None where the version is the same.

    Args:
        record: What the checkpoint records of its run.
        now: The version that resumes it.

    Raises:
        UserError: The major versions differ.
    """
    before = record.get("versions", {}).get(NAME)
    if before == now:
        return None
    if before is None:
        # Versions 0.1 kept the attributes of objects under other names.
        return (
            "that checkpoint names no version of unbroken, so it is older than 0.2.0: the resume is"
            " not exact where your objects keep a state of their own."
        )
    numbers_before = numbers_of(str(before))
    numbers_now = numbers_of(now)
    saved = f"that checkpoint was saved by unbroken {before}, and this is {now}"
    if numbers_before[:1] != numbers_now[:1]:
        raise UserError(
            f"--ckpt_path: {saved}, which cannot resume it exactly. Install {before} again, or"
            " begin a new run with its weights (--init_weights)."
        )
    if numbers_before[:2] != numbers_now[:2]:
        return f"{saved}: it is not promised that the resume is bit for bit."
    return f"{saved}: both resume it exactly."


def numbers_of(version: str) -> list[int]:
    """``"1.20.3"`` → [1, 20, 3]; empty for a text without numbers."""
    return [int(number) for number in re.findall(r"\d+", version)[:3]]
