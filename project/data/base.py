"""Data of any kind: :class:`SplitDataModule`, a data module to inherit from, whose loaders any Trainer takes. In
``project.fit`` they get its sampler: order by seed and epoch, exact resume, all samples once on any number of devices.
"""

import copy
import os
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from project.errors import UserError, require

Split = Literal["train", "val", "test"]


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
        return self.gather(
            torch.tensor(indices, dtype=torch.int64)
        )  # a DataLoader's own way to ask for a whole batch


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
        self.num_workers, self.pin_memory, self.prefetch_factor = (
            num_workers,
            pin_memory,
            prefetch_factor,
        )
        self.on_device = on_device
        self.bytes_on_device: dict[
            str, int
        ] = {}  # by split; for whoever explains what the device's memory holds
        self.limits: dict[str, int | None] = {
            "train": train_samples,
            "val": val_samples,
            "test": test_samples,
        }
        sizes = {
            "batch_size": batch_size,
            "eval_batch_size": eval_batch_size,
            "prefetch_factor": prefetch_factor,
        }
        limits = {f"{split}_samples": limit for split, limit in self.limits.items()}
        for name, value in {**sizes, **limits}.items():
            require(value is None or value >= 1, f"--data.{name}", "be at least 1", value)
        workers, most, option = num_workers or 0, 16 * (os.cpu_count() or 1), "--data.num_workers"
        require(workers >= 0, option, "be at least 0", workers)
        require(
            not workers or on_device is not True, option, "be 0 with --data.on_device true", workers
        )
        require(workers <= most, option, f"be at most {most} on this machine", workers)
        self.allow_zero_length_dataloader_with_multiple_devices = (
            True  # a rank may have no sample of a tiny set
        )
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
        return _part(
            dataset, (order[:-held_out] if split == "train" else order[-held_out:]).sort().values
        )

    def setup(self, stage: str) -> None:
        """Build the splits that ``stage`` ("fit", "validate", "test", "predict") needs, cut to their ``*_samples``."""
        needed: dict[str, list[Split]] = {
            "fit": ["train", "val"],
            "validate": ["val"],
            "test": ["test"],
        }
        for split in needed.get(stage, []):
            if split not in self.splits:
                dataset: Any = self.make_split(split)
                require(
                    len(dataset) > 0,
                    f"{type(self).__name__}.make_split('{split}')",
                    "hold a sample",
                    "none",
                )
                limit = self.limits[split] or len(dataset)
                self.splits[split] = (
                    _part(dataset, torch.arange(limit)) if limit < len(dataset) else dataset
                )
        if stage == "test":
            self.splits.pop(
                "train", None
            )  # the test comes after training: keep one of the two in memory

    def train_dataloader(self) -> DataLoader[Any]:
        if "train" not in self.splits:  # a test has let go of it
            self.setup("fit")
        # a set smaller than a batch is one batch and is not dropped
        return self._loader(
            "train", min(self.batch_size, self.num_samples("train")), shuffle=True, drop_last=True
        )

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
            raise UserError(
                f"--data.on_device true needs data in memory (TensorRows), got {type(dataset).__name__}."
            )
        may = self.on_device == "auto" and device.type == "cuda" and not self.num_workers
        if may and isinstance(dataset, TensorRows):
            return dataset.nbytes <= torch.cuda.get_device_properties(device).total_memory / 10
        return self.on_device is True

    def transfer_batch_to_device(
        self, batch: Any, device: torch.device, dataloader_idx: int
    ) -> Any:
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
        device = (
            self.trainer.strategy.root_device if self.trainer is not None else torch.device("cpu")
        )
        if self.belongs_on(device, dataset):
            dataset, workers, pin = (
                dataset.holding(tensor.to(device) for tensor in dataset.tensors),
                0,
                False,
            )
            self.bytes_on_device[split] = dataset.nbytes
        if workers is None:
            workers = (
                0 if hasattr(dataset, "gather") else torch.get_num_threads()
            )  # to gather is quicker than to ask
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


def collate(samples: Any) -> Any:
    """A batch of a list of samples; a tuple, gathered by :class:`TensorRows`, is one already."""
    return samples if isinstance(samples, tuple) else default_collate(samples)


def _part(dataset: Dataset[Any], indices: Tensor) -> Dataset[Any]:
    """The samples of a dataset at ``indices`` (int64, (count,)); what was in memory stays what it is."""
    if isinstance(dataset, TensorRows):
        return dataset.holding(dataset.gather(indices))
    return Subset(dataset, indices.tolist())
