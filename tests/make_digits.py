"""Make the bundled digits: 10,000 training and 2,000 test images of MNIST, stratified by digit, in their files' order.

    python -m tests.make_digits MNIST_ROOT

reads the full set from MNIST_ROOT (torchvision's layout) and writes the four ``.gz`` files of the package.
"""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from project.data.idx_files import IMAGES_MAGIC, LABELS_MAGIC, find_idx, read_idx
from project.data.mnist import DIGITS, MNISTDataModule


def stratified(labels: Tensor, size: int) -> Tensor:
    """Sorted indices of ``size`` samples with the classes in the proportions of ``labels``, first come first taken."""
    counts = torch.bincount(labels).double() * size / len(labels)
    wanted = counts.floor().long()
    # largest remainders take the places that rounding down left
    for digit in (counts - wanted).argsort(descending=True)[: size - int(wanted.sum())]:
        wanted[digit] += 1
    return (
        torch.cat([(labels == digit).nonzero().flatten()[:n] for digit, n in enumerate(wanted)])
        .sort()
        .values
    )


def write_idx(path: Path, values: Tensor) -> None:
    """Write uint8 images (count, 1, rows, columns) or labels (count,) as an IDX file, gzipped if named ``.gz``."""
    array = values.to(torch.uint8).numpy()
    start = (
        [LABELS_MAGIC, len(array)]
        if array.ndim == 1
        else [IMAGES_MAGIC, len(array), *array.shape[2:]]
    )
    data = np.array(start, ">u4").tobytes() + array.tobytes()
    # mtime=0: the same digits make the same file, whenever they are written
    path.write_bytes(gzip.compress(data, 9, mtime=0) if path.suffix == ".gz" else data)


def main(root: str, target: Path = DIGITS) -> None:
    """Write the bundled files into ``target`` from the full set in ``root``."""
    raw = Path(root) / MNISTDataModule.folder
    for part, size in {"train": 10_000, "t10k": 2_000}.items():
        files = {
            name: sha256 for name, sha256 in MNISTDataModule.files.items() if name.startswith(part)
        }
        images, labels = (
            read_idx(find_idx(raw, name) or raw / name, sha256) for name, sha256 in files.items()
        )
        chosen = stratified(labels, size)
        for name, values in zip(files, (images, labels), strict=True):
            write_idx(target / f"{name}.gz", values[chosen])


if __name__ == "__main__":
    main(sys.argv[1])
