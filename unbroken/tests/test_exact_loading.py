"""The engine's loaders: order by (seed, epoch), a start anywhere, exact shares, seeded draws."""

from __future__ import annotations

import gc
import inspect
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from enum import IntEnum
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
    random_split,
)
from torch.utils.data._utils import MP_STATUS_CHECK_INTERVAL, signal_handling
from torch.utils.data.datapipes.iter import IterableWrapper
from unbroken import ExactCheckpoint
from unbroken.errors import UserError
from unbroken.loading import (
    DataStart,
    ExactBatches,
    ExactLoader,
    RunLoaders,
    exact_form,
    position_of,
    shares,
)
from unbroken.loading.held_data import held_data
from unbroken.loading.proof import fault_of_state
from unbroken.loading.watched_loader import WatchedLoader
from unbroken.loading.workers import workers_end_with_block
from unbroken.seams import Seams
from unbroken.stopping.agreement import Agreement, NextBatch, request_of
from unbroken.stopping.ranks import gather_from_ranks
from unbroken.tensors.same_values import is_same

from tests.commands import complete, rows, run_ranks
from tests.other_tasks import ByEpoch, Line, LoaderWithState, table


class Numbers(Dataset[Tensor]):
    """Sample ``i`` is ``[i]`` and three random numbers, one of each generator."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, random.random(), np.random.rand(), float(torch.rand(()))])


class Gathered(Numbers):
    """In memory: asked for whole batches."""

    def gather(self, indices: Tensor) -> Tensor:
        return indices.float().unsqueeze(1)


def flat(batches: Iterable[Iterable[Any]]) -> list[Any]:
    return [item for batch in batches for item in batch]


def indices(loader: Any) -> list[list[int]]:
    return [[int(row[0]) for row in batch] for batch in loader]


def exact(loader: DataLoader[Any], training: bool = True, **kwargs: Any) -> ExactLoader:
    return exact_form(loader, training, kwargs.pop("seed", 0), **kwargs)


@pytest.mark.parametrize("drop_last", [False, True])
def test_one_rank_has_the_batch_sizes_of_the_plain_loader(drop_last: bool) -> None:
    plain = DataLoader(Numbers(53), batch_size=8, shuffle=True, drop_last=drop_last)
    ours = exact(plain)
    assert [len(batch) for batch in ours] == [len(batch) for batch in plain]
    assert len(ours) == len(plain)
    assert indices(exact(DataLoader(Numbers(53), batch_size=8))) == indices(
        DataLoader(Numbers(53), batch_size=8)
    )


def test_the_order_is_a_function_of_seed_and_epoch_alone() -> None:
    ours = exact(DataLoader(Numbers(40), batch_size=8, shuffle=True))
    first = indices(ours)
    torch.manual_seed(99)
    assert indices(ours) == first
    position_of(ours).set_epoch(1)
    assert indices(ours) != first
    position_of(ours).set_epoch(0)
    assert indices(ours) == first
    assert indices(exact(DataLoader(Numbers(40), batch_size=8, shuffle=True), seed=1)) != first


@pytest.mark.daily(7)
@pytest.mark.parametrize(
    "kind", ["shuffled", "in order", "weighted", "own sampler", "own batch sampler", "gathered"]
)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_start_inside_an_epoch_gives_exactly_the_rest_of_it(kind: str, workers: int) -> None:
    def loader() -> ExactLoader:
        data: Numbers = Gathered(50) if kind == "gathered" else Numbers(50)
        weights = torch.arange(1.0, 51.0).tolist()
        options: dict[str, Any] = {
            "shuffled": {"batch_size": 8, "shuffle": True},
            "gathered": {"batch_size": 8, "shuffle": True},
            "in order": {"batch_size": 8},
            "weighted": {"batch_size": 8, "sampler": WeightedRandomSampler(weights, 50)},
            "own sampler": {"batch_size": 8, "sampler": ByEpoch(50)},
            "own batch sampler": {"batch_sampler": Pairs(50)},
        }[kind]
        return exact(DataLoader(data, num_workers=workers, **options))

    whole = loader()
    position_of(whole).set_epoch(3)
    batches = list(whole)
    rest = loader()
    position_of(rest).start_at(
        DataStart(epoch=3, batches=2, samples_per_batch=position_of(rest).global_batch_size)
    )
    position_of(rest).set_epoch(3)  # as Lightning does once more
    resumed = list(rest)
    assert len(resumed) == len(batches) - 2
    assert all(
        torch.equal(a, b) for a, b in zip(batches[2:], resumed, strict=True)
    )  # transforms included
    assert len(rest) == len(whole)


class Pairs(Sampler[list[int]]):
    """An own batch sampler, shuffled by Python's generator."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count // 2

    def __iter__(self) -> Iterator[list[int]]:
        pairs = [[2 * k, 2 * k + 1] for k in range(self.count // 2)]
        random.shuffle(pairs)
        return iter(pairs)


def test_ranks_train_on_what_one_rank_with_all_their_batches_trains_on() -> None:
    plain = DataLoader(Numbers(103), batch_size=8, shuffle=True)
    shards = [indices(exact(plain, rank=rank, world_size=3)) for rank in range(3)]
    assert len({len(shard) for shard in shards}) == 1
    one = indices(exact(DataLoader(Numbers(103), batch_size=24, shuffle=True)))
    # Two samples come once more, so that the ranks have equally many.
    one[-1] += one[0][:2]
    assert [a + b + c for a, b, c in zip(*shards, strict=True)] == one
    assert sorted(set(flat(one))) == list(range(103))


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("samples", [1, 97, 105])
@pytest.mark.parametrize("kind", ["sampler", "own batch sampler", "ready batches"])
def test_ranks_train_on_batches_of_one_size_and_on_as_many_samples_as_with_torchs_sampler(
    kind: str, samples: int, world_size: int
) -> None:
    def loader() -> DataLoader[Any]:
        rows = Numbers(samples)
        if kind == "sampler":
            return DataLoader(rows, 8, shuffle=True)
        if kind == "ready batches":
            return DataLoader(rows, None, shuffle=True)
        return DataLoader(rows, batch_sampler=OwnBatchSampler(RandomSampler(rows), 8, False))

    shards = [[*exact(loader(), rank=rank, world_size=world_size)] for rank in range(world_size)]
    for batches in zip(*shards, strict=True):
        assert len({len(batch) for batch in batches}) == 1
    if kind == "ready batches":
        seen = [[int(batch[0]) for batch in shard] for shard in shards]
    else:
        seen = [flat(indices(shard)) for shard in shards]
    rows = Numbers(samples)
    torchs: DistributedSampler[Any] = DistributedSampler(rows, world_size, 0)
    assert {len(each) for each in seen} == {len(torchs)}
    assert set(flat(seen)) == set(range(samples))


@pytest.mark.parametrize("batches", [3, 4, 5, 6, 7])
def test_a_rank_that_starts_inside_an_epoch_trains_on_the_rest_with_what_is_repeated(
    batches: int,
) -> None:
    loader = DataLoader(Numbers(105), batch_size=8, shuffle=True)
    whole = [*exact(loader, rank=1, world_size=2)]
    rest = exact(loader, rank=1, world_size=2)
    position_of(rest).start_at(DataStart(batches=batches, samples_per_batch=16))
    assert is_same([*rest], whole[batches:])
    assert len(whole) == len(rest) == 7


def test_what_drop_last_leaves_out_is_not_repeated() -> None:
    loader = DataLoader(Numbers(105), batch_size=8, shuffle=True, drop_last=True)
    seen = flat([flat(indices(exact(loader, rank=rank, world_size=2))) for rank in range(2)])
    assert len(seen) == len(set(seen)) == 96


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_dataset_may_get_shorter_or_longer_between_epochs(shuffle: bool) -> None:
    rows = Numbers(20)
    ours = exact(DataLoader(rows, 8, shuffle=shuffle))
    for epoch, count in enumerate((20, 13, 24)):
        rows.count = count
        position_of(ours).set_epoch(epoch)
        found = [*ours]
        assert len(ours) == len(found)
        assert sorted(int(row[0]) for row in flat(found)) == list(range(count))
        # A resumed run has never seen another length.
        resumed = exact(DataLoader(Numbers(count), 8, shuffle=shuffle))
        position_of(resumed).start_at(DataStart(epoch, batches=1, samples_per_batch=8))
        assert is_same([*resumed], found[1:])


def test_a_generator_that_a_sampler_draws_from_stays_where_it_was() -> None:
    generator = torch.Generator().manual_seed(3)
    rows = Numbers(20)
    ours = exact(DataLoader(rows, 8, sampler=SubsetRandomSampler(range(20), generator)))
    before = generator.get_state()
    first = indices(ours)
    assert torch.equal(generator.get_state(), before)
    generator.manual_seed(4)
    assert indices(ours) == first


@pytest.mark.parametrize("samples", [1, 2, 5, 16, 17, 33, 100])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_evaluation_sees_every_sample_once_on_any_number_of_ranks(
    samples: int, world_size: int, batch_size: int
) -> None:
    plain = DataLoader(Gathered(samples), batch_size=batch_size)
    shards = [
        indices(exact(plain, False, rank=rank, world_size=world_size)) for rank in range(world_size)
    ]
    assert len({len(shard) for shard in shards}) == 1, "a rank would wait for one that has finished"
    assert sorted(flat(flat(shards))) == list(range(samples))
    assert all(len(batch) <= batch_size for shard in shards for batch in shard)


def test_a_tensor_is_a_dataset() -> None:
    batches = list(
        exact_form(DataLoader(torch.arange(10).view(5, 2), batch_size=2), training=True, seed=0)
    )
    assert [batch.tolist() for batch in batches] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9]]]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_no_evaluation_batch_of_a_plain_dataset_is_empty(batch_size: int) -> None:
    shards = [
        indices(exact(DataLoader(Numbers(5), batch_size), False, rank=rank, world_size=2))
        for rank in range(2)
    ]
    assert all(batch for shard in shards for batch in shard)
    assert sorted(flat(flat(shards))) == list(range(5))
    with pytest.raises(UserError, match="1 samples"):
        exact(DataLoader(Numbers(1), 1), False, rank=0, world_size=2)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_batches_of_equal_lengths_stay_what_they_are_on_any_number_of_ranks(ranks: int) -> None:
    lengths = [2, 5, 5, 3, 2, 5, 3, 2, 2, 3]  # of the samples; a batch has those of one length
    batches: list[list[int]] = [[0, 4], [7, 8], [1, 2, 5], [3, 6, 9]]
    dataset = [torch.ones(length) for length in lengths]
    loader = DataLoader(dataset, batch_sampler=batches)  # type: ignore[arg-type]
    shares = [[*exact_form(loader, False, 0, rank, ranks)] for rank in range(ranks)]
    assert len({len(share) for share in shares}) == 1
    assert sum(float(batch.sum()) for share in shares for batch in share) == sum(lengths)
    rows: Any = SimpleNamespace(gather=lambda keys: (keys,))
    shares = [
        [*exact_form(DataLoader(rows, batch_sampler=batches), False, 0, r, ranks)]
        for r in range(ranks)
    ]  # type: ignore[arg-type]
    assert sorted(int(x) for share in shares for batch in share for x in batch[0]) == [*range(10)]


