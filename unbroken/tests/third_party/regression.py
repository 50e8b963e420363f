"""A small regression that the files beside this one feed from different packages."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

TRAINING_SAMPLES = 120


def table(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs of shape (count, 4) and targets of shape (count,)."""
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    return x, x.sum(1).sin()


def validation_loader() -> DataLoader[Any]:
    """37 samples in a plain loader."""
    return DataLoader(TensorDataset(*table(37, 1)), 8)


class Regression(LightningModule):
    """Has dropout, whose random numbers must come back, and a schedule."""

    monitor = "val_loss"
    mode = "min"

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))

    def loss(self, batch: list[Tensor]) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x.float()).squeeze(1), y.float())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]
