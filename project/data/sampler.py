"""Which samples a rank sees, in which order: a function of (seed, epoch, rank) and nothing else.

Lightning and PyTorch shuffle from a global generator, so a resumed run sees other batches than the run that was
killed, and pad or drop samples to make ranks equal, so metrics depend on the number of devices. Here the order
is computed, can start anywhere, and evaluation sees every sample exactly once.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, SequentialSampler, default_collate, get_worker_info


class TrainBatchSampler(Sampler[Tensor]):
    """Index tensors (batch,) of one rank's training batches.

    All ranks cut the same permutation: global batch ``k`` is ``order[k·B·W : (k+1)·B·W]`` and rank ``r`` takes its
    ``r``-th part, so W ranks with batch B train on what one rank with batch B·W trains on. What does not fill a
    global batch at the end of an epoch waits for another epoch's permutation: every step has the same size.

    Args:
        num_samples: Samples in the training set.
        batch_size: Samples per batch and rank; cut to what is there when the set is smaller than one global batch.
        rank: This process's rank.
        world_size: Number of ranks.
        seed: Seed of the permutations.
    """

    def __init__(self, num_samples: int, batch_size: int, rank: int = 0, world_size: int = 1, seed: int = 0) -> None:
        self.num_samples = num_samples
        self.batch_size = min(batch_size, max(1, num_samples // world_size))
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.epoch = 0
        self.start_batch = 0
        self.start_sample = 0

    @property
    def global_batch_size(self) -> int:
        """Samples that all ranks together see per batch."""
        return self.batch_size * self.world_size

    def __len__(self) -> int:
        """Batches in a whole epoch, wherever this one starts."""
        return self.num_samples // self.global_batch_size

    def set_epoch(self, epoch: int) -> None:
        """Lightning's hook: the next iteration is of this epoch. Another epoch than before starts at its beginning."""
        if epoch != self.epoch:
            self.start_batch = self.start_sample = 0
        self.epoch = epoch

    def resume_at(self, epoch: int, samples_done: int) -> int:
        """Start inside an epoch, after ``samples_done`` samples (of all ranks). Returns the batches counted as done.

        The batches that follow reach exactly to where an undisturbed epoch ends, also when the batch size or the
        number of ranks is another than before: no sample is seen twice.
        """
        self.epoch = epoch
        self.start_sample = min(samples_done, self.num_samples)
        self.start_batch = len(self) - (self.num_samples - self.start_sample) // self.global_batch_size
        return self.start_batch

    def __iter__(self) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = torch.randperm(self.num_samples, generator=generator)
        first = self.start_sample + self.rank * self.batch_size
        for k in range(len(self) - self.start_batch):
            start = first + k * self.global_batch_size
            yield order[start : start + self.batch_size]


