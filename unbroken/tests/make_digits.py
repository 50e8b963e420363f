"""Make the bundled digits: 10,000 training and 2,000 test images of MNIST, stratified by digit, in
their files' order.

    python -m tests.make_digits MNIST_ROOT

reads the full set from MNIST_ROOT (torchvision's layout) and writes the four ``.gz`` files of the
package.
"""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

import numpy as np
import torch
from numerals.data.mnist import DIGITS, MNISTDataModule
from torch import Tensor
from unbroken.data.idx_files import IMAGES_MAGIC, LABELS_MAGIC, find_idx, read_idx


def stratified(labels: Tensor, size: int) -> Tensor:
    """Sorted indices of ``size`` samples with the classes in the proportions of ``labels``, first
    come first taken.
    """
    counts = torch.bincount(labels).double() * size / len(labels)
    wanted = counts.floor().long()
    # The largest remainders take the places that rounding down left.
    left = size - int(wanted.sum())
    largest_remainders = (counts - wanted).argsort(descending=True)[:left]
    wanted[largest_remainders] += 1
    chosen = []
    for digit, count in enumerate(wanted.tolist()):
        places = (labels == digit).nonzero().flatten()
        chosen.append(places[:count])
    return torch.cat(chosen).sort().values


def write_idx(path: Path, values: Tensor) -> None:
    """Write uint8 images (count, 1, rows, columns) or labels (count,) as an IDX file, gzipped if
    named ``.gz``.
    """
    array = values.to(torch.uint8).numpy()
    if array.ndim == 1:
        header = [LABELS_MAGIC, len(array)]
    else:
        header = [IMAGES_MAGIC, len(array), *array.shape[2:]]
    data = np.array(header, ">u4").tobytes() + array.tobytes()
    if path.suffix == ".gz":
        # mtime=0: the same digits make the same file, whenever they are written.
        data = gzip.compress(data, 9, mtime=0)
    path.write_bytes(data)


def main(root: str, target: Path = DIGITS) -> None:
    """Write the bundled files into ``target`` from the full set in ``root``."""
    raw = Path(root) / MNISTDataModule.folder
    for part, size in {"train": 10_000, "t10k": 2_000}.items():
        images = read_whole(raw, f"{part}-images-idx3-ubyte")
        labels = read_whole(raw, f"{part}-labels-idx1-ubyte")
        chosen = stratified(labels, size)
        write_idx(target / f"{part}-images-idx3-ubyte.gz", images[chosen])
        write_idx(target / f"{part}-labels-idx1-ubyte.gz", labels[chosen])


def read_whole(raw: Path, name: str) -> Tensor:
    """A file of the full set, checked."""
    return read_idx(find_idx(raw, name) or raw / name, MNISTDataModule.files[name])


if __name__ == "__main__":
    main(sys.argv[1])
