"""Segmentation: a class for each pixel, by a small U-Net. Made-up discs and squares in noise."""

from typing import Any

import torch
from torch import Tensor, nn
from unbroken.data import BatchedDataModule, Split, TensorImages


class Shapes(BatchedDataModule):
    """Images (count, 1, 32, 32) in 0-1. The targets are masks (count, 32, 32) of class numbers."""

    image_shape = (1, 32, 32)
    mean = [0.5]
    std = [0.3]
    class_names = ["background", "disc", "square"]

    def make_split(self, split: Split) -> Any:
        images, masks = made_up(500, seed=["train", "val", "test"].index(split))
        return TensorImages(images, masks)


class UNet(nn.Module):
    """Images (batch, 1, height, width) to logits (batch, classes, height, width); sizes even."""

    def __init__(self, classes: int = 3, width: int = 16) -> None:
        super().__init__()
        self.fine = nn.Sequential(nn.Conv2d(1, width, 5, padding=2), nn.ReLU())
        self.coarse = nn.Sequential(nn.Conv2d(width, width, 5, padding=2), nn.ReLU())
        self.last = nn.Conv2d(2 * width, classes, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        fine = self.fine(images)
        coarse = self.coarse(nn.functional.max_pool2d(fine, 2))
        scaled = nn.functional.interpolate(coarse, scale_factor=2.0)
        return self.last(torch.cat([fine, scaled], dim=1))


def made_up(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images with a disc on the left and a square on the right, and their masks."""
    draw = torch.Generator().manual_seed(seed)
    down, across = torch.rand(2, count, 1, 1, generator=draw) * 8 + 4
    axis = torch.arange(32)
    to_disc = (axis.view(-1, 1) - down) ** 2 + (axis - across) ** 2
    to_square = torch.maximum((axis.view(-1, 1) - across - 12).abs(), (axis - down - 16).abs())
    masks = (to_disc < 16).long() + 2 * (to_square < 4).long()  # (count, 32, 32)
    images = 0.4 * (masks > 0) + 0.6 * torch.rand(masks.shape, generator=draw)
    return images, masks
