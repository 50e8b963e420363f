"""Data modules to inherit from: :class:`SplitDataModule` for any task, :class:`BatchedDataModule` for images. Any
Trainer takes their loaders. ``project.fit`` puts a sampler of its own into them: order by seed and epoch, exact resume,
every sample once on any number of devices.
"""

import copy
import math
import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule
from PIL import Image, ImageOps
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate
from torchvision.transforms import v2

from project.errors import UserError, require

Split = Literal["train", "val", "test"]
# What a checkpoint knows of the data: attributes that are lists, and what these hold.
DESCRIBED: dict[str, Any] = {"class_names": str, "image_shape": int, "mean": float, "std": float}
LARGEST_IMAGE = 2**28  # values; a file that names a larger one was changed
LATTICE = 7  # points per axis of the coarse random field that bends an image; their distance is about a stroke's width


class TensorRows(TensorDataset):
    """Tensors (count, ...) of equal length in memory, such as features and targets; a sample is a row of each."""

    def __init__(self, *tensors: Tensor) -> None:
        lengths = [len(tensor) for tensor in tensors]
        require(len(set(lengths)) == 1, type(self).__name__, "get tensors of equal length", lengths)
        super().__init__(*tensors)

    @property
    def device(self) -> torch.device:
        """Where the samples lie. Whoever draws an epoch's order puts it there once, instead of batch by batch."""
        return self.tensors[0].device

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def holding(self, tensors: Iterable[Tensor]) -> "TensorRows":
        """A dataset of the same kind with other tensors: some of the samples, or all of them on a device."""
        other = copy.copy(self)
        other.tensors = tuple(tensors)
        return other

    def gather(self, indices: Tensor) -> tuple[Tensor, ...]:
        """The batch of these samples (int64, (batch,)), in one call for each tensor, where the samples lie."""
        # copies row by row; tensor[indices] copies byte by byte, which takes eight times as long on a CPU
        return tuple(tensor.index_select(0, indices.to(self.device)) for tensor in self.tensors)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, ...]:
        return self.gather(torch.tensor(indices, dtype=torch.int64))  # a DataLoader's own way to ask for a whole batch


class TensorImages(TensorRows):
    """Images, uint8 or float in 0-1, (count, channels, height, width) or (count, height, width), and their labels,
    (count, ...): of any integer type they become int64, floats stay what they are.
    """

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        images = images if images.ndim == 4 else images.unsqueeze(1)
        super().__init__(images, labels if labels.is_floating_point() else labels.long())

    images = property(lambda self: self.tensors[0])
    labels = property(lambda self: self.tensors[1])


