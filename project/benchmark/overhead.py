"""What each feature of a run costs, and how fast its loader is, beside loops and loaders written by hand."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from lightning.fabric.utilities.exceptions import MisconfigurationException
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchvision import transforms

from project.benchmark import Row, Settings
from project.benchmark.devices import network_name, wanted_devices
from project.benchmark.timing import Epoch, alternate, median_and_spread, progress, run_epochs, synchronize
from project.callbacks.memory import MemoryMonitor  # feature: memory
from project.callbacks.optimizer import OptimizerMonitor  # feature: optimizer
from project.callbacks.throughput import ThroughputMonitor  # feature: throughput
from project.engine.checkpointing import RunCheckpoint
from project.engine.cli import Configuration
from project.engine.exact_loading import ExactLoader
from project.errors import UserError
from project.loggers.metrics_csv import MetricsCSV
from project.loggers.wandb import WandbRunLogger

BATCHES = 200  # of a loader, per measurement; at most one epoch
Way = Callable[[], "DataLoader[Any]"]
FLOOR, PLAIN = "hand-written floor", "plain PyTorch loop"
FEATURES: dict[str, type] = {
    "throughput monitor": ThroughputMonitor,  # feature: throughput
    "memory monitor": MemoryMonitor,  # feature: memory
    "optimizer monitor": OptimizerMonitor,  # feature: optimizer
    "checkpoints": RunCheckpoint,
    "W&B": WandbRunLogger,
    "metrics.csv": MetricsCSV,
}


def measure_overhead(config: Configuration, settings: Settings) -> list[Row]:
    """One row per variant: seconds per epoch and its ratio to the floor's.

    An epoch is its training steps, the validation behind them and what is saved of it (the floor saves nothing, the
    plain PyTorch loop only trains). Every Lightning run trains one epoch to warm up and one that counts. Then, per
    monitor and for the checkpoints, the share of a run that passes inside their hooks: what a run with and without
    them differs by is less than what two runs differ by.
    """

    def real(**options: Any) -> Callable[[], Epoch]:
        return lambda: run_epochs(config, 2, **options).epochs[-1]

    by_hand = loops_by_hand(config, settings.batch_size)
    variants = {**by_hand, "all features": real()}
    if settings.each_feature:
        variants |= {f"without {name}": real(without=[kind]) for name, kind in FEATURES.items()}
        # left out of the callbacks, Lightning would put its own bar there
        variants["without progress bar"] = real(trainer={"enable_progress_bar": False})
    variants["Lightning, nothing on"] = real(bare=True)
    alternate("overhead", by_hand, 1)  # real runs have their own warm-up
    rows: list[Row] = []
    for name, epochs in alternate("overhead", variants, settings.n).items():
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
    watched = tuple(FEATURES.values())
    runs = [run_epochs(config, 2, watched=watched) for _ in progress("inside the hooks", range(settings.n))]
    for name in runs[0].inside_s:
        pct = [100 * run.inside_s[name] / sum(epoch.epoch_s for epoch in run.epochs) for run in runs]
        rows.append({"loop": f"inside {name}", "batch_size": settings.batch_size})
        rows[-1] |= median_and_spread("pct_of_run", pct)
    return rows


# Data for loops written by hand: whole sets of images in memory, and single samples.


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
    label smoothing, a fresh permutation every epoch. No metric, no logging, no progress, no checkpoint.

    Raises:
        UserError: The module has no ``network``, or the data are of another kind than :class:`InMemory`.
    """
    module: Any = config.module
    if not isinstance(getattr(module, "network", None), nn.Module):
        raise UserError(f"--model: loops written by hand train module.network, {type(module).__name__} has none.")
    device, train, val = (
        torch.device(wanted_devices(config)[-1]),
        InMemory.of(config, "train"),
        InMemory.of(config, "val"),
    )
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


# How fast batches come, from this project's loader and from those of a plain PyTorch loop.


