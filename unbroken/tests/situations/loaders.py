"""Loaders, samplers, datasets and batches of all kinds."""

from __future__ import annotations

import random
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    random_split,
)

from tests.situations.situation import Keeps, Task, add, table


class Noisy(Dataset[Any]):
    """A random transform, drawn from three generators."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        x, y = self.dataset[index]
        noise = 0.1 * torch.randn(()) + 0.1 * float(np.random.normal()) + random.uniform(-0.1, 0.1)
        return x + noise, y


def reads(make: Callable[[], Any], validation: Callable[[], Any] | None = None) -> type[Task]:
    """A task with its own training loader."""

    class Reads(Task):
        def train_dataloader(self) -> Any:
            return make()

        def val_dataloader(self) -> Any:
            return super().val_dataloader() if validation is None else validation()

    return Reads


class ByEpoch(Sampler[int]):
    """A sampler that follows ``set_epoch``."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 50

    def __iter__(self) -> Iterator[int]:
        draw = torch.Generator().manual_seed(self.epoch)
        return iter(torch.randperm(50, generator=draw).tolist())


class WithState(Sampler[int]):
    """A sampler with a generator of its own, which goes on from epoch to epoch, and its state."""

    def __init__(self) -> None:
        self.draw = torch.Generator().manual_seed(7)

    def __len__(self) -> int:
        return 50

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(50, generator=self.draw).tolist())

    def state_dict(self) -> dict[str, Tensor]:
        return {"draw": self.draw.get_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.draw.set_state(state["draw"])


class WithoutState(Sampler[int]):
    """A sampler that draws from a generator of NumPy that it keeps for itself."""

    def __init__(self) -> None:
        self.draw = np.random.default_rng(7)

    def __len__(self) -> int:
        return 50

    def __iter__(self) -> Iterator[int]:
        return iter(self.draw.permutation(50).tolist())


class DrawsGlobally(Sampler[int]):
    """A sampler that draws from NumPy's and Python's global generators."""

    def __len__(self) -> int:
        return 50

    def __iter__(self) -> Iterator[int]:
        order = np.random.permutation(50).tolist()
        random.shuffle(order)
        return iter(order)


class OwnGenerators(Dataset[Any]):
    """A random transform, drawn from three generators that the dataset keeps for itself."""

    def __init__(self) -> None:
        self.rows = table(50)
        self.choice = random.Random(1)
        self.noise = [np.random.default_rng(2)]
        self.draw = torch.Generator().manual_seed(3)

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> Any:
        x, y = self.rows[index]
        noise = self.noise[0].normal() + self.choice.uniform(-1, 1)
        return x + 0.1 * torch.randn(4, generator=self.draw) + 0.1 * noise, y


class LateGenerator(Dataset[Any]):
    """A random transform from a generator that it makes late, or that a worker gives it."""

    draw: Any = None

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> Any:
        if self.draw is None:
            self.draw = np.random.default_rng()
        x, y = table(50)[index]
        return x + 0.1 * self.draw.normal(size=4).astype(np.float32), y


def give_generator(worker: int) -> None:
    info: Any = torch.utils.data.get_worker_info()
    info.dataset.draw = np.random.default_rng(worker)


class StreamWithGenerator(IterableDataset[Any]):
    """Shuffles from a generator of its own, which goes on from epoch to epoch."""

    def __init__(self) -> None:
        self.draw = np.random.default_rng(2)

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        rows = table(48)
        # Each worker draws the same order, and reads its own part of it.
        for index in self.draw.permutation(48)[first::step]:
            yield rows[int(index)]


class StreamByTheClock(IterableDataset[Any]):
    """Shuffles from a generator that nobody sees, as webdataset does without a seed."""

    def __iter__(self) -> Iterator[Any]:
        rows = table(50)
        for index in np.random.default_rng().permutation(50):
            yield rows[int(index)]


class Buckets(Sampler[list[int]]):
    """Batches of samples of like size, in an order by chance."""

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[list[int]]:
        starts = torch.randperm(8).tolist()
        return ([*range(6 * start, 6 * start + 6)] for start in starts)


class Stream(IterableDataset[Any]):
    """Samples that come one after the other, without a state."""

    def __iter__(self) -> Iterator[Any]:
        rows = table(50)
        order = list(range(50))
        random.shuffle(order)
        for index in order:
            x, y = rows[index]
            yield x + 0.1 * torch.randn(4), y


class SizedStream(Stream):
    """The same, with a length."""

    def __len__(self) -> int:
        return 50


class StreamWithState(IterableDataset[Any]):
    """A stream with a state: how many have come."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[Any]:
        rows = table(50)
        while self.next < 50:
            self.next += 1
            x, y = rows[self.next - 1]
            yield x + 0.1 * torch.randn(4), y
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class ShortStreamWithState(StreamWithState):
    """Ends much earlier than the other."""

    def __iter__(self) -> Iterator[Any]:
        rows = table(18)
        while self.next < 18:
            self.next += 1
            yield rows[self.next - 1]
        self.next = 0


class EndlessStream(Keeps, IterableDataset[Any]):
    """Never ends, and counts in its state."""

    count = 0

    def __iter__(self) -> Iterator[Any]:
        rows = table(50)
        while True:
            self.count += 1
            yield rows[self.count * 7 % 50]


class SharedByWorkers(IterableDataset[Any]):
    """Each worker has its part of the rows, and draws."""

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        rows = table(48)
        for index in range(first, 48, step):
            x, y = rows[index]
            yield x + 0.1 * torch.randn(4) + float(np.random.rand()), y


class Cached(Dataset[Any]):
    """Draws each sample once, when it is first asked for, and keeps it."""

    def __init__(self) -> None:
        self.rows = table(50)

    def __len__(self) -> int:
        return 50

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(self.rows[i][0] + 0.1 * torch.randn(4), self.rows[i][1]) for i in indices]

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]


EPOCH_END = "from the last epoch's end"
weights = torch.linspace(0.1, 1.0, 50)

add("random_transforms", reads(lambda: DataLoader(Noisy(table(50)), 8, shuffle=True)))
add(
    "random_transforms_in_workers",
    reads(lambda: DataLoader(Noisy(table(50)), 8, shuffle=True, num_workers=2)),
)
add(
    "random_transforms_in_workers_that_live_on",
    reads(
        lambda: DataLoader(
            Noisy(table(50)), 8, shuffle=True, num_workers=2, persistent_workers=True
        )
    ),
)
add(
    "in_the_order_in_which_workers_are_ready",
    reads(lambda: DataLoader(Noisy(table(50)), 8, shuffle=True, num_workers=2, in_order=False)),
    says="in_order=False, and gives the batch that is ready first",
    is_exact=False,
)
add(
    "random_transforms_in_validation",
    reads(
        lambda: DataLoader(Noisy(table(50)), 8, shuffle=True),
        lambda: DataLoader(Noisy(table(20)), 8),
    ),
)
add(
    "random_transforms_of_a_subset",
    reads(lambda: DataLoader(Subset(Noisy(table(60)), range(50)), 8, shuffle=True)),
)
add(
    "random_transforms_in_workers_and_validation_inside_epochs",
    reads(
        lambda: DataLoader(Noisy(table(50)), 8, shuffle=True, num_workers=1),
        lambda: DataLoader(Noisy(table(20)), 8, num_workers=1),
    ),
    val_check_interval=3,
)
add(
    "random_split",
    reads(lambda: DataLoader(random_split(Noisy(table(60)), [50, 10])[0], 8, shuffle=True)),
)
add("asks_for_several_samples_at_once", reads(lambda: DataLoader(Cached(), 8, shuffle=True)))
add("drops_the_last", reads(lambda: DataLoader(table(50), 8, shuffle=True, drop_last=True)))
add("not_shuffled", reads(lambda: DataLoader(Noisy(table(50)), 8)))
add(
    "concatenated",
    reads(lambda: DataLoader(ConcatDataset([table(30), Noisy(table(20, 1))]), 8, shuffle=True)),
)
add(
    "weighted_sampler",
    reads(lambda: DataLoader(table(50), 8, sampler=WeightedRandomSampler(weights, 40))),
)
add(
    "weighted_sampler_with_a_generator",
    reads(
        lambda: DataLoader(
            table(50), 8, sampler=WeightedRandomSampler(weights, 40, generator=torch.Generator())
        )
    ),
)
add(
    "random_sampler_with_replacement",
    reads(lambda: DataLoader(table(50), 8, sampler=RandomSampler(table(50), True, 40))),
)
add(
    "random_sampler_with_a_generator",
    reads(
        lambda: DataLoader(table(50), 8, shuffle=True, generator=torch.Generator().manual_seed(3))
    ),
)
add(
    "subset_sampler",
    reads(lambda: DataLoader(table(50), 8, sampler=SubsetRandomSampler(range(5, 45)))),
)
add(
    "distributed_sampler",
    reads(lambda: DataLoader(table(50), 8, sampler=DistributedSampler(table(50), 1, 0))),
)
add("sampler_by_epoch", reads(lambda: DataLoader(table(50), 8, sampler=ByEpoch())))
add("sampler_with_state", reads(lambda: DataLoader(table(50), 8, sampler=WithState())))
add(
    "sampler_without_state",
    reads(lambda: DataLoader(table(50), 8, sampler=WithoutState())),
    says="WithoutState has neither set_epoch nor state_dict",
    is_exact=False,
)
add(
    "sampler_of_global_generators",
    reads(lambda: DataLoader(table(50), 8, sampler=DrawsGlobally())),
    says="DrawsGlobally has neither set_epoch nor state_dict",
)
add(
    "batch_sampler_of_buckets",
    reads(lambda: DataLoader(table(50), batch_sampler=Buckets())),
    says="Buckets has neither set_epoch nor state_dict",
)
add(
    "batch_sampler_of_torch",
    reads(
        lambda: DataLoader(
            table(50), batch_sampler=BatchSampler(RandomSampler(table(50)), 8, False)
        )
    ),
)
add(
    "batch_sampler_around_a_sampler_with_state",
    reads(lambda: DataLoader(table(50), batch_sampler=BatchSampler(WithState(), 8, False))),
)

add("generators_of_a_dataset", reads(lambda: DataLoader(OwnGenerators(), 8, shuffle=True)))
add(
    "generators_of_a_dataset_in_workers",
    reads(lambda: DataLoader(OwnGenerators(), 8, shuffle=True, num_workers=2)),
)
add("generator_made_late", reads(lambda: DataLoader(LateGenerator(), 8, shuffle=True)))
add(
    "generator_of_each_worker",
    reads(
        lambda: DataLoader(
            LateGenerator(), 8, shuffle=True, num_workers=2, worker_init_fn=give_generator
        )
    ),
)
add(
    "generator_of_a_stream",
    reads(lambda: DataLoader(StreamWithGenerator(), 8)),
    says=EPOCH_END,
)
add(
    "generator_of_a_stream_in_workers",
    reads(lambda: DataLoader(StreamWithGenerator(), 8, num_workers=2)),
    says=EPOCH_END,
)
add(
    "stream_seeded_by_the_clock",
    reads(lambda: DataLoader(StreamByTheClock(), 8)),
    says="a resume is not exact: StreamByTheClock gives other samples when it is begun anew",
    is_exact=False,
)

add("stream", reads(lambda: DataLoader(Stream(), 8)), says=EPOCH_END)
add(
    "stream_and_validation_inside_epochs",
    reads(lambda: DataLoader(Stream(), 8)),
    says=EPOCH_END,
    val_check_interval=2,
)
add("stream_with_a_length", reads(lambda: DataLoader(SizedStream(), 8)), says=EPOCH_END)
add("stream_with_state", reads(lambda: DataLoader(StreamWithState(), 8)))
add(
    "stream_with_state_and_limited_batches",
    reads(lambda: DataLoader(StreamWithState(), 8)),
    limit_train_batches=4,
)
add(
    "stream_with_state_and_validation_inside_epochs",
    reads(lambda: DataLoader(StreamWithState(), 8)),
    val_check_interval=3,
)
add(
    "endless_stream_with_state",
    reads(lambda: DataLoader(EndlessStream(), 8)),
    limit_train_batches=5,
)
add(
    "stream_shared_by_workers",
    reads(lambda: DataLoader(SharedByWorkers(), 8, num_workers=2)),
    says=EPOCH_END,
)
add(
    "stream_shared_by_workers_that_live_on",
    reads(lambda: DataLoader(SharedByWorkers(), 8, num_workers=2, persistent_workers=True)),
    says=EPOCH_END,
)
add(
    "validates_on_a_stream",
    reads(lambda: DataLoader(table(50), 8, shuffle=True), lambda: DataLoader(Stream(), 8)),
)
add(
    "validates_on_a_stream_inside_epochs",
    reads(lambda: DataLoader(table(50), 8, shuffle=True), lambda: DataLoader(Stream(), 8)),
    val_check_interval=2,
)


class Generates:
    """A loader that is no DataLoader, with a state: it draws its batches by the count."""

    def __init__(self) -> None:
        self.count = 0

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[Any]:
        for _ in range(6):
            self.count += 1
            draw = torch.Generator().manual_seed(self.count)
            x = torch.randn(8, 4, generator=draw)
            yield x, x.sum(1).sin()

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}


class Forgetful(Generates):
    """The same loader, without a state."""

    state_dict = None  # type: ignore[assignment]


class Batches:
    """A loader that is no DataLoader and has no state: a list of batches in memory."""

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[Any]:
        for number in range(6):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
            yield x, x.sum(1).sin()


add("own_loader", reads(Batches), says=EPOCH_END)
add("own_loader_without_state", reads(Batches), says=EPOCH_END)


class ResumesItself(Generates):
    """The same loader with a state that can be loaded, also inside an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.done = 0

    def __iter__(self) -> Iterator[Any]:
        while self.done < 6:
            self.done += 1
            self.count += 1
            draw = torch.Generator().manual_seed(self.count)
            x = torch.randn(8, 4, generator=draw)
            yield x, x.sum(1).sin()
        self.done = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count, "done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]
        self.done = state["done"]


add("own_loader_with_state", reads(ResumesItself))


class Several(Task):
    """Trains on two loaders side by side."""

    mode = "max_size_cycle"

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        parts = [part for part in batch.values() if part is not None]
        loss = sum(self.loss(part) for part in parts) / len(parts)
        self.log("train_loss", loss, on_step=True, on_epoch=True, batch_size=8)
        return loss

    def train_dataloader(self) -> Any:
        loaders = {
            "long": DataLoader(Noisy(table(50)), 8, shuffle=True),
            "short": DataLoader(Noisy(table(20, 2)), 8, shuffle=True),
        }
        return CombinedLoader(loaders, self.mode)


for combination in ("max_size_cycle", "min_size", "max_size"):
    kind = type("Combined", (Several,), {"mode": combination})
    add(f"combined_{combination}", kind)
    add(f"combined_{combination}_and_validation_inside_epochs", kind, val_check_interval=2)


class SeveralStreams(Several):
    """Trains on two streams side by side: nothing says when they end."""

    def train_dataloader(self) -> Any:
        loaders = {
            "long": DataLoader(StreamWithState(), 4),
            "short": DataLoader(ShortStreamWithState(), 8),
        }
        return CombinedLoader(loaders, self.mode)


for combination in ("max_size_cycle", "min_size", "max_size"):
    kind = type("CombinedStreams", (SeveralStreams,), {"mode": combination})
    told = "" if combination == "min_size" else EPOCH_END
    add(f"streams_combined_{combination}", kind, says=told)


class Dictionary(Several):
    """The same, given to Lightning as a dictionary."""

    def train_dataloader(self) -> Any:
        return super().train_dataloader().iterables


add("loaders_in_a_dictionary", Dictionary)


class Sequential(Task):
    """One loader after the other."""

    def training_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return super().training_step(batch, batch_idx)

    def train_dataloader(self) -> Any:
        loaders = [DataLoader(table(30), 8, shuffle=True), DataLoader(table(20, 2), 8)]
        return CombinedLoader(loaders, "sequential")


class SeveralValidations(Task):
    """Validates on loaders side by side."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        losses = [self.loss(part) for part in batch.values() if part is not None]
        self.log("val_loss", sum(losses) / len(losses), batch_size=8)

    def val_dataloader(self) -> Any:
        loaders = {"a": DataLoader(table(20, 1), 8), "b": DataLoader(table(9, 2), 4)}
        return CombinedLoader(loaders, "max_size_cycle")


add("validates_side_by_side", SeveralValidations, val_check_interval=3)


class StreamThatGoesOn(IterableDataset[Any]):
    """Each validation has the rows behind those of the one before."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[Any]:
        rows = table(50)
        for _ in range(16):
            yield rows[self.next % 50]
            self.next += 1


add(
    "validation_stream_that_goes_on",
    reads(
        lambda: DataLoader(table(50), 8, shuffle=True),
        validation=lambda: DataLoader(StreamThatGoesOn(), 8),
    ),
    says="the validations of a resumed run are not exact: StreamThatGoesOn gives other samples",
    is_exact=False,
)

Pair = namedtuple("Pair", ["x", "y"])


def as_dictionary(samples: list[Any]) -> Any:
    x, y = (torch.stack(part) for part in zip(*samples, strict=True))
    return {"x": x, "nested": [{"y": y}], "name": "a text", "none": None}


def as_pair(samples: list[Any]) -> Any:
    return Pair(*(torch.stack(part) for part in zip(*samples, strict=True)))


class Dictionaries(Task):
    """Batches that are dictionaries."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss((batch["x"], batch["nested"][0]["y"]))

    def train_dataloader(self) -> Any:
        return DataLoader(table(50), 8, shuffle=True, collate_fn=as_dictionary)

    def val_dataloader(self) -> Any:
        return DataLoader(table(20, 1), 8, collate_fn=as_dictionary)


add("batches_are_dictionaries", Dictionaries)
add(
    "batches_are_named_tuples",
    reads(lambda: DataLoader(table(50), 8, shuffle=True, collate_fn=as_pair)),
)


class Stacked(Dictionaries):
    """Samples that are dictionaries, stacked of several datasets."""

    def loss(self, batch: Any) -> Tensor:
        return Task.loss(self, batch["rows"])

    def train_dataloader(self) -> Any:
        return DataLoader(StackDataset(rows=Noisy(table(50)), others=table(50, 3)), 8, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(StackDataset(rows=table(20, 1)), 8)


add("stacked_datasets", Stacked)


def noisy_collate(samples: list[Any]) -> Any:
    x, y = (torch.stack(part) for part in zip(*samples, strict=True))
    return x * random.uniform(0.9, 1.1) + 0.1 * torch.randn_like(x), y


add(
    "collate_draws", reads(lambda: DataLoader(table(50), 8, shuffle=True, collate_fn=noisy_collate))
)
add(
    "batch_size_none",
    reads(
        lambda: DataLoader(
            [noisy_collate(list(table(8, i))) for i in range(6)], batch_size=None, shuffle=True
        )
    ),
)


class Curriculum(Task):
    """Its loader depends on the epoch, and is made anew for each."""

    def train_dataloader(self) -> Any:
        count = 30 + 10 * self.current_epoch
        return DataLoader(Noisy(table(count)), 8, shuffle=True)


add("curriculum", Curriculum, reload_dataloaders_every_n_epochs=1)
add(
    "curriculum_and_validation_inside_epochs",
    Curriculum,
    reload_dataloaders_every_n_epochs=1,
    val_check_interval=2,
)


class CurriculumOfStreams(Task):
    """The same with streams."""

    def train_dataloader(self) -> Any:
        return DataLoader(StreamWithState(), 8 - 2 * self.current_epoch)


add(
    "curriculum_of_streams",
    CurriculumOfStreams,
    reload_dataloaders_every_n_epochs=1,
)


class Split(LightningDataModule):
    """Splits its rows by chance in ``setup``."""

    def setup(self, stage: str) -> None:
        self.train, self.val = random_split(Noisy(table(70)), [50, 20])

    def train_dataloader(self) -> Any:
        return DataLoader(self.train, 8, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self.val, 8)


add("data_module_splits_by_chance", Task, data=Split)


class HardSamples(Task):
    """Weighs its samples by their losses, in a sampler with state that the module changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", torch.ones(50), persistent=False)

    def train_dataloader(self) -> Any:
        return DataLoader(table(50), 8, sampler=WeightedRandomSampler(self.weights, 40))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * self.weights.mean()


add("sampler_of_a_buffer", HardSamples)
