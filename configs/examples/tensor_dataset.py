"""Tensors in two files, ``root/train.pt`` and ``root/test.pt``: 4 classes of 2-channel measurements, 12 × 20."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import interpolate

from project.data import BatchedDataModule, Split, TensorImages


class TensorFiles(BatchedDataModule):
    """Each file is ``torch.save({"images": float (count, 2, 12, 20) in 0-1, "labels": (count,)}, path)``."""

    image_shape = (2, 12, 20)
    mean = [0.5, 0.5]
    std = [0.3, 0.3]
    class_names = ["left", "right", "both", "neither"]

    def __init__(self, root: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.root = root

    def make_split(self, split: Split) -> Any:
        part = "test" if split == "test" else "train"
        if self.root is None:  # made up: the class is which of the channels are bright
            labels, draw = torch.arange(400) % 4, torch.Generator().manual_seed(len(part))
            bright = torch.stack([labels % 2, labels // 2], dim=1).view(400, 2, 1, 1) / 2
            saved = {
                "images": torch.rand(400, 2, 12, 20, generator=draw) / 2 + bright,
                "labels": labels,
            }
        else:
            saved = torch.load(Path(self.root) / f"{part}.pt", weights_only=True)
        dataset = TensorImages(saved["images"], saved["labels"])
        return dataset if split == "test" else self.hold_out(dataset, split)

    def prepare_image(self, pixels: np.ndarray) -> np.ndarray:
        """For ``predict``: a picture, float (height, width, 3) in 0-1, as an input, uint8 (2, 12, 20): red and blue."""
        small = interpolate(torch.from_numpy(pixels).permute(2, 0, 1)[None], (12, 20), mode="area")
        return (small[0, [0, 2]] * 255).byte().numpy()
