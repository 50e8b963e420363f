"""Random changes of a batch of images, made on its device: every image by an amount of its own."""

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.transforms import v2

# Points per axis of the coarse random field that bends an image. They are about a stroke's width
# apart.
LATTICE = 7


def random_shift(images: Tensor, pixels: int) -> Tensor:
    """Move every image (batch, channels, height, width) by whole pixels of its own, at most so many
    per axis.

    Pixels from outside the image are 0. The type of the images stays.
    """
    if pixels == 0:
        return images
    count, _, height, width = images.shape
    padded = F.pad(images, [pixels] * 4)
    # A view of every possible shift: (batch, channels, shifts, shifts, height, width)
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)
    down, right = torch.randint(2 * pixels + 1, (2, count), device=images.device)
    each = torch.arange(count, device=images.device)
    return windows[each, :, down, right]


def random_deformation(
    images: Tensor, degrees: float, scale: float, shear: float, shift: float, elastic: float
) -> Tensor:
    """Rotate, scale, shear, shift and bend every image by its own random amount.

    Pixels from outside the image are 0.

    Bending is the elastic distortion of Simard, Steinkraus and Platt ("Best practices for
    convolutional neural networks", 2003): each point of a coarse lattice moves, and the points
    between are interpolated.

    Args:
        images: float (batch, channels, height, width).
        degrees: Angle of the rotation, uniform in ± this.
        scale: Factor of each axis, uniform in 1 ± this.
        shear: Angle of the shear in degrees, uniform in ± this.
        shift: Pixels per axis, uniform in ± this.
        elastic: Standard deviation of a lattice point's move per axis, in pixels.
    """
    count, _, height, width = images.shape
    maps = random_affine_maps(images, degrees, scale, shear, shift)
    size = [count, 1, height, width]
    grid = F.affine_grid(maps, size, align_corners=False)  # (batch, height, width, 2)
    if elastic:
        grid = grid + random_bending(images, elastic)
    return F.grid_sample(images, grid, align_corners=False)


def random_affine_maps(
    images: Tensor, degrees: float, scale: float, shear: float, shift: float
) -> Tensor:
    """For each image a random map from a place in the result to its source: (batch, 2, 3)."""
    count, _, height, width = images.shape
    draw = torch.rand(count, 6, device=images.device) * 2 - 1  # uniform in ± 1
    angle = draw[:, 0] * math.radians(degrees)
    tilt = torch.tan(draw[:, 1] * math.radians(shear))
    grow_x = 1 + draw[:, 2] * scale
    grow_y = 1 + draw[:, 3] * scale
    # Places go from -1 to 1 along an axis, so a pixel is 2 / width or 2 / height.
    move_x = draw[:, 4] * 2 * shift / width
    move_y = draw[:, 5] * 2 * shift / height
    cos = torch.cos(angle)
    sin = torch.sin(angle)
    # 1 along one axis is not as many pixels as 1 along the other, unless the image is square.
    x_from_y = (cos * tilt - sin) * grow_y * (height / width)
    y_from_x = sin * grow_x * (width / height)
    x_row = torch.stack([cos * grow_x, x_from_y, move_x], dim=1)
    y_row = torch.stack([y_from_x, (sin * tilt + cos) * grow_y, move_y], dim=1)
    return torch.stack([x_row, y_row], dim=1)


def random_bending(images: Tensor, elastic: float) -> Tensor:
    """A random smooth move of every pixel, for a sampling grid: (batch, height, width, 2)."""
    count, _, height, width = images.shape
    moves = torch.randn(count, 2, LATTICE, LATTICE, device=images.device)
    # The grid spans 2.
    moves[:, 0] *= 2 * elastic / width
    moves[:, 1] *= 2 * elastic / height
    size = (height, width)
    smooth = F.interpolate(moves, size, mode="bilinear", align_corners=True)
    return smooth.permute(0, 2, 3, 1)


def random_changes(
    images: Tensor,
    *,
    rotate_degrees: float,
    scale_fraction: float,
    shear_degrees: float,
    shift_pixels: float,
    elastic_pixels: float,
) -> Tensor:
    """Change every image by its own random amount: :func:`random_shift` where a whole shift is all
    that is asked for, which needs no interpolation, else :func:`random_deformation`.

    Args:
        images: (batch, channels, height, width), uint8 or float in 0-1. Those that are only shifted
            keep their type, others become float32.
        rotate_degrees: Angle of the rotation, uniform in ± this.
        scale_fraction: Factor of each axis, uniform in 1 ± this.
        shear_degrees: Angle of the shear, uniform in ± this.
        shift_pixels: Pixels per axis, uniform in ± this; whole ones if this is whole and all others
            are 0.
        elastic_pixels: Bending, as a standard deviation per point of a coarse lattice.
    """
    others = (rotate_degrees, scale_fraction, shear_degrees, elastic_pixels)
    fits = 0 <= shift_pixels <= min(images.shape[-2:])
    if fits and float(shift_pixels).is_integer() and not any(others):
        return random_shift(images, int(shift_pixels))
    return random_deformation(
        as_unit_floats(images),
        rotate_degrees,
        scale_fraction,
        shear_degrees,
        shift_pixels,
        elastic_pixels,
    )


def transformed(
    images: Tensor, targets: Tensor, transforms: Iterable[nn.Module]
) -> tuple[Tensor, Tensor]:
    """Images (batch, ...) and their targets after transforms of ``torchvision.transforms.v2``.

    ``MixUp`` and ``CutMix`` get the batch with its targets. Every other transform is called image
    by image, so that each image is changed by its own random amount.
    """
    for transform in transforms:
        images = as_unit_floats(images)
        if isinstance(transform, (v2.MixUp, v2.CutMix)):
            images, targets = transform(images, targets)
        else:
            # Called on a batch, a random transform would do the same to all of its images.
            images = torch.stack([transform(image) for image in images])
    return images, targets


def as_unit_floats(images: Tensor) -> Tensor:
    """uint8 images as float32 in 0-1; floats as they are."""
    if images.dtype == torch.uint8:
        return images.float().div_(255)
    return images