class SplitDataModule(LightningDataModule):
    """Base class for any task: write :meth:`make_split`. A sample may be a tensor, a tuple or a dictionary.

    Args:
        batch_size: Training samples per batch and device.
        eval_batch_size: Validation and test samples per batch and device; changes speed and memory, never a metric.
        num_workers: Loader processes per device. Default: none for data in memory, else as many as there are threads.
        on_device: Keep data that are in memory (:class:`TensorRows`) on the device, and make batches there: the same
            order, the same results, no copy in a step. ``auto``: on CUDA, a split of at most a tenth of its memory.
        pin_memory: Page-locked batches, for copies that overlap with computing. Default: with a CUDA device only.
        prefetch_factor: Batches each worker prepares ahead.
        train_samples: Keep the first N training samples (default: all).
        val_samples: Keep the first N validation samples (default: all).
        test_samples: Keep the first N test samples (default: all).
    """

    data_source: str = "files"  # recorded in the run's summary

    def __init__(
        self,
        batch_size: int = 128,
        eval_batch_size: int = 1000,
        num_workers: int | None = None,
        on_device: bool | Literal["auto"] = "auto",
        pin_memory: bool | None = None,
        prefetch_factor: int = 2,
        train_samples: int | None = None,
        val_samples: int | None = None,
        test_samples: int | None = None,
    ) -> None:
        super().__init__()
        self.batch_size, self.eval_batch_size = batch_size, eval_batch_size
        self.num_workers, self.pin_memory, self.prefetch_factor = num_workers, pin_memory, prefetch_factor
        self.on_device = on_device
        self.bytes_on_device: dict[str, int] = {}  # by split; for whoever explains what the device's memory holds
        self.limits: dict[str, int | None] = {"train": train_samples, "val": val_samples, "test": test_samples}
        sizes = {"batch_size": batch_size, "eval_batch_size": eval_batch_size, "prefetch_factor": prefetch_factor}
        limits = {f"{split}_samples": limit for split, limit in self.limits.items()}
        for name, value in {**sizes, **limits}.items():
            require(value is None or value >= 1, f"--data.{name}", "be at least 1", value)
        workers, most, option = num_workers or 0, 16 * (os.cpu_count() or 1), "--data.num_workers"
        require(workers >= 0, option, "be at least 0", workers)
        require(not workers or on_device is not True, option, "be 0 with --data.on_device true", workers)
        require(workers <= most, option, f"be at most {most} on this machine", workers)
        self.allow_zero_length_dataloader_with_multiple_devices = True  # a rank may have no sample of a tiny set
        self.splits: dict[str, Any] = {}  # datasets

    def make_split(self, split: Split) -> Dataset[Any]:
        """Yours to write: the dataset of a split, :class:`TensorRows` or any map-style dataset. Called once a split in
        every process, after ``prepare_data``. :meth:`hold_out` cuts validation from training data, always the same.
        """
        raise NotImplementedError(f"{type(self).__name__} must define make_split(split)")

    def hold_out(self, dataset: Any, split: Split, share: float = 0.1) -> Dataset[Any]:
        """The part of a training set that is ``split`` ("train" or "val"): a fixed random ``share`` is validation."""
        # a seed of its own: the same samples in every run, on every rank and whatever --seed_everything is
        order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0))
        held_out = max(1, round(len(dataset) * share))
        # sorted: reading files or memory in order is several times faster, and training shuffles anyway
        return _part(dataset, (order[:-held_out] if split == "train" else order[-held_out:]).sort().values)

    def setup(self, stage: str) -> None:
        """Build the splits that ``stage`` ("fit", "validate", "test", "predict") needs, cut to their ``*_samples``."""
        needed: dict[str, list[Split]] = {"fit": ["train", "val"], "validate": ["val"], "test": ["test"]}
        for split in needed.get(stage, []):
            if split not in self.splits:
                dataset: Any = self.make_split(split)
                option = f"{type(self).__name__}.make_split('{split}')"
                require(len(dataset) > 0, option, "hold at least one sample", "none")
                limit = self.limits[split] or len(dataset)
                self.splits[split] = _part(dataset, torch.arange(limit)) if limit < len(dataset) else dataset
        if stage == "test":
            self.splits.pop("train", None)  # the test comes after training: keep one of the two in memory

    def train_dataloader(self) -> DataLoader[Any]:
        if "train" not in self.splits:  # a test has let go of it
            self.setup("fit")
        # a set smaller than a batch is one batch and is not dropped
        return self._loader("train", min(self.batch_size, self.num_samples("train")), shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader("val", self.eval_batch_size)

    def test_dataloader(self) -> DataLoader[Any]:
        return self._loader("test", self.eval_batch_size)

    def num_samples(self, split: Split) -> int:
        """Samples in a split that has been set up."""
        return len(self.splits[split])

    def belongs_on(self, device: torch.device, dataset: Dataset[Any]) -> bool:
        """Whether ``on_device`` keeps a split on this device."""
        if self.on_device is True and not isinstance(dataset, TensorRows):
            kind = type(dataset).__name__
            raise UserError(f"--data.on_device true needs data in memory (TensorRows), make_split gave {kind}.")
        may = self.on_device == "auto" and device.type == "cuda" and not self.num_workers
        if may and isinstance(dataset, TensorRows):
            return dataset.nbytes <= torch.cuda.get_device_properties(device).total_memory / 10
        return self.on_device is True

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Copies the parts directly: Lightning's search through nested collections costs more than a small copy."""
        if isinstance(batch, (tuple, list)) and all(isinstance(part, Tensor) for part in batch):
            # to CUDA without waiting; MPS would train on batches that have not arrived (pytorch #189690)
            return tuple(part.to(device, non_blocking=device.type == "cuda") for part in batch)
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def collate_function(self) -> Callable[[Any], Any]:
        """The function that turns a list of samples into a batch. It is sent to worker processes."""
        return collate

    def _loader(self, split: Split, batch_size: int, **order: Any) -> DataLoader[Any]:
        dataset, workers, pin = self.splits[split], self.num_workers, self.pin_memory
        device = self.trainer.strategy.root_device if self.trainer is not None else torch.device("cpu")
        if self.belongs_on(device, dataset):
            dataset, workers, pin = dataset.holding(tensor.to(device) for tensor in dataset.tensors), 0, False
            self.bytes_on_device[split] = dataset.nbytes
        if workers is None:
            # to gather a batch takes less than to ask a worker for it
            workers = 0 if hasattr(dataset, "gather") else torch.get_num_threads()
        if pin is None:
            pin = device.type == "cuda"
        return DataLoader(
            dataset,
            batch_size=batch_size,
            num_workers=workers,
            pin_memory=pin,
            persistent_workers=workers > 0,
            prefetch_factor=self.prefetch_factor if workers > 0 else None,
            collate_fn=self.collate_function(),
            **order,
        )


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
    class_names: list[str] = [str(digit) for digit in range(10)]  # empty if the targets are not classes

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
        self.deformation = (rotate_degrees, scale_fraction, shear_degrees, shift_pixels, elastic_pixels)
        self.transforms = transforms or []

    def augment(self, images: Tensor) -> Tensor:
        """Change training images (batch, channels, height, width) on their device, within 0-1 (or uint8). Override it.
        A resumed run restores torch's global generator, which ``torch.rand(..., device=images.device)`` uses.
        """
        *others, shift, elastic = self.deformation
        if not any((*others, elastic)) and 0 <= shift <= min(images.shape[-2:]) and float(shift).is_integer():
            return random_shift(images, int(shift))
        return random_deformation(as_unit_floats(images), *self.deformation)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        images, targets = batch
        found, named = tuple(images.shape[1:]), tuple(self.image_shape)
        if found != named:
            name = f"{type(self).__name__}.image_shape"
            raise UserError(f"{name} must be the images' (channels, height, width), {found}, got {named}.")
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
        return {name: [kind(value) for value in getattr(self, name)] for name, kind in DESCRIBED.items()}

    def describe(self, description: dict[str, Any]) -> None:
        """Restore what :meth:`description` returned in training. A UserError for what it cannot have returned."""
        for name, kind in DESCRIBED.items():
            if name in description:
                value = description[name]
                is_list = isinstance(value, list) and all(isinstance(item, kind) for item in value)
                require(is_list, f"the checkpoint's {name}", f"be a list of {kind.__name__}", str(value)[:80])
                setattr(self, name, tuple(value) if name == "image_shape" else value)
        are_sizes = min(self.image_shape, default=1) > 0 and math.prod(self.image_shape) <= LARGEST_IMAGE
        require(are_sizes, "the checkpoint's image_shape", "be sizes above 0 of one image", list(self.image_shape))

    def setup(self, stage: str) -> None:
        super().setup(stage)
        names, option = len(self.class_names), f"{type(self).__name__}.class_names"
        for split, dataset in self.splits.items():
            labels = dataset.labels if names and isinstance(dataset, TensorImages) else torch.empty(0)
            if labels.dtype == torch.int64 and labels.ndim == 1:
                least, most = int(labels.min()), int(labels.max())
                must = f"name every class: the {split} labels go from {least} to {most}"
                require(least >= 0 and most < names, option, must, f"{names} names")

    def collate_function(self) -> Callable[[Any], Any]:
        return partial(collate, image_shape=self.image_shape)


def collate(samples: Any, image_shape: tuple[int, int, int] | None = None) -> Any:
    """A batch of a list of samples; a tuple, gathered by a dataset of this file, is one already. With ``image_shape``
    samples are (image, target): Pillow images become uint8 tensors, targets int64 or floating.
    """
    if isinstance(samples, tuple):
        return samples
    if image_shape is None:
        return default_collate(samples)
    if not samples:  # a rank of an evaluation with more ranks than samples
        return torch.empty(0, *image_shape, dtype=torch.uint8), torch.empty(0, dtype=torch.int64)
    fitted = [(fit_image(x, image_shape) if isinstance(x, Image.Image) else x, target) for x, target in samples]
    images, targets = default_collate(fitted)
    return images, targets.float() if targets.is_floating_point() else targets.long()


def fit_image(image: Image.Image, image_shape: tuple[int, int, int]) -> Tensor:
    """The largest middle part of a Pillow image, scaled to uint8 (channels, height, width), grey or RGB."""
    channels, height, width = image_shape
    fitted = ImageOps.fit(image.convert("L" if channels == 1 else "RGB"), (width, height))
    return torch.from_numpy(np.array(fitted)).view(height, width, channels).permute(2, 0, 1)


def _part(dataset: Dataset[Any], indices: Tensor) -> Dataset[Any]:
    """The samples of a dataset at ``indices`` (int64, (count,)); what was in memory stays what it is."""
    if isinstance(dataset, TensorRows):
        return dataset.holding(dataset.gather(indices))
    return Subset(dataset, indices.tolist())


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


def as_unit_floats(images: Tensor) -> Tensor:
    """uint8 images as float32 in 0-1; floats as they are."""
    return images.float().div_(255) if images.dtype == torch.uint8 else images
