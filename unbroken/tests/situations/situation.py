"""What a situation is, the list of all, and the plain task that most of them vary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

Flags = dict[str, Any]


@dataclass
class Situation:
    """One training: a module, and what its Trainer is told.

    Args:
        make: Makes the module.
        flags: Arguments of the Trainer, beside those that all situations have.
        callbacks: Makes the callbacks.
        data: Makes the data module.
        says: The line with which a run says what is not exact. Empty: all is.
        is_exact: Whether the resumed run ends as the undisturbed one does.
        monitor: The metric that best.ckpt follows.
        ranks: How many processes train together.
        ignores: What may differ, by parts of its name: measured times, states without effect.
        ignores_when_over: The same of a run that has come to its end and is started again.
        shorter: What the Trainer is told at first, so that the run ends and goes on later.
        fits: How often one process calls ``fit``, each time with one more epoch.
    """

    make: Callable[[], LightningModule]
    flags: Flags
    callbacks: Callable[[], list[Callback]]
    data: Callable[[], LightningDataModule | None]
    says: str
    is_exact: bool
    monitor: str | None
    ranks: int
    ignores: tuple[str, ...]
    ignores_when_over: tuple[str, ...]
    shorter: Flags
    fits: int


SITUATIONS: dict[str, Situation] = {}


def add(
    name: str,
    make: Callable[[], LightningModule],
    *,
    callbacks: Callable[[], list[Callback]] = list,
    data: Callable[[], LightningDataModule | None] = lambda: None,
    says: str = "",
    is_exact: bool = True,
    monitor: str | None = "val_loss",
    ranks: int = 1,
    ignores: tuple[str, ...] = (),
    ignores_when_over: tuple[str, ...] = (),
    shorter: Flags | None = None,
    fits: int = 1,
    **flags: Any,
) -> None:
    """Put a situation on the list. See :class:`Situation`."""
    assert name not in SITUATIONS, name
    SITUATIONS[name] = Situation(
        make,
        flags,
        callbacks,
        data,
        says,
        is_exact,
        monitor,
        ranks,
        ignores,
        ignores_when_over,
        shorter or {},
        fits,
    )


def table(count: int, seed: int = 0) -> TensorDataset:
    """Samples of four numbers and a target."""
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x.sum(1).sin())


class Task(LightningModule):
    """A small regression with batch norm and dropout: 7 batches an epoch, 3 of validation."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.1), nn.Linear(6, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).squeeze(1)

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.02)

    def train_dataloader(self) -> Any:
        return DataLoader(table(52), 8, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(table(20, 1), 8)


class Manual(Task):
    """The same with manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.log("train_loss", loss.detach(), on_step=True, on_epoch=True)


class Keeps:
    """Has a state of one value, the attribute that ``kept`` names."""

    kept = "count"

    def state_dict(self) -> dict[str, Any]:
        return {self.kept: getattr(self, self.kept)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        setattr(self, self.kept, state_dict[self.kept])
