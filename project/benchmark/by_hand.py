"""Training loops written by hand, to compare with: the floor, and the loop of the course."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from project.benchmark.timing import synchronize
from project.data.base import BatchedDataModule


@dataclass
class Epoch:
    """One epoch's times.

    Args:
        train_s: Seconds of its training steps.
        epoch_s: Seconds of the whole of it: training, validation, saving.
        train_cpu_s: CPU seconds of this process, all threads, in the training steps. A busy neighbour changes it far
            less than ``train_s``.
        val_accuracy: Fraction, 0-1; None where nothing was validated.
    """

    train_s: float
    epoch_s: float
    train_cpu_s: float
    val_accuracy: float | None = None


class FloorLoop:
    """The least a training loop can do: gather a batch by index, forward, backward, a fused optimizer step.

    No metric, no logging, no progress, no checkpoint; validation after every epoch, batched as ours. The optimizer is
    Adam, as in the course. The permutation is fresh every epoch.

    Args:
        network: Images (batch, channels, height, width) → logits.
        datamodule: Has been set up for "fit".
        device: Where to train; the whole training set lies there.
        dtype: Of autocast; None trains in float32.
        steps: Batches per epoch at most.
        channels_last: As ``--model.channels_last``.
        index_select: Gather whole images by ``index_select``, as our dataset does; else by plain indexing, as one
            writes it.
    """

    def __init__(
        self,
        network: nn.Module,
        datamodule: BatchedDataModule,
        device: torch.device,
        dtype: torch.dtype | None = None,
        steps: int | None = None,
        channels_last: bool = False,
        index_select: bool = False,
    ) -> None:
        self.network = network.to(device)
        self.datamodule = datamodule
        self.device = device
        self.autocast: dict[str, Any] = {"device_type": device.type, "dtype": dtype, "enabled": dtype is not None}
        self.steps = steps
        self.index_select = index_select
        self.format = torch.channels_last if channels_last else torch.contiguous_format
        network.to(memory_format=self.format)
        self.optimizer = torch.optim.Adam(network.parameters(), lr=1e-3, fused=True)
        self.train = _on_device(datamodule, "train", device)
        self.val = _on_device(datamodule, "val", device) if "val" in datamodule.splits else None

    def epoch(self) -> Epoch:
        """Train one epoch and validate."""
        began, cpu_began = time.perf_counter(), time.process_time()
        self.network.train()
        images, labels = self.train
        size = self.datamodule.batch_size
        order = torch.randperm(len(labels), device=self.device)
        batches = min(len(labels) // size, self.steps or len(labels))
        for k in range(batches):
            chosen = order[k * size : (k + 1) * size]
            batch = self._prepared(self._take(images, chosen))
            with torch.autocast(**self.autocast):
                loss = F.cross_entropy(self.network(batch), self._take(labels, chosen))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        synchronize(self.device)
        trained, cpu_s = time.perf_counter(), time.process_time() - cpu_began
        accuracy = self._validate() if self.val is not None else None
        return Epoch(trained - began, time.perf_counter() - began, cpu_s, accuracy)

    @torch.no_grad()
    def _validate(self) -> float:
        assert self.val is not None
        self.network.eval()
        images, labels = self.val
        correct = torch.zeros((), device=self.device, dtype=torch.int64)
        for start in range(0, len(labels), self.datamodule.eval_batch_size):
            part = slice(start, start + self.datamodule.eval_batch_size)
            with torch.autocast(**self.autocast):
                correct += (self.network(self._prepared(images[part])).argmax(dim=1) == labels[part]).sum()
        return float(correct) / len(labels)

    def _take(self, samples: Tensor, chosen: Tensor) -> Tensor:
        return samples.index_select(0, chosen) if self.index_select else samples[chosen]

    def _prepared(self, images: Tensor) -> Tensor:
        return self.datamodule.normalize(images).contiguous(memory_format=self.format)


def course_epoch(
    network: nn.Module, optimizer: torch.optim.Optimizer, loader: Iterable[Any], device: torch.device
) -> Epoch:
    """Train one epoch as the course's notebooks do: a loader of single samples, ``loss.item()`` at every step."""
    began, cpu_began = time.perf_counter(), time.process_time()
    network.train()
    criterion = nn.CrossEntropyLoss()
    running_loss = 0.0
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = criterion(network(images), labels)
        loss.backward()
        optimizer.step()
        running_loss += loss.item()
    synchronize(device)
    seconds = time.perf_counter() - began
    return Epoch(seconds, seconds, time.process_time() - cpu_began)


@torch.no_grad()
def accuracy_of(network: nn.Module, loader: Iterable[Any], device: torch.device) -> float:
    """Share (0-1) of a loader's samples that a network labels rightly."""
    network.eval()
    correct = total = 0
    for images, labels in loader:
        predicted = network(images.to(device)).argmax(dim=1)
        correct += int((predicted == labels.to(device)).sum())
        total += len(labels)
    return correct / total


def _on_device(datamodule: BatchedDataModule, split: str, device: torch.device) -> tuple[Tensor, Tensor]:
    dataset: Any = datamodule.splits[split]
    return dataset.images.to(device), dataset.labels.to(device)
