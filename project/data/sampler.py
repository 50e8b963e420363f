"""Which samples a rank sees, in which order: a function of (seed, epoch, rank) and nothing else.

Lightning and PyTorch shuffle from a global generator, so a resumed run sees other batches than the run that was
killed, and pad or drop samples to make ranks equal, so metrics depend on the number of devices. Here the order
is computed, can start anywhere, and evaluation sees every sample exactly once.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import Sampler, SequentialSampler


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