def test_ready_batches_of_an_evaluation_are_shared_where_that_is_possible() -> None:
    plain = DataLoader(Numbers(6), batch_size=None)
    shards = [
        [int(batch[0]) for batch in exact(plain, False, rank=rank, world_size=2)]
        for rank in range(2)
    ]
    assert shards == [[0, 2, 4], [1, 3, 5]]
    with pytest.raises(UserError, match="6 ready batches cannot be shared"):
        exact(plain, False, rank=0, world_size=4)


def test_random_transforms_of_an_evaluation_do_not_depend_on_how_the_set_is_cut() -> None:
    one = torch.cat(list(exact(DataLoader(Numbers(30), batch_size=7), False)))
    parts = [
        exact(DataLoader(Numbers(30), batch_size=4, num_workers=2), False, rank=r, world_size=2)
        for r in range(2)
    ]
    both = torch.cat(
        [batch for part in parts for batch in part]
    )  # (samples, number and what was drawn)
    assert torch.equal(one, both[both[:, 0].argsort()])


class Several(Numbers):
    """Gives several samples in one call, as database readers do."""

    calls = 0

    def __getitems__(self, keys: list[int]) -> list[Tensor]:
        self.calls += 1
        return [self[key] for key in keys]


class Quiet(Several):
    """The same without random numbers."""

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index)])


@pytest.mark.parametrize("kind", ["subset", "several", "subset of several", "one by one", "ready"])
def test_random_transforms_of_any_dataset_do_not_depend_on_how_the_set_is_cut(kind: str) -> None:
    def samples(batch_size: int, rank: int = 0, world_size: int = 1) -> dict[int, list[float]]:
        rows: Any = {
            "subset": Subset(Numbers(40), range(5, 35)),
            "several": Several(30),
            "subset of several": Subset(Several(40), range(5, 35)),
            "one by one": Numbers(30),
            "ready": Numbers(30),
        }[kind]
        if kind == "ready":
            loader: DataLoader[Any] = DataLoader(rows, batch_size=None)
            found = list(exact(loader, False, rank=rank, world_size=world_size))
        else:
            loader = DataLoader(rows, batch_size)
            found = flat(exact(loader, False, rank=rank, world_size=world_size))
        return {int(row[0]): row.tolist() for row in found}

    one = samples(7)
    assert len({row[1] for row in one.values()}) == 30, "every sample has numbers of its own"
    assert samples(4, 0, 2) | samples(4, 1, 2) == one


def test_several_samples_are_asked_for_in_one_call_where_nothing_is_drawn() -> None:
    rows = Quiet(30)
    assert len(list(exact(DataLoader(rows, 10), False))) == 3
    assert rows.calls == 3


class DrawsInGather(Gathered):
    """Augments whole batches."""

    def gather(self, indices: Tensor) -> Tensor:
        return torch.stack([indices.float(), torch.rand(len(indices))], 1)


def test_a_gather_that_draws_random_numbers_is_seeded_for_each_batch() -> None:
    whole = list(exact(DataLoader(DrawsInGather(40), 8, shuffle=True)))
    rest = exact(DataLoader(DrawsInGather(40), 8, shuffle=True))
    position_of(rest).start_at(DataStart(batches=2, samples_per_batch=8))
    torch.rand(5)
    expected = torch.get_rng_state()
    assert all(map(torch.equal, list(rest), whole[2:]))
    assert torch.equal(torch.get_rng_state(), expected), "the training's generator is left alone"


class DrawsForSome(Gathered):
    """Augments a rare class alone: most batches draw nothing."""

    def gather(self, indices: Tensor) -> Tensor:
        rare = indices % 9 == 0
        noise = torch.zeros(len(indices))
        if rare.any():
            noise[rare] = torch.rand(int(rare.sum()))
        return torch.stack([indices.float(), noise], 1)


@pytest.mark.parametrize("first", range(1, 8))
def test_a_gather_that_draws_for_some_batches_is_seeded_for_these(first: int) -> None:
    whole = list(exact(DataLoader(DrawsForSome(64), 8, shuffle=True)))
    rest = exact(DataLoader(DrawsForSome(64), 8, shuffle=True))
    position_of(rest).start_at(DataStart(batches=first, samples_per_batch=8))
    expected = torch.get_rng_state()
    assert all(map(torch.equal, list(rest), whole[first:]))
    assert torch.equal(torch.get_rng_state(), expected), "the training's generator is left alone"


class DrawsOnTheGPU(Dataset[Tensor]):
    """Augments on a device whose generator the training draws from."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, key: int) -> Tensor:
        return torch.rand(3, generator=the_gpus()) + key


class GathersOnTheGPU(DrawsOnTheGPU):
    def gather(self, indices: Tensor) -> Tensor:
        return torch.rand(len(indices), generator=the_gpus()) + indices


def the_gpus() -> torch.Generator:
    return torch.cuda.default_generators[0]


@pytest.mark.parametrize("kind", [DrawsOnTheGPU, GathersOnTheGPU])
def test_what_data_draw_on_a_gpu_is_seeded_for_each_batch(
    kind: type[DrawsOnTheGPU], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A generator on the CPU stands for that of a GPU."""
    generator = torch.Generator().manual_seed(3)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
    whole = list(exact(DataLoader(kind(), 8, shuffle=True)))
    assert generator.get_state().equal(torch.Generator().manual_seed(3).get_state())
    torch.rand(2, generator=generator)
    rest = exact(DataLoader(kind(), 8, shuffle=True))
    position_of(rest).start_at(DataStart(batches=2, samples_per_batch=8))
    assert all(map(torch.equal, list(rest), whole[2:]))


class DrawsLater(Gathered):
    """Augments from its second epoch on."""

    epoch = 0

    def gather(self, indices: Tensor) -> Tensor:
        noise = torch.rand(len(indices)) if self.epoch > 0 else torch.zeros(len(indices))
        return torch.stack([indices.float(), noise], 1)


def test_a_gather_that_begins_to_draw_in_a_later_epoch_is_seeded_from_there_on() -> None:
    def epoch(loader: ExactLoader, number: int, batches: int = 0) -> list[Tensor]:
        loader.dataset.epoch = number  # type: ignore[attr-defined]
        position_of(loader).start_at(DataStart(number, batches=batches, samples_per_batch=8))
        return list(loader)

    undisturbed = exact(DataLoader(DrawsLater(40), 8, shuffle=True))
    epoch(undisturbed, 0)
    whole = epoch(undisturbed, 1)
    rest = epoch(exact(DataLoader(DrawsLater(40), 8, shuffle=True)), 1, 2)
    assert is_same(rest, whole[2:])


class ItsKey(Dataset[Any]):
    """Each sample is the key that it is asked by."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, key: Any) -> Any:
        return key


class Place(IntEnum):
    """Where something lies."""

    LEFT = 0
    RIGHT = 1


@pytest.mark.parametrize(
    "keys",
    [
        [2**63 + 1, 2**63, 2**64 - 1, 5],
        [2**53 + 1, 0.5, 3, 4],
        [0, (1, 2), 3, 4],
        [True, 2, 3, 4],
        [Place.RIGHT, Place.LEFT, 3, 4],
        [4, 3, 2, 1],
    ],
    ids=["large", "with a fraction", "with a pair", "with a bool", "of an enumeration", "small"],
)
def test_samples_are_asked_by_the_keys_that_the_sampler_gives(keys: list[Any]) -> None:
    plain = DataLoader(ItsKey(), sampler=keys, batch_size=2, collate_fn=list)
    kinds = [type(key) for batch in plain for key in batch]
    assert list(exact(plain)) == list(plain)
    assert [type(key) for batch in exact(plain) for key in batch] == kinds


NAMED_KEYS = """
import random
from unbroken.loading import Fetch

class Drawn:
    def __getitem__(self, key):
        return random.random()

