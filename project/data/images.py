"""Images: :class:`BatchedDataModule`, a data module to inherit from, and random changes of a batch on its device."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor, nn
from torch.utils.data import default_collate
from torchvision.transforms import v2

from project.data.base import SplitDataModule, TensorRows
from project.errors import require

# What a checkpoint knows of the data: attributes that are lists, and what these hold.
DESCRIBED: dict[str, Any] = {"class_names": str, "image_shape": int, "mean": float, "std": float}
LARGEST_IMAGE = 2**28  # values; a file that names a larger one was changed
LATTICE = 7  # points per axis of the coarse random field that bends an image; their distance is about a stroke's width


class TensorImages(TensorRows):
    """Images, uint8 or float in 0-1, (count, channels, height, width) or (count, height, width), and their labels,
    (count, ...): of any integer type they become int64, floats stay what they are.
    """

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        images = images if images.ndim == 4 else images.unsqueeze(1)
        super().__init__(images, labels if labels.is_floating_point() else labels.long())

    images = property(lambda self: self.tensors[0])
    labels = property(lambda self: self.tensors[1])


class BatchedDataModule(SplitDataModule):
    """Base class for images: write :meth:`make_split`, and set the class attributes.

    Batches are ``(images, targets)``, images uint8 or float in 0-1, (batch, channels, height, width); the module
    standardizes them by ``mean`` and ``std``. Pillow images of any size and mode are fitted to ``image_shape``.

    Args:
        rotate_degrees: Augmentation: random rotation within ± this angle. All five at 0: no augmentation.
        scale_fraction: Augmentation: random scaling per axis by 1 ± this fraction.
        shear_degrees: Augmentation: random shear within ± this angle.
        shift_pixels: Augmentation: random shift per axis within ± this many pixels; a whole number alone: whole ones.
        elastic_pixels: Augmentation: random bending, by this standard deviation per point of a coarse lattice.
        transforms: Augmentation: transforms of ``torchvision.transforms.v2``, applied in order to each training image
            (float in 0-1) on its device; ``MixUp`` and ``CutMix`` to the batch with its labels.
        kwargs: Those of :class:`SplitDataModule`.
    """

    mean: list[float] = [0.5]  # per channel, of images scaled to 0-1
    std: list[float] = [0.5]
    image_shape: tuple[int, int, int] = (1, 28, 28)  # channels, height, width
    class_names: list[str] = [
        str(digit) for digit in range(10)
    ]  # empty if the targets are not classes

    def __init__(
        self,
        rotate_degrees: float = 0.0,
        scale_fraction: float = 0.0,
        shear_degrees: float = 0.0,
        shift_pixels: float = 0.0,
        elastic_pixels: float = 0.0,
        transforms: list[nn.Module] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.deformation = (
            rotate_degrees,
            scale_fraction,
            shear_degrees,
            shift_pixels,
            elastic_pixels,
        )
        self.transforms = transforms or []

    def augment(self, images: Tensor) -> Tensor:
        """Change training images (batch, channels, height, width) on their device, within 0-1 (or uint8). Override it.
        A resumed run restores torch's global generator, which ``torch.rand(..., device=images.device)`` uses.
        """
        *others, shift, elastic = self.deformation
        if (
            not any((*others, elastic))
            and 0 <= shift <= min(images.shape[-2:])
            and float(shift).is_integer()
        ):
            return random_shift(images, int(shift))
        return random_deformation(as_unit_floats(images), *self.deformation)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        images, targets = batch
        found, named = tuple(images.shape[1:]), tuple(self.image_shape)
        require(
            found == named,
            f"{type(self).__name__}.image_shape",
            f"be the images' shape {found}",
            named,
        )
        if self.trainer is None or not self.trainer.training:
            return images, targets
        images = self.augment(images)
        for transform in self.transforms:
            images = as_unit_floats(images)
            if isinstance(transform, (v2.MixUp, v2.CutMix)):
                images, targets = transform(images, targets)
            else:  # called on a batch, a random one would do the same to all of its images
                images = torch.stack([transform(image) for image in images])
        return images, targets

    def description(self) -> dict[str, Any]:
        """What a checkpoint must know of the data to be used without them; plain values."""
        return {
            name: [kind(value) for value in getattr(self, name)] for name, kind in DESCRIBED.items()
        }

    def describe(self, description: dict[str, Any]) -> None:
        """Restore what :meth:`description` returned in training. A UserError for what it cannot have returned."""
        for name, kind in DESCRIBED.items():
            if name in description:
                value = description[name]
                is_list = isinstance(value, list) and all(isinstance(item, kind) for item in value)
                require(
                    is_list,
                    f"the checkpoint's {name}",
                    f"be a list of {kind.__name__}",
                    str(value)[:80],
                )
                setattr(self, name, tuple(value) if name == "image_shape" else value)
        are_sizes = (
            min(self.image_shape, default=1) > 0 and math.prod(self.image_shape) <= LARGEST_IMAGE
        )
        require(
            are_sizes,
            "the checkpoint's image_shape",
            "be sizes above 0 of one image",
            list(self.image_shape),
        )

    def setup(self, stage: str) -> None:
        super().setup(stage)
        names, option = len(self.class_names), f"{type(self).__name__}.class_names"
        for split, dataset in self.splits.items():
            labels = (
                dataset.labels if names and isinstance(dataset, TensorImages) else torch.empty(0)
            )
            if labels.dtype == torch.int64 and labels.ndim == 1:
                least, most = int(labels.min()), int(labels.max())
                must = f"name every class: the {split} labels go from {least} to {most}"
                require(least >= 0 and most < names, option, must, f"{names} names")

    def collate_function(self) -> Callable[[Any], Any]:
        return partial(collate_images, image_shape=self.image_shape)


def collate_images(samples: Any, image_shape: tuple[int, int, int]) -> Any:
    """A batch of a list of (image, target), or one that is gathered already; Pillow images become uint8 tensors."""
    if isinstance(samples, tuple):
        return samples
    if not samples:  # a rank of an evaluation with more ranks than samples
        return torch.empty(0, *image_shape, dtype=torch.uint8), torch.empty(0, dtype=torch.int64)
    fitted = [
        (fit_image(x, image_shape) if isinstance(x, Image.Image) else x, target)
        for x, target in samples
    ]
    images, targets = default_collate(fitted)
    return images, targets.float() if targets.is_floating_point() else targets.long()


def fit_image(image: Image.Image, image_shape: tuple[int, int, int]) -> Tensor:
    """The largest middle part of a Pillow image, scaled to uint8 (channels, height, width), grey or RGB."""
    channels, height, width = image_shape
    fitted = ImageOps.fit(image.convert("L" if channels == 1 else "RGB"), (width, height))
    return torch.from_numpy(np.array(fitted)).view(height, width, channels).permute(2, 0, 1)


def random_shift(images: Tensor, pixels: int) -> Tensor:
    """Move every image (batch, channels, height, width) by whole pixels of its own, at most so many per axis."""
    if not pixels:
        return images
    count, _, height, width = images.shape
    windows = F.pad(images, [pixels] * 4).unfold(2, height, 1).unfold(3, width, 1)
    down, right = torch.randint(2 * pixels + 1, (2, count), device=images.device)
    return windows[torch.arange(count, device=images.device), :, down, right]


def random_deformation(
    images: Tensor, degrees: float, scale: float, shear: float, shift: float, elastic: float
) -> Tensor:
    """Rotate, scale, shear, shift and bend every image by its own random amount. Pixels from outside the image are 0.

    Images are float (batch, channels, height, width). All amounts are uniform: angles in ± ``degrees`` and ± ``shear``
    (degrees), the factor of each axis in 1 ± ``scale``, its shift in ± ``shift`` pixels. Bending is the elastic
    distortion of Simard, Steinkraus and Platt ("Best practices for convolutional neural networks", 2003): each point of
    a coarse lattice moves by ``elastic`` pixels per axis (standard deviation), those between are interpolated.
    """
    count, _, height, width = images.shape
    draw = torch.rand(count, 6, device=images.device) * 2 - 1
    angle = draw[:, 0] * math.radians(degrees)
    tilt = torch.tan(draw[:, 1] * math.radians(shear))
    grow_x, grow_y = 1 + draw[:, 2] * scale, 1 + draw[:, 3] * scale
    cos, sin = torch.cos(angle), torch.sin(angle)
    x_row = torch.stack(
        [cos * grow_x, (cos * tilt - sin) * grow_y, draw[:, 4] * 2 * shift / width], dim=1
    )
    y_row = torch.stack(
        [sin * grow_x, (sin * tilt + cos) * grow_y, draw[:, 5] * 2 * shift / height], dim=1
    )
    theta = torch.stack([x_row, y_row], dim=1)  # (batch, 2, 3)
    grid = F.affine_grid(
        theta, [count, 1, height, width], align_corners=False
    )  # (batch, height, width, 2)
    if elastic:
        moves = torch.randn(count, 2, LATTICE, LATTICE, device=images.device)
        moves[:, 0] *= 2 * elastic / width  # the grid spans 2
        moves[:, 1] *= 2 * elastic / height
        grid = grid + F.interpolate(
            moves, (height, width), mode="bilinear", align_corners=True
        ).permute(0, 2, 3, 1)
    return F.grid_sample(images, grid, align_corners=False)


def as_unit_floats(images: Tensor) -> Tensor:
    """uint8 images as float32 in 0-1; floats as they are."""
    return images.float().div_(255) if images.dtype == torch.uint8 else images
