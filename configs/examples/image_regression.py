"""Images with a number each, here: how far to the right a bright spot is.

The mean absolute error should be small.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from unbroken.data import BatchedDataModule, Split, TensorImages


class Spots(BatchedDataModule):
    """``root/train.pt`` and ``root/test.pt``, each a dictionary of two tensors.

    ``images`` is uint8 (count, 1, 24, 24), ``targets`` is float (count,).
    """

    image_shape = (1, 24, 24)
    mean = [0.2]
    std = [0.2]
    class_names: list[str] = []  # the targets are no classes

    def __init__(self, root: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.root = root

    def make_split(self, split: Split) -> Any:
        part = "test" if split == "test" else "train"
        if self.root is None:
            images, targets = made_up(600, seed=len(part))
        else:
            saved = torch.load(Path(self.root) / f"{part}.pt", weights_only=True)
            images = saved["images"]
            targets = saved["targets"]
        dataset = TensorImages(images, targets)
        if split == "test":
            return dataset
        return self.hold_out(dataset, split)


def made_up(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images with a spot, and its place from 0 (left) to 1 (right)."""
    draw = torch.Generator().manual_seed(seed)
    places = torch.rand(count, 2, 1, 1, generator=draw)
    across = places[:, 0]
    down = places[:, 1]
    axis = torch.linspace(0, 1, 24)
    distance = (axis.view(1, -1) - across) ** 2 + (axis.view(-1, 1) - down) ** 2
    spots = torch.exp(-distance / 0.02)  # (count, 24, 24), in 0-1
    return (255 * spots).byte(), across.flatten()
