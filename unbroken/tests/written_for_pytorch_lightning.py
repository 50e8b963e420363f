"""A task as most public code is written: it imports ``pytorch_lightning`` and knows nothing else.

No test imports this file before :func:`unbroken.lightning_names.alias` has been called.
"""

from __future__ import annotations

import sys
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.seed import seed_everything
from pytorch_lightning.callbacks import Callback, EarlyStopping, ModelCheckpoint
from pytorch_lightning.loggers import Logger
from pytorch_lightning.utilities import rank_zero_only
from pytorch_lightning.utilities.types import EVAL_DATALOADERS, STEP_OUTPUT, TRAIN_DATALOADERS
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

__all__ = ["EarlyStopping", "ModelCheckpoint", "seed_everything"]


class NoisyRows(Dataset[tuple[Tensor, Tensor]]):
    """Rows of numbers; each is read with fresh noise, from the generator of the worker process."""

    def __init__(self, size: int) -> None:
        draw = torch.Generator().manual_seed(size)
        self.rows = torch.randn(size, 8, generator=draw)
        self.targets = self.rows.sum(dim=1, keepdim=True)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        # A worker process sees the same classes as the process that started it.
        assert pl.LightningModule is sys.modules["lightning.pytorch"].LightningModule
        return self.rows[index] + 0.1 * torch.randn(8), self.targets[index]


class Rows(pl.LightningDataModule):
    """Rows that worker processes read."""

    def __init__(self, start_method: str = "fork", workers: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()

    def loader(self, size: int, shuffle: bool = False) -> DataLoader[Any]:
        return DataLoader(
            NoisyRows(size),
            batch_size=10,
            shuffle=shuffle,
            num_workers=self.hparams["workers"],
            multiprocessing_context=self.hparams["start_method"],
        )

    def train_dataloader(self) -> TRAIN_DATALOADERS:
        return self.loader(160, shuffle=True)

    def val_dataloader(self) -> EVAL_DATALOADERS:
        return self.loader(40)

    def test_dataloader(self) -> EVAL_DATALOADERS:
        return self.loader(30)


class Sum(pl.LightningModule):
    """Learns to add, with dropout."""

    def __init__(self, width: int = 16, lr: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network = nn.Sequential(
            nn.Linear(8, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 1)
        )

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        rows, targets = batch
        return nn.functional.mse_loss(self.network(rows), targets)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> STEP_OUTPUT:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.hparams["lr"])


class CountsSteps(Callback):
    """Counts steps, and keeps the count in the checkpoint."""

    def __init__(self) -> None:
        self.steps = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.steps += 1

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        print(f"{self.steps} steps were counted")

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps = state_dict["steps"]


class PrintsMetrics(Logger):
    """Prints what is logged."""

    @property
    def name(self) -> str:
        return "printed"

    @property
    def version(self) -> str:
        return "0"

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        print(f"logged at {step}: {sorted(metrics)}")
