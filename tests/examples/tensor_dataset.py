"""Tensors in two files, ``root/train.pt`` and ``root/test.pt``: 4 classes of 2-channel measurements, 12 × 20.

python -m project.fit --config configs/examples/tensor_dataset.yaml --data.root measurements
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps

from project.data import BatchedDataModule, Split, TensorImages


class TensorFiles(BatchedDataModule):
    """Each file is ``torch.save({"images": float (count, 2, 12, 20) in 0-1, "labels": (count,)}, path)``."""

    image_shape = (2, 12, 20)
    mean = [0.5, 0.5]
    std = [0.3, 0.3]
    class_names = ["left", "right", "both", "neither"]

    def __init__(self, root: str = "measurements", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.root = root

    def make_split(self, split: Split) -> TensorImages:
        saved = torch.load(Path(self.root) / ("test.pt" if split == "test" else "train.pt"), weights_only=True)
        dataset = TensorImages(saved["images"], saved["labels"])
        return dataset if split == "test" else self.hold_out(dataset, split)

    def prepare_image(self, pixels: np.ndarray) -> np.ndarray:
        """For ``predict``: a picture, float (height, width, 3) in 0-1, as an input, uint8 (2, 12, 20): red and blue."""
        picture = ImageOps.fit(Image.fromarray((pixels * 255).round().astype(np.uint8)), (20, 12))
        return np.asarray(picture).transpose(2, 0, 1)[[0, 2]]