fetch = Fetch(Drawn(), list, seed=1, rank=None, batched=True)
print(hash("left"), *fetch[0, 0, ["left", ("right", 2)]])
"""


@pytest.mark.nightly
def test_samples_with_names_for_keys_are_drawn_alike_in_every_process(
    capsys: pytest.CaptureFixture[str],
) -> None:
    exec(NAMED_KEYS, {})
    ours, *drawn_here = capsys.readouterr().out.split()
    theirs, *drawn_there = complete([sys.executable, "-c", NAMED_KEYS]).stdout.split()
    assert drawn_here == drawn_there != []
    assert ours != theirs or "PYTHONHASHSEED" in os.environ, (
        "what hash() tells differs between processes"
    )


def test_what_is_fetched_here_leaves_the_generators_of_training_alone() -> None:
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    expected = float(torch.rand(())), random.random(), np.random.rand()
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    list(exact(DataLoader(Numbers(20), batch_size=4, shuffle=True)))
    assert (float(torch.rand(())), random.random(), np.random.rand()) == expected


def test_another_batch_size_on_resume_sees_no_sample_twice() -> None:
    order = flat(indices(exact(DataLoader(Numbers(96), batch_size=8, shuffle=True))))
    later = exact(DataLoader(Numbers(96), batch_size=16, shuffle=True))
    position_of(later).start_at(DataStart(epoch=0, batches=3, samples_per_batch=8))
    assert flat(indices(later)) == order[24:]
    assert position_of(later).start_batch == 0  # begins at its beginning when it is cycled through


def test_the_loader_keeps_what_was_asked_of_it() -> None:
    seen: list[int] = []
    plain = DataLoader(
        Numbers(20),
        batch_size=4,
        num_workers=1,
        collate_fn=list,
        prefetch_factor=3,
        persistent_workers=True,
        worker_init_fn=seen.append,
        timeout=7,
    )
    ours = exact(plain)
    for each in (ours, ours.exact_fetching):
        assert (each.num_workers, each.prefetch_factor, each.persistent_workers, each.timeout) == (
            1,
            3,
            True,
            7,
        )
    assert ours.dataset is plain.dataset
    assert (ours.batch_size, ours.drop_last, ours.collate_fn) == (4, False, list)
    assert isinstance(next(iter(ours)), list)
    ours.exact_fetching.worker_init_fn(0)  # type: ignore[misc]
    assert seen == [0]


class Opened(Numbers):
    """Has a handle that each worker opens."""

    handle = 0

    def __getitem__(self, index: int) -> Any:
        return self.handle


def open_handle(worker: int) -> None:
    info: Any = get_worker_info()
    info.dataset.handle = 10 + worker


@pytest.mark.parametrize("kind", [Numbers, Gathered])
def test_what_workers_are_asked_for_needs_no_shared_memory(kind: Any) -> None:
    loader = exact(DataLoader(kind(5), 2, num_workers=1))
    assert list(loader.exact_fetching.sampler) == [(0, 0, [0, 1]), (0, 1, [2, 3]), (0, 2, [4])]


def test_what_a_worker_does_to_its_dataset_reaches_it() -> None:
    ours = exact(DataLoader(Opened(8), batch_size=4, num_workers=2, worker_init_fn=open_handle))
    assert [batch.tolist() for batch in ours] == [[10] * 4, [11] * 4]


class KeysForEver(Sampler[int]):
    """Has no length."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from (5, 3, 1)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_without_a_length_chooses_what_workers_read(workers: int) -> None:
    loader = DataLoader(Numbers(8), 2, sampler=KeysForEver(), num_workers=workers)
    batches = islice(WatchedLoader(loader, None, 0), 3)
    assert [batch[:, 0].tolist() for batch in batches] == [[5, 3], [1, 5], [3, 1]]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_pipe_of_torchs_is_shared_among_the_workers(workers: int) -> None:
    pipe = IterableWrapper(range(8)).sharding_filter()
    loader = DataLoader(pipe, 2, num_workers=workers)
    assert sorted(torch.cat([*WatchedLoader(loader, None, 0)]).tolist()) == list(range(8))


class DrawsBatches(Sampler[list[int]]):
    """Draws its batches from torch's generator."""

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[list[int]]:
        return iter(torch.randperm(8).view(4, 2).tolist())


def test_ranks_deal_one_order_of_batches_that_an_evaluation_draws() -> None:
    seen: list[int] = []
    for rank in range(2):
        torch.manual_seed(rank)
        loader = DataLoader(Numbers(8), batch_sampler=DrawsBatches())
        before = torch.get_rng_state()
        found = exact(loader, training=False, rank=rank, world_size=2)
        assert torch.equal(torch.get_rng_state(), before)
        seen += [int(row[0]) for batch in found for row in batch]
    assert sorted(seen) == list(range(8))


