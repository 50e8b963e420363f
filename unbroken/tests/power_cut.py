"""What a power cut leaves of a folder, at every boundary of a write.

A file system promises little. Bytes that nobody has flushed may be lost, and a rename as well until
the folder is flushed; or the rename survives and the bytes do not. :class:`PowerCut` watches the
writes, flushes, renames and removals of a process, and knows at each of their boundaries what could
be left.
"""

from __future__ import annotations

import itertools
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from unbroken.storage import checkpoint_files

# What could be left, by what is lost
WORLDS = ("nothing", "all that is not flushed", "bytes but not names")


class PowerCut:
    """Watches a folder.

    Args:
        folder: All that lies in it now counts as flushed. Folders in it are left out.
        act: Called at each boundary, with this object. It may end the process.
        writes: One of so many writes has a boundary inside. A checkpoint is hundreds of them.

    Attributes:
        boundaries: The name of each boundary so far.
    """

    def __init__(self, folder: Path, act: Callable[[PowerCut], None], writes: int = 1) -> None:
        self.boundaries: list[str] = []
        self._every = writes
        self._writes = itertools.count()
        self._folder = folder
        self._act = act
        self._numbers = itertools.count()
        # A file is known by a number of its own: the system uses that of a removed one again.
        self._files: dict[int, int] = {}
        self._flushed: dict[int, bytes] = {}
        names = self._names()
        self._durable = names
        for name, file in names.items():
            self._flushed[file] = (folder / name).read_bytes()

    def _names(self) -> dict[str, int]:
        """What lies in the folder, each with the number of its file."""
        found = {}
        for path in self._folder.iterdir():
            status = path.lstat()
            if stat.S_ISREG(status.st_mode):
                found[path.name] = status.st_ino
        self._files = {place: self._files.get(place, -1) for place in found.values()}
        for place, file in self._files.items():
            if file == -1:
                self._files[place] = next(self._numbers)
                self._flushed[self._files[place]] = b""
        return {name: self._files[place] for name, place in found.items()}

    def left(self, world: str) -> dict[str, bytes]:
        """The files that a power cut leaves now, in one of the ``WORLDS``."""
        names = self._names()
        if world == "nothing":
            return {name: (self._folder / name).read_bytes() for name in names}
        if world == "all that is not flushed":
            names = self._durable
        return {name: self._flushed[file] for name, file in names.items()}

    def leave(self, world: str) -> None:
        """Let the folder be as a power cut leaves it now."""
        left = self.left(world)
        for name in self._names():
            (self._folder / name).unlink()
        for name, data in left.items():
            (self._folder / name).write_bytes(data)

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        """Watch this process until the patch is undone."""
        self._watch_flushes(patch)
        self._watch_writes(patch)
        for name in ("replace", "rename", "unlink", "remove"):
            self._watch_names(patch, name)

    def _boundary(self, name: str) -> None:
        self._names()
        self.boundaries.append(name)
        self._act(self)

    def _watch_flushes(self, patch: pytest.MonkeyPatch) -> None:
        flush = os.fsync

        def fsync(handle: int) -> None:
            status = os.fstat(handle)
            is_folder = stat.S_ISDIR(status.st_mode)
            what = "the folder" if is_folder else "a file"
            self._boundary(f"before {what} is flushed")
            flush(handle)
            names = self._names()
            if is_folder:
                self._durable = names
            elif status.st_ino in self._files:
                path = Path(os.readlink(f"/proc/self/fd/{handle}"))
                self._flushed[self._files[status.st_ino]] = path.read_bytes()
            self._boundary(f"after {what} is flushed")

        patch.setattr(os, "fsync", fsync)

    def _watch_names(self, patch: pytest.MonkeyPatch, name: str) -> None:
        original = getattr(os, name)

        def act(path: Any, *args: Any, **kwargs: Any) -> None:
            if Path(path).parent != self._folder:
                original(path, *args, **kwargs)
                return
            self._boundary(f"before {name}")
            original(path, *args, **kwargs)
            self._boundary(f"after {name}")

        patch.setattr(os, name, act)

    def _watch_writes(self, patch: pytest.MonkeyPatch) -> None:
        write = checkpoint_files.WholeWrites.write

        def in_two(writes: Any, data: Any) -> int:
            rest = memoryview(data).cast("B")
            half = len(rest) // 2
            write(writes, rest[:half])
            if next(self._writes) % self._every == 0:
                self._boundary("inside a write")
            write(writes, rest[half:])
            return len(data)

        def copy(source: Any, target: Any, length: int = 0) -> None:
            data = source.read()
            target.write(data[: len(data) // 2])
            target.flush()
            self._boundary("inside a copy")
            target.write(data[len(data) // 2 :])

        patch.setattr(checkpoint_files.WholeWrites, "write", in_two)
        patch.setattr(shutil, "copyfileobj", copy)
