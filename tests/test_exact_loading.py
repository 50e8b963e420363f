"""The engine's loaders: order by (seed, epoch), a start anywhere, exact shards, transforms that repeat."""

from __future__ import annotations

import multiprocessing
import os
import random
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
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
    WeightedRandomSampler,
    get_worker_info,
)

from project.engine.loading import ExactBatches, ExactLoader, ExactLoading, Start
from project.errors import UserError
from tests.commands import complete
from tests.other_tasks import ByEpoch, Line, table


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
    return ExactLoader(loader, training, kwargs.pop("seed", 0), **kwargs)


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
    ours.sampler.set_epoch(1)
    assert indices(ours) != first
    ours.sampler.set_epoch(0)
    assert indices(ours) == first
    assert indices(exact(DataLoader(Numbers(40), batch_size=8, shuffle=True), seed=1)) != first


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
    whole.sampler.set_epoch(3)
    batches = list(whole)
    rest = loader()
    rest.sampler.start_at(
        Start(epoch=3, batches=2, samples_per_batch=rest.sampler.global_batch_size)
    )
    rest.sampler.set_epoch(3)  # as Lightning does once more
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
    assert [a + b + c for a, b, c in zip(*shards, strict=True)] == one
    assert sorted(flat(one)) == list(range(103))


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
        ExactLoader(DataLoader(torch.arange(10).view(5, 2), batch_size=2), training=True, seed=0)
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
    shares = [[*ExactLoader(loader, False, 0, rank, ranks)] for rank in range(ranks)]
    assert len({len(share) for share in shares}) == 1
    assert sum(float(batch.sum()) for share in shares for batch in share) == sum(lengths)
    rows: Any = SimpleNamespace(gather=lambda keys: (keys,))
    shares = [
        [*ExactLoader(DataLoader(rows, batch_sampler=batches), False, 0, r, ranks)]
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


NAMED_KEYS = """
import random
from project.engine.loading import Fetch

class Drawn:
    def __getitem__(self, key):
        return random.random()

print(hash("left"), *Fetch(Drawn(), list, seed=1, rank=None, batched=True)[0, 0, ["left", ("right", 2)]])
"""


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
    later.sampler.start_at(Start(epoch=0, batches=3, samples_per_batch=8))
    assert flat(indices(later)) == order[24:]
    assert later.sampler.start_batch == 0  # begins at its beginning when it is cycled through


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
    for each in (ours, ours.fetching):
        assert (each.num_workers, each.prefetch_factor, each.persistent_workers, each.timeout) == (
            1,
            3,
            True,
            7,
        )
    assert ours.dataset is plain.dataset
    assert (ours.batch_size, ours.drop_last, ours.collate_fn) == (4, False, list)
    assert isinstance(next(iter(ours)), list)
    ours.fetching.worker_init_fn(0)  # type: ignore[misc]
    assert seen == [0]


class Opened(Numbers):
    """Has a handle that each worker opens."""

    handle = 0

    def __getitem__(self, index: int) -> Any:
        return self.handle


def open_handle(worker: int) -> None:
    info: Any = get_worker_info()
    info.dataset.handle = 10 + worker


def test_what_a_worker_does_to_its_dataset_reaches_it() -> None:
    ours = exact(DataLoader(Opened(8), batch_size=4, num_workers=2, worker_init_fn=open_handle))
    assert [batch.tolist() for batch in ours] == [[10] * 4, [11] * 4]


def test_lightning_ends_the_workers_of_a_training(tmp_path: Path) -> None:
    alive: list[int] = []

    class Counts(Callback):
        def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            alive.append(len(multiprocessing.active_children()))

        def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
            alive.append(len(multiprocessing.active_children()))

    before = len(multiprocessing.active_children())
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(
        accelerator="cpu", max_epochs=1, callbacks=[Counts()], default_root_dir=tmp_path, **quiet
    )
    ExactLoading().install(trainer)
    samples = table(16)
    trainer.fit(Line(), DataLoader(samples, batch_size=4, num_workers=2, persistent_workers=True))
    assert alive == [before + 2, before]


def test_python_ends_although_workers_are_left() -> None:
    code = (
        "from torch.utils.data import DataLoader; from project.engine.loading import ExactLoader; import sys\n"
        "sys.batches = iter(ExactLoader(DataLoader(range(8), 2, num_workers=1), True, 0)); next(sys.batches)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


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
    loading = ExactLoading(seed=0)
    loading.exact(loader, trainer)
    loading.exact(loader, trainer)
    assert loading.anywhere is anywhere
    assert len({*loading.notes}) == (said is not None)
    assert said is None or said in loading.notes[0]


@pytest.mark.parametrize("wrapped", [False, True])
def test_what_a_distributed_sampler_has_shared_is_not_shared_again(wrapped: bool) -> None:
    seen = []
    for rank in range(2):
        sampler = DistributedSampler(Numbers(8), num_replicas=2, rank=rank)
        options: Any = (
            {"batch_sampler": BatchSampler(sampler, 2, False)} if wrapped else {"sampler": sampler}
        )
        trainer: Any = SimpleNamespace(
            training=True,
            current_epoch=0,
            reload_dataloaders_every_n_epochs=0,
            global_rank=rank,
            world_size=2,
        )
        seen += indices(ExactLoading(seed=0).exact(DataLoader(Numbers(8), **options), trainer))
    assert sorted(flat(seen)) == list(range(8))


@pytest.mark.filterwarnings("ignore:.*returned .None")
def test_a_stream_with_a_state_goes_on_where_its_checkpoint_was_taken() -> None:
    class Looks(LightningModule):
        seen: list[int] = []

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            Looks.seen += [int(x) for x in batch[:, 0]]

        def configure_optimizers(self) -> None: ...

        def on_train_batch_end(self, *_: Any) -> None:
            if self.trainer.fit_loop.total_batch_idx == 4:
                states.append(loading.training[0].state_after(5, epoch_ends=False))

    states: list[Any] = []
    loading = ExactLoading(seed=0)
    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        max_epochs=1,
        enable_model_summary=False,
    )
    loading.install(trainer)
    trainer.fit(Looks(), DataLoader(ResumableStream(), batch_size=2))
    assert states == [(5, {"next": 10})]  # Lightning itself had fetched one batch more
    trainer.training = True
    rest = loading.exact(DataLoader(ResumableStream(), batch_size=2), trainer)
    rest.sampler.start_at(Start(batches=5), *states[0])
    assert [int(x) for batch in rest for x in batch] == Looks.seen[10:]


def test_plain_samplers_are_told_from_own_ones() -> None:
    for sampler in (SequentialSampler(range(3)), RandomSampler(range(3))):
        batches = ExactBatches(sampler, 2)
        assert sorted(int(i) for _, _, part in batches for i in part) == [0, 1, 2]