@pytest.mark.skipif(sys.platform == "win32", reason="sends a signal")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    "read",
    [
        lambda: exact(DataLoader(Numbers(24), 4, num_workers=2)),
        lambda: WatchedLoader(DataLoader(Stream(), 4, num_workers=2), None, 0),
    ],
    ids=["keys", "stream"],
)
def test_a_worker_that_is_asked_to_stop_as_it_starts_does_not_end(
    read: Callable[[], Any], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher asks all processes of a run, and the trainer ends them when it has saved."""
    prepare = signal_handling._set_worker_signal_handlers

    def prepare_and_ask() -> None:
        prepare()
        os.kill(os.getpid(), number)

    # A worker is a fork, in which torch calls this before the worker_init_fn.
    monkeypatch.setattr(signal_handling, "_set_worker_signal_handlers", prepare_and_ask)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    assert len([*read()]) >= 6
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == blocked


class AsksOnArrival(Numbers):
    """As a worker unpickles it, the worker is asked to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(24)
        self.number = number

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        os.kill(os.getpid(), self.number)


@pytest.mark.skipif(sys.platform == "win32", reason="sends a signal")
@pytest.mark.nightly
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_worker_that_imports_the_main_module_ignores_what_asks_it_to_stop(
    number: int, method: str
) -> None:
    """That takes seconds, in which a terminal's Ctrl-C reaches it, too."""
    samples = AsksOnArrival(number)
    loader = DataLoader(samples, 4, num_workers=1, multiprocessing_context=method)
    assert len([*exact(loader)]) == 6
    process = multiprocessing.get_context(method).Process(target=signal.raise_signal, args=[number])
    process.start()
    process.join()
    assert process.exitcode not in (None, 0), "another process of the user's is ended by it"


def test_lightning_ends_the_workers_of_a_training(tmp_path: Path) -> None:
    alive: list[int] = []
    # Workers of other tests may end meanwhile.
    before = multiprocessing.active_children()

    def count() -> None:
        new = [each for each in multiprocessing.active_children() if each not in before]
        alive.append(len(new))

    class Counts(Callback):
        def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            count()

        def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
            count()

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(
        accelerator="cpu", max_epochs=1, callbacks=[Counts()], default_root_dir=tmp_path, **quiet
    )
    RunLoaders().install(Seams(trainer), trainer)
    samples = table(16)
    trainer.fit(Line(), DataLoader(samples, batch_size=4, num_workers=2, persistent_workers=True))
    assert alive == [2, 0]


def test_python_ends_although_workers_are_left() -> None:
    code = (
        "import sys; from torch.utils.data import DataLoader\n"
        "from unbroken.loading import exact_form\n"
        "loader = DataLoader(range(8), 2, num_workers=1)\n"
        "sys.batches = iter(exact_form(loader, True, 0)); next(sys.batches)"
    )
    assert complete([sys.executable, "-c", code], timeout=60).returncode == 0


class Stream(IterableDataset[Tensor]):
    """Numbers that come one after the other."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(24.0).unsqueeze(1))


class ResumableStream(IterableDataset[Tensor]):
    """The same, with a state."""

    def __init__(self) -> None:
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]

    def __iter__(self) -> Iterator[Tensor]:
        while self.next < 24:
            self.next += 1
            yield torch.tensor([float(self.next - 1)])
        self.next = 0


class OwnState(Sampler[int]):
    """An own sampler that remembers something."""

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[int]:
        return iter([3, 1, 0, 2])


@pytest.mark.parametrize(
    ("loader", "anywhere", "said"),
    [
        (DataLoader(Numbers(8), batch_size=2), True, None),
        (DataLoader(Stream(), batch_size=2), False, "Stream, which has no state_dict"),
        (DataLoader(ResumableStream(), batch_size=2), True, None),
        (
            DataLoader(ResumableStream(), batch_size=2, num_workers=1),
            False,
            "ResumableStream, whose state is in its worker processes",
        ),
        (
            DataLoader(Numbers(4), batch_size=2, sampler=OwnState()),
            True,
            "OwnState has neither set_epoch nor state",
        ),
        ([torch.zeros(2)], False, "list, which has no state_dict"),
    ],
)
def test_what_cannot_be_made_exact_is_said_in_one_line(
    loader: Any, anywhere: bool, said: str | None
) -> None:
    trainer = Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.training = True
    loading = RunLoaders(seed=0)
    loading.exact(loader, trainer)
    loading.exact(loader, trainer)
    assert loading.can_start_inside_epochs is anywhere
    assert len({*loading.lines}) == (said is not None)
    assert said is None or said in loading.lines[0]


def rank_of(rank: int, world_size: int, training: bool = True, **more: Any) -> Any:
    """What a loading asks of the trainer of one of several ranks."""
    return SimpleNamespace(
        training=training,
        current_epoch=more.get("epoch", 0),
        reload_dataloaders_every_n_epochs=more.get("reload", 0),
        limit_train_batches=1.0,
        limit_val_batches=1.0,
        state=SimpleNamespace(fn=more.get("doing", "fit")),
        strategy=None,
        global_rank=rank,
        world_size=world_size,
    )


# Shares of the data that the user has cut himself


class OwnGroups:
    """Batches of this rank's part, as a batch sampler of one's own makes them."""

    def __init__(self, sampler: Any, size: int = 2) -> None:
        self.parts = [sampler]
        self.size = size

    def __len__(self) -> int:
        return len(self.parts[0]) // self.size

    def __iter__(self) -> Iterator[list[int]]:
        rows = list(self.parts[0])
        for begin in range(0, len(rows), self.size):
            yield rows[begin : begin + self.size]


class OwnBatchSampler(BatchSampler):
    """The same as a subclass of torch's."""


class OwnDistributedSampler(DistributedSampler[Any]):
    """A subclass, as people write it; it repeats a sample where ranks would have unequal parts."""


class Reversed(OwnDistributedSampler):
    """A share in an order of its own."""

    def __iter__(self) -> Iterator[int]:
        return reversed(list(super().__iter__()))  # type: ignore[return-value]


class OwnNames(Sampler[int]):
    """A share that is not called by torch's names, as in detection libraries."""

    def __init__(self, count: int, rank: int, world_size: int) -> None:
        self.count = count
        self._rank = rank
        self._world_size = world_size

    def __len__(self) -> int:
        return self.count // self._world_size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._rank, self.count, self._world_size))


def shared_by_the_user(kind: str, rank: int, count: int = 8) -> DataLoader[Any]:
    rows = Numbers(count)
    sampler = DistributedSampler(rows, num_replicas=2, rank=rank)
    if kind == "sampler":
        return DataLoader(rows, 2, sampler=sampler)
    if kind == "subclass":
        return DataLoader(rows, 2, sampler=OwnDistributedSampler(rows, 2, rank))
    if kind == "own names":
        return DataLoader(rows, 2, sampler=OwnNames(count, rank, 2))
    batches: Any = {
        "torch's batch sampler": BatchSampler(sampler, 2, False),
        "subclass of the batch sampler": OwnBatchSampler(sampler, 2, False),
        "own batch sampler": OwnGroups(sampler),
        "at any depth": OwnGroups(OwnGroups(sampler), 1),
    }[kind]
    return DataLoader(rows, batch_sampler=batches)


@pytest.mark.parametrize(
    "kind",
    [
        "sampler",
        "subclass",
        "own names",
        "torch's batch sampler",
        "subclass of the batch sampler",
        "own batch sampler",
    ],
)
def test_what_the_user_has_shared_himself_is_not_shared_again(kind: str) -> None:
    seen = []
    for rank in range(2):
        loading = RunLoaders(seed=0)
        found = loading.exact(shared_by_the_user(kind, rank), rank_of(rank, 2))
        seen += flat(indices(found))
        assert "shares the training data among the ranks itself" in loading.lines[-1]
    assert sorted(seen) == list(range(8))


def test_a_share_is_recognised_at_any_depth() -> None:
    loading = RunLoaders(seed=0)
    loading.exact(shared_by_the_user("at any depth", 0), rank_of(0, 2))
    assert loading.positions[0].own_share  # type: ignore[attr-defined]


def test_a_subset_per_rank_is_left_alone_where_the_user_shares() -> None:
    seen = []
    for rank in range(2):
        for training in (True, False):
            loading = RunLoaders(seed=0)
            loading.shares.are_ours = False
            mine = Subset(Numbers(8), range(rank, 8, 2))
            found = loading.exact(DataLoader(mine, 2, shuffle=True), rank_of(rank, 2, training))
            seen += flat(indices(found))
            assert [note for note in loading.lines if "use_distributed_sampler" in note]
    assert sorted(seen) == sorted([*range(8), *range(8)]), "once in training, once in evaluation"


class Files(Dataset[int]):
    """Names of files in a folder, as each machine has it."""

    def __init__(self, names: list[str], folder: str = "data", rank: int = 0) -> None:
        self.samples = [(f"{folder}/{name}", number) for number, name in enumerate(names)]
        self.rank = rank

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> int:
        raise AssertionError("no sample is asked for")


class Wraps(Dataset[int]):
    """Transforms another set's samples."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> int:
        raise AssertionError("no sample is asked for")


NAMES = [f"{number}.png" for number in range(8)]
ROWS = torch.arange(8.0).reshape(8, 1)


class Frame:
    """Gives rows as a table of pandas does."""

    def __init__(self, values: list[int]) -> None:
        self.iloc = [torch.tensor(value).numpy() for value in values]

    def __len__(self) -> int:
        return len(self.iloc)


def unseeded_split(rank: int) -> Any:
    return random_split(Numbers(8), [6, 2], torch.Generator().manual_seed(rank))[0]


def of_frame(rank: int) -> Any:
    dataset = Wraps(range(8))
    dataset.inner = Frame([rank] * 8)
    return dataset


def of_pictures(pictures: np.ndarray[Any, Any]) -> Any:
    dataset = Wraps(range(len(pictures)))
    dataset.inner = pictures
    return dataset


PICTURES = np.arange(27.0, dtype=np.float32).reshape(9, 3)
SHARED_BY_HAND: dict[str, Callable[[int], DataLoader[Any]]] = {
    "subset": lambda rank: DataLoader(Subset(Numbers(8), range(rank, 8, 2)), 2),
    "split without a seed": lambda rank: DataLoader(unseeded_split(rank), 2),
    "inside another set": lambda rank: DataLoader(Wraps(Subset(Numbers(8), [rank, 4])), 2),
    "list of files": lambda rank: DataLoader(Files(NAMES[rank::2]), 2),
    "rows": lambda rank: DataLoader(TensorDataset(ROWS[rank::2]), 2),
    "list": lambda rank: DataLoader(list(range(rank, 8, 2)), 2),
    "table": lambda rank: DataLoader(of_frame(rank), 2),
    "flipped pictures": lambda rank: DataLoader(of_pictures(PICTURES[rank:][:8, ::-1]), 2),
    "lengths": lambda rank: DataLoader(Numbers(8 + rank), 2),
    "sampler": lambda rank: DataLoader(
        Numbers(8), 2, sampler=SubsetRandomSampler(range(rank, 8, 2))
    ),
}
THE_SAME: dict[str, Callable[[int], DataLoader[Any]]] = {
    "subset": lambda rank: DataLoader(Subset(Numbers(8), range(0, 8, 2)), 2),
    "split with a seed": lambda rank: DataLoader(unseeded_split(0), 2),
    "files in another folder": lambda rank: DataLoader(Files(NAMES, f"/scratch/{rank}"), 2),
    "knows its rank": lambda rank: DataLoader(Files(NAMES, rank=rank), 2),
    "computed on another machine": lambda rank: DataLoader(
        TensorDataset(ROWS * (1 + rank * 1e-6)), 2
    ),
    "shuffled": lambda rank: DataLoader(Numbers(8), 2, shuffle=True),
    "flipped pictures": lambda rank: DataLoader(of_pictures(PICTURES[:8, ::-1]), 2),
    "foreign byte order": lambda rank: DataLoader(of_pictures(PICTURES[:8].astype(">f4")), 2),
}


def of_two_ranks(monkeypatch: pytest.MonkeyPatch, other: DataLoader[Any]) -> None:
    """Let the ranks be this one, and another with another loader."""

    def of_both(mine: Any) -> list[Any]:
        return [mine, held_data(other) if isinstance(mine, list) else mine]

    monkeypatch.setattr(shares, "gather_from_ranks", of_both)


@pytest.mark.daily(6)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", SHARED_BY_HAND)
def test_ranks_that_hold_different_data_have_shared_them_themselves(
    kind: str, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_two_ranks(monkeypatch, SHARED_BY_HAND[kind](1))
    loading = RunLoaders(seed=0)
    mine = SHARED_BY_HAND[kind](0)
    found = loading.exact(mine, rank_of(0, 2, training))
    assert len(found) == len(mine)
    assert "the ranks hold different data in" in loading.lines[0]


@pytest.mark.parametrize("kind", THE_SAME)
def test_what_every_rank_holds_is_shared_and_that_is_said(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_two_ranks(monkeypatch, THE_SAME[kind](1))
    loading = RunLoaders(seed=0)
    mine = THE_SAME[kind](0)
    found = loading.exact(mine, rank_of(0, 2))
    assert len(found) == -(-len(mine) // 2)
    name = type(mine.dataset).__name__
    assert loading.lines == [f"each of the 2 ranks trains on its share of {name}."]


def test_a_resumed_share_goes_on_behind_its_own_batches() -> None:
    whole = shared_by_the_user("sampler", 1, 24)
    order = flat(indices(RunLoaders(seed=0).exact(whole, rank_of(1, 2))))
    loading = RunLoaders(seed=0)
    found = loading.exact(shared_by_the_user("sampler", 1, 24), rank_of(1, 2))
    loading.data_start = DataStart(batches=4, samples_per_batch=loading.samples_per_batch)
    loading.begin()
    assert flat(indices(found)) == order[8:]


@pytest.mark.parametrize("sampler", [DistributedSampler, OwnDistributedSampler])
@pytest.mark.parametrize("count", [8, 13])
def test_an_evaluation_with_a_distributed_sampler_sees_every_sample_once(
    sampler: type[DistributedSampler[Any]], count: int
) -> None:
    seen = []
    for rank in range(2):
        rows = Numbers(count)
        loader = DataLoader(rows, 2, sampler=sampler(rows, 2, rank, shuffle=False))
        loading = RunLoaders(seed=0)
        seen += flat(indices(loading.exact(loader, rank_of(rank, 2, training=False))))
        assert not loading.lines
    assert sorted(seen) == list(range(count))


def test_an_evaluation_in_an_own_order_is_left_alone_and_said() -> None:
    rows = Numbers(13)
    loader = DataLoader(rows, 2, sampler=Reversed(rows, 2, 1, shuffle=False))
    loading = RunLoaders(seed=0)
    found = loading.exact(loader, rank_of(1, 2, training=False))
    assert flat(indices(found)) == [0, 11, 9, 7, 5, 3, 1], "with the sample that it repeats"
    assert "Reversed shares the evaluation's data among the ranks itself" in loading.lines[0]


def test_shares_of_unequal_length_are_refused_before_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shares, "gather_from_ranks", lambda mine: [mine, mine + 1])
    loading = RunLoaders(seed=0)
    loading.shares.are_ours = False
    with pytest.raises(UserError, match="have 4, 5 batches, and must have equally many"):
        loading.exact(DataLoader(Numbers(8), 2), rank_of(0, 2))
    limited = rank_of(0, 2)
    limited.limit_train_batches = 4
    assert position_of(loading.exact(DataLoader(Numbers(8), 2), limited)).ranks_agree
    found = loading.exact(DataLoader(Numbers(8), 2), rank_of(0, 2, training=False))
    assert not position_of(found).ranks_agree
    assert "the ranks' own shares of an evaluation have 4, 5 batches" in loading.lines[-1]


class CountsSamples(Line):
    """Its batch sampler, or a subset for each rank, shares the data; it logs how many different
    samples all ranks see.
    """

    def __init__(self, by_hand: bool = False) -> None:
        super().__init__()
        self.by_hand = by_hand

    def train_dataloader(self) -> DataLoader[Any]:
        rows: Any = table(96)
        if self.by_hand:
            mine = range(self.global_rank, 96, self.trainer.world_size)
            return DataLoader(Subset(rows, mine), 8, shuffle=True)
        sampler: Any = DistributedSampler(rows, self.trainer.world_size, self.global_rank, seed=1)
        return DataLoader(rows, batch_sampler=OwnBatchSampler(sampler, 8, False))

    def on_train_epoch_start(self) -> None:
        self.seen: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.seen += batch[1].tolist()
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        samples = flat(gather_from_ranks(self.seen))
        self.log("train_seen", float(len(samples)))
        self.log("train_different", float(len(set(samples))))


@pytest.mark.parametrize(
    ("by_hand", "said"),
    [
        pytest.param(
            "false",
            "DistributedSampler shares the training data among the ranks itself",
            marks=pytest.mark.nightly,
        ),
        ("true", "the ranks hold different data in Subset: each trains on all of its own"),
    ],
)
def test_two_ranks_train_on_every_sample_of_their_own_shares(
    by_hand: str, said: str, workplace: Path
) -> None:
    words = ["--model", "tests.test_exact_loading.CountsSamples", "--model.by_hand", by_hand]
    words += ["--data", "null", "--accelerator", "cpu", "--max_epochs", "1", "--run_name", "r"]
    words += ["--report", "false"]
    ended = run_ranks("fit", *words)
    assert ended.returncode == 0, ended.stderr
    assert said in ended.stdout
    (counts,) = [row for row in rows(Path("checkpoints/r")) if row.get("train_seen")]
    assert float(counts["train_seen"]) == float(counts["train_different"]) == 96


# Ranks with unequally many batches


class Counted(IterableDataset[Tensor]):
    """A stream of so many numbers."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(self.count))


class CountedWithState(Counted):
    """The same with a state, and a length."""

    position = 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Tensor]:
        while self.position < self.count:
            self.position += 1
            yield torch.tensor(self.position - 1)
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def read_as_one_of_two_ranks(
    rank: int, folder: Path, stream: Any, training: bool, told: Any
) -> None:
    """Read two epochs of a stream as Lightning does, and step, which needs both ranks."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    agreement = Agreement()
    agreement.begin(2)
    loading = RunLoaders(seed=0)
    request = request_of(signal.SIGTERM) if rank == 1 else 0
    loading.shares.agree_on_next_batch = lambda has_one: agreement.agree_on_next_batch(
        rank, has_one, request
    )
    epochs: list[list[int]] = []
    try:
        trainer = rank_of(rank, 2, training)
        loader = loading.exact(DataLoader(stream), trainer)
        length = len(loader) if sized_len(stream) is not None else None
        for epoch in range(2):
            trainer.current_epoch = epoch
            epochs.append([])
            # Lightning asks for no more than there are.
            for batch in islice(loader, length):
                epochs[-1].append(int(batch))
                if training:
                    dist.all_reduce(torch.ones(1))
                    agreement.agree(0)
                    assert agreement.stop_signal == signal.SIGTERM
            position_of(loader).end_epoch(len(epochs[-1]))
        told.put((rank, epochs))
    except UserError as error:
        told.put((rank, str(error)))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("kind", "counts", "training", "expected"),
    [
        (Counted, (5, 3), True, [[[0, 1, 2], [0, 1, 2]], [[0, 1, 2], [0, 1, 2]]]),
        # What a stream with a state has left comes in the next epoch.
        (CountedWithState, (5, 3), True, [[[0, 1, 2], [3, 4]], [[0, 1, 2], [0, 1]]]),
        # An evaluation reads all that there is.
        (Counted, (2, 3), False, [[[0, 1], [0, 1]], [[0, 1, 2], [0, 1, 2]]]),
        (Counted, (0, 3), True, "rank 0 has no batch of data that others have"),
        (Counted, (3, 0), False, "rank 1 has no batch of data that others have"),
        (CountedWithState, (3, 0), False, "rank 1 has no batch of data that others have"),
    ],
)
def test_ranks_with_unequally_many_batches_end_an_epoch_together(
    tmp_path: Path, kind: Any, counts: tuple[int, int], training: bool, expected: Any
) -> None:
    """Two processes with gloo. A rank that trains on its own would wait for the other for ever."""
    context = multiprocessing.get_context("fork")
    told = context.Queue()
    processes = []
    for rank, count in enumerate(counts):
        how = (rank, tmp_path, kind(count), training, told)
        processes.append(context.Process(target=read_as_one_of_two_ranks, args=how))
    for process in processes:
        process.start()
    try:
        outcomes = dict(told.get(timeout=20) for _ in processes)
    finally:
        for process in processes:
            process.kill()
            process.join()
    if isinstance(expected, str):
        assert all(expected in outcome for outcome in outcomes.values()), outcomes
    else:
        assert [outcomes[0], outcomes[1]] == expected


def test_an_epoch_that_ends_early_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    loading = RunLoaders(seed=0)
    loading.shares.agree_on_next_batch = lambda has_one: NextBatch(
        everywhere=False, rank_ended_early=1
    )
    assert not loading.shares._goes_on_together(4, True)
    assert not loading.shares._goes_on_together(4, True)
    line = "the data of rank 1 ended after 4 batches, before those of another rank: the epoch ends"
    assert capsys.readouterr().out == f"{line} there for all ranks.\n"


# Loaders that are made anew


def test_loaders_that_a_schedule_asks_for_leave_the_start_alone() -> None:
    """``estimated_stepping_batches`` loads before the checkpoint's counters are restored."""
    whole = exact(DataLoader(Numbers(40), 4, shuffle=True))
    position_of(whole).set_epoch(1)
    order = indices(whole)
    loading = RunLoaders(seed=0)
    loading.data_start = DataStart(
        epoch=1, batches=6, samples_per_batch=4, loader_states=[(0, None)]
    )
    for epoch in (0, 1):
        found = loading.exact(
            DataLoader(Numbers(40), 4, shuffle=True), rank_of(0, 1, epoch=epoch, reload=1)
        )
    loading.begin()
    assert indices(found) == order[6:]
    later = loading.exact(
        DataLoader(Numbers(40), 4, shuffle=True), rank_of(0, 1, epoch=2, reload=1)
    )
    assert len(indices(later)) == 10, "a later epoch is a whole one"


