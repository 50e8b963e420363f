"""Augmentation of a training batch on its device: affine and elastic in one ``grid_sample``, and torchvision's."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.transforms import v2

LATTICE = 7  # points per axis of the coarse random field that bends an image; their distance is about a stroke's width


def random_deformation(
    images: Tensor, degrees: float, scale: float, shear: float, shift: float, elastic: float
) -> Tensor:
    """Rotate, scale, shear, shift and bend every image by its own random amount. Pixels from outside the image are 0.

    Images are float (batch, channels, height, width). Rotation and shear are uniform in ± ``degrees`` and ± ``shear``
    degrees, the factor of each axis in 1 ± ``scale``, the shift of each axis in ± ``shift`` pixels. Bending is the
    elastic distortion of Simard, Steinkraus and Platt ("Best practices for convolutional neural networks", 2003): each
    point of a coarse lattice moves by ``elastic`` pixels per axis (standard deviation), those between are interpolated.
    """
    count, _, height, width = images.shape
    draw = torch.rand(count, 6, device=images.device) * 2 - 1
    angle = draw[:, 0] * math.radians(degrees)
    tilt = torch.tan(draw[:, 1] * math.radians(shear))
    grow_x, grow_y = 1 + draw[:, 2] * scale, 1 + draw[:, 3] * scale
    cos, sin = torch.cos(angle), torch.sin(angle)
    x_row = torch.stack([cos * grow_x, (cos * tilt - sin) * grow_y, draw[:, 4] * 2 * shift / width], dim=1)
    y_row = torch.stack([sin * grow_x, (sin * tilt + cos) * grow_y, draw[:, 5] * 2 * shift / height], dim=1)
    theta = torch.stack([x_row, y_row], dim=1)  # (batch, 2, 3)
    grid = F.affine_grid(theta, [count, 1, height, width], align_corners=False)  # (batch, height, width, 2)
    if elastic:
        moves = torch.randn(count, 2, LATTICE, LATTICE, device=images.device)
        moves[:, 0] *= 2 * elastic / width  # the grid spans 2
        moves[:, 1] *= 2 * elastic / height
        grid = grid + F.interpolate(moves, (height, width), mode="bilinear", align_corners=True).permute(0, 2, 3, 1)
    return F.grid_sample(images, grid, align_corners=False)


def transformed(images: Tensor, targets: Tensor, transforms: Sequence[nn.Module]) -> tuple[Tensor, Tensor]:
    """Apply torchvision's transforms in their order: MixUp and CutMix to the batch with its targets, others per image.

    Images (batch, channels, height, width) are uint8, or float in 0-1.
    """
    for transform in transforms:
        images = as_unit_floats(images)
        if isinstance(transform, (v2.MixUp, v2.CutMix)):
            images, targets = transform(images, targets)
        else:  # called on a batch, a random one would do the same to all of its images
            images = torch.stack([transform(image) for image in images])
    return images, targets


def as_unit_floats(images: Tensor) -> Tensor:
    """uint8 images as float32 in 0-1; floats as they are."""
    return images.float().div_(255) if images.dtype == torch.uint8 else images
