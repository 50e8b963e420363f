"""Small trainings, each with one thing that no checkpoint holds, and what must be said of it.

Tests of :mod:`unbroken.testing` train them. Each is as a user would write it by mistake.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

Batch = tuple[Tensor, Tensor]


def table(rows: int, seed: int) -> TensorDataset:
    """Rows of four features, and a target."""
    features = torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(features, features.sum(1).sin())


class Tables:
    """Rows to train, validate and test on: 13 batches an epoch."""

    def train_dataloader(self) -> Any:
        return DataLoader(table(104, 0), 8, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(table(37, 1), 8)

    def test_dataloader(self) -> Any:
        return DataLoader(table(29, 2), 8)


class Plain(Tables, LightningModule):
    """Has nothing planted: its run is exact."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1))

    def loss(self, batch: Batch) -> Tensor:
        output: Tensor = self.net(batch[0])
        return nn.functional.mse_loss(output.squeeze(1), batch[1])

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(batch) + self.further(batch)
        self.log("train_loss", loss)
        return loss

    def further(self, batch: Batch) -> Any:
        """What is planted adds to the loss."""
        return 0.0

    def weigh(self, value: float) -> Tensor:
        """A term of the loss that depends on a number."""
        first: Any = self.net[0]
        weighed: Tensor = value * first.weight.square().mean()
        return weighed

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


class Objects(Plain):
    """A set of objects."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[Any] = set()

    def further(self, batch: Batch) -> Any:
        self.seen.add(object())
        return self.weigh(0.01 * len(self.seen))


class Unread(Objects):
    """The same, and nothing depends on it."""

    def further(self, batch: Batch) -> Any:
        self.seen.add(object())
        return 0.0


def module_with_closure() -> LightningModule:
    """A generator of random numbers that a function keeps."""
    noise = torch.Generator().manual_seed(1)

    class Closure(Plain):
        def further(self, batch: Batch) -> Any:
            return self.weigh(float(torch.rand(1, generator=noise)))

    return Closure()


STEPS_OF_ALL: dict[str, int] = {"count": 0}


class Global(Plain):
    """A global variable."""

    def further(self, batch: Batch) -> Any:
        STEPS_OF_ALL["count"] += 1
        return self.weigh(0.01 * STEPS_OF_ALL["count"])


class OfTheClass(Plain):
    """A number of the class. A list of it is kept."""

    count: ClassVar[int] = 0

    def further(self, batch: Batch) -> Any:
        OfTheClass.count += 1
        return self.weigh(0.01 * OfTheClass.count)


class Iterating(Plain):
    """An iterator that goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = itertools.cycle([0.0, 0.1, 0.2, 0.3, 0.4])

    def further(self, batch: Batch) -> Any:
        return self.weigh(next(self.turns))


class Hashing(Plain):
    """An object of C code that nobody can look into."""

    def __init__(self) -> None:
        super().__init__()
        self.chain = hashlib.sha256()

    def further(self, batch: Batch) -> Any:
        self.chain.update(b"step")
        return self.weigh(self.chain.digest()[0] / 256)


class HashingLayer(nn.Linear):
    """A layer that scales by an object of C code, which nobody can look into."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.chain = hashlib.sha256()

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.chain.update(b"step")
        return super().forward(x) * (self.chain.digest()[0] / 256)


class HasHashingLayer(Plain):
    """Such a layer in the middle of a network."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), HashingLayer(6, 1))


class Unseeded(Plain):
    """A generator without a seed: no two runs are the same."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = np.random.default_rng()

    def further(self, batch: Batch) -> Any:
        return self.weigh(float(self.noise.random()))


class Clock(Plain):
    """A rate by the clock."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1 + time.time() % 1)
        return [optimizer], [{"scheduler": rate, "interval": "step"}]


class Alternating(torch.optim.SGD):
    """Decays weights in turns, by an iterator beside its state."""

    def __init__(self, weights: Any, lr: float) -> None:
        super().__init__(weights, lr)
        self.turns = itertools.cycle([0.0, 0.01, 0.02, 0.03, 0.04])

    def step(self, closure: Any = None) -> Any:
        decay = next(self.turns)
        for weight in self.param_groups[0]["params"]:
            weight.data.mul_(1 - decay)
        return super().step(closure)


class OwnOptimizer(Plain):
    """An optimizer with an iterator of its own."""

    def configure_optimizers(self) -> Any:
        return Alternating(self.parameters(), 0.05)


