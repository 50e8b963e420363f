"""Images with a number each, here: how far to the right a bright spot is. The mean absolute error should be small."""

from pathlib import Path
from typing import Any

import torch

from project.data import BatchedDataModule, Split, TensorImages


class Spots(BatchedDataModule):
    """``root/train.pt`` and ``root/test.pt``: {"images": uint8 (count, 1, 24, 24), "targets": float (count,)}."""

    image_shape = (1, 24, 24)
    mean, std = [0.2], [0.2]
    class_names: list[str] = []  # the targets are no classes

    def __init__(self, root: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.root = root

    def make_split(self, split: Split) -> Any:
        part = "test" if split == "test" else "train"
        if self.root is None:
            images, targets = made_up(600, seed=len(part))
        else:
            images, targets = torch.load(Path(self.root) / f"{part}.pt").values()
        dataset = TensorImages(images, targets)
        return dataset if split == "test" else self.hold_out(dataset, split)


def made_up(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images with a spot, and its place from 0 (left) to 1 (right)."""
    draw = torch.Generator().manual_seed(seed)
    places = torch.rand(count, 2, 1, 1, generator=draw)
    axis = torch.linspace(0, 1, 24)
    distance = (axis.view(1, -1) - places[:, 0]) ** 2 + (axis.view(-1, 1) - places[:, 1]) ** 2
    return (255 * torch.exp(-distance / 0.02)).byte(), places[:, 0].flatten()
