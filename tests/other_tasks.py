"""Modules and data modules of people who have never heard of this project: nothing of it is imported here."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

from configs.examples.autoencoder import LitAutoEncoder, Waves


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """A random transform, drawn from three generators."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, place = self.dataset[index]
        return image * random.uniform(0.9, 1.1) + 0.1 * torch.randn(()) + 0.1 * np.random.normal(), place


class NoisyWaves(Waves):
    """Lightning's data module with random transforms in two workers, and a test set that no batch size divides."""

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
