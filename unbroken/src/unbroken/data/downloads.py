"""Files that are fetched: in bounded time, and never half a file where they belong."""

import contextlib
import io
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

# Seconds that a download may take to connect, and for each read.
DOWNLOAD_TIMEOUT = 10


def download_into(
    folder: Path, names: Iterable[str], fetch: Callable[[str], object], subfolder: str = ""
) -> None:
    """Let ``fetch`` download into a folder of its own, and move these files from there, and no
    others. A failed download leaves nothing behind.

    Args:
        folder: Where the files belong. It is made once they are there.
        names: The names of the files, which are not there yet.
        fetch: Downloads into the folder that it is given. It prints nothing, and a connection and
            each read take at most ``DOWNLOAD_TIMEOUT`` seconds.
        subfolder: Where ``fetch`` leaves the files in that folder.
    """
    with (
        socket_timeout(DOWNLOAD_TIMEOUT),
        tempfile.TemporaryDirectory(dir=nearest_folder(folder), prefix=".download-") as scratch,
    ):
        with contextlib.redirect_stdout(io.StringIO()):
            fetch(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            shutil.move(Path(scratch) / subfolder / name, folder / name)


def nearest_folder(path: Path) -> Path:
    """The folder itself, or the closest one above it that exists."""
    path = path.absolute()
    while not path.is_dir():
        path = path.parent
    return path


@contextlib.contextmanager
def socket_timeout(seconds: float) -> Iterator[None]:
    """Inside, new connections wait at most so long to be made, and for each read."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
