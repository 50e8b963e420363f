"""What a loader and its samplers tell about themselves: their kind, their order, and whose share
they give.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils import data
from torch.utils.data import DataLoader, DistributedSampler
from unbroken import contract
from unbroken.holding.walk import entries_of
from unbroken.lightning_internals import makes_its_own_iterator

# The names by which samplers say how many parts there are, and which part they give.
NAMES_OF_SHARES = (
    ("num_replicas", "rank"),
    ("world_size", "rank"),
    ("num_processes", "process_index"),
    ("num_shards", "shard_id"),
)
# A list of more samplers than this is a list of something else, such as samples.
MOST_SAMPLERS_IN_A_LIST = 32


class Cut(NamedTuple):
    """How a loader cuts its sampler's order into batches."""

    # Samples per rank; None where the user or the dataset cuts the batches.
    batch_size: int | None
    drop_last: bool


def has_state(part: Any) -> bool:
    """Whether an object can be saved and gone on with. A class is no object that has a state."""
    return isinstance(part, contract.HasState) and not isinstance(part, type)


def gathers(dataset: Any) -> bool:
    """Whether a dataset gives whole batches of rows in memory, by its own ``gather``. A tensor's is
    another.
    """
    return isinstance(dataset, contract.GathersBatches) and not isinstance(dataset, Tensor)


def is_plain(loader: Any) -> bool:
    """Whether a loader gives its batches as PyTorch's own does; a subclass may have other
    arguments.
    """
    if not isinstance(loader, DataLoader):
        return False
    is_own = type(loader).__iter__ is not DataLoader.__iter__ or makes_its_own_iterator(loader)
    return not is_own and not has_state(loader)


def is_stream(dataset: Any) -> bool:
    """Whether a dataset gives its samples one after the other, instead of by a key."""
    return isinstance(dataset, data.IterableDataset)


def source_of(loader: DataLoader[Any]) -> Any:
    """The sampler of a plain loader's samples, or a batch sampler of the user's own."""
    batch_sampler: Any = loader.batch_sampler
    if batch_sampler is None:
        return loader.sampler
    if cuts_as_torch_does(batch_sampler):
        # Not the loader's sampler: the user may have given this BatchSampler.
        return batch_sampler.sampler
    return batch_sampler


def cuts_as_torch_does(batch_sampler: Any) -> bool:
    """Whether a batch sampler only cuts its sampler's order into batches of one size."""
    if not isinstance(batch_sampler, data.BatchSampler):
        return False
    has_more = has_state(batch_sampler) or isinstance(batch_sampler, contract.OrdersByEpoch)
    return type(batch_sampler).__iter__ is data.BatchSampler.__iter__ and not has_more


def reads_all(limit: float) -> bool:
    """Whether a Trainer's limit, such as ``limit_val_batches``, is all batches. An int is a number
    of batches: 1 is one of them.
    """
    return isinstance(limit, float) and limit == 1.0


def cut_of(loader: Any) -> Cut:
    """How a loader cuts its batches now: ``batch_sampler.batch_size`` may be set at any time."""
    batch_sampler: Any = getattr(loader, "batch_sampler", None)
    if not cuts_as_torch_does(batch_sampler):
        return Cut(None, False)
    return Cut(batch_sampler.batch_size, batch_sampler.drop_last)


def cut_anew(loader: Any, cut: Cut) -> None:
    """Let a loader cut its batches so from now on, if it cuts them as PyTorch does."""
    if cut_of(loader) != cut and cut.batch_size is not None:
        loader.batch_sampler.batch_size = cut.batch_size
        loader.batch_sampler.drop_last = cut.drop_last


def name_of(loader: Any) -> str:
    """The name of the class that decides what is read: an own loader's, else the dataset's."""
    is_own_loader = isinstance(loader, DataLoader) and not is_plain(loader)
    if is_own_loader or not hasattr(loader, "dataset"):
        return type(loader).__name__
    return type(loader.dataset).__name__


def generators_of_order(source: Any) -> list[torch.Generator]:
    """The generators of torch that a sampler, and those within it, draw the order from.

    A generator of NumPy is left alone: nobody knows whether the order is all that it is for.
    """
    holders = [
        each for each in samplers_within(source) if isinstance(each, contract.BindsGenerator)
    ]
    found = [each.generator for each in holders]
    return [each for each in found if isinstance(each, torch.Generator)]


def exact_source(loader: DataLoader[Any], training: bool, own_share: bool) -> Any:
    """The source whose order an exact loader cuts.

    In an evaluation a DistributedSampler is replaced by the whole set in order, for it repeats or
    drops samples.
    """
    source = source_of(loader)
    if isinstance(source, DistributedSampler) and not training and not own_share:
        return data.SequentialSampler(source.dataset)  # type: ignore[arg-type]
    return source


def samplers_within(source: Any) -> Iterator[Any]:
    """A sampler and all samplers that it holds, at any depth. Datasets are not looked into."""
    waiting = [source]
    seen = set()
    while waiting:
        sampler = waiting.pop()
        if id(sampler) in seen:
            continue
        seen.add(id(sampler))
        yield sampler
        for value in getattr(sampler, "__dict__", {}).values():
            is_list = isinstance(value, (list, tuple)) and len(value) <= MOST_SAMPLERS_IN_A_LIST
            candidates = [each for _, each in entries_of(value)] if is_list else [value]
            waiting += [each for each in candidates if _is_sampler(each)]


def _is_sampler(value: Any) -> bool:
    if isinstance(value, type) or not hasattr(value, "__dict__"):
        return False
    if isinstance(value, data.Sampler) or gives_a_share(value):
        return True
    # What can be asked for a sample by its key is a dataset.
    return hasattr(value, "__iter__") and not hasattr(value, "__getitem__") and not _is_data(value)


def _is_data(value: Any) -> bool:
    return isinstance(value, (data.Dataset, Tensor))


def gives_a_share(sampler: Any) -> bool:
    """Whether a sampler says that it gives one of several parts of the data."""
    for parts, part in NAMES_OF_SHARES:
        for prefix in ("", "_"):
            # Names of the user's own classes: there is no protocol that all of them follow.
            count = getattr(sampler, prefix + parts, None)
            number = getattr(sampler, prefix + part, None)
            if isinstance(count, int) and isinstance(number, int) and count > 1:
                return True
    return False


def deals_in_order(source: Any) -> bool:
    """Whether a sampler deals a whole set to the ranks one by one, as PyTorch's own does without
    shuffling.

    Then cutting the set anew changes nothing but the samples that it repeats or drops to make ranks
    equal.
    """
    if not isinstance(source, DistributedSampler):
        return False
    if type(source) is DistributedSampler:
        return True
    plain: DistributedSampler[Any] = DistributedSampler(
        source.dataset,
        source.num_replicas,
        source.rank,
        shuffle=False,
        drop_last=source.drop_last,
    )
    expected = list(plain)
    with isolate_rng(include_cuda=False):
        # There are samplers that never end.
        found = list(islice(source, len(expected) + 1))
    length = len(source.dataset)  # type: ignore[arg-type]
    unrepeated = range(source.rank, length, source.num_replicas)
    return found in (expected, list(unrepeated))
