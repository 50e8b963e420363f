"""Sets of images in IDX files, such as MNIST: a header of big-endian numbers, then bytes.

Files are checked before they are used.
"""

import gzip
import hashlib
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from unbroken.data.downloads import download_into
from unbroken.data.images import TensorImages
from unbroken.errors import UserError, require

# The first four bytes of a file say what it holds.
IMAGES_MAGIC = 2051
LABELS_MAGIC = 2049
# So many bytes of a file are read at a time.
CHUNK_BYTES = 2**20

# A compressed file may hold so many bytes, or so many times its own size. Images take a tenth of
# theirs or more; a few bytes that are made to can be a thousand times as many.
MOST_UNPACKED = 2**26
MOST_RATIO = 64

# The names of a set's files: those of the training set, and those of the test set
PARTS = ("train", "t10k")
IMAGES = "images-idx3-ubyte"
LABELS = "labels-idx1-ubyte"


@dataclass(frozen=True)
class IdxSet:
    """A set of four files in torchvision's layout, ``ROOT/SUBFOLDER/...``, plain or ``.gz``.

    Attributes:
        subfolder: Such as ``MNIST/raw``.
        sha256: Of the decompressed files: training images and labels, test images and labels.
            None: they are not compared.
    """

    subfolder: str
    sha256: Sequence[str] | None = None

    @property
    def names(self) -> list[str]:
        """The names of the four files, in the order of ``sha256``."""
        return [f"{part}-{kind}" for part in PARTS for kind in (IMAGES, LABELS)]

    def folder(self, root: str | Path) -> Path:
        """The folder of the files: below ``root``, or where ``root`` is that folder itself or the
        one above it.

        Raises:
            UserError: No system takes ``root`` for a path, as a checkpoint may hold it.
        """
        require("\0" not in str(root), "--data.root", "be a folder's name", repr(root))
        absolute = Path(root).resolve()
        for above in (absolute, *absolute.parents[:2]):
            place = above / self.subfolder
            if place.is_relative_to(absolute) and any(find_idx(place, name) for name in self.names):
                return place
        return Path(root) / self.subfolder

    def missing(self, root: str | Path) -> list[str]:
        """Names of the files that are not there."""
        folder = self.folder(root)
        return [name for name in self.names if find_idx(folder, name) is None]

    def state(self, root: str | Path, otherwise: str = "") -> dict[str, Any]:
        """Whether the files are there: ``found``, their ``folder``, and a ``text`` of one line,
        which says ``otherwise`` where none is there.
        """
        folder = self.folder(root)
        missing = self.missing(root)
        text = f"found in {folder}"
        if len(missing) == len(self.names):
            text = f"not in {folder}{otherwise}"
        elif missing:
            text = f"incomplete in {folder}: {', '.join(missing)} missing"
        return {"found": not missing, "folder": str(folder), "text": text}

    def download(self, root: str | Path, fetch: Callable[[str], object]) -> str:
        """Bring what is missing by ``fetch``, which downloads into a root that it is given. See
        :func:`download_into`. Returns why that failed, in a few words, or nothing.
        """
        try:
            download_into(self.folder(root), self.missing(root), fetch, self.subfolder)
        except Exception as error:
            reason = " ".join(str(error).split())
            return f" and the download failed ({reason})"
        return ""

    def read(self, root: str | Path, part: str) -> TensorImages:
        """The images and labels of a part, "train" or "t10k", checked by their digests.

        Raises:
            UserError: A file is missing or damaged.
        """
        digests = {}
        if self.sha256 is not None:
            digests = dict(zip(self.names, self.sha256, strict=True))
        return read_part(self.folder(root), part, digests)


def read_part(
    folder: Path,
    part: str,
    digests: Mapping[str, str] = {},
) -> TensorImages:
    """The images and labels of a folder's training ("train") or test files ("t10k"), checked by
    their digests, where there are any.
    """

    def read(name: str) -> Tensor:
        # Where there is no such file, the error names the plain one.
        path = find_idx(folder, name) or folder / name
        return read_idx(path, digests.get(name))

    images = read(f"{part}-{IMAGES}")
    labels = read(f"{part}-{LABELS}")
    if len(images) != len(labels):
        raise UserError(f"{folder}: {len(images)} {part} images but {len(labels)} labels.")
    return TensorImages(images, labels)


def find_idx(folder: Path, name: str) -> Path | None:
    """The file ``name`` or ``name.gz`` in ``folder``, the plain one first; None where there is
    neither.
    """
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    return None


def read_idx(path: Path, sha256: str | None = None) -> Tensor:
    """Images (count, 1, rows, columns), uint8, or labels (count,), int64, of an IDX file, plain or
    ``.gz``.

    Raises:
        UserError: It cannot be read, it is damaged, or its decompressed bytes have another digest
            than ``sha256``.
    """
    fix = f" Delete {path} and run again to fetch it anew."
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            magic_bytes = file.read(4)
            magic = number(magic_bytes)
            is_known = magic in (IMAGES_MAGIC, LABELS_MAGIC)
            option = f"{path} is damaged: its magic number"
            require(is_known, option, f"be {IMAGES_MAGIC} or {LABELS_MAGIC}", magic, fix)

            # Then the count stands there, and for images the rows and columns, four bytes each.
            dimensions = 3 if magic == IMAGES_MAGIC else 1
            sizes = [file.read(4) for _ in range(dimensions)]
            shape = [number(size) for size in sizes]
            if path.suffix == ".gz":
                most = max(MOST_UNPACKED, MOST_RATIO * path.stat().st_size)
                option = f"{path} is damaged: what its header announces"
                must = f"be at most {most:,} bytes for a file of this size"
                require(math.prod(shape) <= most, option, must, f"{math.prod(shape):,}", fix)
            data = read_at_most(file, math.prod(shape))
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} cannot be read: {error}.{fix}") from None

    header = b"".join((magic_bytes, *sizes))
    announced = 4 + 4 * dimensions + math.prod(shape)
    found = len(header) + len(data)
    option = f"{path} is damaged: its size"
    must = f"be the {announced:,} bytes that its header announces"
    require(found == announced, option, must, f"{found:,}" if found < announced else "more", fix)

    if sha256 is not None:
        digest = hashlib.sha256(header + data).hexdigest()
        require(digest == sha256, f"{path} is damaged: SHA-256", f"be {sha256}", digest, fix)

    values = torch.from_numpy(np.frombuffer(data, np.uint8))
    if magic == LABELS_MAGIC:
        return values.long()
    count, rows, columns = shape
    return values.view(count, 1, rows, columns)


def read_at_most(file: BufferedIOBase, announced: int) -> bytearray:
    """The rest of a file; no more than that where it is longer than announced, because a few
    compressed bytes can be gigabytes.
    """
    data = bytearray()
    while len(data) <= announced and (chunk := file.read(CHUNK_BYTES)):
        data += chunk
    return data


def number(four_bytes: bytes) -> int:
    """A big-endian number; bytes that are missing count as 0."""
    return int.from_bytes(four_bytes.ljust(4, b"\0"), "big")
