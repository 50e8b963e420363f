"""Small made data sets in every form the worked examples read: a class is a bright place in a noisy
picture.
"""

from __future__ import annotations

from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from tests.make_digits import write_idx


def spots(
    count: int, classes: int, shape: tuple[int, int, int], seed: int
) -> tuple[Tensor, Tensor]:
    """uint8 images (count, channels, height, width) and labels (count,): class c is bright in the
    c-th of 12 cells.
    """
    generator = torch.Generator().manual_seed(seed)
    channels, height, width = shape
    images = torch.rand(count, channels, height, width, generator=generator) * 100
    labels = torch.arange(count) % classes
    for image, label in zip(images, labels.tolist(), strict=True):
        row, column = divmod(label, 4)
        rows = slice(row * height // 3, (row + 1) * height // 3)
        columns = slice(column * width // 4, (column + 1) * width // 4)
        image[:, rows, columns] += 150
    return images.to(torch.uint8), labels


def make_idx_files(folder: Path, train: int = 480, test: int = 203) -> None:
    """MNIST's four files, ten classes of (1, 28, 28)."""
    folder.mkdir(parents=True)
    for seed, (prefix, count) in enumerate((("train", train), ("t10k", test))):
        images, labels = spots(count, 10, (1, 28, 28), seed)
        write_idx(folder / f"{prefix}-images-idx3-ubyte", images)
        write_idx(folder / f"{prefix}-labels-idx1-ubyte.gz", labels)


def make_picture_folder(root: Path, names: list[str], train: int = 300, test: int = 101) -> None:
    """``root/train/NAME/*.png`` and ``root/test/NAME/*.png``, RGB of several sizes."""
    for seed, (split, count) in enumerate((("train", train), ("test", test))):
        images, labels = spots(count, len(names), (3, 24, 24), seed)
        for index, (image, label) in enumerate(zip(images, labels.tolist(), strict=True)):
            folder = root / split / names[label]
            folder.mkdir(parents=True, exist_ok=True)
            side = 24 + 8 * (index % 4)
            picture = Image.fromarray(image.permute(1, 2, 0).numpy()).resize((side, side))
            picture.save(folder / f"{index:04}.png")


def make_tensor_files(root: Path, train: int = 400, test: int = 103) -> None:
    """``root/train.pt`` and ``root/test.pt``: four classes of float (2, 12, 20)."""
    root.mkdir(parents=True)
    for seed, (split, count) in enumerate((("train", train), ("test", test))):
        images, labels = spots(count, 4, (2, 12, 20), seed)
        torch.save({"images": images / 255, "labels": labels}, root / f"{split}.pt")
