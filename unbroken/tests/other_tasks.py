"""Modules, loaders and data modules as people have them; most know nothing of this project."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import CombinedLoader
from numerals.data import MNISTDataModule
from numerals.model import MNISTClassifier
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)
from torchmetrics import MeanAbsoluteError, SpearmanCorrCoef

from configs.examples.autoencoder import LitAutoEncoder, Waves


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """A random transform, drawn from three generators."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, place = self.dataset[index]
        image = image * random.uniform(0.9, 1.1)
        image = image + 0.1 * torch.randn(()) + 0.1 * np.random.normal()
        return image, place


class NoisyWaves(Waves):
    """Lightning's data module with random transforms in two workers, and a test set that no batch
    size divides.
    """

    description = "a text, and a method of its author's"

    def describe(self) -> str:
        return self.description

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Noisy(self.train_set), batch_size=64, shuffle=True, num_workers=2)

    def test_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Subset(self.val_set, range(111)), batch_size=32)


class TestedAutoEncoder(LitAutoEncoder):
    """Lightning's module with a test step, which logs without a word on ranks."""

    __test__ = False  # pytest: this is no test class

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.training_step(batch, batch_idx, "test_loss")


class Pretrained(nn.Module):
    """A network that would download its first weights."""

    def __init__(self, weights: str | None = None) -> None:
        super().__init__()
        assert weights is None, "downloaded"
        self.blocks = nn.Sequential(
            nn.Flatten(),
            nn.Linear(784, 256),
            nn.ReLU(),
            nn.Identity(),
            nn.Linear(256, 128),
            nn.ReLU(),
            nn.Identity(),
            nn.Linear(128, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.blocks(images)


def table(count: int) -> TensorDataset:
    """Four features and a target of any size and sign."""
    draw = torch.Generator().manual_seed(count)
    x = torch.randn(count, 4, generator=draw)
    weights = torch.tensor([1.0, -2.0, 3.0, 0.5])
    return TensorDataset(x, x @ weights + torch.arange(count) / 100 + 0.25)


class Line(L.LightningModule):
    """A regression that logs in every way Lightning knows, and draws random numbers on its way."""

    def __init__(self, lr: float = 0.02, width: int = 4) -> None:
        super().__init__()
        self.lr = lr
        self.first = nn.Linear(4, width)
        self.last = nn.Linear(width, 1)
        self.error = MeanAbsoluteError()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        predicted = self.last(nn.functional.dropout(self.first(x), 0.1, self.training)).squeeze(1)
        loss = nn.functional.mse_loss(predicted, y)
        self.error(predicted.detach(), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("train_error", self.error, on_step=False, on_epoch=True)
        self.log("train_largest", loss, on_step=False, on_epoch=True, reduce_fx="max")
        self.log("train_samples", float(len(y)), on_step=False, on_epoch=True, reduce_fx="sum")
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self.last(self.first(x)).squeeze(1), y))
        self.log("val_mean", y.mean())
        self.log("val_largest", y.max(), reduce_fx="max")
        self.log("val_samples", float(len(y)), reduce_fx="sum")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Forces(Line):
    """Its outputs are gradients of an energy, in a test, too."""

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x = batch[0].clone().requires_grad_()
        with torch.enable_grad():
            (force,) = torch.autograd.grad(self.last(self.first(x)).sum(), x)
        self.log("test_force", force.abs().mean())

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(table(40), batch_size=8, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(table(12), batch_size=8)

    def test_dataloader(self) -> DataLoader[Any]:
        return DataLoader(table(13), batch_size=8)


class Habitual(Line):
    """Does what code for Lightning's own logger does: a folder beside the log, hyperparameters of
    any type.
    """

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters(
            {
                "path": Path("a/b"),
                "weights": np.array([1.0, 2.0]),
                "n": np.float64(3),
                "own": {1: 2},
            }
        )

    def on_train_epoch_end(self) -> None:
        Path(self.logger.log_dir, "samples").mkdir(exist_ok=True)  # type: ignore[union-attr, arg-type]


class Draws(Line):
    """Writes for TensorBoard."""

    def on_validation_epoch_end(self) -> None:
        self.logger.experiment.add_scalar("x", 1.0, self.global_step)  # type: ignore[union-attr]


class ByEpoch(Sampler[int]):
    """A sampler that follows ``set_epoch``."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        draw = torch.Generator().manual_seed(self.epoch)
        return iter(torch.randperm(self.count, generator=draw).tolist())


class WithState(Sampler[int]):
    """A sampler with a generator of its own, which goes on from epoch to epoch, and its state."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.draw = torch.Generator().manual_seed(7)

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.count, generator=self.draw).tolist())

    def state_dict(self) -> dict[str, Tensor]:
        return {"draw": self.draw.get_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.draw.set_state(state["draw"])


class Stream(IterableDataset[Any]):
    """Samples that come one after the other, without a state."""

    def __iter__(self) -> Iterator[Any]:
        return iter(table(101))


class StreamWithState(IterableDataset[Any]):
    """The same, with a state: how many have come."""

    def __init__(self) -> None:
        self.rows = table(101)
        self.next = 0

    def __iter__(self) -> Iterator[Any]:
        while self.next < len(self.rows):
            self.next += 1
            yield self.rows[self.next - 1]
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class SizedStreamWithState(StreamWithState):
    """The same, with a length: Lightning then never asks for one batch more than there are."""

    def __len__(self) -> int:
        return len(self.rows)


class LoaderWithState:
    """A loader as torchdata's ``StatefulDataLoader``: an iteration begins anew unless a state was
    loaded before it.
    """

    def __init__(self) -> None:
        self.rows = table(101)
        self.epochs = 0
        self.done = 0
        self.loaded = False

    def __len__(self) -> int:
        return 13

    def __iter__(self) -> Iterator[list[Tensor]]:
        if not self.loaded:
            self.done = 0
        self.loaded = False
        order = torch.randperm(101, generator=torch.Generator().manual_seed(self.epochs))
        while self.done < len(self):
            self.done += 1
            yield list(self.rows[order[8 * self.done - 8 : 8 * self.done]])
        self.epochs = self.epochs + 1
        self.done = 0

    def state_dict(self) -> dict[str, int]:
        return {"epochs": self.epochs, "done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epochs = state["epochs"]
        self.done = state["done"]
        self.loaded = True


def weighted() -> DataLoader[Any]:
    return DataLoader(table(101), 8, sampler=WeightedRandomSampler(torch.arange(1.0, 102.0), 101))


LOADERS: dict[str, Callable[[], Any]] = {
    "weighted": weighted,
    "by epoch": lambda: DataLoader(table(101), 8, sampler=ByEpoch(101)),
    "sampler with state": lambda: DataLoader(table(101), 8, sampler=WithState(101)),
    "stream": lambda: DataLoader(Stream(), 8),
    "stream with state": lambda: DataLoader(StreamWithState(), 8),
    "sized stream with state": lambda: DataLoader(SizedStreamWithState(), 8),
    "loader with state": LoaderWithState,
}


class Loaders(L.LightningDataModule):
    """Training data from one of :data:`LOADERS`; 13 batches an epoch. ``kind`` is its name."""

    def __init__(self, kind: str = "weighted") -> None:
        super().__init__()
        self.kind = kind

    def train_dataloader(self) -> Any:
        return LOADERS[self.kind]()

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(table(53), batch_size=10)


class LineWithLoaders(Line):
    """A module that brings its own loaders, and notes on every rank what it is trained on."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        targets = [round(y, 4) for y in batch[1].tolist()]
        with open(f"seen-{self.trainer.world_size}-{self.global_rank}.txt", "a") as file:
            print(self.current_epoch, batch_idx, *targets, file=file)
        return super().training_step(batch, batch_idx)

    def train_dataloader(self) -> DataLoader[Any]:
        size = 16 // self.trainer.world_size  # of all ranks together it is the same
        return DataLoader(
            # The ranks share the rest of six evenly: no sample comes once more.
            table(102),
            size,
            sampler=WeightedRandomSampler(torch.arange(1.0, 103.0), 102),
        )

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(table(53), batch_size=10)


class Builtins(Line):
    """Logs with Python's own functions, which Lightning takes as it takes torch's."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        for reduce in (max, min, sum):
            self.log(
                f"train_{reduce.__name__}",
                batch[1].mean(),
                on_step=False,
                on_epoch=True,
                reduce_fx=reduce,
            )
        return super().training_step(batch, batch_idx)


class Grouped(Line):
    """Logs a value over a group of ranks of its own, for which a name stands here."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.log(
            "train_grouped", batch[1].mean(), on_step=False, on_epoch=True, sync_dist_group="mine"
        )
        return super().training_step(batch, batch_idx)


class Told(Line):
    """Its validation errors are told beforehand: the best is not the last."""

    monitor = "val_told"
    mode = "min"
    errors = [0.59, 0.63, 0.21, 0.21, 6.85]

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("val_told", self.errors[self.current_epoch])


class Plateaus(Told):
    """Its learning rate falls where its errors no longer do."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "monitor": "val_told"},
        }


class Side(Line):
    """Trains on two loaders side by side, and notes what they give."""

    def __init__(self, kind: str = "cycled") -> None:
        super().__init__()
        self.kind = kind

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        parts = [part for part in batch if part is not None]
        targets = [[round(float(y), 3) for y in part[1]] for part in parts]
        with open("side.txt", "a") as file:
            print(self.current_epoch, *targets, sep="|", file=file)
        joined = [torch.cat(part) for part in zip(*parts, strict=True)]
        return super().training_step(joined, batch_idx)

    def train_dataloader(self) -> Any:
        shuffled = [DataLoader(Noisy(table(rows)), 8, shuffle=True) for rows in (37, 101)]
        stateful = [DataLoader(table(rows), 8, sampler=WithState(rows)) for rows in (37, 101)]
        return {
            "cycled": shuffled,
            "alike": [shuffled[1], DataLoader(Noisy(table(101)), 8, shuffle=True)],
            "longest": CombinedLoader(shuffled, "max_size"),
            "states": stateful,
            "one has a state": [shuffled[0], stateful[1]],
            "no length": CombinedLoader(
                [shuffled[1], DataLoader(StreamWithState(), 8)], "min_size"
            ),
        }[self.kind]

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(table(53), batch_size=10)


class Habits(Side):
    """What it needs for an epoch it makes at its start, also in its data; it draws where others do
    not look.
    """

    beta = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.BatchNorm1d(4)
        self.register_buffer("epochs", torch.zeros(()))

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Curriculum(101), 8, shuffle=True, num_workers=1)

    def on_train_epoch_start(self) -> None:
        self.epochs += 1
        self.frozen.eval()
        self.beta = 0.1 * self.current_epoch
        self.outputs = list[Tensor]()
        loader = self.trainer.train_dataloader
        loader.dataset.shift = loader.dataset.step * self.current_epoch * loader.batch_size  # type: ignore[union-attr]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.outputs.append(batch[0])
        noisy = self.frozen(batch[0]) + self.beta * torch.randn_like(batch[0])
        return Line.training_step(self, [noisy, batch[1]], batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        torch.randn(3)

    def on_validation_end(self) -> None:
        random.random()


class Curriculum(TensorDataset):
    """Rows that are shifted as the module says."""

    shift = 0.0
    step = 0.25

    def __init__(self, rows: int) -> None:
        super().__init__(*table(rows).tensors)

    def __getitem__(self, index: Any) -> Any:
        x, y = super().__getitem__(index)
        return x + self.shift, y


class Accumulates(Side):
    """Manual optimization, a step for every third batch; its validation has a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.val_error = MeanAbsoluteError()

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(table(101), 8, shuffle=True)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(Line.training_step(self, batch, batch_idx))
        if batch_idx % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.val_error(self.last(self.first(batch[0])).squeeze(1), batch[1])
        self.log("val_error", self.val_error)


class OwnWays(Side):
    """A metric that keeps predictions with their graph, other weights in validations, and names of
    ours for others.
    """

    monitor: Any = MeanAbsoluteError
    mode = "pretrain"

    def __init__(self) -> None:
        super().__init__()
        self.ranks = SpearmanCorrCoef()

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(table(101), 8, shuffle=True)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.ranks.update(self.last(self.first(batch[0])).squeeze(1), batch[1])
        self.log("train_rank", self.ranks, on_step=False, on_epoch=True)
        if batch_idx == 0:  # a later log step of the epoch has it, too
            self.log("train_first", batch[1].mean(), on_step=True, on_epoch=True)
            self.log("train_first_alone", batch[1].mean(), on_step=True, on_epoch=False)
        return Line.training_step(self, batch, batch_idx)

    def on_validation_epoch_start(self) -> None:
        self.kept = [parameter.data for parameter in self.parameters()]
        for parameter in self.parameters():
            parameter.data = parameter.data / 2

    on_validation_epoch_start.__module__ = "numerals.model"  # the user's room in a clone

    def on_validation_epoch_end(self) -> None:
        for parameter, data in zip(self.parameters(), self.kept, strict=True):
            parameter.data = data


@dataclass
class Rates:
    """Settings as a dataclass."""

    first: float = 0.02
    later: float = 0.01


class Keeps(Side):
    """A base whose arguments are not all its subclass's."""

    def __init__(self, width: int = 4, rates: Rates | None = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.last = nn.Linear(self.hparams["width"], 1)

    train_dataloader = OwnWays.train_dataloader
    training_step = Line.training_step


class Composed(Keeps):
    """A network and a dataclass are its arguments; it uses them from ``hparams``."""

    def __init__(self, net: nn.Module, rates: Rates) -> None:
        super().__init__(6, rates)
        self.save_hyperparameters()
        self.first = self.hparams["net"]

    def configure_optimizers(self) -> Any:
        rates: Rates = self.hparams["rates"]
        optimizer = torch.optim.Adam(self.parameters(), lr=rates.first)
        change = lambda epoch: rates.later / rates.first if epoch else 1.0  # noqa: E731
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, change)]


