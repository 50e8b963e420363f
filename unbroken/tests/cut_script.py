"""A script whose module cuts itself (FSDP2), on two ranks: FOLDER, the step at which it kills
itself (-1: none).
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from unbroken import ExactCheckpoint


class Cut(LightningModule):
    """Draws random numbers in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def configure_model(self) -> None:
        mesh: Any = self.device_mesh
        for part in (self.net[0], self.net[2], self.net):
            fully_shard(part, mesh=mesh["data_parallel"])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 0.01)


class Dies(Callback):
    """Ends its rank before a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder: str, killed_at: int) -> None:
    seed_everything(3)
    keep = ExactCheckpoint(folder, every="1")
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ModelParallelStrategy(
            data_parallel_size=2,
            tensor_parallel_size=1,
            save_distributed_checkpoint=False,
            process_group_backend="gloo",
        ),
        max_epochs=2,
        logger=False,
        callbacks=[keep, Dies(killed_at)],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rows = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(rows), 2, shuffle=True)
    trainer.fit(Cut(), loader, ckpt_path=keep.resume_from)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
