"""Data of any kind: :class:`SplitDataModule`, a data module to inherit from, whose loaders any
Trainer takes.

In ``project.fit`` the loaders get the engine's sampler: an order by seed and epoch, exact resume,
and in an evaluation all samples once on any number of devices.
"""

import copy
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningDataModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate
from unbroken.errors import UserError, require

Split = Literal["train", "val", "test"]

# The splits that each stage of Lightning's needs. A prediction brings its own data.
SPLITS_OF_STAGE: dict[str, list[Split]] = {
    "fit": ["train", "val"],
    "validate": ["val"],
    "test": ["test"],
}

# More worker processes per core than this are a mistake.
MOST_WORKERS_PER_CORE = 16

# More batches ahead than this are a mistake: a worker holds that many in memory.
MOST_BATCHES_AHEAD = 1000

# "auto" keeps a split on the device if it takes at most this share of the device's memory.
SHARE_OF_DEVICE = 1 / 10


@runtime_checkable
class GathersBatches(Protocol):
    """A dataset in memory that gives a whole batch in one call."""

    def gather(self, indices: Tensor) -> Any:
        """``indices``: int64 (batch,). Returns the batch."""
        ...


class TensorRows(TensorDataset):
    """Tensors (count, ...) of equal length in memory, such as features and targets; a sample is a
    row of each.
    """

    def __init__(self, *tensors: Tensor) -> None:
        lengths = [len(tensor) for tensor in tensors]
        are_equal = len(set(lengths)) == 1
        require(are_equal, type(self).__name__, "get tensors of equal length", lengths)
        super().__init__(*tensors)

    @property
    def device(self) -> torch.device:
        """Where the samples lie.

        Whoever draws an epoch's order puts it there once, instead of batch by batch.
        """
        return self.tensors[0].device

    @property
    def nbytes(self) -> int:
        """Bytes that the samples take."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def holding(self, tensors: Iterable[Tensor]) -> "TensorRows":
        """A dataset of the same kind with other tensors: some of the samples, or all of them on a
        device.
        """
        other = copy.copy(self)
        other.tensors = tuple(tensors)
        return other

    def gather(self, indices: Tensor) -> tuple[Tensor, ...]:
        """The batch of these samples (int64, (batch,)), in one call for each tensor, where the
        samples lie.
        """
        # index_select copies row by row. tensor[indices] copies byte by byte, which takes eight
        # times as long on a CPU.
        here = indices.to(self.device)
        return tuple(tensor.index_select(0, here) for tensor in self.tensors)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, ...]:
        """The batch of these samples. This is how a plain DataLoader asks for a whole batch."""
        return self.gather(torch.tensor(indices, dtype=torch.int64))


class SplitDataModule(LightningDataModule):
    """Base class for any task: write :meth:`make_split`.

    A sample may be a tensor, a tuple or a dictionary.

    Args:
        batch_size: Training samples per batch and device.
        eval_batch_size: Validation and test samples per batch and device; changes speed and memory,
            never a metric.
        num_workers: Loader processes per device. Default: none for data in memory, else as many as
            there are threads.
        on_device: Keep data that are in memory (:class:`TensorRows`) on the device, and make
            batches there: the same order, the same results, no copy in a step. ``auto``: on CUDA, a
            split of at most a tenth of its memory.
        pin_memory: Page-locked batches, for copies that overlap with computing. Default: with a
            CUDA device only.
        prefetch_factor: Batches each worker prepares ahead, at most 1000.
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
        sizes = {
            "batch_size": batch_size,
            "eval_batch_size": eval_batch_size,
            "train_samples": train_samples,
            "val_samples": val_samples,
            "test_samples": test_samples,
        }
        check_loading(sizes, prefetch_factor, num_workers, on_device)
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.num_workers = num_workers
        self.on_device = on_device
        self.pin_memory = pin_memory
        self.prefetch_factor = prefetch_factor
        self.limits: dict[str, int | None] = {
            "train": train_samples,
            "val": val_samples,
            "test": test_samples,
        }
        self.splits: dict[str, Any] = {}  # datasets
        # Bytes of each split, for whoever explains what the device's memory holds.
        self.bytes_on_device: dict[str, int] = {}
        # Lightning's name: a rank may have no sample of a tiny set.
        self.allow_zero_length_dataloader_with_multiple_devices = True

    # Yours

    def make_split(self, split: Split) -> Dataset[Any]:
        """Yours to write: the dataset of a split, :class:`TensorRows` or any map-style dataset.

        It is called once a split in every process, after ``prepare_data``. :meth:`hold_out` cuts
        validation from training data, always the same.
        """
        raise NotImplementedError(f"{type(self).__name__} must define make_split(split)")

    def hold_out(self, dataset: Any, split: Split, share: float = 0.1) -> Dataset[Any]:
        """The part of a data set that is ``split``: "val" is a fixed random ``share``, which is
        held out, and "train" is the rest.
        """
        return hold_out(dataset, split, share)

    def collate_function(self) -> Callable[[Any], Any]:
        """The function that turns a list of samples into a batch, also in worker processes."""
        return collate

    # What Lightning calls

    def setup(self, stage: str) -> None:
        """Build the splits that ``stage`` ("fit", "validate", "test", "predict") needs, cut to
        their ``*_samples``.
        """
        for split in SPLITS_OF_STAGE.get(stage, []):
            if split not in self.splits:
                self.splits[split] = self._limited(split, self.make_split(split))
        if stage == "test":
            # The test comes after the training: only one of the two is kept in memory.
            self.splits.pop("train", None)

    def train_dataloader(self) -> DataLoader[Any]:
        if "train" not in self.splits:  # a test has let go of it
            self.setup("fit")
        # A set smaller than a batch is one batch; it would be dropped otherwise.
        batch_size = min(self.batch_size, self.num_samples("train"))
        return self._loader("train", batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader("val", self.eval_batch_size)

    def test_dataloader(self) -> DataLoader[Any]:
        return self._loader("test", self.eval_batch_size)

    def transfer_batch_to_device(
        self, batch: Any, device: torch.device, dataloader_idx: int
    ) -> Any:
        return copy_to(device, batch)

    # The parts of the above

    def num_samples(self, split: Split) -> int:
        """Samples in a split that has been set up."""
        return len(self.splits[split])

    def _limited(self, split: Split, dataset: Any) -> Dataset[Any]:
        """The first samples of a split, as many as its ``*_samples`` says; a UserError where it has
        none.
        """
        maker = f"{type(self).__name__}.make_split('{split}')"
        require(len(dataset) > 0, maker, "hold a sample", "none")
        return first_samples(dataset, self.limits[split])

    def _loader(self, split: Split, batch_size: int, **order: Any) -> DataLoader[Any]:
        loader = make_loader(
            self.splits[split],
            batch_size,
            self.trainer,
            on_device=self.on_device,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            prefetch_factor=self.prefetch_factor,
            collate_fn=self.collate_function(),
            **order,
        )
        self.bytes_on_device[split] = bytes_on_device(loader)
        return loader


def hold_out(dataset: Any, split: Split, share: float) -> Any:
    """The part of a training set that is ``split``, "train" or "val": a fixed random ``share`` is
    validation.
    """
    # The generator has a seed of its own, so that the split is the same in every run, on every
    # rank, and whatever --seed_everything is.
    fixed = torch.Generator().manual_seed(0)
    order = torch.randperm(len(dataset), generator=fixed)
    held_out = max(1, round(len(dataset) * share))
    chosen = order[:-held_out] if split == "train" else order[-held_out:]
    # Sorted, because to read files or memory in order is several times faster. Training shuffles
    # anyway.
    return part_of(dataset, chosen.sort().values)


def first_samples(dataset: Any, count: int | None) -> Any:
    """The first samples of a dataset, at most so many; all of them where ``count`` is None."""
    if count is None or count >= len(dataset):
        return dataset
    return part_of(dataset, torch.arange(count))


def make_loader(
    dataset: Any,
    batch_size: int,
    trainer: Trainer | None,
    *,
    on_device: bool | Literal["auto"] = "auto",
    num_workers: int | None = None,
    pin_memory: bool | None = None,
    prefetch_factor: int = 2,
    collate_fn: Callable[[Any], Any] | None = None,
    **order: Any,
) -> DataLoader[Any]:
    """A loader whose batches reach the Trainer's device quickly.

    Args:
        dataset: :class:`TensorRows`, whose batches are gathered in one call, or another dataset.
        batch_size: Samples per batch.
        trainer: Its device is the one. None: the CPU.
        on_device: Keep a dataset that is in memory (:class:`TensorRows`) on the device, and make
            batches there. ``auto``: on CUDA, at most a tenth of its memory.
        num_workers: Loader processes. Default: none for data in memory, else as many as there are
            threads.
        pin_memory: Page-locked batches. Default: with a CUDA device only.
        prefetch_factor: Batches each worker prepares ahead.
        collate_fn: Makes a batch of a list of samples. Default: PyTorch's way; a batch that was
            gathered is one already.
        order: Further arguments of DataLoader, such as ``shuffle``.

    Raises:
        UserError: ``on_device`` is true, and the dataset is not in memory.
    """
    device = torch.device("cpu") if trainer is None else trainer.strategy.root_device
    if belongs_on(device, dataset, on_device, num_workers):
        dataset = dataset.holding(tensor.to(device) for tensor in dataset.tensors)
        num_workers = 0
        pin_memory = False
    if num_workers is None:
        # To gather a batch in memory is quicker than to ask another process for it.
        num_workers = 0 if isinstance(dataset, GathersBatches) else torch.get_num_threads()
    if pin_memory is None:
        pin_memory = device.type == "cuda"
    return DataLoader(
        dataset,
        batch_size=batch_size,
        num_workers=num_workers,
        pin_memory=pin_memory,
        persistent_workers=num_workers > 0,
        prefetch_factor=prefetch_factor if num_workers > 0 else None,
        collate_fn=collate_fn or collate,
        **order,
    )


def belongs_on(
    device: torch.device,
    dataset: Any,
    on_device: bool | Literal["auto"],
    num_workers: int | None,
) -> bool:
    """Whether ``on_device`` keeps a dataset on this device.

    Raises:
        UserError: The user asks for it, and the dataset is not in memory.
    """
    if on_device is True:
        if not isinstance(dataset, TensorRows):
            needs = "--data.on_device true needs data in memory (TensorRows)"
            raise UserError(f"{needs}, got {type(dataset).__name__}.")
        return True
    # Worker processes, where somebody asks for them, cannot use the device.
    may = on_device == "auto" and device.type == "cuda" and not num_workers
    if not may or not isinstance(dataset, TensorRows):
        return False
    memory = torch.cuda.get_device_properties(device).total_memory
    return dataset.nbytes <= memory * SHARE_OF_DEVICE


def bytes_on_device(loader: DataLoader[Any]) -> int:
    """Bytes of a loader's data that lie on a device: 0 where they are in the host's memory."""
    dataset = loader.dataset
    if isinstance(dataset, TensorRows) and dataset.device.type != "cpu":
        return dataset.nbytes
    return 0


def copy_to(device: torch.device, batch: Any) -> Any:
    """A batch of any structure on a device.

    A tuple or list of tensors is copied directly: Lightning's search through nested collections
    costs more than a small copy.
    """
    # A named tuple keeps its names.
    is_flat = type(batch) in (tuple, list)
    if not is_flat or not all(isinstance(part, Tensor) for part in batch):
        return move_data_to_device(batch, device)
    # A copy to CUDA need not be waited for. MPS would train on batches that have not arrived
    # (pytorch #189690).
    non_blocking = device.type == "cuda"
    return type(batch)(part.to(device, non_blocking=non_blocking) for part in batch)


def is_same_on_all_ranks(value: Any, trainer: Trainer | None) -> bool:
    """Whether every rank has the value that rank zero has. Every rank has to call it."""
    if trainer is None:
        return True
    first = trainer.strategy.broadcast(value)
    return trainer.strategy.reduce_boolean_decision(first == value)


def check_loading(
    sizes: Mapping[str, int | None],
    prefetch_factor: int,
    num_workers: int | None,
    on_device: bool | Literal["auto"],
) -> None:
    """A UserError for options of a data module that cannot be.

    Args:
        sizes: By the names of their options, such as ``batch_size``. None: no size was given.
        prefetch_factor: Batches each worker prepares ahead.
        num_workers: Loader processes. None: as many as suit the data.
        on_device: Whether to keep data on the device.
    """
    for name, size in {**sizes, "prefetch_factor": prefetch_factor}.items():
        require(size is None or size >= 1, f"--data.{name}", "be at least 1", size)
    most = f"be at most {MOST_BATCHES_AHEAD}"
    is_bounded = prefetch_factor <= MOST_BATCHES_AHEAD
    require(is_bounded, "--data.prefetch_factor", most, prefetch_factor)
    check_workers(num_workers or 0, on_device)


def check_workers(workers: int, on_device: bool | Literal["auto"]) -> None:
    """A UserError for a number of worker processes that cannot be, or is of no use."""
    option = "--data.num_workers"
    most = MOST_WORKERS_PER_CORE * (os.cpu_count() or 1)
    require(workers >= 0, option, "be at least 0", workers)
    require(workers <= most, option, f"be at most {most} on this machine", workers)
    if on_device is True:
        require(workers == 0, option, "be 0 with --data.on_device true", workers)


def collate(samples: Any) -> Any:
    """A batch of a list of samples; a tuple, gathered by :class:`TensorRows`, is one already."""
    if isinstance(samples, tuple):
        return samples
    return default_collate(samples)


def part_of(dataset: Dataset[Any], indices: Tensor) -> Dataset[Any]:
    """The samples of a dataset at ``indices`` (int64, (count,)); what was in memory stays what it
    is.
    """
    if isinstance(dataset, TensorRows):
        return dataset.holding(dataset.gather(indices))
    return Subset(dataset, indices.tolist())
