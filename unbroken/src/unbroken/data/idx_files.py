"""MNIST's file format, IDX: a header of big-endian numbers, then bytes.

Files are checked before they are used.
"""

import gzip
import hashlib
import math
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from unbroken.errors import UserError, require

# The first four bytes of a file say what it holds.
IMAGES_MAGIC = 2051
LABELS_MAGIC = 2049


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
    fix = f" Delete {path} and run again to fetch it anew, or use --data.source sample."
    data = decompressed(path, fix)
    magic = number_at(data, 0)
    is_known = magic in (IMAGES_MAGIC, LABELS_MAGIC)
    option = f"{path} is damaged: its magic number"
    require(is_known, option, f"be {IMAGES_MAGIC} or {LABELS_MAGIC}", magic, fix)

    # After the magic number stands the count, and for images the rows and columns, four bytes each.
    dimensions = 3 if magic == IMAGES_MAGIC else 1
    header = 4 + 4 * dimensions
    shape = [number_at(data, 4 + 4 * place) for place in range(dimensions)]
    announced = header + math.prod(shape)
    option = f"{path} is damaged: its size"
    must = f"be the {announced:,} bytes that its header announces"
    require(len(data) == announced, option, must, f"{len(data):,}", fix)

    if sha256 is not None:
        digest = hashlib.sha256(data.data).hexdigest()
        require(digest == sha256, f"{path} is damaged: SHA-256", f"be {sha256}", digest, fix)

    values = torch.from_numpy(data[header:])
    if magic == LABELS_MAGIC:
        return values.long()
    count, rows, columns = shape
    return values.view(count, 1, rows, columns)


def decompressed(path: Path, fix: str) -> np.ndarray:
    """The bytes of a file, uint8 (size,), after decompression where its name ends in ``.gz``."""
    try:
        if path.suffix == ".gz":
            # A bytearray, so that the array may be written to; PyTorch warns of others.
            return np.frombuffer(bytearray(gzip.decompress(path.read_bytes())), np.uint8)
        return np.fromfile(path, np.uint8)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} cannot be read: {error}.{fix}") from None


def number_at(data: np.ndarray, place: int) -> int:
    """The big-endian number of four bytes that begins at ``place``; missing bytes count as 0."""
    return int.from_bytes(data[place : place + 4].tobytes().ljust(4, b"\0"), "big")
