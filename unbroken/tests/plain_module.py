"""A LightningModule as anybody has one: it inherits nothing of ours and knows nothing of a
checkpoint.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split


def rows(count: int, seed: int) -> TensorDataset:
    """Samples of four numbers and a target."""
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


class Regression(LightningModule):
    """A small regression with dropout, whose random numbers must come back, and a schedule."""

    def __init__(self, workers: int = 0) -> None:
        super().__init__()
        self.workers = workers
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))

    def loss(self, batch: list[Tensor]) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(rows(200, 0), 4, shuffle=True, num_workers=self.workers)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(rows(37, 1), 8)


class Dies(Callback):
    """Raises after a step, as a cell that is interrupted by an error does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            raise RuntimeError("died")


class SplitsByChance(LightningDataModule):
    """Splits its rows in each ``setup``, by the global generator."""

    splits: ClassVar[list[list[int]]] = []

    def setup(self, stage: str) -> None:
        self.train, self.test = random_split(rows(60, 0), [40, 20])
        self.splits.append(list(self.test.indices))

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train, 4, shuffle=True)

    def test_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.test, 4)


class AlsoTested(Regression):
    val_dataloader: Any = None
    validation_step: Any = None

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))


class StepsByItself(Regression):
    """Gives Lightning no optimizer, and steps with one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.own = torch.optim.SGD(self.parameters(), 0.01, momentum=0.9)

    def configure_optimizers(self) -> None:
        return None

    def on_after_backward(self) -> None:
        self.own.step()
        self.own.zero_grad()
