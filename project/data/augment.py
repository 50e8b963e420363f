"""Random affine and elastic augmentation of a whole batch, on its device, in one ``grid_sample``."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

LATTICE = 7  # points per axis of the coarse random field that bends an image: about the width of a stroke apart


def random_deformation(
    images: Tensor,
    generator: torch.Generator,
    *,
    degrees: float,
    scale: float,
    shear: float,
    shift: float,
    elastic: float,
) -> Tensor:
    """Rotate, scale, shear, shift and bend every image by its own random amount; what comes in from outside is 0.

    Bending is the elastic distortion of Simard, Steinkraus and Platt ("Best practices for convolutional neural
    networks", 2003), with a coarse random field, interpolated, in place of a fine one that is smoothed.

    Args:
        images: float (batch, channels, height, width), the background 0 (so: before normalisation).
        generator: Source of the random numbers, on the images' device.
        degrees: Rotation is uniform in ±``degrees``.
        scale: Each axis is scaled by a factor uniform in 1 ± ``scale``.
        shear: Shear angle is uniform in ±``shear`` degrees.
        shift: Shift per axis is uniform in ±``shift`` pixels.
        elastic: Standard deviation, in pixels, of what each of ``LATTICE`` × ``LATTICE`` points moves per axis.

    Returns:
        float (batch, channels, height, width).
    """
    count, _, height, width = images.shape
    draw = torch.rand(count, 6, device=images.device, generator=generator) * 2 - 1
    angle = draw[:, 0] * math.radians(degrees)
    tilt = torch.tan(draw[:, 1] * math.radians(shear))
    grow_x, grow_y = 1 + draw[:, 2] * scale, 1 + draw[:, 3] * scale
    cos, sin = torch.cos(angle), torch.sin(angle)
    theta = torch.stack(
        [
            torch.stack([cos * grow_x, (cos * tilt - sin) * grow_y, draw[:, 4] * 2 * shift / width], dim=1),
            torch.stack([sin * grow_x, (sin * tilt + cos) * grow_y, draw[:, 5] * 2 * shift / height], dim=1),
        ],
        dim=1,
    )  # (batch, 2, 3)
    grid = F.affine_grid(theta, [count, 1, height, width], align_corners=False)  # (batch, height, width, 2)
    if elastic:
        moves = torch.randn(count, 2, LATTICE, LATTICE, device=images.device, generator=generator)
        moves[:, 0] *= 2 * elastic / width  # the grid spans 2
        moves[:, 1] *= 2 * elastic / height
        grid = grid + F.interpolate(moves, (height, width), mode="bilinear", align_corners=True).permute(0, 2, 3, 1)
    return F.grid_sample(images, grid, align_corners=False)