@pytest.mark.filterwarnings("ignore:.*returned .None")
def test_a_stream_with_a_state_goes_on_where_its_checkpoint_was_taken() -> None:
    class Looks(LightningModule):
        seen: list[int] = []

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            Looks.seen += [int(x) for x in batch[:, 0]]

        def configure_optimizers(self) -> None: ...

        def on_train_batch_end(self, *_: Any) -> None:
            if self.trainer.fit_loop.total_batch_idx == 4:
                states.append(loading.positions[0].state_to_start_after(5, epoch_ends=False))

    states: list[Any] = []
    loading = RunLoaders(seed=0)
    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        max_epochs=1,
        enable_model_summary=False,
    )
    loading.install(Seams(trainer), trainer)
    trainer.fit(Looks(), DataLoader(ResumableStream(), batch_size=2))
    assert states == [(5, {"next": 10})]  # Lightning itself had fetched one batch more
    trainer.training = True
    rest = loading.exact(DataLoader(ResumableStream(), batch_size=2), trainer)
    position_of(rest).start_at(DataStart(batches=5), *states[0])
    assert [int(x) for batch in rest for x in batch] == Looks.seen[10:]


def test_plain_samplers_are_told_from_own_ones() -> None:
    for sampler in (SequentialSampler(range(3)), RandomSampler(range(3))):
        batches = ExactBatches(DataLoader(range(3), 2, sampler=sampler))
        assert sorted(int(i) for _, _, part in batches for i in part) == [0, 1, 2]


