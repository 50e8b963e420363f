"""The first samples of a batch, as the network gets them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

MOST_SAMPLES = 16


@dataclass(frozen=True)
class Sample:
    """An image of a batch, and its target."""

    image: np.ndarray  # uint8 (height, width, channels)
    target: int | float | None  # None where it is no single number


def first_samples(batch: Any) -> list[Sample]:
    """The first images of a batch ``(images, targets)``; none where it is another one.

    Images are (batch, 1 or 3, height, width), uint8 or float. Floats outside of 0-1, such as those
    of a preparation that normalizes, are scaled to what can be shown.
    """
    if not isinstance(batch, list | tuple) or not batch or not isinstance(batch[0], Tensor):
        return []
    images = batch[0]
    if images.ndim != 4 or images.shape[1] not in (1, 3):
        return []
    shown = images[:MOST_SAMPLES].detach().cpu()
    if shown.dtype is not torch.uint8:
        shown = shown.float().nan_to_num(0, 0, 0)
        low = min(0.0, float(shown.min()))
        high = max(1.0, float(shown.max()))
        shown = ((shown - low) / (high - low) * 255).round().byte()
    targets: list[Any] = [None] * len(shown)
    if len(batch) > 1 and isinstance(batch[1], Tensor) and batch[1].ndim == 1:
        targets = batch[1][:MOST_SAMPLES].tolist()
    pictures = shown.permute(0, 2, 3, 1).numpy()  # (samples, height, width, channels)
    return [Sample(*each) for each in zip(pictures, targets, strict=True)]
