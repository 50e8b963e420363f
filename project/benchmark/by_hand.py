"""What the benchmark compares with: data in memory, and training loops as people write them by hand."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import seed_everything
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset
from torchvision import transforms

from project.benchmark import Row
from project.benchmark.timing import Epoch, progress, wanted_devices
from project.engine.cli import Configuration
from project.engine.log_steps import synchronize
from project.errors import UserError

FLOOR, PLAIN = "hand-written floor", "plain PyTorch loop"
IMAGE_SHAPE = (1, 28, 28)  # of pytorch/examples' network


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
            needs = "loops written by hand need images and labels in memory (project.data.TensorImages)"
            raise UserError(f"--data: {needs}, {type(data).__name__} has none for {split}.")
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


def loops_by_hand(config: Configuration, batch_size: int) -> dict[str, Callable[[], Epoch]]:
    """The floor and the plain PyTorch loop: name → function that trains one epoch, on copies of the module's network.

    The floor is the least a training loop can do: gather a batch by index, forward, backward, a fused optimizer step,
    and after every epoch a validation, batched as ours. The whole set lies on the device. Adam, cross-entropy without
    label smoothing, a fresh permutation every epoch. No metric, no logging, no progress, no checkpoint. A UserError
    where the module has no ``network``, or the data are of another kind than :class:`InMemory`.
    """
    module: Any = config.module
    if not isinstance(getattr(module, "network", None), nn.Module):
        raise UserError(f"--model: loops written by hand train module.network, {type(module).__name__} has none.")
    device = torch.device(wanted_devices(config)[-1])
    train, val = InMemory.of(config, "train"), InMemory.of(config, "val")
    (images, labels), (val_images, val_labels) = [(x.images.to(device), x.labels.to(device)) for x in (train, val)]
    normalize, memory_format = train.normalizer(device), getattr(module, "memory_format", torch.contiguous_format)
    network: nn.Module = copy.deepcopy(module.network).to(device).to(memory_format=memory_format)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3, fused=True)
    size, eval_size = min(batch_size, len(labels)), getattr(config.datamodule, "eval_batch_size", batch_size)
    dtype = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}.get(str(config.trainer["precision"]))
    autocast = partial(torch.autocast, device.type, dtype=dtype, enabled=dtype is not None)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for chosen in torch.randperm(len(labels), device=device).split(size)[: len(labels) // size]:
            # index_select copies whole images; images[chosen] goes byte by byte
            some = normalize(images.index_select(0, chosen)).contiguous(memory_format=memory_format)
            yield some, labels.index_select(0, chosen)

    def floor_epoch() -> Epoch:
        began = time.perf_counter()
        trained = train_epoch(network, optimizer, batches(), device, autocast, reads_loss=False)
        network.eval()
        correct = torch.zeros((), device=device, dtype=torch.int64)
        for some, truth in zip(val_images.split(eval_size), val_labels.split(eval_size), strict=True):
            with torch.no_grad(), autocast():
                logits = network(normalize(some).contiguous(memory_format=memory_format))
                correct += (logits.argmax(dim=1) == truth).sum()
        correct.item()
        return replace(trained, epoch_s=time.perf_counter() - began)

    copied = copy.deepcopy(network)
    adam = torch.optim.Adam(copied.parameters(), lr=1e-3)
    loader: DataLoader[Any] = DataLoader(PerSampleImages(train), batch_size, shuffle=True)
    return {FLOOR: floor_epoch, PLAIN: partial(train_epoch, copied, adam, loader, device)}


def train_epoch(
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Any],
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    reads_loss: bool = True,
) -> Epoch:
    """Train one epoch, by default as most tutorials do, with ``loss.item()`` at every step."""
    began, cpu_began, running_loss = time.perf_counter(), time.process_time(), 0.0
    network.train()
    for images, labels in batches:
        images, labels = images.to(device), labels.to(device)
        with autocast():
            loss = F.cross_entropy(network(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        running_loss += loss.item() if reads_loss else 0.0
    synchronize(device)
    seconds = time.perf_counter() - began
    return Epoch(seconds, seconds, time.process_time() - cpu_began)


def example_network() -> nn.Module:
    """Images (batch, 1, 28, 28) → log-probabilities (batch, 10); 1,199,882 parameters."""
    features = [nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25)]
    classifier = [nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10)]
    return nn.Sequential(*features, *classifier, nn.LogSoftmax(dim=1))


class PlainLoop:
    """Trains as the example does until the test accuracy, looked at after every epoch, reaches a target.

    All training samples (also those that we hold out for validation), batch 64, per-sample transforms through Pillow,
    Adadelta from 1.0 and 0.7 times that after each epoch. Its test after each epoch is not part of the time. A
    UserError where the data are no grey images of 28 × 28 pixels in 10 classes, or do not lie in memory.
    """

    def __init__(self, config: Configuration) -> None:
        train, val, test = (InMemory.of(config, split) for split in ("train", "val", "test"))
        shape, classes = tuple(train.images.shape[1:]), int(train.labels.max()) + 1
        if shape != IMAGE_SHAPE or classes > 10:
            raise UserError(f"--baseline needs images of {IMAGE_SHAPE} in 10 classes, got {shape} in {classes}.")
        both: Dataset[Any] = ConcatDataset([PerSampleImages(part) for part in (train, val)])
        self.loader: DataLoader[Any] = DataLoader(both, batch_size=64, shuffle=True)
        self.test_loader: DataLoader[Any] = DataLoader(PerSampleImages(test), batch_size=1000)
        self.device = torch.device(wanted_devices(config)[-1])

    def train(self, target: float, most_epochs: int) -> Row:
        """``epochs``, ``test/accuracy`` at the end, ``fit_s``, and ``to_target_s`` where the target was reached."""
        seed_everything(0, verbose=False)
        network, device = example_network().to(self.device), self.device
        optimizer = torch.optim.Adadelta(network.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
        row: Row = {"fit_s": 0.0}
        for epoch in progress("plain loop", range(1, most_epochs + 1)):
            row["fit_s"] += train_epoch(network, optimizer, self.loader, device).train_s
            schedule.step()
            with torch.no_grad():
                network.eval()
                right = [network(images.to(device)).argmax(1).cpu() == labels for images, labels in self.test_loader]
            row |= {"epochs": epoch, "test/accuracy": float(torch.cat(right).double().mean())}
            if row["test/accuracy"] >= target:
                return {**row, "to_target_s": row["fit_s"]}
        return row
