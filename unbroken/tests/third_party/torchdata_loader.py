"""torchdata: a StatefulDataLoader, with and without random transforms."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.third_party.regression import TRAINING_SAMPLES, table, validation_loader


class WithNoise(Dataset[tuple[Tensor, Tensor]]):
    """Adds noise to each sample as it is read."""

    def __init__(self, size: float) -> None:
        self.size = size
        self.x, self.y = table(TRAINING_SAMPLES, seed=0)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index] + self.size * torch.randn(4), self.y[index]


class Shuffled(LightningDataModule):
    noise = 0.0

    def __init__(self, workers: int = 0) -> None:
        super().__init__()
        self.workers = workers

    def train_dataloader(self) -> Any:
        samples = WithNoise(self.noise)
        return StatefulDataLoader(samples, batch_size=8, shuffle=True, num_workers=self.workers)

    def val_dataloader(self) -> Any:
        return validation_loader()


class Noisy(Shuffled):
    noise = 0.1
