"""Small sets of digits for tests, and where the settings lie."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np

CONFIGS = Path(__file__).parents[1] / "configs"


def write_set(folder: Path, train: int = 24, test: int = 10) -> None:
    """Four files in MNIST's format, plain and ``.gz``: the i-th image is of the grey value i."""
    folder.mkdir(parents=True)
    for part, count in (("train", train), ("t10k", test)):
        numbers = np.arange(count, dtype=np.uint8)
        images = np.broadcast_to(numbers[:, None, None], (count, 28, 28))
        header = np.array([2051, count, 28, 28], ">u4").tobytes()
        (folder / f"{part}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        header = np.array([2049, count], ">u4").tobytes()
        labels = gzip.compress(header + (numbers % 10).tobytes())
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(labels)
