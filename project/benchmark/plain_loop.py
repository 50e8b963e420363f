"""The loop that most people start from, timed to a target: the kind that pytorch/examples has for MNIST."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader

from project.benchmark.by_hand import accuracy_of, course_epoch
from project.benchmark.per_sample import PerSampleImages
from project.benchmark.steps import Steps
from project.data.base import BatchedDataModule

MOST_EPOCHS = 14  # what the example trains


class ExampleNetwork(nn.Module):
    """Two convolutions, one pooling, two linear layers with dropout: 1,199,882 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2))
        self.classify = nn.Sequential(nn.Dropout(0.25), nn.Flatten(), nn.Linear(9216, 128), nn.ReLU())
        self.head = nn.Sequential(nn.Dropout(0.5), nn.Linear(128, 10))

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 1, 28, 28) → logits (batch, 10)."""
        return F.log_softmax(self.head(self.classify(self.features(images))), dim=1)


def time_to_target(
    datamodule: BatchedDataModule, target: float, device: torch.device, steps: Steps, most_epochs: int = MOST_EPOCHS
) -> dict[str, Any]:
    """Train as the example does until the test accuracy, looked at after every epoch, reaches the target.

    All training samples (also those that we hold out for validation), batch 64, per-sample transforms through Pillow,
    Adadelta from 1.0 and 0.7 times that after each epoch. Its test after each epoch is not part of the time.

    Returns:
        ``epochs``, ``test/accuracy`` at the end, ``fit_s``, and ``to_target_s`` where the target was reached.
    """
    datamodule.setup("fit")
    samples = [
        PerSampleImages(datamodule.splits[split], datamodule.mean[0], datamodule.std[0])  # type: ignore[arg-type]
        for split in ("train", "val")
    ]
    loader: DataLoader[Any] = DataLoader(ConcatDataset(samples), batch_size=64, shuffle=True)
    datamodule.setup("test")
    test = PerSampleImages(datamodule.splits["test"], datamodule.mean[0], datamodule.std[0])  # type: ignore[arg-type]
    test_loader: DataLoader[Any] = DataLoader(test, batch_size=1000)
    network = ExampleNetwork().to(device)
    optimizer = torch.optim.Adadelta(network.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    row: dict[str, Any] = {"fit_s": 0.0}
    began = time.perf_counter()
    for epoch in range(1, most_epochs + 1):
        steps.begin(f"plain loop, epoch {epoch} ({time.perf_counter() - began:.0f} s)")
        row["fit_s"] += course_epoch(network, optimizer, loader, device).train_s
        schedule.step()
        row |= {"epochs": epoch, "test/accuracy": accuracy_of(network, test_loader, device)}
        if row["test/accuracy"] >= target:
            return {**row, "to_target_s": row["fit_s"]}
    return row