class Counting(Dataset[Any]):
    """Counts how often it was read."""

    def __init__(self) -> None:
        self.rows = table(104, 0)
        self.reads = 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        features, target = self.rows[index]
        return features + 0.01 * self.reads, target


class CountingData(Plain):
    """A dataset that counts."""

    def train_dataloader(self) -> Any:
        return DataLoader(Counting(), 8, shuffle=True)


class CountingWorkers(Plain):
    """The same in worker processes, where nobody sees it."""

    def train_dataloader(self) -> Any:
        return DataLoader(Counting(), 8, shuffle=True, num_workers=1, persistent_workers=True)


class Endless(IterableDataset[Any]):
    """A stream that goes on where it was, in the next epoch as well."""

    def __init__(self) -> None:
        self.rows = table(104, 0)
        self.place = 0

    def __iter__(self) -> Iterator[Any]:
        for _ in range(64):
            self.place += 1
            yield self.rows[self.place % len(self.rows)]


class Streaming(Plain):
    """A stream with a place of its own."""

    def train_dataloader(self) -> Any:
        return DataLoader(Endless(), 8)


class Halving(Plain):
    """Lowers the rate by what an object of C code has counted."""

    def __init__(self) -> None:
        super().__init__()
        self.chain = hashlib.sha256()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.chain.update(b"step")
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = 0.05 * self.chain.digest()[0] / 256


class OnDisk(Plain):
    """A file that grows, beside the run."""

    def __init__(self) -> None:
        super().__init__()
        self.path = Path("steps.txt")
        self.path.write_text("", encoding="utf-8")

    def further(self, batch: Batch) -> Any:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write("x")
        return self.weigh(0.01 * self.path.stat().st_size)


class Growing(Plain):
    """Makes a layer in its second epoch."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.more = nn.Linear(4, 1)
            self.trainer.optimizers[0].add_param_group({"params": list(self.more.parameters())})

    def further(self, batch: Batch) -> Any:
        return self.more(batch[0]).mean() if hasattr(self, "more") else 0.0

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        # The best has the layer, so that it can be tested.
        self.log("val_loss", -float(self.global_step))


class Averages(Callback):
    """Keeps what it adds up in an attribute that no state holds, and logs the mean."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(float(outputs["loss"]))
        pl_module.log("mean_loss", sum(self.losses) / len(self.losses))


class Patience(Callback):
    """Counts how long it has waited, and would stop after a thousand batches."""

    def __init__(self) -> None:
        self.waited = 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.waited += 1
        if self.waited > 1000:
            trainer.should_stop = True


@dataclass
class Planted:
    """A training with a fault.

    Attributes:
        make: Makes its module.
        says: Words that the table must hold: what is the cause.
        trainer: Arguments of the Trainer.
    """

    make: Callable[[], LightningModule]
    says: list[str]
    trainer: dict[str, Any] = field(default_factory=dict)


PLANTED: dict[str, Planted] = {
    "objects": Planted(Objects, ["1. module.seen changes in training and is not kept"]),
    "closure": Planted(module_with_closure, ["noise changes in training and is not kept"]),
    "global": Planted(Global, ["planted.STEPS_OF_ALL changes in training and is not kept"]),
    "class": Planted(OfTheClass, ["planted.OfTheClass.count changes in training and is not kept"]),
    "iterator": Planted(Iterating, ["1. module.turns"]),
    "c_object": Planted(Hashing, ["a state that cannot be seen", "module.chain (HASH)"]),
    "c_object_of_a_layer": Planted(
        HasHashingLayer, ["computed differently", "aten.mul.Tensor in net.2"]
    ),
    "unseeded": Planted(Unseeded, ["not deterministic", "module.noise is another one"]),
    "clock": Planted(Clock, ["not deterministic", "lr of optimizer 0", "as by a clock"]),
    "own_optimizer": Planted(OwnOptimizer, ["1. optimizers[0]"]),
    "counting": Planted(CountingData, ["training data[0].dataset.reads changes in training"]),
    "counting_workers": Planted(CountingWorkers, ["training batches", "get other samples"]),
    "stream": Planted(Streaming, ["training batches", "get other samples"]),
    "rate": Planted(Halving, ["lr of optimizer 0"]),
    "on_disk": Planted(OnDisk, ["a state that cannot be seen"]),
    "growing": Planted(Growing, ["it changes its shape in training", "more.weight is new"]),
    "callback": Planted(
        Plain, ["callback Averages.losses changes in training"], {"callbacks": [Averages()]}
    ),
}
