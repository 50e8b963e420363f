"""Images with any number of labels each, here: which of four corners are bright."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from unbroken.data import BatchedDataModule, Split, TensorImages


class Corners(BatchedDataModule):
    """``root/train.pt`` and ``root/test.pt``, each a dictionary of two tensors.

    ``images`` is uint8 (count, 3, 16, 16), ``labels`` is 0 or 1 (count, 4).
    """

    image_shape = (3, 16, 16)
    mean = [0.3, 0.3, 0.3]
    std = [0.2, 0.2, 0.2]
    class_names = ["top left", "top right", "bottom left", "bottom right"]

    def __init__(self, root: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.root = root

    def make_split(self, split: Split) -> Any:
        part = "test" if split == "test" else "train"
        if self.root is None:
            images, labels = made_up(600, seed=len(part))
        else:
            saved = torch.load(Path(self.root) / f"{part}.pt", weights_only=True)
            images = saved["images"]
            labels = saved["labels"]
        dataset = TensorImages(images, labels)
        if split == "test":
            return dataset
        return self.hold_out(dataset, split)


def made_up(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Noisy images, and which of their corners are bright."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, (count, 4), generator=draw)
    corners = labels.view(count, 1, 2, 2)
    bright = corners.repeat_interleave(8, dim=2).repeat_interleave(8, dim=3)  # (count, 1, 16, 16)
    noise = torch.rand(count, 3, 16, 16, generator=draw) * 150
    return (noise + 60 * bright).byte(), labels
