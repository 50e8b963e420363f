"""Replaces a run's loaders by ones with order by (seed, epoch), start at any batch, and exact sharding.

PyTorch and Lightning shuffle from a global generator, so a resumed run sees other batches, and pad or drop samples to
make ranks equal, so metrics depend on the number of devices. Here a plain ``DataLoader`` keeps all but its sampler and
seeding. A loader that cannot be made exact stays as it is, and the run says so in one line.
"""

import atexit
import math
import multiprocessing
import os
import random
import signal
import zlib
from collections.abc import Callable, Iterator, Sequence
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

from project.engine.lightning_internals import iterator_of
from project.errors import UserError

# Samplers that draw from torch's generator only, which is seeded here.
SEEDABLE = (
    data.RandomSampler,
    data.SequentialSampler,
    data.SubsetRandomSampler,
    data.WeightedRandomSampler,
)
# What an exact loader takes over as it is
KEPT = (
    "num_workers",
    "prefetch_factor",
    "persistent_workers",
    "multiprocessing_context",
    "pin_memory",
    "timeout",
)
END = object()  # of a loader
Request = tuple[
    int, int, Any
]  # a batch's epoch, its number there, also of several passes, its samples' keys


class Start(NamedTuple):
    """Where in an epoch training goes on."""

    epoch: int = 0
    batches: int = 0  # done, on each rank
    samples_per_batch: int = 0  # of all ranks together, at that time
    # of each of this rank's loaders: the number of the batch at which its pass began, and its (or its sampler's) state
    loaders: Sequence[tuple[int, Any]] = ()
    over: bool = False  # whether the epoch's training is done, and only its validation is left


class Passes:
    """Where training is in one of its loaders. Beside a longer one, a loader is passed through again in an epoch."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner  # what has a state that is kept, if anything has
        self.start = Start()  # of the next pass
        self.first = 0  # batches of this epoch's earlier passes
        self.finished = False  # whether a loader without an exact form has come to its end
        self.cycles = False  # whether a further pass of an epoch counts on, in another order
        self.states: dict[int, Any] = {}  # batches of this epoch that are done → the owner's state

    def set_epoch(self, epoch: int) -> None:
        """Lightning's hook: the next pass is of this epoch. Another epoch than before starts at its beginning."""
        if epoch != self.start.epoch:
            self.start, self.first = Start(epoch), 0

    def start_at(self, start: Start, first: int = 0, state: Any = None) -> None:
        """Start inside an epoch, in the pass before which ``first`` batches came."""
        self.set_epoch(start.epoch)
        self.start, self.first, self.finished = start, first, start.over
        if state is not None:
            self.owner.load_state_dict(state)

    def state(self) -> Any:
        return None if self.owner is None else self.owner.state_dict()

    def state_after(self, batches: int, epoch_ends: bool) -> tuple[int, Any]:
        """Where training goes on after so many batches, or with the next epoch; see :class:`Start`."""
        if epoch_ends:
            return 0, self.state()
        known = max((number for number in self.states if number <= batches), default=0)
        return known, self.states.get(known)


