"""The files of a run as they are right after a save, opened while the run goes on."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from unbroken.mirror.manifest import MIRRORED


@dataclass
class OpenFile:
    """A file whose first ``size`` bytes stay what they are."""

    file: IO[bytes]
    size: int


@dataclass
class Save:
    """The state of a run's folder at one moment.

    Each file is opened, and its size is noted. The run replaces a file by a rename, so that an open
    one stays what it was, or it appends to it, behind the size that was noted. So nothing has to be
    copied before training goes on, and files of two saves cannot be mixed. Windows replaces no file
    that is open; there a copy is made.
    """

    step: int
    files: dict[str, OpenFile] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path, step: int) -> Save:
        """What lies in the folder now. A file that is not there is left out."""
        save = cls(step)
        for name in MIRRORED:
            path = folder / name
            # Nothing else is opened: a link may lead anywhere, and a pipe waits for ever.
            if path.is_file() and not path.is_symlink():
                file = hold(path)
                save.files[name] = OpenFile(file, os.fstat(file.fileno()).st_size)
        return save

    def close(self) -> None:
        """Let go of the files."""
        for opened in self.files.values():
            opened.file.close()


def hold(path: Path) -> IO[bytes]:
    """An open file that nobody changes."""
    file = open(path, "rb")  # noqa: SIM115 - it is closed when it has been copied
    if os.name != "nt":
        return file
    with file:
        copy = tempfile.TemporaryFile()  # noqa: SIM115 - as above
        shutil.copyfileobj(file, copy)
        copy.flush()
        copy.seek(0)
        return copy
