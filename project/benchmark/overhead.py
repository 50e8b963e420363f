"""What each feature of a run costs: everything on, without each, Lightning alone, and plain PyTorch loops."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from lightning.fabric.utilities.exceptions import MisconfigurationException
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from project.benchmark import Row, Settings
from project.benchmark.devices import best_device, network_name
from project.benchmark.timing import Epoch, alternate, median_and_spread, progress, run_epochs, synchronize
from project.callbacks.memory import MemoryMonitor  # feature: memory
from project.callbacks.optimizer import OptimizerMonitor  # feature: optimizer
from project.callbacks.throughput import ThroughputMonitor  # feature: throughput
from project.engine.checkpointing import RunCheckpoint
from project.engine.cli import Configuration
from project.errors import UserError
from project.loggers.metrics_csv import MetricsCSV
from project.loggers.wandb import WandbRunLogger

FLOOR, PLAIN, ALL = "hand-written floor", "plain PyTorch loop", "all features"
FEATURES: dict[str, type] = {
    "throughput monitor": ThroughputMonitor,  # feature: throughput
    "memory monitor": MemoryMonitor,  # feature: memory
    "optimizer monitor": OptimizerMonitor,  # feature: optimizer
    "checkpoints": RunCheckpoint,
    "W&B": WandbRunLogger,
    "metrics.csv": MetricsCSV,
}


def measure(config: Configuration, settings: Settings) -> list[Row]:
    """One row per variant: seconds per epoch and its ratio to the floor's.

    An epoch is its training steps, the validation behind them and what is saved of it (the floor saves nothing, the
    plain PyTorch loop only trains). Every Lightning run trains one epoch to warm up and one that counts. Then, per
    monitor and for the checkpoints, the share of a run that passes inside their hooks: what a run with and without
    them differs by is less than what two runs differ by.
    """
    variants = make_variants(config, settings)
    watched = {"inside the hooks": partial(pct_inside_hooks, config)}
    with progress("overhead", 2 + (len(variants) + 1) * settings.n) as bar:
        alternate({name: variants[name] for name in (FLOOR, PLAIN)}, 1, bar)  # real runs have their own warm-up
        results = alternate(variants, settings.n, bar)
        (shares,) = alternate(watched, settings.n, bar).values()
    rows: list[Row] = []
    for name, epochs in results.items():
        row: Row = {"loop": name, "network": network_name(config), "batch_size": settings.batch_size}
        row |= median_and_spread("epoch_s", [epoch.epoch_s for epoch in epochs])
        row["train_s"] = statistics.median(epoch.train_s for epoch in epochs)
        row["train_cpu_s"] = statistics.median(epoch.train_cpu_s for epoch in epochs)
        floor = rows[0] if rows else row
        row["train_vs_floor"] = row["train_s"] / floor["train_s"]
        row["train_cpu_vs_floor"] = row["train_cpu_s"] / floor["train_cpu_s"]
        if name != PLAIN:
            row["epoch_vs_floor"] = row["epoch_s"] / floor["epoch_s"]
        rows.append(row)
    for name in shares[0]:
        pct = median_and_spread("pct_of_run", [share[name] for share in shares])
        rows.append({"loop": f"inside {name}", "batch_size": settings.batch_size, **pct})
    return rows


def make_variants(config: Configuration, settings: Settings) -> dict[str, Callable[[], Epoch]]:
    """Name → function that trains one measured epoch. The floor comes first."""
    floor = FloorLoop(config, settings.batch_size, best_device(config))
    network = copy.deepcopy(floor.network)
    adam = torch.optim.Adam(network.parameters(), lr=1e-3)
    loader: DataLoader[Any] = DataLoader(PerSampleImages(floor.train), settings.batch_size, shuffle=True)
    plain = partial(plain_epoch, network, adam, loader, floor.device)
    variants: dict[str, Callable[[], Epoch]] = {FLOOR: floor.epoch, PLAIN: plain, ALL: partial(second_epoch, config)}
    if settings.each_feature:
        for name, kind in FEATURES.items():
            variants[f"without {name}"] = partial(second_epoch, config, without=[kind])
        without_bar = {"enable_progress_bar": False}  # left out of the callbacks, Lightning would put its own there
        variants["without progress bar"] = partial(second_epoch, config, trainer=without_bar)
    return {**variants, "Lightning, nothing on": partial(second_epoch, config, bare=True)}


def second_epoch(config: Configuration, **options: Any) -> Epoch:
    """Of a real run; ``options`` are those of :func:`run_epochs`."""
    return run_epochs(config, 2, **options).epochs[-1]


def pct_inside_hooks(config: Configuration) -> dict[str, float]:
    """Class of a monitor, and of the checkpoints → share (0-100) of a run of two epochs inside its hooks."""
    run = run_epochs(config, 2, watched=tuple(FEATURES.values()))
    seconds = sum(epoch.epoch_s for epoch in run.epochs)
    return {name: 100 * inside / seconds for name, inside in run.inside_s.items()}


# Data for the plain loops: whole sets of images in memory, and single samples.


@dataclass(frozen=True)
class InMemory:
    """The images and labels of one split."""

    images: Tensor  # uint8 in 0-255 or float in 0-1, (count, channels, height, width)
    labels: Tensor  # class numbers, int64 (count,)
    mean: list[float]  # per channel, of images scaled to 0-1
    std: list[float]

    @classmethod
    def of(cls, config: Configuration, split: str) -> InMemory:
        """A split ("train", "val" or "test") of the configured data; a UserError where it is not of this kind."""
        data: Any = config.datamodule
        images = labels = None
        with suppress(MisconfigurationException, AttributeError):  # no loader, or one without such tensors
            data.prepare_data()
            data.setup("test" if split == "test" else "fit")
            dataset = getattr(data, f"{split}_dataloader")().dataset
            images, labels = dataset.images, dataset.labels
        if not (isinstance(images, Tensor) and isinstance(labels, Tensor) and images.ndim == 4):
            raise UserError(
                "--data: loops written by hand need images and labels in memory (project.data.TensorImages), "
                f"{type(data).__name__} has none for {split}."
            )
        grey = [0.5] * images.shape[1]
        return cls(images, labels, list(getattr(data, "mean", grey)), list(getattr(data, "std", grey)))

    def normalizer(self, device: torch.device) -> Callable[[Tensor], Tensor]:
        """A function of a batch of the images on ``device`` → float32 with mean 0 and standard deviation 1."""
        whole = 1.0 if self.images.is_floating_point() else 255.0
        # made once: tensors made at every step would be copied to the device and waited for
        shift = (whole * torch.tensor(self.mean, device=device)).view(1, -1, 1, 1)
        scale = 1 / (whole * torch.tensor(self.std, device=device)).view(1, -1, 1, 1)
        return lambda images: images.to(torch.float32, copy=True).sub_(shift).mul_(scale)


class PerSampleImages(Dataset[tuple[Tensor, int]]):
    """Single images as torchvision's MNIST gives them with the usual transforms: tensor, Pillow, tensor, normalised."""

    def __init__(self, data: InMemory) -> None:
        self.images = data.images if data.images.dtype == torch.uint8 else (255 * data.images).round().byte()
        self.labels = data.labels
        self.transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize(data.mean, data.std)])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.images[index]  # (channels, height, width)
        pixels = image[0] if len(image) == 1 else image.permute(1, 2, 0)
        return self.transform(Image.fromarray(pixels.numpy())), int(self.labels[index])


