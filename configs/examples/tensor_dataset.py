"""Tensors in two files, ``root/train.pt`` and ``root/test.pt``: 2-channel measurements, 12 × 20, of
4 classes.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate
from unbroken.data import BatchedDataModule, Split, TensorImages


class TensorFiles(BatchedDataModule):
    """Each file is a dictionary of two tensors, written by ``torch.save``.

    ``images`` is float (count, 2, 12, 20) in 0-1, ``labels`` is (count,).
    """

    image_shape = (2, 12, 20)
    mean = [0.5, 0.5]
    std = [0.3, 0.3]
    class_names = ["left", "right", "both", "neither"]

    def __init__(self, root: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.root = root

    def make_split(self, split: Split) -> Any:
        part = "test" if split == "test" else "train"
        if self.root is None:
            images, labels = made_up(400, seed=len(part))
        else:
            saved = torch.load(Path(self.root) / f"{part}.pt", weights_only=True)
            images = saved["images"]
            labels = saved["labels"]
        dataset = TensorImages(images, labels)
        if split == "test":
            return dataset
        return self.hold_out(dataset, split)

    def prepare_image(self, pixels: np.ndarray) -> np.ndarray:
        """For ``predict``: a picture, float (height, width, 3) in 0-1, as an input, uint8 (2, 12,
        20): red and blue.
        """
        channels_first = torch.from_numpy(pixels).permute(2, 0, 1)
        small = interpolate(channels_first[None], (12, 20), mode="area")[0]
        red_and_blue = small[[0, 2]]
        return (red_and_blue * 255).byte().numpy()


def made_up(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Noise whose class is which of the two channels are bright."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 4
    bright = torch.stack([labels % 2, labels // 2], dim=1)  # (count, 2)
    images = torch.rand(count, 2, 12, 20, generator=draw) / 2 + bright.view(count, 2, 1, 1) / 2
    return images, labels
