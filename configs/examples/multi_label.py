"""Images with any number of labels each, here: which of four corners are bright."""

from pathlib import Path
from typing import Any

import torch

from project.data import BatchedDataModule, Split, TensorImages


class Corners(BatchedDataModule):
    """``root/train.pt`` and ``root/test.pt``: {"images": uint8 (count, 3, 16, 16), "labels": 0 or 1, (count, 4)}."""

    image_shape = (3, 16, 16)
    mean, std = [0.3, 0.3, 0.3], [0.2, 0.2, 0.2]
    class_names = ["top left", "top right", "bottom left", "bottom right"]

    def __init__(self, root: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.root = root

    def make_split(self, split: Split) -> Any:
        part = "test" if split == "test" else "train"
        if self.root is None:
            images, labels = made_up(600, seed=len(part))
        else:
            images, labels = torch.load(Path(self.root) / f"{part}.pt").values()
        dataset = TensorImages(images, labels)
        return dataset if split == "test" else self.hold_out(dataset, split)


def made_up(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy images, and which of their corners are bright."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, (count, 4), generator=draw)
    bright = labels.view(count, 1, 2, 2).repeat_interleave(8, dim=2).repeat_interleave(8, dim=3)
    return (torch.rand(count, 3, 16, 16, generator=draw) * 150 + 60 * bright).byte(), labels