class EvalBatchSampler(SequentialSampler):  # as such, --overfit_batches leaves it in its place
    """Index tensors (batch,) of one rank's evaluation batches: every sample once, in order, over all ranks.

    Rank ``r`` takes a contiguous part of the set. All ranks make the same number of batches, of sizes that differ
    by at most one and may be 0 (more ranks than samples), so that a collective in a step never waits for a rank
    that has finished.
    """

    def __init__(self, num_samples: int, batch_size: int, rank: int = 0, world_size: int = 1) -> None:
        self.first = num_samples * rank // world_size
        self.end = num_samples * (rank + 1) // world_size
        largest = -(-num_samples // world_size)
        self.num_batches = max(1, -(-largest // batch_size))

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[Tensor]:  # type: ignore[override]  # batches of indices, not indices
        size = self.end - self.first
        for k in range(self.num_batches):
            start = self.first + size * k // self.num_batches
            end = self.first + size * (k + 1) // self.num_batches
            yield torch.arange(start, end)


# Datasets that answer a whole batch of indices in one call, and the loader around them.


class TensorImages(Dataset[tuple[Tensor, Tensor]]):
    """Images and labels that live in memory; a batch is gathered by its indices (int64, from 0) in one call.

    Args:
        images: uint8, or float in 0-1, (count, channels, height, width); (count, height, width) is one channel.
        labels: Whole numbers from 0, (count,).
    """

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images = images if images.ndim == 4 else images.unsqueeze(1)
        self.labels = labels.long()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, indices: Any) -> tuple[Tensor, Tensor]:
        if isinstance(indices, Tensor) and indices.ndim == 1 and indices.dtype == torch.int64:
            # copies image by image; images[indices] goes byte by byte and takes a CPU eight times as long
            return self.images.index_select(0, indices), self.labels.index_select(0, indices)
        return self.images[indices], self.labels[indices]


class SeededFetch(Dataset[Any]):
    """A map-style dataset of single samples, fetched a batch at a time with random numbers tied to the batch.

    Random augmentation in ``__getitem__`` usually depends on which worker fetched what before, and so cannot be
    repeated. Here all generators are seeded from (seed, epoch, the batch's indices) before a batch is fetched: any
    number of workers, and a resumed run, get the same images.

    Args:
        dataset: Any map-style dataset (``__getitem__(int)``; ``__getitems__(list)`` is used where it exists).
        seed: Seed of the run.
        collate: Makes a batch of a list of samples.
    """

    def __init__(self, dataset: Dataset[Any], seed: int, collate: Callable[[list[Any]], Any] = default_collate) -> None:
        self.dataset = dataset
        self.seed = seed
        self.collate = collate

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, request: tuple[int, Tensor]) -> Any:
        epoch, indices = request
        # In a worker the generators are nobody else's; in the main process the training's own must not move.
        scope: AbstractContextManager[Any] = nullcontext() if get_worker_info() else torch.random.fork_rng(devices=[])
        python_state, numpy_state = random.getstate(), np.random.get_state()
        with scope:
            first = int(indices[0]) if len(indices) else 0
            seed = hash((self.seed, epoch, first)) % 2**32
            torch.default_generator.manual_seed(seed)  # not the GPU's as well, which are the training's
            random.seed(seed)
            np.random.seed(seed)
            wanted = indices.tolist()
            fetch_many = getattr(self.dataset, "__getitems__", None)
            samples = fetch_many(wanted) if fetch_many else [self.dataset[i] for i in wanted]
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        return self.collate(samples)


def collate_images(samples: list[Any], image_shape: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """A batch of (image, label) samples; Pillow images become uint8 tensors of ``image_shape``.

    Returns:
        Images (batch, channels, height, width), and labels int64 (batch,).
    """
    if not samples:  # a rank of an evaluation with more ranks than samples
        return torch.empty(0, *image_shape, dtype=torch.uint8), torch.empty(0, dtype=torch.int64)
    images, labels = default_collate([(_as_tensor(image, image_shape), label) for image, label in samples])
    return images, labels.long()


def _as_tensor(image: Any, image_shape: tuple[int, int, int]) -> Any:
    """uint8 (channels, height, width) of a Pillow image: its largest middle part of that shape. Tensors as they are."""
    if not hasattr(image, "convert"):
        return image
    from PIL import ImageOps

    channels, height, width = image_shape
    fitted = ImageOps.fit(image.convert("L" if channels == 1 else "RGB"), (width, height))
    return torch.from_numpy(np.array(fitted)).view(height, width, channels).permute(2, 0, 1)


class EpochTagged(Sampler[Any]):
    """Yields ``(epoch, indices)`` for :class:`SeededFetch`; everything else is the wrapped sampler's."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler)

    def __getattr__(self, name: str) -> Any:
        if name == "sampler":  # not set yet: copying and unpickling ask before __init__ has run
            raise AttributeError(name)
        return getattr(self.sampler, name)

    def __iter__(self) -> Any:
        epoch = getattr(self.sampler, "epoch", 0)
        return ((epoch, indices) for indices in self.sampler)


def make_loader(
    dataset: Dataset[Any],
    sampler: Sampler[Any],
    *,
    num_workers: int,
    pin_memory: bool,
    prefetch_factor: int,
    seed: int,
    image_shape: tuple[int, int, int],
) -> DataLoader[Any]:
    """A loader that asks ``dataset`` for whole batches: ``dataset[indices]`` for every item of ``sampler``."""
    if not isinstance(dataset, TensorImages):
        dataset = SeededFetch(dataset, seed, partial(collate_images, image_shape=image_shape))
        sampler = EpochTagged(sampler)
    return DataLoader(
        dataset,
        sampler=sampler,
        batch_size=None,  # the sampler yields batches; PyTorch neither collates nor copies
        collate_fn=_as_it_is,
        num_workers=num_workers,
        pin_memory=pin_memory,
        persistent_workers=num_workers > 0,
        prefetch_factor=prefetch_factor if num_workers > 0 else None,
        worker_init_fn=_leave_signals_to_the_trainer if num_workers > 0 else None,
        generator=torch.Generator().manual_seed(seed),  # else every epoch draws from the training's generator
    )


def _as_it_is(batch: Any) -> Any:
    """In the place of PyTorch's walk through every batch in search of arrays to convert: 7 microseconds a step."""
    return batch


def _leave_signals_to_the_trainer(_: int) -> None:
    """A signal sent to the whole process group must not kill the workers under a trainer that is saving."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
