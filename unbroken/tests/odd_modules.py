"""Modules whose state is of an odd kind, and which a plain Trainer trains as they are."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.plain_module import Regression, rows


class Odd(Regression):
    """Five batches an epoch, and a test."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(rows(40, 0), 8, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(rows(16, 1), 8)

    test_dataloader = val_dataloader


class Silent(Odd):
    """Forgets to return its loss."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.loss(batch)


class Lazy(Odd):
    """Layers whose sizes come with the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.LazyLinear(6), nn.LazyBatchNorm1d(), nn.Dropout(0.2), nn.LazyLinear(1)
        )


class Grows(Odd):
    """Gets another layer in its second epoch. The first is the best by ``val_epoch``."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.further = nn.Linear(1, 1)

    def on_validation_epoch_end(self) -> None:
        self.log("val_epoch", float(self.current_epoch))


class MadeInSetup(Odd):
    """Makes a layer in ``setup``, and there takes over a mean of more numbers than it had."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(1))
        self.last = nn.Identity()

    def setup(self, stage: str) -> None:
        self.mean = torch.linspace(0, 1, 4)
        if isinstance(self.last, nn.Identity):
            self.last = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.net(x - self.mean))


class Untested(MadeInSetup):
    """Makes a layer in ``setup``, and has no test."""

    test_step = LightningModule.test_step


class MakesRoom(Odd):
    """Has more weights after its first epoch, and makes room for them as it is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.shifts = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.shifts.sum()

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 0:
            self.shifts.data = torch.cat([self.shifts.data, torch.zeros(2)])

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.shifts.data = torch.zeros_like(checkpoint["state_dict"]["shifts"])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Unused(Odd):
    """A lazy layer that no batch passes."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.LazyLinear(1)


class Queue(Odd):
    """Computes with a buffer that its state dict leaves out, and that training changes.

    Args:
        first_epoch: The first epoch in which it changes.
    """

    def __init__(self, first_epoch: int = 0) -> None:
        super().__init__()
        self.first_epoch = first_epoch
        self.register_buffer("queue", torch.zeros(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + self.queue.mean()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.current_epoch >= self.first_epoch:
            # Each epoch is worse than the one before, so that the first is the best.
            self.queue = self.queue + batch[1][:4, 0].abs() + 1
        return loss


class Graph(Odd):
    """A sparse matrix of 3,000 nodes as a buffer."""

    def __init__(self, layout: str = "coo") -> None:
        super().__init__()
        matrix = torch.eye(3000).to_sparse()
        self.register_buffer("adjacency", matrix if layout == "coo" else matrix.to_sparse_csr())

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * torch.sparse.mm(self.adjacency, torch.ones(3000, 1)).mean()


class Answers(Odd):
    """Predicts rows of its own."""

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Any]:
        return {"answer": self(batch[0]), "row": [f"row {index}" for index in range(len(batch[0]))]}

    def predict_dataloader(self) -> DataLoader[Any]:
        return DataLoader(rows(11, 2), batch_size=4)


class Lists(Answers):
    """Answers a batch with a list."""

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> list[float]:
        return list(self(batch[0]).flatten().tolist())
