"""A run's folder in a store: any file system that fsspec knows.

Everything here raises what the store's own package raises. Who calls it decides whether that ends
the start of a run, or is only told while the run goes on.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import fsspec
from fsspec.core import url_to_fs
from unbroken.errors import UserError, nearest, printable
from unbroken.mirror.manifest import LONGEST

# What to install for a kind of address. The extras mirror-* in pyproject.toml bring the same.
PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "sftp": "paramiko",
    "ssh": "paramiko",
}
# These have no folders: to make one would make a bucket, perhaps of a name that was mistyped.
WITHOUT_FOLDERS = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "oci"}
# A file is written in parts of so many bytes, and S3 takes at most 10,000 parts of a file.
PART = 5 * 2**20
MOST_PARTS = 5_000


def is_address(text: str) -> bool:
    """Whether a text names a place in a store, such as ``s3://bucket/runs``, and not a path."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.\-]+://", text) is not None


def without_password(url: str) -> str:
    """An address as it is printed and kept: ``sftp://me:secret@host`` → ``sftp://me:***@host``."""
    shown = re.sub(r"(?<=://)([^/@:]*):[^/@]*@", r"\1:***@", url)
    return printable(shown)


def one_line(error: BaseException) -> str:
    """An error of a store's package, which may be a page long, as a reason in a line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return printable(text[:1_000])[:200].rstrip(".")


class Store:
    """A folder at an address.

    Args:
        url: An address (``s3://bucket/runs``), or the path of a folder.
        option: Who gave it, for errors.

    Raises:
        UserError: Nobody knows such addresses here, or the package for them is not installed.
    """

    def __init__(self, url: str, option: str = "--mirror") -> None:
        self.url = url
        self.option = option
        self.shown = without_password(url)
        self._files, self._root = self._open()

    def reopen(self) -> None:
        """Connect anew: a connection that was lost does not come back by itself."""
        self._files, self._root = self._open()

    def _open(self) -> tuple[Any, str]:
        protocol = "file"
        if is_address(self.url):
            protocol = self.url.partition("://")[0].lower()
        try:
            # Each object has a connection of its own: a stalled one must not hold up the others.
            files, root = url_to_fs(self.url, skip_instance_cache=True)
        except ImportError as error:
            package = PACKAGES.get(protocol)
            how = f"pip install {package}" if package else one_line(error)
            raise UserError(
                f"{self.option} {self.shown} needs a package that is not installed: {how}."
            ) from None
        except ValueError as error:
            known = fsspec.available_protocols()
            if protocol in known:
                raise self.unusable(error) from None
            hint = nearest(protocol, known)
            raise UserError(
                f"{self.option} must be a folder, or an address such as s3://, gs://, az:// or"
                f" sftp://, got {self.shown}.{hint}"
            ) from None
        except Exception as error:
            raise self.unusable(error) from None
        self.has_folders = protocol not in WITHOUT_FOLDERS
        return files, str(root).rstrip("/")

    def unusable(self, error: BaseException) -> UserError:
        """What is told at a start where the store does not answer as it should."""
        return UserError(
            f"{self.option} {self.shown} cannot be used: {one_line(error)}."
            f" Mend that and try again, or leave {self.option} out."
        )

    def below(self, name: str) -> Store:
        """The store of a folder in this one."""
        return Store(f"{self.url.rstrip('/')}/{name}", self.option)

    @property
    def local_folder(self) -> Path | None:
        """The folder, where it is one of this machine."""
        protocols = self._files.protocol
        is_local = "file" in ([protocols] if isinstance(protocols, str) else protocols)
        return Path(self._root) if is_local else None

    def names(self, folder: str = "") -> list[str]:
        """The names of what lies in the folder, or in a folder in it; none where there is none."""
        return sorted(self.kinds(folder))

    def kinds(self, folder: str = "") -> dict[str, str]:
        """What lies in the folder, or in a folder in it: names, each with ``file``, ``directory``,
        or ``other`` for a link, a pipe and the like.
        """
        self._files.invalidate_cache()
        try:
            found = self._files.ls(self._path(folder), detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        kinds = {}
        for each in found:
            is_plain = each["type"] in ("file", "directory") and not each.get("islink")
            name = str(each["name"]).rstrip("/").rpartition("/")[2]
            kinds[name] = str(each["type"]) if is_plain else "other"
        return kinds

    def read(self, name: str) -> bytes | None:
        """A small file; None where there is none. Of a large one, which is none of ours, no more
        than ``LONGEST`` bytes and one are read.
        """
        size = self.size(name)
        # Some stores refuse to read a range of an empty file.
        if not size:
            return None if size is None else b""
        try:
            return bytes(self._files.cat_file(self._path(name), start=0, end=LONGEST + 1))
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes) -> None:
        """Write a small file in one request."""
        path = self._path(name)
        try:
            self._files.pipe_file(path, data)
        except FileNotFoundError:
            self._make_folder_of(path)
            self._files.pipe_file(path, data)

    def size(self, name: str) -> int | None:
        """The bytes of a file; None where there is none."""
        self._files.invalidate_cache()
        try:
            return int(self._files.info(self._path(name))["size"])
        except FileNotFoundError:
            return None

    def is_file(self, name: str) -> bool:
        """Whether there is such a file."""
        self._files.invalidate_cache()
        return bool(self._files.isfile(self._path(name)))

    def remove(self, name: str) -> None:
        """Remove a file; nothing where there is none."""
        with contextlib.suppress(FileNotFoundError):
            self._files.rm_file(self._path(name))

    def put(self, source: IO[bytes], size: int, name: str, moved: Callable[[int], None]) -> None:
        """Write the first ``size`` bytes of an open file, in parts.

        Args:
            source: The file, at its begin.
            size: How much of it.
            name: The name in the store.
            moved: It is told the bytes of each part that was written.

        Raises:
            OSError: Among others, where another number of bytes has arrived.
        """
        path = self._path(name)
        part = max(PART, -(-size // MOST_PARTS))
        with self._open_to_write(path, part) as target:
            if hasattr(target, "set_pipelined"):
                # Else paramiko waits for an answer to every 32 KiB.
                target.set_pipelined(True)
            left = size
            while left:
                data = source.read(min(part, left))
                if not data:
                    raise OSError("the file became shorter while it was copied")
                target.write(data)
                left -= len(data)
                moved(len(data))
        arrived = self.size(name)
        if arrived != size:
            raise OSError(f"{arrived} of {size} bytes have arrived")

    def _open_to_write(self, path: str, part: int) -> Any:
        try:
            return self._files.open(path, "wb", block_size=part)
        except FileNotFoundError:
            self._make_folder_of(path)
            return self._files.open(path, "wb", block_size=part)

    def get(self, name: str, path: Path) -> None:
        """Read a file into a local one."""
        self._files.get_file(self._path(name), os.fspath(path))

    def _make_folder_of(self, path: str) -> None:
        if not self.has_folders:
            raise FileNotFoundError("there is no such bucket or container")
        self._files.makedirs(path.rpartition("/")[0], exist_ok=True)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root