# Streams and loaders with a state


class NoisyStream(IterableDataset[Tensor]):
    """Samples for each worker, with random numbers."""

    def __iter__(self) -> Iterator[Tensor]:
        info: Any = get_worker_info()
        assert isinstance(info.dataset, NoisyStream), "the user's own"
        for number in range(info.id, 24, info.num_workers):
            yield torch.tensor([number, random.random(), np.random.rand(), float(torch.rand(()))])


@pytest.mark.daily(1)
@pytest.mark.parametrize("training", [True, False])
def test_workers_of_a_stream_that_outlive_an_epoch_are_seeded_for_each(training: bool) -> None:
    def epochs(*numbers: int) -> list[list[Tensor]]:
        stream = DataLoader(NoisyStream(), 4, num_workers=2, persistent_workers=True)
        trainer = rank_of(0, 1, training)
        found = RunLoaders(seed=0).exact(stream, trainer)
        batches = []
        for number in numbers:
            trainer.current_epoch = number
            batches.append(list(found))
        return batches

    first, second = epochs(0, 1)
    (resumed,) = epochs(1)
    assert all(map(torch.equal, resumed, second))
    assert not torch.equal(first[0], second[0])


@pytest.mark.parametrize("rows", [Numbers(8), NoisyStream()], ids=["exact", "stream"])
def test_workers_end_at_once_when_the_garbage_collector_finds_their_loader(rows: Any) -> None:
    loader = DataLoader(rows, 4, num_workers=2, persistent_workers=True)
    found = RunLoaders(seed=0).exact(loader, rank_of(0, 1))
    earlier = multiprocessing.active_children()
    list(found)
    workers = [each for each in multiprocessing.active_children() if each not in earlier]
    assert len(workers) == 2
    # The attribute is one of the user's loader, too.
    found.circle = found
    del found, loader
    began = time.monotonic()
    gc.collect()
    assert not any(worker.is_alive() for worker in workers)
    assert [worker.exitcode for worker in workers] == [0, 0]
    # PyTorch waits for so long for each worker that does not end.
    assert time.monotonic() - began < MP_STATUS_CHECK_INTERVAL


class OwnIteration(DataLoader[Any]):
    """Not PyTorch's own: its workers cannot be seeded anew."""

    def __iter__(self) -> Any:
        return super().__iter__()


def test_workers_that_outlive_an_epoch_and_cannot_be_seeded_are_said() -> None:
    loading = RunLoaders(seed=0)
    loader = OwnIteration(Numbers(8), 2, num_workers=1, persistent_workers=True)
    loading.exact(loader, rank_of(0, 1))
    assert (
        "the workers of OwnIteration outlive an epoch: if they draw random numbers, a resumed run "
        "sees others."
    ) in loading.lines
    # What a validation draws is tried.
    validating = RunLoaders(seed=0)
    validating.exact(loader, rank_of(0, 1, training=False))
    (note,) = validating.lines
    assert note.startswith("the validations of a resumed run are not exact: OwnIteration gives")


class Buffered(ResumableStream):
    """Shuffles in a buffer that its state does not hold."""

    def __iter__(self) -> Iterator[Tensor]:
        draw = random.Random(0)
        buffer: list[Tensor] = []
        for row in super().__iter__():
            buffer.append(row)
            if len(buffer) == 8:
                yield buffer.pop(draw.randrange(8))
        yield from buffer


class FirstEpochAgain(LoaderWithState):
    """Its state lacks the epoch."""

    def load_state_dict(self, state: dict[str, int]) -> None:
        super().load_state_dict({**state, "epochs": 0})


class WithArguments(ResumableStream):
    """Its state_dict has arguments of its own."""

    def state_dict(self, samples: int) -> dict[str, int]:  # type: ignore[override]
        return {"next": samples}


class WithLock(ResumableStream):
    """Cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class ChangesWhatItReturned(ResumableStream):
    """Returns its own state, and goes on changing it."""

    def __init__(self) -> None:
        super().__init__()
        self.own = {"next": 0}

    def state_dict(self) -> dict[str, int]:
        self.own["next"] = self.next
        return self.own


class ForgetsWhenAsked(LoaderWithState):
    """Forgets what was loaded when it is asked for its state before it is read, as litdata's."""

    def state_dict(self) -> dict[str, int]:
        self.loaded = False
        return super().state_dict()


class DrawsWhenAsked(LoaderWithState):
    """Draws a number as it is asked for its state, as torchdata's loader does."""

    def state_dict(self) -> dict[str, int]:
        torch.rand(())
        return super().state_dict()


@pytest.mark.parametrize(
    ("loader", "said"),
    [
        (DataLoader(Buffered(), 2), "Buffered, which gives other samples when it goes on from its"),
        (FirstEpochAgain(), "FirstEpochAgain, which gives other samples when it goes on from its"),
        (DataLoader(WithArguments(), 2), "WithArguments, which has a state_dict that cannot be"),
        (DataLoader(WithLock(), 2), "WithLock, which cannot be copied, so its state_dict cannot"),
    ],
)
def test_a_state_that_cannot_be_gone_on_from_is_not_believed(loader: Any, said: str) -> None:
    loading = RunLoaders(seed=0)
    found = loading.exact(loader, rank_of(0, 1))
    assert not loading.can_start_inside_epochs
    assert said in loading.lines[0]
    assert loading.lines[0].endswith(": a resumed run goes on from the last epoch's end.")
    assert position_of(found).start == DataStart()


def test_a_state_that_is_right_at_the_end_of_an_epoch_alone_is_kept_there() -> None:
    def started(epoch: int) -> tuple[RunLoaders, Any]:
        loading = RunLoaders(seed=0)
        trainer.current_epoch = epoch
        return loading, loading.exact(DataLoader(CountsEpochs(), 4), trainer)

    trainer = rank_of(0, 1)
    loading, whole = started(0)
    assert len(loading.lines) == 1
    assert "which gives other samples when it goes on from its state_dict" in loading.lines[0]
    list(whole)
    state = loading.positions[0].state_to_start_after(6, epoch_ends=True)
    trainer.current_epoch = 1
    second = list(whole)
    _, resumed = started(1)
    position_of(resumed).start_at(DataStart(1, loader_states=[state]), *state)
    assert is_same(list(resumed), second)
    _, anew = started(1)
    assert not is_same(list(anew), second)


class CountsEpochs(Buffered):
    """Shuffles in another way in each epoch, and counts them in its state."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next, "epochs": self.epochs}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]
        self.epochs = state["epochs"]

    def __iter__(self) -> Iterator[Tensor]:
        rows = list(super().__iter__())
        random.Random(self.epochs).shuffle(rows)
        self.epochs += 1
        yield from rows


class SeededByTheClock(Stream):
    """Shuffles as webdataset does: its iteration makes a generator."""

    def __iter__(self) -> Iterator[Tensor]:
        rows = list(super().__iter__())
        random.Random(time.time_ns()).shuffle(rows)
        return iter(rows)


class OwnGenerator(Stream):
    """Goes on drawing from a generator from epoch to epoch."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __iter__(self) -> Iterator[Tensor]:
        for row in super().__iter__():
            if isinstance(self.generator, torch.Generator):
                yield row + torch.rand(1, generator=self.generator)
            else:
                yield row + self.generator.random()


class CountsItsEpochs(Stream):
    """Draws another order for each epoch, and counts them where nobody sees it."""

    epoch = -1

    def __iter__(self) -> Iterator[Tensor]:
        self.epoch += 1
        rows = list(super().__iter__())
        random.Random(self.epoch).shuffle(rows)
        return iter(rows)