class OwnPace(Side):
    """Looks at all its data before it trains; stops a part in mid-run; saves no fixed weights; has
    no learning rate.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.fixed = nn.Linear(4, 4).requires_grad_(False)

    train_dataloader = OwnWays.train_dataloader

    def on_train_start(self) -> None:
        self.middle = torch.stack([y.mean() for _, y in self.trainer.train_dataloader]).mean()  # type: ignore[union-attr]

    def on_train_epoch_start(self) -> None:
        self.first_target = next(iter(self.trainer.train_dataloader))[1][0]  # type: ignore[arg-type]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.global_step == 8:
            self.norm.eval()
        inputs = self.norm(batch[0])
        targets = batch[1] - self.middle + self.first_target
        return Line.training_step(self, [inputs, targets], batch_idx)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        for name in ("fixed.weight", "fixed.bias"):
            del checkpoint["state_dict"][name]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        for name, value in self.fixed.state_dict().items():
            checkpoint["state_dict"][f"fixed.{name}"] = value

    def configure_optimizers(self) -> Any:
        return WithoutRate(self.parameters(), {"pace": 0.02})


class WithoutRate(torch.optim.Optimizer):
    """Moves by the signs of the gradients."""

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = closure() if closure is not None else None
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter -= group["pace"] * parameter.grad.sign()
        return loss


class Reloads(Side):
    """New loaders for every epoch, whose samplers have a state."""

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(table(101), 8, sampler=WithState(101))

    training_step = Line.training_step


class ReadsItself(Side):
    """Its step takes its batch from the loader; it draws after each."""

    train_dataloader = Reloads.train_dataloader

    def training_step(self, dataloader_iter: Iterator[Any]) -> Tensor:  # type: ignore[override]
        batch, _, _ = next(dataloader_iter)
        noisy = batch[0] + torch.randn(4)
        predicted = self.last(self.first(noisy)).squeeze(1)
        return nn.functional.mse_loss(predicted, batch[1])

    def on_train_batch_end(self, *_: Any) -> None:
        torch.randn(3)


class TwoSteps(Side):
    """Manual optimization, two steps a batch after the first."""

    train_dataloader = Reloads.train_dataloader

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(Line.training_step(self, batch, batch_idx))
        optimizer.step()
        if batch_idx > 0:
            optimizer.step()


class LateLayers(Reloads):
    """Makes its layers where Lightning's documents do: in ``setup`` or ``configure_model``."""

    def __init__(self, where: str = "setup") -> None:
        super().__init__()
        self.where = where
        self.last = nn.Identity()
        self.first = nn.Identity()

    def make(self) -> None:
        if isinstance(self.last, nn.Identity):
            self.last = nn.Linear(4, 1)

    def setup(self, stage: str) -> None:
        if self.where == "setup":
            self.make()

    def configure_model(self) -> None:
        if self.where == "configure_model":
            self.make()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["told"] = 7

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.told = checkpoint["told"]
        with open("loads.txt", "a") as file:
            print("loaded", file=file)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test_told", float(self.told))
        self.log("test_loss", nn.functional.mse_loss(self.last(batch[0]).squeeze(1), batch[1]))

    test_dataloader = Side.val_dataloader