# The loops.


class FloorLoop:
    """The least a training loop can do: gather a batch by index, forward, backward, a fused optimizer step.

    The whole set lies on the device. Adam, cross-entropy without label smoothing, a fresh permutation every epoch. No
    metric, no logging, no progress, no checkpoint; validation after every epoch, batched as ours.

    Args:
        config: Whose data, network (it is copied), precision and memory format.
        batch_size: Training samples per step.
        device: Where to train.

    Raises:
        UserError: The module has no ``network``, or the data are of another kind than :class:`InMemory`.
    """

    def __init__(self, config: Configuration, batch_size: int, device: torch.device) -> None:
        module: Any = config.module
        if not isinstance(getattr(module, "network", None), nn.Module):
            raise UserError(f"--model: loops written by hand train module.network, {type(module).__name__} has none.")
        self.train, val = InMemory.of(config, "train"), InMemory.of(config, "val")
        self.splits = [(part.images.to(device), part.labels.to(device)) for part in (self.train, val)]
        self.normalize = self.train.normalizer(device)
        self.device = device
        self.format = getattr(module, "memory_format", torch.contiguous_format)
        self.network: nn.Module = copy.deepcopy(module.network).to(device).to(memory_format=self.format)
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=1e-3, fused=True)
        self.batch_size = min(batch_size, len(self.train.labels))
        self.eval_batch_size = getattr(config.datamodule, "eval_batch_size", batch_size)
        dtype = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}.get(str(config.trainer["precision"]))
        self.autocast = partial(torch.autocast, device.type, dtype=dtype, enabled=dtype is not None)

    def epoch(self) -> Epoch:
        """Train one epoch and validate."""
        began, cpu_began = time.perf_counter(), time.process_time()
        self.network.train()
        images, labels = self.splits[0]
        order = torch.randperm(len(labels), device=self.device)
        for start in range(0, len(labels) - self.batch_size + 1, self.batch_size):
            chosen = order[start : start + self.batch_size]
            with self.autocast():
                # index_select copies whole images; images[chosen] goes byte by byte
                logits = self.network(self._prepared(images.index_select(0, chosen)))
                loss = F.cross_entropy(logits, labels.index_select(0, chosen))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        synchronize(self.device)
        train_s, train_cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
        self.accuracy = self._validate()
        return Epoch(train_s, time.perf_counter() - began, train_cpu_s)

    @torch.no_grad()
    def _validate(self) -> float:
        self.network.eval()
        correct = torch.zeros((), device=self.device, dtype=torch.int64)
        images, labels = self.splits[1]
        for some, truth in zip(images.split(self.eval_batch_size), labels.split(self.eval_batch_size), strict=True):
            with self.autocast():
                correct += (self.network(self._prepared(some)).argmax(dim=1) == truth).sum()
        return float(correct) / len(labels)

    def _prepared(self, images: Tensor) -> Tensor:
        return self.normalize(images).contiguous(memory_format=self.format)


def plain_epoch(
    network: nn.Module, optimizer: torch.optim.Optimizer, loader: Iterable[Any], device: torch.device
) -> Epoch:
    """Train one epoch as most tutorials do: a loader of single samples, ``loss.item()`` at every step."""
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
