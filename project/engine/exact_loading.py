"""Replaces a run's loaders by ones with order by (seed, epoch), start at any batch, and exact sharding.

PyTorch and Lightning shuffle from a global generator, so a resumed run sees other batches, and pad or drop samples to
make ranks equal, so metrics depend on the number of devices. Here a plain ``DataLoader`` keeps all but its sampler and
seeding. A loader that cannot be made exact stays as it is, and the run says so in one line.
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
from itertools import chain, islice, pairwise, repeat
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils import data
from torch.utils.data import DataLoader

from project.errors import UserError

# Samplers that draw from torch's generator only, which is seeded here.
SEEDABLE = (data.RandomSampler, data.SequentialSampler, data.SubsetRandomSampler, data.WeightedRandomSampler)
# What an exact loader takes over as it is
KEPT = ("num_workers", "prefetch_factor", "persistent_workers", "multiprocessing_context", "pin_memory", "timeout")
SEED_STRIDE = 1_000_003  # between two seeds' epochs
END = object()  # of a loader


class Start(NamedTuple):
    """Where in an epoch training goes on."""

    epoch: int = 0
    batches: int = 0  # done, on each rank
    samples_per_batch: int = 0  # of all ranks together, at that time
    # of each of this rank's loaders: the number of the batch at which its pass began, and its (or its sampler's) state
    loaders: Sequence[tuple[int, Any]] = ()
    over: bool = False  # whether the epoch's training is done, and only its validation is left


class Request(NamedTuple):
    """A batch that is asked for."""

    epoch: int
    number: int  # in the epoch, also where a loader is passed through several times
    keys: Any


@dataclass(eq=False)
class ExactBatches(data.Sampler[Request]):
    """What one rank's loader asks its dataset for.

    Training: global batch ``k`` is ``order[k·B·W : (k+1)·B·W]`` and rank ``r`` takes its ``r``-th part, so W ranks with
    batch B train on what one rank with batch B·W trains on. The rest is shared evenly as a last, smaller batch, or left
    out with ``drop_last`` and where it has fewer samples than ranks.

    Evaluation: every sample comes once. One rank has the batches of the loader that was given. On several ranks global
    batches differ by at most one sample: all ranks have equally many, so that none waits for one that has finished.
    """

    source: Any  # the sampler whose order is cut into batches, or a batch sampler
    batch_size: int | None  # samples per rank; None with a batch sampler
    drop_last: bool = False
    training: bool = True
    in_memory: bool = False  # the dataset gives whole batches (see gathers), also of no samples
    seed: int = 0
    rank: int = 0
    world_size: int = 1
    device: torch.device | None = None  # where the dataset is asked

    def __post_init__(self) -> None:
        self.epoch = self.start_batch = self.start_sample = 0
        self.over = False  # whether nothing of this epoch is left
        # a short loader beside a longer one is passed through again, in another order
        self.cycles, self.passed = False, 0  # batches of this epoch's earlier passes
        self.passes: dict[int, Any] = {}  # the source's state where it has one, at the start of each pass
        self.num_samples = len(self.source)
        if self.batch_size is not None and self.training and self.drop_last:  # a set smaller than a batch is one batch
            self.batch_size = min(self.batch_size, max(1, self.num_samples // self.world_size))
        few = self.num_samples < self.world_size and not self.in_memory
        if not self.training and (self.num_samples % self.world_size if self.batch_size is None else few):
            parts = f"{self.num_samples} {'samples' if self.batch_size else 'ready batches'}"
            raise UserError(f"--devices {self.world_size}: an evaluation of {parts} cannot be shared. Use fewer.")

    @property
    def global_batch_size(self) -> int:
        """Samples that all ranks together see per batch; with a batch sampler, batches."""
        return (self.batch_size or 1) * self.world_size

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return len(self._cuts()) - 1

    def set_epoch(self, epoch: int) -> None:
        """Lightning's hook: the next iteration is of this epoch. Another epoch than before starts at its beginning."""
        if epoch != self.epoch:
            self.start_batch = self.start_sample = self.passed = 0
            self.over, self.passes = False, {}
        self.epoch = epoch

    def start_at(self, start: Start, passed: int = 0, state: Any = None) -> None:
        """Start inside an epoch, whose rest has the samples not seen, even if batch size or number of ranks differ."""
        self.epoch, self.over, self.passed = start.epoch, start.over, passed
        per_batch = start.samples_per_batch or self.global_batch_size
        self.start_sample = min((start.batches - passed) * per_batch, self.num_samples)
        self.start_batch = len(self._cuts()) - len(self._cuts(self.start_sample))
        if state is not None:
            self.source.load_state_dict(state)

    def __iter__(self) -> Iterator[Request]:
        if self.over:  # workers ask before they are asked; the source's order must wait for the next epoch
            return
        epoch, order, first = self.epoch, self._order(), self.passed + self.start_batch
        order = order.to(self.device) if self.device is not None and isinstance(order, Tensor) else order
        cuts = self._cuts(self.start_sample)
        self.start_batch = self.start_sample = 0  # the next iteration starts at the first batch
        for number, (begin, end) in enumerate(pairwise(cuts), start=first):
            mine, others = (begin + (end - begin) * rank // self.world_size for rank in (self.rank, self.rank + 1))
            yield Request(epoch, number, order[mine] if self.batch_size is None else order[mine:others])
        self.passed = first + len(cuts) - 1 if self.cycles else 0

    def _order(self) -> Any:
        """The samples (or batches) of a whole pass in order, the same on every rank."""
        source, epoch_seed, self.passes[self.passed] = self.source, self.seed * SEED_STRIDE + self.epoch, None
        epoch_seed = hash((epoch_seed, self.passed)) % 2**63 if self.passed else epoch_seed
        if type(source) is data.SequentialSampler:
            return torch.arange(self.num_samples)
        permutes = type(source) is data.RandomSampler and not source.replacement
        if permutes and self.num_samples == len(source.data_source):
            return torch.randperm(self.num_samples, generator=torch.Generator().manual_seed(epoch_seed))
        if hasattr(source, "set_epoch"):
            source.set_epoch(self.epoch)
        if has_state(source):
            self.passes[self.passed] = source.state_dict()
        with isolate_rng(include_cuda=False):
            seed_generators(epoch_seed)
            if isinstance(generator := getattr(source, "generator", None), torch.Generator):
                generator.manual_seed(epoch_seed)
            order = list(islice(source, len(source)))  # there are samplers that never end
        self.num_samples = len(order)
        return torch.tensor(order) if order and isinstance(order[0], int) else order

    def _cuts(self, first: int = 0) -> list[int]:
        """Where the global batches of an epoch's samples from ``first`` on begin, and the last one ends."""
        samples, ranks = self.num_samples, self.world_size
        if self.training or ranks == 1 or self.batch_size is None:
            cuts = list(range(first, samples + 1, self.global_batch_size))
            has_more = samples - cuts[-1] >= ranks and not self.drop_last  # never without a batch size
            return [*cuts, samples] if has_more else cuts
        batches = math.ceil(math.ceil(samples / ranks) / self.batch_size)
        batches = max(1, batches if self.in_memory else min(batches, samples // ranks))
        return [samples * number // batches for number in range(batches + 1)]


class Fetch(data.Dataset[Any]):
    """Fetches and collates batches of a map-style dataset. Its samples and attributes are the dataset's own.

    All generators are seeded first: in training from (seed, rank, epoch, batch), so that any number of workers, and a
    resumed run, get the same batch; in evaluation (``rank`` None) from (seed, sample), however the set is cut.

    The dataset's ``gather(indices: int64 tensor)``, ``__getitems__(list)`` or ``__getitem__`` is used, the first that
    it has. Without ``batched`` a request holds one key instead of a batch's.
    """

    _dataset: Any
    _how: Any

    def __init__(self, dataset: Any, collate: Callable[[Any], Any], seed: int, rank: int | None, batched: bool) -> None:
        vars(self).update(_dataset=dataset, _how=(collate, seed, rank, batched))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # pickle asks before there is a dataset
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, request: Any) -> Any:
        dataset, (collate, seed, rank, batched) = self._dataset, self._how
        if not isinstance(request, Request):
            return dataset[request]
        epoch, number, part = request
        if gathers(dataset):
            return dataset.gather(part)
        keys = part.tolist() if isinstance(part, Tensor) else part
        # a worker has generators of its own; in the main process those of the training must not change
        with isolate_rng(include_cuda=False) if data.get_worker_info() is None else nullcontext():
            seed_generators(hash((seed, rank or 0, epoch, number)))
            if not batched:
                samples = dataset[keys]
            elif hasattr(dataset, "__getitems__"):
                samples = dataset.__getitems__(keys)
            else:
                samples = []
                for key in keys:
                    if rank is None:  # hash() of a text differs from process to process
                        number = key if isinstance(key, int) else zlib.crc32(repr(key).encode())
                        seed_generators(hash((seed, number)))
                    samples.append(dataset[key])
            return collate(samples)


class ExactLoader(DataLoader[Any]):
    """A ``DataLoader`` of the user's with :class:`ExactBatches` for its sampler."""

    batches: ExactBatches
    start_at: Callable[..., None]

    @classmethod
    def of(cls, loader: DataLoader[Any], training: bool, seed: int, rank: int = 0, world_size: int = 1) -> ExactLoader:
        """The exact form of a plain loader over a map-style dataset."""
        dataset: Any = loader.dataset
        inner: Any = loader.batch_sampler
        source = source_of(loader)
        size, drop_last = None, False  # batch_size=None: the dataset returns whole batches
        if type(inner) is data.BatchSampler:
            size, drop_last = inner.batch_size, inner.drop_last
        elif source is inner and not training and world_size > 1:  # for equally many batches, cut the samples again
            parts = [list(part) for part in source]
            size, source = max(map(len, parts), default=1), [key for part in parts for key in part]
        device = getattr(dataset, "device", None) if gathers(dataset) else None
        batches = ExactBatches(source, size, drop_last, training, gathers(dataset), seed, rank, world_size, device)
        exact = cls(
            Fetch(dataset, loader.collate_fn, seed, rank if training else None, batched=inner is not None),
            sampler=batches,
            batch_size=None,  # a request is a batch; PyTorch neither collates nor copies
            collate_fn=torch.nn.Identity(),  # not PyTorch's search for arrays in every batch
            worker_init_fn=partial(prepare_worker, further=loader.worker_init_fn),
            generator=torch.Generator().manual_seed(seed),  # not the training's generator
            in_order=loader.in_order,
            **{name: getattr(loader, name) for name in KEPT},
        )
        exact.batches, exact.start_at = batches, batches.start_at
        vars(exact).update(batch_size=loader.batch_size, drop_last=loader.drop_last)  # as the user's code knows them
        return exact

    def __iter__(self) -> Any:  # a generator: workers start when the first batch is asked for, at an epoch's start
        if self.batches.in_memory and not (self.num_workers or self.pin_memory):
            yield from map(self.dataset.__getitem__, self.batches)  # PyTorch's iterator takes longer than the batch
        else:
            yield from super().__iter__()

    def state_after(self, batches: int, epoch_ends: bool) -> tuple[int, Any]:
        """Where the pass that has given this batch of the epoch began, or the next epoch's will; see :class:`Start`."""
        source = self.batches.source
        if epoch_ends:
            return 0, source.state_dict() if has_state(source) else None
        began = max((number for number in self.batches.passes if number < batches), default=0)
        return began, self.batches.passes.get(began)


class WatchedLoader:
    """A training loader that has no exact form. Where its ``owner`` (loader or dataset) has a state, that is kept by
    batch, as Lightning may have fetched one more than training has used. Random numbers in this process come from
    (seed, epoch, batch), the same on every rank.
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
        done, self.first, self._rest = self.first, 0, None
        self._states = {done: self._state()}
        batches = self._drawn_for(-1, lambda: iter(self.loader))
        batch = self._drawn_for(done, lambda: next(batches, END))
        self.finished = batch is END
        while not self.finished:
            done += 1
            self._states[done] = self._state()
            self._states.pop(done - 4, None)
            # One batch ahead: Lightning does not ask a loader with a length for more, and it would never end its epoch.
            current, batch = batch, self._drawn_for(done, lambda: next(batches, END))
            self.finished = batch is END
            self.first = done if self.finished else 0  # of a further pass, beside a longer loader
            yield current

    def _drawn_for(self, batch: int, make: Callable[[], Any]) -> Any:
        with isolate_rng(include_cuda=False):
            seed_generators(hash((self.seed, self.epoch, batch)))
            return make()

    def _state(self) -> Any:
        return None if self.owner is None else self.owner.state_dict()

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.first = epoch, self.first if epoch == self.epoch else 0
        samplers = (getattr(self.loader, name, None) for name in ("sampler", "batch_sampler"))
        for part in (self.dataset, self.loader, *samplers):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)

    def start_at(self, start: Start, passed: int = 0, state: Any = None) -> None:
        self.set_epoch(start.epoch)
        if state is not None:
            self.owner.load_state_dict(state)
            self.first = 0 if start.over else start.batches
        self._over = start.epoch if start.over else -1

    def state_after(self, batches: int, epoch_ends: bool) -> tuple[int, Any]:
        if epoch_ends and self.finished:
            return 0, self._state()
        state = self._states.get(batches)
        if epoch_ends:
            self._rest = state
        return 0, state


class ExactLoading:
    """Puts exact loaders in the place of a run's own, where Lightning lets the strategy process them."""

    def __init__(self, seed: int | None = None) -> None:
        self.seed = int(os.environ.get("PL_GLOBAL_SEED", "0")) if seed is None else seed  # seed_everything recorded it
        self.start = Start()
        self.anywhere = True  # whether training can start inside an epoch
        self.notes: list[str] = []  # what could not be made exact, a line each
        self.training: list[ExactLoader | WatchedLoader] = []
        self.read_early = False  # whether Lightning reads before the module's hooks: a loader has no length
        self._loaded_at: int | None = None  # the epoch for which ``training`` was made

    def install(self, trainer: Trainer) -> None:
        """From now on the trainer's loaders pass through here (``Strategy.process_dataloader``, Lightning's hook)."""
        strategy: Any = trainer.strategy
        further = strategy.process_dataloader
        strategy.process_dataloader = lambda loader: further(self.exact(loader, trainer))

    def exact(self, loader: Any, trainer: Trainer) -> Any:
        """A loader in its exact form, or as it is where there is none."""
        if trainer.training and self._loaded_at != (epoch := trainer.current_epoch):
            # the first loaders, or those of --reload_dataloaders_every_n_epochs: these get no state of the ones before
            place, n = self.start, trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]
            if self._loaded_at is not None or (n and not place.batches and not place.over):
                self.start = Start(epoch)
            self._loaded_at, self.training = epoch, []
        found = self._exact(loader, trainer.training, trainer.global_rank, trainer.world_size)
        if not isinstance(found, ExactLoader) and getattr(found, "owner", None) is None:
            own = isinstance(loader, DataLoader) and not is_plain(loader)
            name = type(loader if own else getattr(loader, "dataset", loader)).__name__
            if trainer.training:
                self.anywhere = False
                lacks = f"the training data come from {name}, which has no state_dict"
                self._note(f"{lacks}: a resumed run goes on from the last epoch's end.")
            if trainer.world_size > 1:
                self._note(f"every rank reads all of {name} as it is: let it yield each rank its own part.")
        if trainer.training:
            self.training.append(found)
            self.read_early = self.read_early or sized_len(found) is None
            if self.read_early:
                self.begin()
            for each in self.training:
                if isinstance(each, ExactLoader):
                    each.batches.cycles = len(self.training) > 1
        return found

    def _exact(self, loader: Any, training: bool, rank: int, world_size: int) -> Any:
        # loaders side by side differ in order and draws
        seed = hash((self.seed, len(self.training))) % 2**32 if training and self.training else self.seed
        if is_plain(loader) and not isinstance(loader.dataset, data.IterableDataset):
            source = source_of(loader)
            sharded = hasattr(source, "num_replicas")  # a DistributedSampler has cut its rank's part itself
            if sized_len(source) is not None:
                known = isinstance(source, SEEDABLE) or hasattr(source, "set_epoch") or has_state(source)
                if training and not known:
                    lacks = f"{type(source).__name__} has neither set_epoch nor state_dict"
                    self._note(f"{lacks}: if it keeps its own random state, a resumed run sees another order.")
                return ExactLoader.of(loader, training, seed, *((0, 1) if sharded else (rank, world_size)))
            if world_size > 1 and not sharded:
                why = f"{type(source).__name__} has no length, so it cannot be shared by the ranks"
                raise UserError(f"--devices {world_size}: {why}. Give it __len__, or use one device.")
        # with workers the dataset that counts is theirs
        owners = (loader, None if getattr(loader, "num_workers", 0) else getattr(loader, "dataset", None))
        owner = next((part for part in owners if has_state(part)), None)
        return WatchedLoader(loader, owner, seed) if training else loader

    def begin(self) -> None:
        """Put the loaders where training starts."""
        for loader, place in zip(self.training, chain(self.start.loaders, repeat((0, None))), strict=False):
            loader.start_at(self.start, *place)

    def states(self, batches: int, epoch_ends: bool = False) -> list[tuple[int, Any]]:
        """Where this rank's training loaders are after so many batches of the epoch, or before the next epoch."""
        return [loader.state_after(batches, epoch_ends) for loader in self.training]

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
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.environ["OMP_NUM_THREADS"] = "1"  # for other libraries: torch sees to itself
    if further is not None:
        further(worker)


def is_plain(loader: Any) -> bool:
    """Whether a loader gives its batches as PyTorch's own does; a subclass may have other arguments."""
    return isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__ and not has_state(loader)


def source_of(loader: DataLoader[Any]) -> Any:
    """The sampler of a plain loader's samples, or a batch sampler of the user's own."""
    inner = loader.batch_sampler
    if type(inner) is data.BatchSampler:
        return inner.sampler  # not the loader's, where the user gave a BatchSampler
    return loader.sampler if inner is None else inner


def gathers(dataset: Any) -> bool:
    """Whether a dataset gives whole batches of rows in memory, by its own ``gather`` (a tensor's is another)."""
    return hasattr(dataset, "gather") and not isinstance(dataset, Tensor)


def has_state(part: Any) -> bool:
    """Whether an object can be saved and gone on with."""
    return callable(getattr(part, "state_dict", None)) and callable(getattr(part, "load_state_dict", None))
