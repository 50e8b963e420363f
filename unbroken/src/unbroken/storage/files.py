"""How every file of a run is written: whole, or not at all."""

import contextlib
import os
from pathlib import Path

from unbroken.errors import UserError


def write_atomically(data: str | bytes | memoryview, path: Path) -> None:
    """Write a file beside ``path``, flush it to disk, and put it in ``path``'s place; a UserError
    where that fails.
    """
    if isinstance(data, str):
        # A file's name need not be valid Unicode. Python reads such a byte as a code that UTF-8
        # does not have.
        data = data.encode(errors="backslashreplace")
    # Two commands may write the same file, so each has a name of its own.
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(beside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        reason = error.strerror or error
        fix = "What was there before is whole. Free space, or make the folder writable."
        raise UserError(f"{path} could not be saved: {reason}. {fix}") from error
    flush_folder(path.parent)


def flush_folder(folder: Path) -> None:
    """Let a rename survive a power cut.

    Windows and some file systems cannot open a folder; there it is done without.
    """
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
