"""Images: :class:`BatchedDataModule`, a data module to inherit from."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor, nn
from torch.utils.data import default_collate
from unbroken.data.augmentation import random_changes, transformed
from unbroken.data.base import SplitDataModule, TensorRows
from unbroken.errors import require
from unbroken.pictures import as_plain

# What a checkpoint knows of the data: attributes that are lists, and what these hold.
DESCRIBED: dict[str, Any] = {"class_names": str, "image_shape": int, "mean": float, "std": float}

# Values of one image. A checkpoint that names a larger image was changed.
LARGEST_IMAGE = 2**28

# The arguments of `augment`, which gets no targets.
AUGMENTATIONS = (
    "rotate_degrees",
    "scale_fraction",
    "shear_degrees",
    "shift_pixels",
    "elastic_pixels",
)


class TensorImages(TensorRows):
    """Images and their labels, in memory.

    Args:
        images: uint8, or float in 0-1; (count, channels, height, width) or (count, height, width).
        labels: (count, ...). Those of any integer type become int64, floats stay what they are.
    """

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        if images.ndim != 4:
            images = images.unsqueeze(1)
        if not labels.is_floating_point():
            labels = labels.long()
        super().__init__(images, labels)

    @property
    def images(self) -> Tensor:
        """(count, channels, height, width)."""
        return self.tensors[0]

    @property
    def labels(self) -> Tensor:
        """(count, ...)."""
        return self.tensors[1]


class BatchedDataModule(SplitDataModule):
    """Base class for images: write :meth:`make_split`, and set the class attributes.

    Batches are ``(images, targets)``, images uint8 or float in 0-1, (batch, channels, height,
    width); the module standardizes them by ``mean`` and ``std``. Pillow images of any size and mode
    are fitted to ``image_shape``.

    Augmentation changes the images alone. It is refused where targets are of the images' height and
    width, such as masks: to change both, override :meth:`transformed`.

    Args:
        rotate_degrees: Augmentation: random rotation within ± this angle. All five at 0: no
            augmentation.
        scale_fraction: Augmentation: random scaling per axis by 1 ± this fraction.
        shear_degrees: Augmentation: random shear within ± this angle.
        shift_pixels: Augmentation: random shift per axis within ± this many pixels; a whole number
            alone: whole ones.
        elastic_pixels: Augmentation: random bending, by this standard deviation per point of a
            coarse lattice.
        transforms: Augmentation: transforms of ``torchvision.transforms.v2``, applied in order to
            the training images (float in 0-1) on their device. ``MixUp`` and ``CutMix`` get the
            batch with its labels. Every other transform is called image by image, so that each
            image is changed by its own random amount; this takes longer than the augmentations
            above, which change a batch at once.
        kwargs: Those of :class:`SplitDataModule`.
    """

    mean: list[float] = [0.5]  # per channel, of images scaled to 0-1
    std: list[float] = [0.5]
    image_shape: tuple[int, int, int] = (1, 28, 28)  # channels, height, width
    # Empty if targets are no classes
    class_names: list[str] = [str(number) for number in range(10)]

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
        self.rotate_degrees = rotate_degrees
        self.scale_fraction = scale_fraction
        self.shear_degrees = shear_degrees
        self.shift_pixels = shift_pixels
        self.elastic_pixels = elastic_pixels
        self.transforms = transforms or []

    # Yours

    def augment(self, images: Tensor) -> Tensor:
        """Change training images (batch, channels, height, width) on their device, within 0-1 (or
        uint8). Override it.

        A resumed run restores torch's global generator, which ``torch.rand(...,
        device=images.device)`` uses.
        """
        amounts = {name: getattr(self, name) for name in AUGMENTATIONS}
        return random_changes(images, **amounts)

    # What Lightning calls

    def setup(self, stage: str) -> None:
        super().setup(stage)
        for split, dataset in self.splits.items():
            if isinstance(dataset, TensorImages):
                self.check_labels(split, dataset.labels)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        images, targets = batch
        found = tuple(images.shape[1:])
        named = tuple(self.image_shape)
        if found != named:
            option = f"{type(self).__name__}.image_shape"
            require(False, option, f"be the images' shape {found}", named)
        if self.trainer is None or not self.trainer.training:
            return images, targets
        self.refuse_beside_masks(AUGMENTATIONS, images, targets)
        return self.transformed(self.augment(images), targets)

    # What a checkpoint knows of the data

    def description(self) -> dict[str, Any]:
        """What a checkpoint must know of the data to be used without them; plain values."""
        told = {}
        for name, kind in DESCRIBED.items():
            told[name] = [kind(value) for value in getattr(self, name)]
        return told

    def describe(self, description: dict[str, Any]) -> None:
        """Restore what :meth:`description` returned in training.

        A UserError for what it cannot have returned.
        """
        for name, kind in DESCRIBED.items():
            if name not in description:
                continue
            value = description[name]
            is_right = isinstance(value, list) and all(isinstance(item, kind) for item in value)
            must = f"be a list of {kind.__name__}"
            require(is_right, f"the checkpoint's {name}", must, str(value)[:80])
            setattr(self, name, tuple(value) if name == "image_shape" else value)
        shape = self.image_shape
        are_sizes = min(shape, default=1) > 0 and math.prod(shape) <= LARGEST_IMAGE
        must = "be sizes above 0 of one image"
        require(are_sizes, "the checkpoint's image_shape", must, list(shape))

    # The parts of the above

    def collate_function(self) -> Callable[[Any], Any]:
        return partial(collate_images, image_shape=self.image_shape)

    def refuse_beside_masks(self, names: Sequence[str], images: Tensor, targets: Any) -> None:
        """A UserError where one of these arguments changes images (batch, channels, height, width)
        whose targets are (..., height, width): a mask would no longer lie on its image.
        """
        if not isinstance(targets, Tensor) or targets.ndim < 3:
            return
        if targets.shape[-2:] != images.shape[-2:]:
            return
        for name in names:
            value = getattr(self, name)
            nothing = "empty" if name == "transforms" else "0"
            must = f"be {nothing} where targets are masks: it changes the images alone"
            hint = f" To change both, override {type(self).__name__}.transformed."
            require(not value, f"--data.{name}", must, value, hint)

    def transformed(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Training images (batch, ...) and their targets after the user's ``transforms``."""
        self.refuse_beside_masks(["transforms"], images, targets)
        return transformed(images, targets, self.transforms)

    def check_labels(self, split: str, labels: Tensor) -> None:
        """A UserError for class numbers (count,) without a name; they would be an index error in
        the loss.
        """
        names = len(self.class_names)
        are_classes = names > 0 and labels.dtype == torch.int64 and labels.ndim == 1
        if not are_classes:
            return
        least = int(labels.min())
        most = int(labels.max())
        option = f"{type(self).__name__}.class_names"
        must = f"name every class: the {split} labels go from {least} to {most}"
        require(least >= 0 and most < names, option, must, f"{names} names")