class OwnLoader(DataLoader[Any]):
    """With other arguments than PyTorch's, as graph libraries have one."""

    def __init__(self, rows: int, batch_size: int) -> None:
        super().__init__(table(rows), batch_size=batch_size)


class Joined(Line):
    """On several ranks: a loader of its own, validation sets side by side, a value put together and
    logged by hand.
    """

    def train_dataloader(self) -> DataLoader[Any]:
        return OwnLoader(101, 16 // self.trainer.world_size)

    def val_dataloader(self) -> Any:
        self.seen = 0
        return CombinedLoader({rows: DataLoader(table(rows), 5) for rows in (21, 53)}, "max_size")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        for rows, part in batch.items():
            if part is not None:
                self.seen += len(part[1])
                self.log(f"val_samples_{rows}", float(len(part[1])), reduce_fx="sum")
                self.log(f"val_mean_{rows}", part[1].mean(), batch_size=len(part[1]))

    def on_validation_batch_end(self, *_: Any) -> None:
        self.log("val_last", float(self.seen), batch_size=1)
        self.log("val_same", 0.5, batch_size=self.seen)

    def on_validation_epoch_end(self) -> None:
        self.log("val_seen", float(self.seen))
        self.logger.experiment.log({"seen": self.seen})  # type: ignore[union-attr] # as code for W&B does, on all ranks


class SlowClassifier(MNISTClassifier):
    """With a learning rate of its own."""

    def __init__(self, lr: float = 0.0005, **kwargs: Any) -> None:
        super().__init__(lr=lr, **kwargs)


class Notes(L.Callback):
    """A callback of one's own: writes ``word`` into a file at every epoch's end."""

    def __init__(self, word: str) -> None:
        self.word = word

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        with open("notes.txt", "a") as file:
            print(self.word, trainer.current_epoch, file=file)


class TextLogger(Logger):
    """A logger of one's own: a line of text per call."""

    def __init__(self, file: str = "log.txt") -> None:
        super().__init__()
        self.file = file

    @property
    def name(self) -> str:
        return "text"

    @property
    def version(self) -> str:
        return "0"

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        with open(self.file, "a") as file:
            print(step, *sorted(metrics), file=file)


class SignSGD(torch.optim.Optimizer):
    """An optimizer of one's own."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad.sign(), alpha=group["lr"])
        return loss


class Balanced(MNISTDataModule):
    """Digits, drawn by weight: no image of a class above ``most``; every one of them turned by the
    method below.
    """

    def __init__(self, most: int = 4, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.most = most

    def augment(self, images: Tensor) -> Tensor:
        return super().augment(images).flip(-1)

    def train_dataloader(self) -> DataLoader[Any]:
        train: Any = self.splits["train"]
        weights = (train.labels <= self.most).double()
        return DataLoader(
            train,
            self.batch_size,
            sampler=WeightedRandomSampler(weights, 320),
            collate_fn=self.collate_function(),
        )

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        images, labels = super().on_after_batch_transfer(batch, dataloader_idx)
        if self.trainer is not None and self.trainer.training:
            with open("labels.txt", "a") as file:
                print(*labels.tolist(), file=file)
        return images, labels