def measure_loaders(config: Configuration, settings: Settings) -> list[Row]:
    """One row per way to load: milliseconds until a float32, normalised batch is on the device.

    ``start_ms`` is what the first batch of an epoch takes: starting workers, unless they persist. It is not part of
    ``ms_per_batch``.
    """
    device, samples = torch.device(wanted_devices(config)[-1]), InMemory.of(config, "train")
    batches = min(20 if settings.quick else BATCHES, max(1, len(samples.labels) // settings.batch_size))
    ways, normalize = ways_to_load(config, samples, settings, device.type == "cuda"), samples.normalizer(device)
    timed = {name: partial(time_epoch, way, normalize, device, batches) for name, way in ways.items()}
    alternate("loaders", timed, 1)  # warms files, caches and persistent workers up
    rows: list[Row] = []
    for name, measured in alternate("loaders", timed, settings.n).items():
        row: Row = {"loader": name, "device": device.type, "batch_size": settings.batch_size, "batches": batches}
        row |= median_and_spread("ms_per_batch", [ms for ms, _ in measured])
        row["start_ms"] = statistics.median(start for _, start in measured)
        row["batches_per_sec"] = 1000 / row["ms_per_batch"]
        rows.append({**row, "times_ours": row["ms_per_batch"] / (rows[0] if rows else row)["ms_per_batch"]})
    return rows


def ways_to_load(config: Configuration, samples: InMemory, settings: Settings, pinned: bool) -> dict[str, Way]:
    """Name → function that gives a loader; a persistent one gives the same every time. Ours comes first."""
    given = cast(Any, config.datamodule).train_dataloader()
    kept = {"batch_size": given.batch_size, "drop_last": given.drop_last, "collate_fn": given.collate_fn}
    shuffled = partial(DataLoader, batch_size=settings.batch_size, shuffle=True)
    plain = partial(shuffled, PerSampleImages(samples))

    def ours(workers: int, pinned: bool) -> DataLoader[Any]:
        asked: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0, "pin_memory": pinned}
        return ExactLoader.of(DataLoader(given.dataset, shuffle=True, **kept, **asked), training=True, seed=0)

    ways: dict[str, Way] = {"ours": partial(ours, 0, pinned)}
    if pinned:
        ways["ours, not pinned"] = partial(ours, 0, False)
    ways["tensors, one sample at a time"] = partial(shuffled, TensorDataset(samples.images, samples.labels))
    for count in settings.workers:
        ways[f"plain PyTorch, {count} workers"] = partial(plain, num_workers=count)
    if some := next((count for count in settings.workers if count > 0), 0):
        name, our_own = f"plain PyTorch, {some} workers", ours(some, pinned)
        persistent = plain(num_workers=some, persistent_workers=True)
        ways[f"ours, {some} workers"] = lambda: our_own
        ways[f"{name}, persistent"] = lambda: persistent
        ways[f"{name}, prefetch 8"] = partial(plain, num_workers=some, prefetch_factor=8)
        if pinned:
            ways[f"{name}, pinned"] = partial(plain, num_workers=some, pin_memory=True)
    return ways


def time_epoch(
    way: Way, normalize: Callable[[Tensor], Tensor], device: torch.device, batches: int
) -> tuple[float, float]:
    """Milliseconds per batch after the first one, and until the first one."""

    def fetch() -> None:
        # elsewhere than on CUDA a batch could be read before it has been copied (pytorch issue 189690)
        images, _ = (part.to(device, non_blocking=device.type == "cuda") for part in next(iterator))
        if images.dtype == torch.uint8:  # the per-sample transforms have normalised already
            normalize(images)

    began = time.perf_counter()
    iterator = iter(way())
    fetch()
    synchronize(device)
    first = time.perf_counter()
    for _ in range(batches - 1):
        fetch()
    synchronize(device)
    return 1000 * (time.perf_counter() - first) / max(1, batches - 1), 1000 * (first - began)
