"""A module and a data module with settings of many types, which remember what they were given."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


@dataclass
class Rate:
    """A group of settings."""

    lr: float = 0.1
    name: str = "a"


class Typed(LightningModule):
    """Learns the sum of four numbers."""

    def __init__(
        self,
        text: str | None = None,
        number: int | float | str = 3,
        mode: Literal["x", "y", 1, None] = "x",
        rate: Rate = Rate(),  # noqa: B008 - it is not changed
        extra: dict[str, Any] | None = None,
        lr: float = 0.01,
    ) -> None:
        super().__init__()
        self.given = {"text": text, "number": number, "mode": mode, "rate": rate, "extra": extra}
        self.lr = lr
        self.layer = nn.Linear(4, 1)

    def loss(self, batch: list[Tensor]) -> Tensor:
        return ((self.layer(batch[0]) - batch[1]) ** 2).mean()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val/loss", self.loss(batch))
        # Like an accuracy, it is a number also where the weights are none.
        self.log("val/size", float(len(batch[0])))

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test/loss", self.loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.lr)


class Numbers(LightningDataModule):
    """64 rows of four random numbers."""

    def __init__(self, root: str = "data", folder: Path | None = None, workers: int = 0) -> None:
        super().__init__()
        self.root = root
        self.folder = folder
        self.workers = workers

    def _loader(self, seed: int, shuffle: bool = False) -> DataLoader[Any]:
        rows = torch.randn(64, 4, generator=torch.Generator().manual_seed(seed))
        data = TensorDataset(rows, rows.sum(dim=1, keepdim=True))
        return DataLoader(data, 16, shuffle=shuffle, num_workers=self.workers)

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(0, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(1)

    def test_dataloader(self) -> DataLoader[Any]:
        return self._loader(2)