def collate_images(samples: Any, image_shape: tuple[int, int, int]) -> Any:
    """A batch of a list of (image, target), or one that is gathered already; Pillow images become
    uint8 tensors.
    """
    if isinstance(samples, tuple):
        return samples
    if not samples:  # a rank of an evaluation with more ranks than samples
        no_images = torch.empty(0, *image_shape, dtype=torch.uint8)
        no_targets = torch.empty(0, dtype=torch.int64)
        return no_images, no_targets
    fitted = []
    for image, target in samples:
        if isinstance(image, Image.Image):
            image = fit_image(image, image_shape)
        fitted.append((image, target))
    images, targets = default_collate(fitted)
    targets = targets.float() if targets.is_floating_point() else targets.long()
    return images, targets


def fit_image(image: Image.Image, image_shape: tuple[int, int, int]) -> Tensor:
    """The largest middle part of a Pillow image, scaled to uint8 (channels, height, width), grey or
    RGB. It is turned, scaled and blended as :func:`unbroken.data.read_picture` does.
    """
    channels, height, width = image_shape
    mode = "L" if channels == 1 else "RGB"
    fitted = ImageOps.fit(as_plain(image).convert(mode), (width, height))
    pixels = torch.from_numpy(np.array(fitted))  # (height, width) or (height, width, channels)
    return pixels.view(height, width, channels).permute(2, 0, 1)
