"""MNIST's IDX files, plain or ``.gz``: read, and checked before they are believed.

Format: a big-endian magic number (2051 images, 2049 labels), the count, for images also rows and columns, then one
byte per pixel or label (http://yann.lecun.com/exdb/mnist, section "FILE FORMATS"). torchvision's reader opens plain
files only and answers a truncated one with an assertion or a reshape error, so this is ours.
"""

from __future__ import annotations

import gzip
import hashlib
import struct
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from project.errors import UserError

IMAGES_MAGIC, LABELS_MAGIC = 2051, 2049


def find_idx(folder: Path, name: str) -> Path | None:
    """The file ``name`` or ``name.gz`` in ``folder``, the plain one first; None where there is neither."""
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def read_idx(path: Path, sha256: str | None = None) -> Tensor:
    """Images (count, 1, rows, columns) or labels (count,) of an IDX file; images uint8, labels int64.

    Args:
        path: The file, plain or ``.gz``.
        sha256: Expected digest of the decompressed bytes; not checked when None.

    Raises:
        UserError: The file cannot be read, is damaged, truncated, too long, or not the expected one.
    """
    fix = f"Delete {path} and run again to fetch it anew, or use --data.source sample."
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} cannot be read: {error}. {fix}") from None
    magic = struct.unpack(">I", data[:4])[0] if len(data) >= 4 else None
    if magic not in (IMAGES_MAGIC, LABELS_MAGIC):
        raise UserError(f"{path} is not an IDX file: magic number {magic}, not {IMAGES_MAGIC} or {LABELS_MAGIC}. {fix}")
    header = 16 if magic == IMAGES_MAGIC else 8
    if len(data) < header:
        raise UserError(f"{path} is truncated: {len(data)} bytes. {fix}")
    shape = struct.unpack(f">{header // 4 - 1}I", data[4:header])
    expected = header + int(np.prod(shape))
    if len(data) != expected:
        raise UserError(f"{path} is damaged: {len(data):,} bytes where its header announces {expected:,}. {fix}")
    if sha256 is not None and (found := hashlib.sha256(data).hexdigest()) != sha256:
        raise UserError(f"{path} is damaged: SHA-256 {found[:12]}…, not {sha256[:12]}…. {fix}")
    # frombuffer is a view of read-only bytes; the copy owns writable memory
    values = torch.from_numpy(np.frombuffer(data, np.uint8, offset=header).copy())
    if magic == LABELS_MAGIC:
        return values.long()
    return values.view(shape[0], 1, shape[1], shape[2])


def write_idx(path: Path, values: Tensor) -> None:
    """Write uint8 images (count, 1, rows, columns) or labels (count,) as an IDX file, gzipped if named ``.gz``."""
    array = values.to(torch.uint8).numpy()
    if array.ndim == 1:
        header = struct.pack(">II", LABELS_MAGIC, len(array))
    else:
        header = struct.pack(">IIII", IMAGES_MAGIC, len(array), *array.shape[2:])
    data = header + array.tobytes()
    # mtime=0: the same digits make the same file, whenever they are written
    path.write_bytes(gzip.compress(data, 9, mtime=0) if path.suffix == ".gz" else data)
