"""Replaces a run's loaders by ones with order by (seed, epoch), start at any batch, and exact sharding.

PyTorch and Lightning shuffle from a global generator, so a resumed run sees other batches than the run that was killed,
and pad or drop samples to make ranks equal, so metrics depend on the number of devices. Here a plain ``DataLoader``
that a module or data module returns keeps its dataset, batch size, collate function, workers and pinning, and gets
another sampler and seeding. A loader that cannot be made exact stays as it is, and the run says so in one line.
"""

from __future__ import annotations

import math
import os
import random
import signal
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from project.errors import UserError

# Samplers that draw from torch's generator only, which is seeded here.
SEEDABLE = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)
SEED_STRIDE = 1_000_003  # between two seeds' epochs
END = object()  # of a loader


@dataclass(frozen=True)
class Start:
    """Where in an epoch training goes on."""

    epoch: int = 0
    batches: int = 0  # done, on each rank
    samples_per_batch: int = 0  # of all ranks together, at that time
    states: Sequence[Any] = ()  # of this rank's stateful loaders or samplers
    over: bool = False  # whether nothing of the epoch's training is left: only its validation, and the states after it


class ExactBatches(Sampler[Any]):
    """What one rank's loader asks its dataset for: ``(epoch, number, keys)`` per batch.

    Training: global batch ``k`` is ``order[k·B·W : (k+1)·B·W]`` and rank ``r`` takes its ``r``-th part, so W ranks with
    batch B train on what one rank with batch B·W trains on. What does not fill a global batch is shared out evenly as a
    last, smaller one, or left out with ``drop_last`` (and where it has fewer samples than ranks).

    Evaluation: one rank has the batches of the loader that was given. Of several ranks each takes a contiguous part
    of the set and makes equally many batches of it, whose sizes differ by at most one, so that a collective in a step
    never waits for a rank that has finished. Every sample comes once.

    ``source`` is the sampler whose order is cut into batches of ``batch_size`` samples per rank, or a batch sampler
    where that is None. ``may_be_empty``: the dataset can make a batch of no samples (more ranks than samples).
    ``device``: where the dataset is asked; an order is put there once.
    """

    def __init__(
        self,
        source: Any,
        batch_size: int | None,
        drop_last: bool = False,
        training: bool = True,
        may_be_empty: bool = False,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | None = None,
    ) -> None:
        self.device = device
        self.source, self.batch_size, self.drop_last, self.training = source, batch_size, drop_last, training
        self.may_be_empty, self.seed, self.rank, self.world_size = may_be_empty, seed, rank, world_size
        self.epoch = self.start_batch = self.start_sample = 0
        self.over = False  # whether nothing of this epoch is left
        self.state: Any = None  # of the source at the epoch's start, where it has one
        self.num_samples = len(source)
        if batch_size is not None and training and drop_last:  # a set smaller than a batch is one batch
            self.batch_size = min(batch_size, max(1, self.num_samples // world_size))
        uneven = self.num_samples % world_size if batch_size is None else self.num_samples < world_size
        if not training and uneven and not may_be_empty:
            parts = f"{self.num_samples} {'samples' if batch_size else 'ready batches'}"
            raise UserError(f"--devices {world_size}: an evaluation of {parts} cannot be shared. Use fewer devices.")

    @property
    def global_batch_size(self) -> int:
        """Samples that all ranks together see per batch; with a batch sampler, batches."""
        return (self.batch_size or 1) * self.world_size

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return self._batches_of(self.num_samples)

    def set_epoch(self, epoch: int) -> None:
        """Lightning's hook: the next iteration is of this epoch. Another epoch than before starts at its beginning."""
        if epoch != self.epoch:
            self.start_batch, self.start_sample, self.over = 0, 0, False
        self.epoch = epoch

    def start_at(self, start: Start) -> None:
        """Start inside an epoch. The rest ends where an undisturbed epoch ends, and no sample is seen twice, even
        if the batch size or the number of ranks has changed.
        """
        self.epoch, self.over = start.epoch, start.over
        per_batch = start.samples_per_batch or self.global_batch_size
        self.start_sample = min(start.batches * per_batch, self.num_samples)
        self.start_batch = len(self) - self._batches_of(self.num_samples - self.start_sample)
        if start.states and has_state(self.source):
            self.source.load_state_dict(start.states[0])

    def __iter__(self) -> Iterator[Any]:
        if self.over:  # workers ask before they are asked; the source's order must wait for the next epoch
            return
        epoch, first_batch, order = self.epoch, self.start_batch, self._order()
        order = order.to(self.device) if self.device is not None and isinstance(order, Tensor) else order
        by_batches = self.training or self.world_size == 1
        parts = self._batches(order, self.start_sample) if by_batches else self._shares(order)
        for number, part in enumerate(parts, start=first_batch):
            yield (epoch, number, part)
        self.start_batch = self.start_sample = 0  # the next iteration starts at the first batch

    def _order(self) -> Any:
        """The whole epoch's samples (or batches) in order, the same on every rank."""
        source, epoch_seed = self.source, self.seed * SEED_STRIDE + self.epoch
        if type(source) is SequentialSampler:
            return torch.arange(self.num_samples)
        if type(source) is RandomSampler and not source.replacement and self.num_samples == len(source.data_source):
            return torch.randperm(self.num_samples, generator=torch.Generator().manual_seed(epoch_seed))
        if hasattr(source, "set_epoch"):
            source.set_epoch(self.epoch)
        if has_state(source):
            self.state = source.state_dict()
        with isolate_rng(include_cuda=False):
            seed_generators(epoch_seed)
            if isinstance(generator := getattr(source, "generator", None), torch.Generator):
                generator.manual_seed(epoch_seed)
            order = list(source)
        self.num_samples = len(order)
        return torch.tensor(order) if order and isinstance(order[0], int) else order

    def _batches(self, order: Any, first: int) -> Iterator[Any]:
        rank, ranks, size = self.rank, self.world_size, self.batch_size
        if size is None:  # whole batches, distributed over the ranks in turn
            yield from (order[k + rank] for k in range(first, len(order) - ranks + 1, ranks))
            return
        for begin in range(first, len(order) - ranks * size + 1, ranks * size):
            yield order[begin + rank * size : begin + (rank + 1) * size]
        rest = (len(order) - first) % (ranks * size)
        if rest >= ranks and not self.drop_last:
            begin = len(order) - rest
            yield order[begin + rest * rank // ranks : begin + rest * (rank + 1) // ranks]

    def _shares(self, order: Any) -> Iterator[Any]:
        """Of an evaluation on several ranks."""
        batches, begin = len(self), len(order) * self.rank // self.world_size
        mine = len(order) * (self.rank + 1) // self.world_size - begin
        if self.batch_size is None:
            yield from order[begin : begin + mine]
            return
        yield from (order[begin + mine * k // batches : begin + mine * (k + 1) // batches] for k in range(batches))

    def _batches_of(self, samples: int) -> int:
        """Number of batches per rank for this many samples."""
        if self.batch_size is None:
            return samples // self.world_size
        if self.training or self.world_size == 1:
            whole, rest = divmod(samples, self.global_batch_size)
            return whole + (rest >= self.world_size and not self.drop_last)
        needed = max(1, math.ceil(math.ceil(samples / self.world_size) / self.batch_size))
        return needed if self.may_be_empty else max(1, min(needed, samples // self.world_size))


class Fetch(Dataset[Any]):
    """A map-style dataset, fetched and collated a batch at a time, its random numbers tied to what is fetched.

    Random transforms usually depend on what each worker fetched before, so they cannot be repeated. Here all generators
    are seeded first: in training from (seed, rank, epoch, batch), so that any number of workers, and a resumed run, get
    the same batch; in evaluation from (seed, sample), so that nothing depends on how the set is cut into batches.

    ``__getitem__`` of the dataset, or where it exists ``__getitems__(list)``, is used. One that has
    ``gather(indices: int64 tensor)`` is in memory and is asked for whole batches. ``rank`` is None in evaluation;
    without ``batched`` a request holds one key instead of a batch's.
    """

    def __init__(
        self, dataset: Any, collate: Callable[[Any], Any], seed: int, rank: int | None, batched: bool = True
    ) -> None:
        self.dataset, self.collate, self.seed, self.rank, self.batched = dataset, collate, seed, rank, batched

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, request: tuple[int, int, Any]) -> Any:
        epoch, number, part = request
        if hasattr(self.dataset, "gather"):
            return self.dataset.gather(part)
        keys = part.tolist() if isinstance(part, Tensor) else part
        # a worker has generators of its own; in the main process those of the training must not change
        with isolate_rng(include_cuda=False) if get_worker_info() is None else nullcontext():
            seed_generators(hash((self.seed, self.rank or 0, epoch, number)))
            if not self.batched:
                samples = self.dataset[keys]
            elif hasattr(self.dataset, "__getitems__"):
                samples = self.dataset.__getitems__(keys)
            else:
                samples = [self._sample(key) for key in keys]
            return self.collate(samples)

    def _sample(self, key: Any) -> Any:
        if self.rank is None:
            # hash() of a text differs from process to process
            number = key if isinstance(key, int) else zlib.crc32(repr(key).encode())
            seed_generators(hash((self.seed, number)))
        return self.dataset[key]


class ExactLoader(DataLoader[Any]):
    """A ``DataLoader`` of the user's with :class:`ExactBatches` for its sampler; ``dataset.dataset`` is the user's."""

    batches: ExactBatches
    start_at: Callable[[Start], None]

    @classmethod
    def of(cls, loader: DataLoader[Any], training: bool, seed: int, rank: int = 0, world_size: int = 1) -> ExactLoader:
        """The exact form of a plain loader over a map-style dataset."""
        dataset: Any = loader.dataset
        inner: Any = loader.batch_sampler
        size, drop_last, source = None, False, inner
        if inner is None:  # batch_size=None: the dataset returns whole batches
            source = loader.sampler
        elif type(inner) is BatchSampler:
            size, drop_last, source = inner.batch_size, inner.drop_last, inner.sampler
        elif not training and world_size > 1:  # ranks need equally many batches, so the samples are distributed again
            parts = [list(part) for part in inner]
            size, source = max(map(len, parts), default=1), [key for part in parts for key in part]
        in_memory, device = hasattr(dataset, "gather"), getattr(dataset, "device", None)
        batches = ExactBatches(source, size, drop_last, training, in_memory, seed, rank, world_size, device)
        workers = loader.num_workers
        exact = cls(
            Fetch(dataset, loader.collate_fn, seed, rank if training else None, batched=inner is not None),
            sampler=batches,
            batch_size=None,  # a request is a batch; PyTorch neither collates nor copies
            collate_fn=as_it_is,
            num_workers=workers,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=partial(prepare_worker, further=loader.worker_init_fn) if workers else None,
            multiprocessing_context=loader.multiprocessing_context,
            generator=torch.Generator().manual_seed(seed),  # not the training's generator
            prefetch_factor=loader.prefetch_factor if workers else None,
            persistent_workers=loader.persistent_workers,
            in_order=loader.in_order,
        )
        exact.batches, exact.start_at = batches, batches.start_at
        return exact

    def state_after(self, batches: int, epoch_ends: bool) -> Any:
        """The sampler's own state when this epoch began, or when the next one will; None where it has none."""
        source = self.batches.source
        return source.state_dict() if epoch_ends and has_state(source) else self.batches.state


class WatchedLoader:
    """A training loader that has no exact form; it may have a state (or its dataset), recorded after every batch.

    Its random numbers in this process come from (seed, epoch, batch), the same on every rank, and training's generators
    do not move. Lightning may have fetched one batch more than training has used. So the states after the last batches
    are kept, and a checkpoint takes the one with its batch's number.

    ``owner`` has ``state_dict`` and ``load_state_dict``: the loader, its dataset, or None.
    """

    def __init__(self, loader: Any, owner: Any, seed: int) -> None:
        self.loader, self.owner, self.seed = loader, owner, seed
        self.dataset = getattr(loader, "dataset", None)
        self.sampler = self  # where Lightning looks for ``set_epoch``
        self.epoch = 0
        self.first = 0  # batches of this epoch that came before
        self.finished = False  # whether the loader has come to its end
        self._states: dict[int, Any] = {}  # batch → state after it
        self._over = -1  # an epoch of which nothing is left
        self._rest: Any = None  # state after an epoch that ended before the loader did (``--limit_train_batches``)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        if self.epoch == self._over:
            return
        if self._rest is not None:  # as a resumed run does
            self.owner.load_state_dict(self._rest)
        done, self.first, self.finished, self._rest = self.first, 0, False, None
        self._states = {done: self._state()}
        batches = self._drawn_for(-1, lambda: iter(self.loader))
        batch = self._next(batches, done)
        while not self.finished:
            done += 1
            self._states[done] = self._state()
            self._states.pop(done - 4, None)
            # One batch ahead: Lightning does not ask a loader with a length for more, and it would never end its epoch.
            current, batch = batch, self._next(batches, done)
            yield current

    def _next(self, batches: Iterator[Any], number: int) -> Any:
        batch = self._drawn_for(number, lambda: next(batches, END))
        self.finished = batch is END
        return batch

    def _drawn_for(self, batch: int, make: Callable[[], Any]) -> Any:
        with isolate_rng(include_cuda=False):
            seed_generators(hash((self.seed, self.epoch, batch)))
            return make()

    def _state(self) -> Any:
        return None if self.owner is None else self.owner.state_dict()

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        samplers = [getattr(self.loader, "sampler", None), getattr(self.loader, "batch_sampler", None)]
        for part in (self.dataset, self.loader, *samplers):
            if (tell := getattr(part, "set_epoch", None)) is not None:
                tell(epoch)

    def start_at(self, start: Start) -> None:
        """Start where the checkpoint was taken."""
        self.set_epoch(start.epoch)
        if start.states and self.owner is not None:
            self.owner.load_state_dict(start.states[0])
            self.first = 0 if start.over else start.batches
        self._over = start.epoch if start.over else -1

    def state_after(self, batches: int, epoch_ends: bool) -> Any:
        """The state after so many batches of this epoch, where there is one."""
        if epoch_ends and self.finished:
            return self._state()
        state = self._states.get(batches)
        if epoch_ends:
            self._rest = state
        return state


class ExactLoading:
    """Puts exact loaders in the place of a run's own, where Lightning lets the strategy process them."""

    def __init__(self, seed: int | None = None) -> None:
        # the run's seed, as Lightning's seed_everything recorded it
        self.seed = int(os.environ.get("PL_GLOBAL_SEED", "0")) if seed is None else seed
        self.start = Start()
        self.anywhere = True  # whether training can start inside an epoch
        self.notes: list[str] = []  # what could not be made exact, a line each
        self.training: list[ExactLoader | WatchedLoader] = []
        self._installed: object = None

    def install(self, trainer: Trainer) -> None:
        """From now on the trainer's loaders pass through here (``Strategy.process_dataloader``, Lightning's hook)."""
        strategy: Any = trainer.strategy
        if self._installed is not strategy:
            self._installed, further = strategy, strategy.process_dataloader
            strategy.process_dataloader = lambda loader: further(self.exact(loader, trainer))

    def exact(self, loader: Any, trainer: Trainer) -> Any:
        """A loader in its exact form, or as it is where there is none."""
        found = self._exact(loader, trainer.training, trainer.global_rank, trainer.world_size)
        if not isinstance(found, ExactLoader) and getattr(found, "owner", None) is None:
            name = type(getattr(loader, "dataset", loader)).__name__
            if trainer.training:
                self.anywhere = False
                self._note(
                    f"the training data come from {name}, which has no state_dict: a resumed run goes on from the last "
                    "epoch's end."
                )
            if trainer.world_size > 1:
                self._note(f"every rank reads all of {name} as it is: let it yield each rank its own part.")
        if trainer.training:
            self.training.append(found)
            found.start_at(self.start)
        return found

    def _exact(self, loader: Any, training: bool, rank: int, world_size: int) -> Any:
        if type(loader) is DataLoader and not isinstance(loader.dataset, IterableDataset):
            inner: Any = loader.batch_sampler
            source = loader.sampler if inner is None or type(inner) is BatchSampler else inner
            sharded = hasattr(source, "num_replicas")  # a DistributedSampler has cut its rank's part itself
            if _has_length(source):
                known = isinstance(source, SEEDABLE) or hasattr(source, "set_epoch") or has_state(source)
                if training and not known:
                    self._note(
                        f"{type(source).__name__} has neither set_epoch nor state_dict: if it keeps its own random "
                        "state, a resumed run sees another order than the run that was killed."
                    )
                return ExactLoader.of(loader, training, self.seed, *((0, 1) if sharded else (rank, world_size)))
            if world_size > 1 and not sharded:
                raise UserError(
                    f"--devices {world_size}: {type(source).__name__} has no length, so it cannot be shared by the "
                    "ranks. Give it __len__, or use one device."
                )
        # with workers the dataset that counts is theirs
        owners = (loader, None if getattr(loader, "num_workers", 0) else getattr(loader, "dataset", None))
        owner = next((part for part in owners if has_state(part)), None)
        return WatchedLoader(loader, owner, self.seed) if training else loader

    def states(self, batches: int, epoch_ends: bool = False) -> list[Any]:
        """The state of this rank's training loaders after so many batches of the epoch, or before the next epoch."""
        states = [loader.state_after(batches, epoch_ends) for loader in self.training]
        return states if any(state is not None for state in states) else []

    @property
    def samples_per_batch(self) -> int:
        """Samples per batch of all ranks together, 0 where it is not known."""
        loader = self.training[0] if len(self.training) == 1 else None
        return loader.batches.global_batch_size if isinstance(loader, ExactLoader) else 0

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def seed_generators(seed: int) -> None:
    """Seed Python's, NumPy's and torch's CPU generators, not the GPU's, which only the training uses."""
    torch.default_generator.manual_seed(seed % 2**63)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def prepare_worker(worker: int, further: Callable[[int], Any] | None) -> None:
    """Let a loader's worker ignore stop signals, which the trainer handles, and use one core."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    if further is not None:
        further(worker)


def as_it_is(batch: Any) -> Any:
    """Replaces PyTorch's search for arrays to convert in every batch."""
    return batch


def has_state(part: Any) -> bool:
    """Whether an object can be saved and gone on with."""
    return callable(getattr(part, "state_dict", None)) and callable(getattr(part, "load_state_dict", None))


def _has_length(source: Any) -> bool:
    try:
        return len(source) >= 0
    except (TypeError, NotImplementedError):
        return False
