"""Disks that take no checkpoint for a while: one that fails where a test wants it, and a real one
that is full.
"""

from __future__ import annotations

import io
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

import pytest
from unbroken.storage import checkpoint_files, files

# Where in the way of a file to the disk its error comes
Place = Literal["start", "middle", "flush", "rename", "folder"]
PLACES: tuple[Place, ...] = ("start", "middle", "flush", "rename", "folder")
# A checkpoint of the tests has more bytes than that.
MIDDLE = 3000
BOTH = ("best.ckpt", "last.ckpt")
MANY = 10**6


class Disk(Protocol):
    """A disk on which a run is saved."""

    def fail(self) -> None:
        """From now on it takes no checkpoint."""

    def mend(self) -> None:
        """From now on it takes them again."""


class FailingDisk:
    """Gives the system's errors to the code that writes checkpoints.

    Args:
        folder: Where they lie.
        place: Where in the way of a file the error comes.
        number: The error's.
        names: The files that the disk does not take.
        files_refused: How many of them in a row. Then it mends itself.

    Attributes:
        refused: The name of each file that it has refused.
    """

    def __init__(
        self,
        folder: Path,
        place: Place,
        number: int,
        names: tuple[str, ...] = BOTH,
        files_refused: int = MANY,
    ) -> None:
        self.refused: list[str] = []
        self._folder = folder
        self._place = place
        self._number = number
        self._names = names
        self._files_refused = files_refused
        # How many more files are refused.
        self._left = 0
        # Whether the file that was begun last is one of them.
        self._refuses = False

    def fail(self) -> None:
        self._left = self._files_refused

    def mend(self) -> None:
        self._left = 0
        # It is behind its end, and what is written next may be no checkpoint.
        self._refuses = False

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        """Stand between the library and the system until the patch is undone."""
        flush, replace = os.fsync, os.replace

        def fsync(handle: int) -> None:
            is_folder = stat.S_ISDIR(os.fstat(handle).st_mode)
            self._pass("folder" if is_folder else "flush")
            flush(handle)

        def rename(source: Any, target: Any) -> None:
            self._pass("rename")
            replace(source, target)

        patch.setattr(os, "fsync", fsync)
        patch.setattr(os, "replace", rename)
        # A name of a module comes before Python's own.
        for module in (files, checkpoint_files):
            patch.setattr(module, "open", self._open, raising=False)
        # A copy that shares its bytes with the first file writes none.
        patch.setattr(files, "_share_bytes", lambda source, target: False)

    def _pass(self, place: Place) -> None:
        if self._refuses and place == self._place:
            raise OSError(self._number, os.strerror(self._number))

    def _open(self, path: Any, mode: str = "r", buffering: int = -1) -> Any:
        path = Path(path)
        # .last.ckpt.PID.part is written, and then renamed.
        name = path.name.removeprefix(".").rpartition(".ckpt.")[0] + ".ckpt"
        if mode != "wb" or path.parent != self._folder or name not in BOTH:
            return open(path, mode, buffering)
        self._refuses = self._left > 0 and name in self._names
        if self._refuses:
            self._left -= 1
            self.refused.append(name)
        self._pass("start")
        is_cut = self._refuses and self._place == "middle"
        file = CutFile(path, self._number if is_cut else None)
        return file if buffering == 0 else io.BufferedWriter(file)


class CutFile(io.FileIO):
    """A file for which there is no room behind its first ``MIDDLE`` bytes: as of the system, one
    write is short, and the next one an error.
    """

    def __init__(self, path: Path, number: int | None) -> None:
        super().__init__(path, "wb")
        self._error = number

    def write(self, data: Any) -> int:
        if self._error is None:
            return super().write(data)
        room = MIDDLE - self.tell()
        if room <= 0:
            raise OSError(self._error, os.strerror(self._error))
        return super().write(memoryview(data).cast("B")[:room])


class SmallDisk:
    """A real file system, which other files fill.

    Args:
        folder: Where it is mounted.
        place: ``start``: there is no room for the name of a file. ``middle``: there is room for a
            part of one.
    """

    def __init__(self, folder: Path, place: Place) -> None:
        self._others = folder / "others"
        self._others.mkdir()
        self._place = place

    def fail(self) -> None:
        if self._place == "start":
            self._use_all_names()
        else:
            self._leave_room_for(2)

    def _use_all_names(self) -> None:
        number = 0
        while os.statvfs(self._others).f_favail > 0:
            (self._others / str(number)).touch()
            number += 1

    def _leave_room_for(self, pages: int) -> None:
        status = os.statvfs(self._others)
        filled = (status.f_bavail - pages) * status.f_frsize
        (self._others / "large").write_bytes(b"x" * filled)

    def mend(self) -> None:
        for path in self._others.iterdir():
            path.unlink()


@contextmanager
def mounted(folder: Path) -> Iterator[Path]:
    """A file system of one MiB and 64 files. Where none may be mounted, the test is skipped."""
    folder.mkdir()
    if sys.platform != "linux":
        pytest.skip("mounts a file system in memory, as Linux does")
    options = "size=1m,nr_inodes=64"
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True
    )
    if made.returncode != 0:
        pytest.skip("no file system can be mounted here")
    try:
        yield folder
    finally:
        # Pages of a checkpoint that was read may be mapped.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