@dataclass(eq=False)
class ExactBatches(Passes, data.Sampler[Request]):
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
        super().__init__(self.source if has_state(self.source) else None)
        self.num_samples = len(self.source)
        if (
            self.batch_size is not None and self.training and self.drop_last
        ):  # a set smaller than a batch is one batch
            self.batch_size = min(self.batch_size, max(1, self.num_samples // self.world_size))
        few = self.num_samples < self.world_size and not self.in_memory
        if not self.training and (
            self.num_samples % self.world_size if self.batch_size is None else few
        ):
            parts = f"{self.num_samples} {'samples' if self.batch_size else 'ready batches'}"
            raise UserError(
                f"--devices {self.world_size}: an evaluation of {parts} cannot be shared. Use fewer."
            )

    @property
    def global_batch_size(self) -> int:
        """Samples that all ranks together see per batch; with a batch sampler, batches."""
        return (self.batch_size or 1) * self.world_size

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return len(self._cuts()) - 1

    @property
    def start_sample(self) -> int:
        """Samples before the next pass's first one. The batches they were seen in may have had another size."""
        done = max(0, self.start.batches - self.first) * (
            self.start.samples_per_batch or self.global_batch_size
        )
        return min(done, self.num_samples)

    @property
    def start_batch(self) -> int:
        """The number in the epoch of the next pass's first batch."""
        return self.first + len(self._cuts()) - len(self._cuts(self.start_sample))

    def __iter__(self) -> Iterator[Request]:
        if (
            self.start.over
        ):  # workers ask before they are asked; the source's order must wait for the next epoch
            return
        order = self._order()
        order = (
            order.to(self.device)
            if self.device is not None and isinstance(order, Tensor)
            else order
        )
        epoch, first, cuts = self.start.epoch, self.start_batch, self._cuts(self.start_sample)
        self.start = Start(epoch)  # the next iteration starts at the first batch
        for number, (begin, end) in enumerate(pairwise(cuts), start=first):
            mine, others = (
                begin + (end - begin) * rank // self.world_size
                for rank in (self.rank, self.rank + 1)
            )
            yield epoch, number, order[mine] if self.batch_size is None else order[mine:others]
        self.first = first + len(cuts) - 1 if self.cycles else 0

    def _order(self) -> Any:
        """The samples (or batches) of a whole pass in order, the same on every rank."""
        source, epoch_seed = (
            self.source,
            self.seed * 1_000_003 + self.start.epoch,
        )  # seeds' epochs lie far apart
        epoch_seed = hash((epoch_seed, self.first)) % 2**63 if self.first else epoch_seed
        self.states = {**(self.states if self.first else {}), self.first: self.state()}
        if type(source) is data.SequentialSampler:
            return torch.arange(self.num_samples)
        permutes = type(source) is data.RandomSampler and not source.replacement
        if permutes and self.num_samples == len(source.data_source):
            return torch.randperm(
                self.num_samples, generator=torch.Generator().manual_seed(epoch_seed)
            )
        if hasattr(source, "set_epoch"):
            source.set_epoch(self.start.epoch)
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
            has_more = (
                samples - cuts[-1] >= ranks and not self.drop_last
            )  # never without a batch size
            return [*cuts, samples] if has_more else cuts
        samples -= (
            samples % self.batch_size if self.drop_last and samples > self.batch_size else 0
        )  # as one rank does
        batches = math.ceil(math.ceil(samples / ranks) / self.batch_size)
        batches = max(1, batches if self.in_memory else min(batches, samples // ranks))
        return [samples * number // batches for number in range(batches + 1)]


@dataclass
class Fetch:
    """Fetches and collates batches of a map-style dataset.

    All generators are seeded first: in training from (seed, rank, epoch, batch), so that any number of workers, and a
    resumed run, get the same batch; in evaluation (``rank`` None) from (seed, sample), however the set is cut.

    The dataset's ``gather(indices: int64 tensor)``, ``__getitems__(list)`` or ``__getitem__`` is used, the first that
    it has. Without ``batched`` a request holds one key instead of a batch's.
    """

    dataset: Any
    collate: Callable[[Any], Any]
    seed: int
    rank: int | None
    batched: bool

    def __getitem__(self, request: Request) -> Any:
        dataset, seed, rank = self.dataset, self.seed, self.rank
        epoch, number, part = request
        if gathers(dataset):
            return dataset.gather(
                torch.as_tensor(part)
            )  # a list from a batch sampler of the user's own
        keys = part.tolist() if isinstance(part, Tensor) else part
        with isolate_rng(
            include_cuda=False
        ):  # in the main process those of the training must not change
            seed_generators(hash((seed, rank or 0, epoch, number)))
            if not self.batched:
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
            return self.collate(samples)


class ExactLoader(DataLoader[Any]):
    """The exact form of a plain loader over a map-style dataset: to the user's code the same loader, sampler apart."""

    sampler: ExactBatches
    _iterator = iterator_of("fetching")

    def __init__(
        self, loader: DataLoader[Any], training: bool, seed: int, rank: int = 0, world_size: int = 1
    ) -> None:
        dataset: Any = loader.dataset
        inner: Any = loader.batch_sampler
        source = source_of(loader, training)
        size, drop_last = None, False  # batch_size=None: the dataset returns whole batches
        if type(inner) is data.BatchSampler:
            size, drop_last = inner.batch_size, inner.drop_last
        elif (
            source is inner and not training
        ):  # for equally many batches per rank, the largest are halved
            source = sorted(map(list, source), key=len) if world_size > 1 else source
            while len(source) % world_size and len(source[-1]) > 1:
                largest = source.pop()
                half = len(largest) // 2
                source = sorted([*source, largest[:half], largest[half:]], key=len)
        device = getattr(dataset, "device", None) if gathers(dataset) else None
        batches = ExactBatches(
            source, size, drop_last, training, gathers(dataset), seed, rank, world_size, device
        )
        vars(self).update(
            vars(loader), sampler=batches
        )  # DataLoader.__init__ would take other arguments
        self.fetching: DataLoader[Any] = DataLoader(
            Fetch(
                dataset,
                loader.collate_fn,
                seed,
                rank if training else None,
                batched=inner is not None,
            ),  # type: ignore[arg-type]
            sampler=batches,
            batch_size=None,  # a request is a batch; PyTorch neither collates nor copies
            collate_fn=torch.nn.Identity(),  # not PyTorch's search for arrays in every batch
            worker_init_fn=partial(prepare_worker, further=loader.worker_init_fn),
            generator=torch.Generator().manual_seed(seed),  # not the training's generator
            in_order=loader.in_order,
            **{name: getattr(loader, name) for name in KEPT},
        )

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(
        self,
    ) -> Any:  # a generator: workers start when the first batch is asked for, at an epoch's start
        if self.sampler.in_memory and not (self.num_workers or self.pin_memory):
            yield from map(
                self.fetching.dataset.__getitem__, self.sampler
            )  # PyTorch's takes longer than the batch
        else:
            yield from self.fetching


class WatchedLoader(Passes):
    """A loader that has no exact form. The state of its ``owner`` (loader or dataset) is kept by batch: Lightning may
    have fetched one more than it trained. Random numbers here come from (seed, epoch, batch), on all ranks alike.
    """

    _iterator = iterator_of("loader")

    def __init__(self, loader: Any, owner: Any, seed: int) -> None:
        super().__init__(owner)
        self.loader, self.seed = loader, seed
        self.sampler = self  # where Lightning looks for ``set_epoch``
        self.rest: Any = None  # state after an epoch that ended before the loader did (``--limit_train_batches``)

    def __getattr__(self, name: str) -> Any:  # for the user's code: what the loader has
        if name == "loader" or name.startswith("_") or name.endswith("state_dict"):
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        if self.start.over:
            return
        if self.rest is not None:  # as a resumed run does
            self.owner.load_state_dict(self.rest)
        done, self.start, self.first, self.rest, self.finished = (
            self.first,
            Start(self.start.epoch),
            0,
            None,
            False,
        )
        self.states, length = (
            {**(self.states if done else {}), done: self.state()},
            sized_len(self.loader),
        )
        batches = self._drawn_for(-1, lambda: iter(self.loader))
        batch = self._drawn_for(done, lambda: next(batches, END))
        if batch is END:  # the epoch before ended with the loader
            batches = self._drawn_for(-1, lambda: iter(self.loader))
            batch = self._drawn_for(done, lambda: next(batches, END))
        while batch is not END:
            done += 1
            self.states[done] = self.state()
            self.states.pop(done - 4, None)
            # A batch ahead at the end, past which Lightning does not ask: a loader with a state must end its epoch. Not
            # before, as far as a length tells it: a loader may fill the same tensor again.
            current, is_ahead = (
                batch,
                self.owner is not None and (length is None or done % (length or 1) == 0),
            )
            batch = self._drawn_for(done, lambda: next(batches, END)) if is_ahead else batch
            self.finished = batch is END
            yield current
            batch = batch if is_ahead else self._drawn_for(done, lambda: next(batches, END))
        self.finished, self.first = True, done if self.cycles else 0

    def _drawn_for(self, batch: int, make: Callable[[], Any]) -> Any:
        with isolate_rng(include_cuda=False):
            seed_generators(hash((self.seed, self.start.epoch, batch)))
            return make()

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        parts = (
            getattr(self.loader, name, None) for name in ("dataset", "sampler", "batch_sampler")
        )
        for part in (self.loader, *parts):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)

    def state_after(self, batches: int, epoch_ends: bool) -> tuple[int, Any]:
        if epoch_ends and not self.finished:
            self.rest = self.states.get(batches)
            return 0, self.rest
        return super().state_after(batches, epoch_ends)


class ExactLoading:
    """Puts exact loaders in the place of a run's own, where Lightning lets the strategy process them."""

    def __init__(self, seed: int | None = None) -> None:
        self.seed = (
            int(os.environ.get("PL_GLOBAL_SEED", "0")) if seed is None else seed
        )  # seed_everything recorded it
        self.start = Start()
        self.shares = True
        self.anywhere = True  # whether training can start inside an epoch
        self.notes: list[str] = []  # what could not be made exact; several loaders may say the same
        self.training: list[Passes] = []
        self.read_early = (
            False  # whether Lightning reads before the module's hooks: a loader has no length
        )
        self._loaded_at: int | None = None  # the epoch for which ``training`` was made

    def install(self, trainer: Trainer) -> None:
        """From now on the trainer's loaders pass through here (``Strategy.process_dataloader``, Lightning's hook)."""
        strategy: Any = trainer.strategy
        further = strategy.process_dataloader
        strategy.process_dataloader = lambda loader: further(self.exact(loader, trainer))

    def exact(self, loader: Any, trainer: Trainer) -> Any:
        """A loader in its exact form, or as it is where there is none."""
        training, ranks = trainer.training, trainer.world_size
        if training and self._loaded_at != (epoch := trainer.current_epoch):
            # the first loaders, or those of --reload_dataloaders_every_n_epochs: these get no state of the ones before
            place, n = self.start, trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]
            if self._loaded_at is not None or (n and not place.batches and not place.over):
                self.start = Start(epoch)
            self._loaded_at, self.training = epoch, []
        # loaders side by side differ in order and draws
        seed = (
            hash((self.seed, len(self.training))) % 2**32
            if training and self.training
            else self.seed
        )
        maps = is_plain(loader) and not isinstance(loader.dataset, data.IterableDataset)
        source = source_of(loader, training) if maps else None
        sharded = hasattr(
            source, "num_replicas"
        )  # a DistributedSampler has cut its rank's part itself
        if sized_len(source) is not None:
            found = ExactLoader(
                loader, training, seed, *((0, 1) if sharded else (trainer.global_rank, ranks))
            )
            known = (
                isinstance(source, SEEDABLE) or hasattr(source, "set_epoch") or has_state(source)
            )
            if training and not known:
                lacks = f"{type(source).__name__} has neither set_epoch nor state_dict"
                self.notes.append(
                    f"{lacks}: if it keeps its own random state, a resumed run sees another order."
                )
        elif source is not None and ranks > 1 and not sharded:
            why = f"{type(source).__name__} has no length, so it cannot be shared by the ranks"
            raise UserError(f"--devices {ranks}: {why}. Give it __len__, or use one device.")
        else:
            found = self._watched(loader, seed, training, ranks)
        if training:
            self.training.append(found.sampler)
            self.read_early = self.read_early or sized_len(found) is None
            if self.read_early:
                self.begin()
            for each in self.training:
                each.cycles = len(self.training) > 1
        return found

    def _watched(self, loader: Any, seed: int, training: bool, ranks: int) -> Any:
        # with workers the dataset that counts is theirs
        owners = (
            loader,
            None if getattr(loader, "num_workers", 0) else getattr(loader, "dataset", None),
        )
        owner = next((part for part in owners if has_state(part)), None)
        own = isinstance(loader, DataLoader) and not is_plain(loader)
        name = type(loader if own else getattr(loader, "dataset", loader)).__name__
        if training and owner is None:
            self.anywhere = False
            lacks = f"the training data come from {name}, which has no state_dict"
            self.notes.append(f"{lacks}: a resumed run goes on from the last epoch's end.")
        if ranks > 1 and not (training and owner is not None):
            advice = "let it yield each rank its own part" + (
                "" if training else ", and log with sync_dist=True"
            )
            self.notes.append(f"every rank reads {name} as it is: {advice}.")
        return WatchedLoader(loader, owner if training else None, seed)

    def begin(self) -> None:
        """Put the loaders where training starts."""
        for loader, place in zip(
            self.training, chain(self.start.loaders, repeat((0, None))), strict=False
        ):
            loader.start_at(self.start, *place)

    @property
    def samples_per_batch(self) -> int:
        """Samples per batch of all ranks together, 0 where it is not known."""
        return getattr(self.training[0], "global_batch_size", 0) if len(self.training) == 1 else 0


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
        info: Any = data.get_worker_info()
        if info is not None:
            object.__setattr__(
                info, "dataset", info.dataset.dataset
            )  # the user's own, for their code
        further(worker)


@atexit.register
def end_workers() -> None:
    """Kill workers that are left as Python ends: it would wait for them, since they ignore the signal it sends."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises where a worker is killed
    for worker in multiprocessing.active_children():
        if worker.daemon:
            worker.kill()


def is_plain(loader: Any) -> bool:
    """Whether a loader gives its batches as PyTorch's own does; a subclass may have other arguments."""
    return (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__
        and not has_state(loader)
    )


def source_of(loader: DataLoader[Any], training: bool) -> Any:
    """The sampler of a plain loader's samples, or a batch sampler of the user's own."""
    inner: Any = loader.batch_sampler
    # not the loader's, where the user gave a BatchSampler
    source = (
        inner.sampler
        if type(inner) is data.BatchSampler
        else loader.sampler
        if inner is None
        else inner
    )
    if type(source) is data.DistributedSampler and not training:  # which repeats or drops samples
        return data.SequentialSampler(loader.dataset)  # type: ignore[arg-type]
    return source


def gathers(dataset: Any) -> bool:
    """Whether a dataset gives whole batches of rows in memory, by its own ``gather`` (a tensor's is another)."""
    return hasattr(dataset, "gather") and not isinstance(dataset, Tensor)


def has_state(part: Any) -> bool:
    """Whether an object can be saved and gone on with."""
    return callable(getattr(part, "state_dict", None)) and callable(
        getattr(part, "load_state_dict", None)
    )
