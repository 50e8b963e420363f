"""The exact form of a plain loader over a map-style dataset."""

import functools
import operator
import types
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.utils import data
from torch.utils.data import DataLoader
from unbroken.lightning_internals import iterator_of
from unbroken.loading.batches import ExactBatches, Request
from unbroken.loading.fetch import Fetch
from unbroken.loading.samplers import source_of
from unbroken.loading.workers import end_workers_at_exit, iterate, prepare_worker
from unbroken.stopping.ranks import say

# What an exact loader takes over from the loader that was given.
KEPT = (
    "num_workers",
    "prefetch_factor",
    "persistent_workers",
    "multiprocessing_context",
    "pin_memory",
    "timeout",
    "in_order",
)


def made_of(loader: DataLoader[Any]) -> list[Any]:
    """What the loader that fetches is made of."""
    names = ("dataset", "collate_fn", "worker_init_fn", *KEPT)
    return [getattr(loader, name) for name in names]


def are_the_same(before: list[Any], now: list[Any]) -> bool:
    """Whether two lists hold the same objects: data sets may not be compared by value."""
    return len(before) == len(now) and all(map(operator.is_, before, now))


def not_in_a_checkpoint(loader: DataLoader[Any]) -> dict[str, Any]:
    """What decides which batches a loader gives, and can be exchanged in training."""
    return {"collate_fn": loader.collate_fn, "the sampler": source_of(loader)}


def lost_unless_set_again(name: str, loader: Any) -> str:
    """The line about an attribute that no checkpoint holds."""
    return (
        f"{name} of {type(loader).__name__} was changed in training: a resumed run has it only if"
        " on_train_epoch_start sets it, by the epoch's number."
    )


def itself(loader: Any) -> Any:
    """The loader. A pickled object begins with a call."""
    return loader


class PlainRequests(data.Sampler[Request]):
    """The same requests without tensors, for worker processes.

    A tensor would be sent through shared memory. Where that is full, the request would be lost, and
    worker and training would wait for each other.
    """

    def __init__(self, batches: ExactBatches) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Request]:
        for epoch, number, part in self.batches:
            yield epoch, number, part.tolist() if isinstance(part, torch.Tensor) else part


class ExactLoader(DataLoader[Any]):
    """The exact form of a plain loader: to the user's code the same loader.

    It is made by :func:`exact_form`, of a class of its own. That one inherits first from the class
    of the user's loader, so its methods and its ``__len__`` hold, then from this class, then from
    PyTorch's. Its attributes are those of the user's loader themselves, so that what is read or
    written in the one is so in the other. What a pass needs of them is read as it begins.
    """

    # In slots, because all other attributes are the user's loader's.
    exact_position: ExactBatches
    exact_fetching: DataLoader[Any]
    exact_fetching_is_made_of: list[Any]
    # What was changed since the loader was made, if no checkpoint holds it, is said once.
    exact_as_made: dict[str, Any]

    _iterator = iterator_of("exact_fetching")

    def __len__(self) -> int:
        return len(self.exact_position)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Batches. A generator: workers start when the first batch is asked for, at an epoch's
        start.
        """
        batches = self.exact_position
        if batches.training:
            self._say_what_a_resume_lacks()
        if not are_the_same(self.exact_fetching_is_made_of, made_of(self)):
            # Workers that outlive an epoch would go on with what they were started with.
            make_fetching(self)
        fetch: Any = self.exact_fetching.dataset
        fetch.seed = batches.seeds.draws
        if batches.in_memory and not self.num_workers and not self.pin_memory:
            # PyTorch's loader would take longer than the batch.
            for request in batches:
                yield fetch[request]
        else:
            yield from iterate(self.exact_fetching)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy is one of the user's own loader."""
        return itself, (self.exact_position.loader,)

    def _say_what_a_resume_lacks(self) -> None:
        for name, value in not_in_a_checkpoint(self).items():
            if name in self.exact_as_made and self.exact_as_made[name] is not value:
                del self.exact_as_made[name]
                say(lost_unless_set_again(name, self))


class _Unannounced:
    """Keeps the user's ``__init_subclass__`` from hearing of a class that he has not written."""

    def __init_subclass__(cls) -> None: ...


@functools.cache
def exact_class(kind: type[DataLoader[Any]]) -> type[ExactLoader]:
    """The class of the exact form of the loaders of a class. It goes by the same name."""
    bases: tuple[type, ...] = (ExactLoader,)
    if kind is not DataLoader:
        bases = (_Unannounced, kind, ExactLoader)
    names = {
        "__slots__": tuple(ExactLoader.__annotations__),
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }
    return types.new_class(kind.__name__, bases, exec_body=lambda body: body.update(names))


def exact_form(
    loader: DataLoader[Any],
    training: bool,
    seed: int,
    rank: int = 0,
    world_size: int = 1,
    own_share: bool = False,
) -> ExactLoader:
    """The exact form of a plain loader.

    Args:
        loader: The plain loader (see :func:`unbroken.loading.samplers.is_plain`) over a
            map-style dataset.
        training: Whether it is trained on, or evaluated.
        seed: The order and all random numbers of the data come from it, unless its passes get
            other ``seeds``.
        rank: This process, 0 to ``world_size - 1``.
        world_size: Processes that train together.
        own_share: The loader gives this rank's share of the data already: its batches are not cut
            for the ranks.

    Raises:
        UserError: An evaluation cannot be shared by so many ranks.
    """
    batches = ExactBatches(loader, training, seed, rank, world_size, own_share)
    kind: Any = type(loader)
    found: ExactLoader = object.__new__(exact_class(kind))
    # A class of the user's may set attributes in another way.
    object.__setattr__(found, "__dict__", vars(loader))
    found.exact_position = batches
    found.exact_as_made = not_in_a_checkpoint(loader)
    make_fetching(found)
    if found.num_workers:
        end_workers_at_exit()
    return found


def position_of(loader: Any) -> Any:
    """The :class:`LoaderPosition` of what the run has put in a loader's place."""
    return loader.exact_position


def make_fetching(loader: ExactLoader) -> None:
    """Make the loader of PyTorch's that fetches what an exact one asks for."""
    batches = loader.exact_position
    seed = batches.seeds.draws
    fetch: Any = Fetch(
        loader.dataset,
        loader.collate_fn,
        seed,
        rank=batches.rank if batches.training else None,
        batched=loader.batch_sampler is not None,
    )
    loader.exact_fetching_is_made_of = made_of(loader)
    loader.exact_fetching = DataLoader(
        fetch,
        sampler=PlainRequests(batches) if loader.num_workers else batches,
        # A request is a whole batch: PyTorch neither collates nor copies it.
        batch_size=None,
        # PyTorch's own would search every batch for arrays.
        collate_fn=torch.nn.Identity(),
        worker_init_fn=partial(prepare_worker, further=loader.worker_init_fn),
        # PyTorch draws a seed for the workers. It should not come from the training's
        # generator.
        generator=torch.Generator().manual_seed(seed),
        **{name: getattr(loader, name) for name in KEPT},
    )
