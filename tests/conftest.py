"""What every test of the template has: a folder of its own, no W&B, and sets of digits to read."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import numpy as np
import pytest

# Threads that wait for each other take longer than small tensors do. torch reads the variable as it
# is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

CONFIGS = Path(__file__).parents[1] / "configs"


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, in which a run leaves its files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setenv("PL_GLOBAL_SEED", "")
    monkeypatch.delenv("PL_GLOBAL_SEED")
    return tmp_path


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