class GoesOn(Stream):
    """Has new samples each time: a queue of messages, or a file that grows."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[Tensor]:
        for row in super().__iter__():
            yield row + self.next
            self.next += 1


@pytest.mark.parametrize(
    ("make", "workers"),
    [
        (lambda: random.Random(0), 0),
        (lambda: np.random.default_rng(0), 0),
        (lambda: np.random.default_rng(0), 1),
        (lambda: np.random.Generator(np.random.MT19937(0)), 0),
        (lambda: np.random.RandomState(0), 0),
        (torch.Generator, 0),
    ],
)
def test_generators_that_a_dataset_holds_are_seeded_for_each_batch(make: Any, workers: int) -> None:
    def batches(epoch: int, first: int, training: bool = True) -> list[Tensor]:
        loader = DataLoader(HoldsGenerator(make()), 4, num_workers=workers)
        found = exact_form(loader, training, seed=3)
        position_of(found).start_at(DataStart(epoch, batches=first))
        return list(found)

    whole = batches(1, 0)
    assert is_same(batches(1, 2), whole[2:])
    assert not is_same(batches(0, 0), whole)
    assert is_same(batches(1, 0, training=False), batches(0, 0, training=False))


class HoldsGenerator(Numbers):
    """A transform with a generator of its own."""

    def __init__(self, generator: Any) -> None:
        super().__init__(16)
        self.transforms = [{"draw": generator}]

    def __getitem__(self, index: int) -> Tensor:
        generator = self.transforms[0]["draw"]
        if isinstance(generator, torch.Generator):
            return super().__getitem__(index) + torch.rand(1, generator=generator)
        return super().__getitem__(index) + float(generator.uniform(0, 1))


class MakesGenerator(Numbers):
    """Makes a generator when it is asked for its first sample."""

    draw: Any = None

    def __getitem__(self, index: int) -> Tensor:
        if self.draw is None:
            self.draw = np.random.default_rng()
        return super().__getitem__(index) + self.draw.uniform()


def give_generator(worker: int) -> None:
    """As a worker begins: a generator for its dataset."""
    info: Any = torch.utils.data.get_worker_info()
    info.dataset.draw = np.random.default_rng()


@pytest.mark.parametrize(("workers", "prepare"), [(0, None), (1, None), (1, give_generator)])
def test_generators_that_a_dataset_gets_later_are_seeded_for_each_batch(
    workers: int, prepare: Any
) -> None:
    def batches(first: int, training: bool = True) -> list[Tensor]:
        loader = DataLoader(MakesGenerator(16), 4, num_workers=workers, worker_init_fn=prepare)
        found = exact_form(loader, training, seed=3)
        position_of(found).start_at(DataStart(1, batches=first))
        return list(found)

    assert is_same(batches(2), batches(0)[2:])
    if workers == 0:
        assert is_same(batches(0, training=False), batches(0, training=False))


made_late: Any = None


def draw_from_global_generator() -> float:
    """It is made when it is first drawn from."""
    global made_late
    if made_late is None:
        made_late = np.random.default_rng(0)
    return float(made_late.uniform())


class MakesAGlobalGenerator(Numbers):
    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(index) + draw_from_global_generator()


class GathersFromAGlobalGenerator(Numbers):
    """Draws from no other generator."""

    def gather(self, indices: Tensor) -> Tensor:
        return indices + draw_from_global_generator()


@pytest.mark.parametrize("make", [MakesAGlobalGenerator, GathersFromAGlobalGenerator])
@pytest.mark.parametrize("workers", [0, 1])
def test_generators_that_a_first_batch_puts_into_a_global_variable_are_seeded_for_each_batch(
    make: Any, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def batches(first: int) -> list[Tensor]:
        # A new process has none yet.
        monkeypatch.setattr(sys.modules[__name__], "made_late", None)
        loader = DataLoader(make(16), 4, num_workers=workers)
        found = exact_form(loader, True, seed=3)
        position_of(found).start_at(DataStart(1, batches=first))
        return list(found)

    assert is_same(batches(2), batches(0)[2:])


@pytest.mark.parametrize("workers", [0, 2])
def test_generators_that_a_stream_holds_are_seeded_for_each_epoch(workers: int) -> None:
    loading = RunLoaders(seed=0)
    loading.exact(DataLoader(OwnGenerator(random.Random(0)), 2, num_workers=workers), rank_of(0, 1))
    assert len(loading.lines) == 1
    assert "has no state_dict" in loading.lines[0]


@pytest.mark.parametrize("make", [SeededByTheClock, CountsItsEpochs])
def test_a_stream_that_a_resumed_run_reads_in_another_way_is_said(make: Any) -> None:
    loading = RunLoaders(seed=0)
    loading.exact(DataLoader(make(), 2), rank_of(0, 1))
    name = type(make()).__name__
    expected = f"a resume is not exact: {name} gives other samples when it is begun anew ("
    assert [line.startswith(expected) for line in loading.lines] == [False, True]


@pytest.mark.parametrize("make", [GoesOn, CountsItsEpochs])
def test_a_validation_that_a_resumed_run_reads_in_another_way_is_said(make: Any) -> None:
    loading = RunLoaders(seed=0)
    loading.exact(DataLoader(make(), 2), rank_of(0, 1, training=False))
    loading.exact(DataLoader(Stream(), 2), rank_of(0, 1, training=False))
    name = type(make()).__name__
    expected = f"the validations of a resumed run are not exact: {name} gives other samples"
    assert [line.startswith(expected) for line in loading.lines] == [True]
    # It says nothing of an evaluation alone, nor where the next validation begins anew.
    alone = RunLoaders(seed=0)
    alone.exact(DataLoader(make(), 2), rank_of(0, 1, training=False, doing="validate"))
    alone.exact(DataLoader(OwnGenerator(random.Random(0)), 2), rank_of(0, 1, training=False))
    assert not alone.lines


class Kept(Dataset[Tensor]):
    """Rows that may depend on which were fetched before."""

    def __init__(self) -> None:
        self.seen = 0
        self.last = 0.0
        self.cache: dict[int, Tensor] = {}
        self.generator: torch.Generator | None = None

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        raise NotImplementedError


class Counts(Kept):
    def __getitem__(self, index: int) -> Tensor:
        self.seen += 1
        return torch.tensor(float(self.seen))


class MixesWithTheLast(Kept):
    def __getitem__(self, index: int) -> Tensor:
        mixed = torch.tensor(index + 0.1 * self.last)
        self.last = float(index)
        return mixed


class Caches(Kept):
    def __getitem__(self, index: int) -> Tensor:
        return self.cache.setdefault(index, torch.tensor(float(index)))


class CachesWhatItDraws(Kept):
    def __getitem__(self, index: int) -> Tensor:
        if index not in self.cache:
            self.cache[index] = index + torch.rand(1)
        return self.cache[index]


class Queues(Kept):
    """Gives its samples in fours, each four from the last to the first."""

    four = 4

    def __init__(self) -> None:
        super().__init__()
        self.queue: list[Tensor] = []

    def __getitem__(self, index: int) -> Tensor:
        if len(self.queue) == self.four:
            self.queue = []
        self.queue.append(torch.tensor(float(index)))
        return self.queue[0] + len(self.queue)


class QueuesOfTwo(Queues):
    four = 2


class Sevenths(Kept):
    def __getitem__(self, index: int) -> Tensor:
        self.seen += 1
        return torch.tensor(float(index) + (self.seen % 7 == 0))


class Draws(Kept):
    def __getitem__(self, index: int) -> Tensor:
        if self.generator is None:
            self.generator = torch.Generator().manual_seed(3)
        return index + torch.rand(1, generator=self.generator) + torch.rand(1)


class ReplacesItsGenerator(Kept):
    """Draws from a generator that it has made of the one before."""

    def __getitem__(self, index: int) -> Tensor:
        if self.generator is None:
            self.generator = torch.Generator().manual_seed(3)
        seed = int(torch.randint(2**32, (), generator=self.generator))
        self.generator = torch.Generator().manual_seed(seed)
        return index + torch.rand(1, generator=self.generator)


class Fails(Kept):
    """Raises an error of its own, which belongs to the training."""


TWELVE_ROWS = TensorDataset(torch.arange(12.0))


class CountsInASubset(Subset[Any]):
    def __init__(self) -> None:
        super().__init__(TWELVE_ROWS, range(12))
        self.seen = 0

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.seen += 1
        return [torch.tensor(float(self.seen)) for _ in indices]


@pytest.mark.daily(7)
@pytest.mark.skipif(sys.platform != "linux", reason="a process is copied on Linux alone")
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("make", "is_told"),
    [
        (Counts, True),
        (MixesWithTheLast, True),
        (CachesWhatItDraws, True),
        (Queues, True),
        (QueuesOfTwo, True),
        (Sevenths, True),
        (ReplacesItsGenerator, True),
        (CountsInASubset, True),
        (Caches, False),
        (Draws, False),
        (Fails, False),
    ],
)
def test_a_set_whose_samples_depend_on_what_was_fetched_before_is_said(
    make: Any, is_told: bool, training: bool, workers: int
) -> None:
    loading = RunLoaders(seed=0)
    dataset = make()
    state = torch.get_rng_state()
    for _ in range(2):
        loading.exact(DataLoader(dataset, 4, num_workers=workers), rank_of(0, 1, training))
    of = "the training data come from" if training else "a resume is not exact: validations read"
    expected = f"{of} {make.__name__}, which gives other samples when the same are fetched again"
    assert [note.startswith(expected) for note in loading.lines] == [True] * is_told
    assert loading.can_start_inside_epochs == (not (is_told and training))
    # It was tried in another process.
    assert vars(dataset) == vars(make())
    assert torch.equal(torch.get_rng_state(), state)


class Graph:
    """A sample that compares only who it is."""

    def __init__(self, index: int) -> None:
        self.nodes = torch.full((index % 3 + 1,), float(index))

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = None  # type: ignore[assignment]


class Graphs(Kept):
    def __getitem__(self, index: int) -> Any:
        return Graph(index)


class CountedGraphs(Kept):
    def __getitem__(self, index: int) -> Any:
        self.seen += 1
        return Graph(index + self.seen)


@pytest.mark.skipif(sys.platform != "linux", reason="a process is copied on Linux alone")
@pytest.mark.parametrize(("make", "is_told"), [(Graphs, False), (CountedGraphs, True)])
def test_samples_that_are_objects_are_compared_by_what_they_hold(make: Any, is_told: bool) -> None:
    loading = RunLoaders(seed=0)
    loading.exact(DataLoader(make(), 4, collate_fn=list), rank_of(0, 1))
    assert len(loading.lines) == is_told
    assert loading.can_start_inside_epochs is not is_told


@pytest.mark.skipif(sys.platform != "linux", reason="a process is copied on Linux alone")
def test_a_set_for_training_is_tried_beside_one_of_its_class_for_validation() -> None:
    """The validation's is asked first, by the sanity check."""
    loading = RunLoaders(seed=0)
    loading.exact(DataLoader(Subset(Caches(), range(8)), 4), rank_of(0, 1, training=False))
    loading.exact(DataLoader(Subset(Counts(), range(8)), 4), rank_of(0, 1))
    expected = "the training data come from Subset, which gives other samples"
    assert [line.startswith(expected) for line in loading.lines] == [True]
    assert not loading.can_start_inside_epochs


