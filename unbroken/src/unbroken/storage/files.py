"""How the files of a run are written: whole, or not at all (a kill may cut an appended row)."""

import contextlib
import errno
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unbroken.errors import UserError

if sys.platform == "linux":
    import fcntl

# A request of ioctl(2): share the bytes of another file (linux/fs.h)
FICLONE = 0x40049409
# Bytes
COPIED_AT_ONCE = 16 * 2**20
# What systems answer that cannot open a folder, as Windows, or file systems that cannot flush one.
# It is the same at each save, and says nothing of the disk.
NO_FLUSH_OF_FOLDERS = {
    errno.EACCES,
    errno.EPERM,
    errno.EISDIR,
    errno.EBADF,
    errno.EINVAL,
    errno.ENOSYS,
    errno.ENOTSUP,
    errno.EOPNOTSUPP,
}


class NotWritten(UserError):
    """A file could not be written now: no room, no permission, a disk that fails."""


def write_atomically(data: str | bytes, path: Path) -> None:
    """Write a file beside ``path``, flush it to disk, and put it in ``path``'s place.

    Raises:
        NotWritten: That failed, and what was there before is whole.
    """
    if isinstance(data, str):
        # A file's name need not be valid Unicode. Python reads such a byte as a code that UTF-8
        # does not have.
        data = data.encode(errors="backslashreplace")
    with written_atomically(path) as beside:
        beside.write_bytes(data)


@contextlib.contextmanager
def written_atomically(path: Path) -> Iterator[Path]:
    """Inside, write the file that is yielded; then it is flushed to disk and put in ``path``'s
    place.

    Raises:
        NotWritten: That failed, and what was there before is whole. Or all but the last failed, the
            flush of the folder: the new file is there, and a power cut may undo that.
    """
    # Two commands of a machine may write the same file, so each process has a name of its own.
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield beside
        flush(beside)
        os.replace(beside, path)
    except OSError as error:
        remove(beside)
        raise not_written(path, error) from error
    except BaseException:
        remove(beside)
        raise
    try:
        flush_folder(path.parent)
    except OSError as error:
        raise NotWritten(
            f"{path} could not be saved for good: {error.strerror or error}. It is whole, and a"
            " power cut may bring back what was there before."
        ) from error


def not_written(path: Path, error: OSError) -> NotWritten:
    """What the system's error means for a file."""
    reason = error.strerror or error
    fix = "What was there before is whole. Free space, or make the folder writable."
    return NotWritten(f"{path} could not be saved: {reason}. {fix}")


class WholeWrites:
    """A file without a buffer, whose writes are whole: the system may write a part only.

    PyTorch's writer turns an error of the file's into one of its own, which names no reason. So it
    is kept here.
    """

    def __init__(self, file: Any) -> None:
        self._file = file
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        """Write all of ``data``; returns its bytes."""
        rest = memoryview(data).cast("B")
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self.failure = error
            raise
        return len(data)

    def flush(self) -> None:
        """Nothing: what was written is with the system."""


def append_whole(data: bytes, path: Path) -> None:
    """Append to a file all of ``data``, or nothing.

    Raises:
        OSError: It could not be written, and the file is as it was.
    """
    with open(path, "ab", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        try:
            WholeWrites(file).write(data)
        except OSError:
            file.truncate(size)
            raise


def copy_atomically(source: Path, path: Path) -> None:
    """Put a copy of a file in ``path``'s place, without reading it into memory.

    Where the file system can, both share their bytes until one is changed (a reflink). It is no
    hard link: damage to one file would be damage to both.

    Raises:
        NotWritten: That failed, and what was there before is whole.
    """
    with written_atomically(path) as beside, open(source, "rb") as old, open(beside, "wb") as new:
        if not _share_bytes(old.fileno(), new.fileno()):
            shutil.copyfileobj(old, new, COPIED_AT_ONCE)


def _share_bytes(source: int, target: int) -> bool:
    """Let an empty file share the bytes of another; returns whether the file system can."""
    if sys.platform != "linux":
        return False
    with contextlib.suppress(OSError):
        fcntl.ioctl(target, FICLONE, source)
        return True
    return False


def flush(path: Path) -> None:
    """Let what was written into a file survive a power cut."""
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def remove(path: Path) -> None:
    """Remove a file that may not be there."""
    with contextlib.suppress(OSError):
        path.unlink()


def flush_folder(folder: Path) -> None:
    """Let a rename survive a power cut. Where a folder cannot be flushed, it is done without.

    Raises:
        OSError: The disk has no room for the names in the folder, or fails.
    """
    try:
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno not in NO_FLUSH_OF_FOLDERS:
            raise
