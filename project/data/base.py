"""What every data module of this template inherits: order, evaluation, loaders, normalisation on the device."""

import os
from typing import Any, Literal

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from project import threads
from project.data.augment import random_deformation
from project.data.sampler import EvalBatchSampler, TensorImages, TrainBatchSampler, make_loader
from project.errors import UserError

Split = Literal["train", "val", "test"]
SPLIT_SEED = 0  # of the validation split: the same samples whatever --seed_everything is


class BatchedDataModule(LightningDataModule):
    """Base class: write :meth:`make_split`, set the four class attributes, and inherit the rest.

    The loader yields ``(images, labels)``: images uint8 or float in 0-1, (batch, channels, height, width), labels
    int64 (batch,). On the device, images become float32, in training augmented, and normalised.

    Args:
        batch_size: Training samples per batch and device.
        eval_batch_size: Validation and test samples per batch and device; changes speed and memory, never a metric.
        num_workers: Loader processes per device. Default: none for data in memory (gathering a batch takes less than
            asking a worker for it), else this process's share of the CPU cores.
        pin_memory: Page-locked batches, for copies that overlap with computing. Default: with a CUDA device only.
        prefetch_factor: Batches each worker prepares ahead.
        train_samples: Keep the first N training samples (default: all).
        val_samples: Keep the first N validation samples (default: all).
        test_samples: Keep the first N test samples (default: all).
        rotate_degrees: Augmentation: random rotation within ± this angle. All five at 0: no augmentation.
        scale_fraction: Augmentation: random scaling per axis by 1 ± this fraction.
        shear_degrees: Augmentation: random shear within ± this angle.
        shift_pixels: Augmentation: random shift per axis within ± this many pixels.
        elastic_pixels: Augmentation: random bending, by this standard deviation per point of a coarse lattice.
    """

    mean: list[float] = [0.5]  # per channel, of images scaled to 0-1
    std: list[float] = [0.5]
    image_shape: tuple[int, int, int] = (1, 28, 28)  # channels, height, width
    class_names: list[str] = [str(digit) for digit in range(10)]
    data_source: str = "files"  # recorded in the run's summary

    def __init__(
        self,
        batch_size: int = 128,
        eval_batch_size: int = 1000,
        num_workers: int | None = None,
        pin_memory: bool | None = None,
        prefetch_factor: int = 2,
        train_samples: int | None = None,
        val_samples: int | None = None,
        test_samples: int | None = None,
        rotate_degrees: float = 0.0,
        scale_fraction: float = 0.0,
        shear_degrees: float = 0.0,
        shift_pixels: float = 0.0,
        elastic_pixels: float = 0.0,
    ) -> None:
        super().__init__()
        self.batch_size = _at_least("batch_size", batch_size, 1)
        self.eval_batch_size = _at_least("eval_batch_size", eval_batch_size, 1)
        self.num_workers = num_workers if num_workers is None else _at_least("num_workers", num_workers, 0)
        self.pin_memory = pin_memory
        self.prefetch_factor = _at_least("prefetch_factor", prefetch_factor, 1)
        self.limits: dict[str, int | None] = {"train": train_samples, "val": val_samples, "test": test_samples}
        for split, limit in self.limits.items():
            if limit is not None:
                _at_least(f"{split}_samples", limit, 1)
        self.augmentation = {
            "degrees": rotate_degrees,
            "scale": scale_fraction,
            "shear": shear_degrees,
            "shift": shift_pixels,
            "elastic": elastic_pixels,
        }
        # A rank with no sample of a tiny evaluation set is as it should be, see EvalBatchSampler.
        self.allow_zero_length_dataloader_with_multiple_devices = True
        self.splits: dict[str, Dataset[Any]] = {}
        self._augment_generator: torch.Generator | None = None

    # What a newcomer writes

    def make_split(self, split: Split) -> Dataset[Any]:
        """The dataset of a split: :class:`TensorImages`, or any map-style dataset of (image, label) samples.

        An image is a uint8 tensor (channels, height, width), a float one in 0-1, or a Pillow image of any size and
        mode, which is fitted to ``image_shape``. Called once per split in every process, after ``prepare_data`` (which
        runs once per machine). Validation must be cut from the training data in the same way every time:
        :meth:`hold_out` does.
        """
        raise NotImplementedError(f"{type(self).__name__} must define make_split(split)")

    # What a newcomer inherits

    def hold_out(self, dataset: Dataset[Any], split: Split, share: float = 0.1) -> Dataset[Any]:
        """The part of a training set that is ``split`` ("train" or "val"): a fixed random ``share`` is validation.

        The same samples in every run, on every rank and whatever ``--seed_everything`` is.
        """
        count = len(dataset)  # type: ignore[arg-type]
        order = torch.randperm(count, generator=torch.Generator().manual_seed(SPLIT_SEED))
        held_out = max(1, round(count * share))
        # sorted: reading files or memory in order is several times faster, and training shuffles anyway
        chosen = (order[:-held_out] if split == "train" else order[-held_out:]).sort().values
        if isinstance(dataset, TensorImages):
            return TensorImages(*dataset[chosen])
        return Subset(dataset, chosen.tolist())

    def description(self) -> dict[str, Any]:
        """What a checkpoint must know of the data to be used without them; plain values."""
        return {
            "class_names": [str(name) for name in self.class_names],
            "image_shape": list(self.image_shape),
            "mean": [float(value) for value in self.mean],
            "std": [float(value) for value in self.std],
        }

    def describe(self, description: dict[str, Any]) -> None:
        """Take over what :meth:`description` said in training: class names may have been read from a folder."""
        for name, value in description.items():
            setattr(self, name, tuple(value) if name == "image_shape" else value)

    def stay_with(self, data_source: str | None) -> None:
        """Use the data that an earlier run of this configuration found, where there is a choice. Here there is none."""

    def setup(self, stage: str) -> None:
        """Build the splits that ``stage`` ("fit", "validate", "test", "predict") needs, cut to their ``*_samples``."""
        needed: dict[str, list[Split]] = {"fit": ["train", "val"], "validate": ["val"], "test": ["test"]}
        for split in needed.get(stage, []):
            if split not in self.splits:
                self.splits[split] = _first(self.make_split(split), self.limits[split])
                self._check_split(split)
        if stage == "test":
            self.splits.pop("train", None)  # the test set comes after training: one of them in memory at a time

    def train_dataloader(self) -> DataLoader[Any]:
        rank, world_size = self._rank()
        dataset = self.splits["train"]
        if len(dataset) < world_size:  # type: ignore[arg-type]
            raise UserError(
                f"--data.train_samples must be at least the number of devices ({world_size}), got {len(dataset)}."  # type: ignore[arg-type]
            )
        if self.trainer is not None and getattr(self.trainer, "overfit_batches", False):  # the first, in order
            return self._loader(dataset, EvalBatchSampler(self.num_samples("train"), self.batch_size, rank, world_size))
        sampler = TrainBatchSampler(len(dataset), self.batch_size, rank, world_size, global_seed())  # type: ignore[arg-type]
        return self._loader(dataset, sampler)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._eval_loader("val")

    def test_dataloader(self) -> DataLoader[Any]:
        return self._eval_loader("test")

    def num_samples(self, split: Split) -> int:
        """Samples in a split that has been set up."""
        return len(self.splits[split])  # type: ignore[arg-type]

    def train_batches_per_epoch(self) -> int:
        """Training batches per rank and epoch, known without building a loader (schedules need it early)."""
        _, world_size = self._rank()
        return len(TrainBatchSampler(self.num_samples("train"), self.batch_size, 0, world_size))

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Augment (training only) and normalise a batch that has reached its device."""
        images, labels = batch
        if tuple(images.shape[1:]) != tuple(self.image_shape):
            raise UserError(
                f"{type(self).__name__}.image_shape must be the images' (channels, height, width), "
                f"{tuple(images.shape[1:])}, got {tuple(self.image_shape)}."
            )
        if self.trainer is not None and self.trainer.training and any(self.augmentation.values()):
            images = random_deformation(
                as_unit_floats(images), self._batch_generator(images.device), **self.augmentation
            )
        return self._as_weights(self.normalize(images)), labels

    def normalize(self, images: Tensor) -> Tensor:
        """uint8 in 0-255 or float in 0-1, (batch, channels, height, width) → float32 with ``mean`` 0 and ``std`` 1."""
        whole = 255.0 if images.dtype == torch.uint8 else 1.0
        # plain numbers: no little tensors, which at every step would be copied to the device and waited for
        if len(self.mean) == 1:
            return _standardized(images, whole * self.mean[0], whole * self.std[0])
        channels = [
            _standardized(channel, whole * mean, whole * std)
            for channel, mean, std in zip(images.split(1, dim=1), self.mean, self.std, strict=True)
        ]
        return torch.cat(channels, dim=1)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Copy without waiting; Lightning's general walk through nested collections costs more than the copy."""
        if isinstance(batch, (tuple, list)) and all(isinstance(part, Tensor) for part in batch):
            return tuple(part.to(device, non_blocking=True) for part in batch)
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    # Inside

    def _as_weights(self, images: Tensor) -> Tensor:
        """In the weights' type under ``--precision bf16-true`` and the like; autocast does it by itself."""
        plugin = self.trainer.precision_plugin if self.trainer is not None else None
        if isinstance(plugin, (HalfPrecision, DoublePrecision)):
            return plugin.convert_input(images)  # Lightning's own call came when they were still bytes
        return images

    def _rank(self) -> tuple[int, int]:
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer is not None else (0, 1)

    def _check_split(self, split: Split) -> None:
        """What is wrong with a user's data said in the user's words, before it is an index error in the loss."""
        dataset, name = self.splits[split], type(self).__name__
        if not len(dataset):  # type: ignore[arg-type]
            raise UserError(f"{name}.make_split('{split}') must hold at least one sample, got none.")
        if isinstance(dataset, TensorImages) and int(dataset.labels.max()) >= len(self.class_names):
            raise UserError(
                f"{name}.class_names must name every class: the {split} labels go up to {int(dataset.labels.max())}, "
                f"got {len(self.class_names)} names."
            )

    def _eval_loader(self, split: Split) -> DataLoader[Any]:
        rank, world_size = self._rank()
        return self._loader(
            self.splits[split], EvalBatchSampler(self.num_samples(split), self.eval_batch_size, rank, world_size)
        )

    def _loader(self, dataset: Dataset[Any], sampler: Any) -> DataLoader[Any]:
        workers = self.num_workers
        if workers is None:
            local_ranks = self.trainer.num_devices if self.trainer is not None else 1
            workers = 0 if isinstance(dataset, TensorImages) else max(1, threads.available_cores() // local_ranks)
        pin = self.pin_memory
        if pin is None:
            pin = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        return make_loader(
            dataset,
            sampler,
            num_workers=workers,
            pin_memory=pin,
            prefetch_factor=self.prefetch_factor,
            seed=global_seed(),
            image_shape=self.image_shape,
        )

    def _batch_generator(self, device: torch.device) -> torch.Generator:
        """Generator of this batch's augmentation: a function of (seed, rank, batches so far), so a resume repeats."""
        if self._augment_generator is None or self._augment_generator.device != device:
            self._augment_generator = torch.Generator(device)
        assert self.trainer is not None
        rank, world_size = self._rank()
        position = self.trainer.fit_loop.epoch_loop.batch_progress.total.completed * world_size + rank
        return self._augment_generator.manual_seed(global_seed() * 1_000_003 + position)


def _standardized(images: Tensor, mean: float, std: float) -> Tensor:
    return images.to(torch.float32, copy=True).sub_(mean).mul_(1 / std)


def as_unit_floats(images: Tensor) -> Tensor:
    """uint8 images as float32 in 0-1; floats as they are."""
    return images.float().div_(255) if images.dtype == torch.uint8 else images


def global_seed() -> int:
    """The seed of the run, as Lightning's ``seed_everything`` recorded it; 0 without one."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))


def _at_least(name: str, value: int, least: int) -> int:
    if value < least:
        raise UserError(f"--data.{name} must be at least {least}, got {value}.")
    return value


def _first(dataset: Dataset[Any], limit: int | None) -> Dataset[Any]:
    if limit is None or limit >= len(dataset):  # type: ignore[arg-type]
        return dataset
    if isinstance(dataset, TensorImages):
        return TensorImages(dataset.images[:limit].clone(), dataset.labels[:limit].clone())
    return Subset(dataset, range(limit))