@pytest.mark.skipif(sys.platform != "linux", reason="a process is copied on Linux alone")
def test_each_kind_of_set_that_validations_read_through_a_subset_is_tried() -> None:
    loading = RunLoaders(seed=0)
    for each in (Caches(), Counts()):
        loading.exact(DataLoader(Subset(each, range(8)), 4), rank_of(0, 1, training=False))
    expected = "a resume is not exact: validations read Subset, which gives other samples"
    assert [line.startswith(expected) for line in loading.lines] == [True]


class ReadsOn(Kept):
    """Reads lines from a file and answers from a connection that it holds open. It seeks where it
    is not at the place already.
    """

    def __init__(self, path: Path, connection: Any) -> None:
        super().__init__()
        path.write_bytes(bytes(range(12)))
        self.file = path.open("rb", buffering=0)
        self.connection = connection
        self.place = 0

    def __getitem__(self, index: int) -> Tensor:
        if self.place != index:
            self.file.seek(index)
        self.place = index + 1
        self.connection.send(b"?")
        return torch.tensor([self.file.read(1)[0], self.connection.recv(1)[0]])


@pytest.mark.skipif(sys.platform != "linux", reason="a process is copied on Linux alone")
def test_a_trial_moves_no_place_in_a_file_and_asks_no_connection(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        connection = socket.create_connection(server.getsockname(), timeout=10)
        answering, _ = server.accept()
        # It would answer the trial as well.
        answering.sendall(bytes(range(12)))
        with connection, answering:
            loading = RunLoaders(seed=0)
            dataset = ReadsOn(tmp_path / "rows", connection)
            loader = loading.exact(DataLoader(dataset, 4), rank_of(0, 1, True))
            read = torch.cat(list(loader))
            dataset.file.close()
    assert read.tolist() == [[number, number] for number in range(12)]


def test_a_stream_that_cannot_be_copied_is_said() -> None:
    class Locked(Stream):
        def __init__(self) -> None:
            self.lock = threading.Lock()

    loading = RunLoaders(seed=0)
    loading.exact(DataLoader(Locked(), 2), rank_of(0, 1))
    expected = "a resume may not be exact: Locked could not be tried with a copy (TypeError: "
    assert loading.lines[1].startswith(expected)


def test_an_epoch_that_is_cut_is_tried_as_it_is_trained() -> None:
    """A list of batches is read from its beginning in each epoch, an iterator is not."""

    class Endless(Stream):
        def __init__(self) -> None:
            self.numbers = iter(range(1000))

        def __iter__(self) -> Iterator[Tensor]:
            while True:
                yield torch.tensor([float(next(self.numbers))])

    trainer = rank_of(0, 1)
    trainer.limit_train_batches = 4
    loading = RunLoaders(seed=0)
    loading.exact(DataLoader(Endless(), 2), trainer)
    assert "Endless gives other samples when it is begun anew" in loading.lines[1]


class Reloads(Line):
    """Makes its stream anew for each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def train_dataloader(self) -> Any:
        return DataLoader(ResumableStream(), 5 + self.current_epoch)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen += batch.flatten().tolist()
        return self.first(batch.new_ones(1, 4)).sum()


def test_a_stream_that_is_made_anew_for_each_epoch_loses_no_sample(tmp_path: Path) -> None:
    quiet: Any = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=3,
        reload_dataloaders_every_n_epochs=1,
        limit_val_batches=0,
        callbacks=[ExactCheckpoint(None)],
        default_root_dir=tmp_path,
        **quiet,
    )
    module = Reloads()
    trainer.fit(module)
    assert module.seen == [*map(float, range(24))] * 3


@pytest.mark.parametrize(
    "make",
    [
        LoaderWithState,
        ForgetsWhenAsked,
        DrawsWhenAsked,
        lambda: DataLoader(ResumableStream(), 2),
        lambda: DataLoader(ChangesWhatItReturned(), 2),
    ],
)
def test_a_state_that_was_proved_gives_exactly_the_rest(make: Any) -> None:
    def started(place: DataStart | None = None) -> tuple[RunLoaders, Any]:
        loading = RunLoaders(seed=0)
        if place is not None:
            loading.data_start = place
        trainer.current_epoch = place.epoch if place else 0
        found = loading.exact(make(), trainer)
        assert loading.can_start_inside_epochs
        loading.begin()
        return loading, found

    trainer = rank_of(0, 1)
    loading, whole = started()
    generators = torch.get_rng_state()
    list(whole)
    trainer.current_epoch = 1
    batches = []
    for batch in whole:
        batches.append(batch)
        if len(batches) == 3:
            state = loading.positions[0].state_to_start_after(3, epoch_ends=False)
    assert torch.equal(torch.get_rng_state(), generators)
    _, rest = started(DataStart(epoch=1, batches=3, loader_states=[state]))
    found = list(rest)
    assert is_same(found, batches[3:])
    assert len(found) == len(batches) - 3 > 0


class FailsWhereItGoesOn(IterableDataset[Tensor]):
    fails = False

    def __iter__(self) -> Iterator[Tensor]:
        if self.fails:
            raise ValueError("no such place")
        yield from torch.arange(64)


class LoaderThatFails(DataLoader[Tensor]):
    """Its workers fail when it goes on from its state."""

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.dataset.fails = True  # type: ignore[attr-defined]


def test_a_trial_that_fails_in_a_worker_leaves_no_worker_that_torch_would_miss() -> None:
    """Else torch would say that a worker has died, as soon as any child of this process ends."""
    loader = LoaderThatFails(FailsWhereItGoesOn(), 4, num_workers=1)
    fault = fault_of_state(loader, loader, seed=0)
    # At the end of any child torch looks at the workers that it knows.
    subprocess.run([sys.executable, "-c", ""], check=True)
    assert fault is not None
    assert "has a state_dict that cannot be used" in fault
    assert multiprocessing.active_children() == []
    assert len(list(loader)) == 16


def test_torch_does_not_miss_killed_workers_whose_loader_somebody_still_holds() -> None:
    with workers_end_with_block():
        batches = iter(DataLoader(Numbers(8), 4, num_workers=1))
        next(batches)
    subprocess.run([sys.executable, "-c", ""], check=True)
    assert multiprocessing.active_children() == []
    del batches


class HoldsLock(Numbers):
    """Its worker holds, most of the time, a lock that torch takes to tell workers to end."""

    def __getitem__(self, index: int) -> Tensor:
        frame = inspect.currentframe()
        while frame is not None and "done_event" not in frame.f_locals:
            frame = frame.f_back
        assert frame is not None
        is_done = frame.f_locals["done_event"].is_set

        def ask() -> None:
            while True:
                is_done()

        threading.Thread(target=ask, daemon=True).start()
        return super().__getitem__(index)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("thread", "times"), [("main", 6), ("another", 1)])
def test_nobody_waits_for_a_lock_that_a_killed_worker_held(thread: str, times: int) -> None:
    def kill() -> None:
        for _ in range(times):
            with workers_end_with_block():
                batches = iter(DataLoader(HoldsLock(1), num_workers=1))
                next(batches)

    if thread == "main":
        kill()
    else:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(kill).result()
    subprocess.run([sys.executable, "-c", ""], check=True)
    assert multiprocessing.active_children() == []


def test_trying_a_state_leaves_the_loader_and_the_generators_alone() -> None:
    loader = LoaderWithState()
    before = vars(loader).copy()
    generators = torch.get_rng_state()
    assert fault_of_state(loader, loader, seed=0) is None
    assert vars(loader) == before
    assert torch.equal(torch.get_rng_state(), generators)


def test_trying_a_state_without_workers_does_not_wait_for_the_garbage_collector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    collected: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda: collected.append(1))
    monkeypatch.setattr(multiprocessing, "active_children", list)
    loader = DataLoader(CountedWithState(5))
    assert fault_of_state(loader, loader.dataset, 0) is None
    assert collected == []


def test_batches_are_compared_by_value() -> None:
    class Plain:
        def __init__(self, x: float) -> None:
            self.x = torch.tensor([x, float("nan")])

    values: list[Any] = [1, "a", None, np.array([1.0, np.nan]), torch.eye(2).to_sparse()]
    assert is_same({"a": [*values, Plain(1)]}, {"a": [*values, Plain(1)]})
    for other in ([2], ["b"], [np.array([1.0, 2.0])], [torch.eye(3)], [Plain(2)]):
        assert not is_same([*values, Plain(1)], other)
    assert not is_same(Plain(1), Plain(2))
    assert not is_same(torch.tensor([1]), torch.tensor([1.0]))


def test_a_state_that_no_loader_takes_any_more_is_told_and_left_out() -> None:
    loading = RunLoaders(0)
    loading.positions = [WatchedLoader([torch.zeros(1)], None, 0)]
    loading.data_start = DataStart(loader_states=[(0, {"position": 3})])
    loading.begin()
    assert loading.lines == [
        "the checkpoint holds a state of a loader that has none now: the resume is not exact."
    ]


def test_how_a_pass_is_cut_is_saved_as_well_before_its_rest_is_read() -> None:
    first = exact_form(DataLoader(range(12), 4), True, seed=0)
    next(iter(first))
    first.batch_sampler.batch_size = 2
    kept = first.exact_position.kept_cut(epoch_ends=False)
    assert (kept["of_pass"], kept["now"]) == ([4, False], [2, False])
    resumed = exact_form(DataLoader(range(12), 4), True, seed=0)
    resumed.exact_position.cut_again(kept)
    assert resumed.exact_position.kept_cut(epoch_ends=False) == kept
