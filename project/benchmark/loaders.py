"""How fast batches come: this project's loader beside the ways of the course."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from project.benchmark.flags import Settings
from project.benchmark.overhead import best_device
from project.benchmark.per_sample import per_sample_loader
from project.benchmark.steps import Steps
from project.benchmark.timing import alternate, median_and_spread, synchronize
from project.data.base import BatchedDataModule
from project.data.sampler import TrainBatchSampler, make_loader
from project.engine.cli import ProjectCLI

BATCHES = 200  # per measurement, at most one epoch


def measure(cli: ProjectCLI, settings: Settings) -> list[dict[str, Any]]:
    """One row per way to load: milliseconds until a float32, normalised batch is on the device.

    ``start_ms`` is what the first batch of an epoch takes: starting workers, unless they persist. It is not part of
    ``ms_per_batch``.
    """
    datamodule = cli.datamodule
    datamodule.setup("fit")
    device = torch.device("cpu") if cli.config_init.trainer.accelerator == "cpu" else best_device()
    batches = min(20 if settings.quick else BATCHES, datamodule.train_batches_per_epoch())
    ways = ways_to_load(datamodule, settings.workers, device)
    timed = {name: partial(time_epoch, way, datamodule, device, batches) for name, way in ways.items()}
    steps = Steps("loaders", len(ways) * (settings.n + 1))
    alternate(timed, 1, steps)  # warms files, caches and persistent workers up
    results = alternate(timed, settings.n, steps)
    steps.finish()
    rows = []
    for name, measured in results.items():
        row = {
            "loader": name,
            "device": device.type,
            "batch_size": datamodule.batch_size,
            "batches": batches,
            **median_and_spread("ms_per_batch", [ms for ms, _ in measured]),
            "start_ms": median_and_spread("start_ms", [start for _, start in measured])["start_ms"],
        }
        row["batches_per_sec"] = 1000 / row["ms_per_batch"]
        rows.append(row)
    for row in rows:
        row["times_ours"] = row["ms_per_batch"] / rows[0]["ms_per_batch"]
    return rows


def ways_to_load(
    datamodule: BatchedDataModule, workers: list[int], device: torch.device
) -> dict[str, Callable[[], DataLoader[Any]]]:
    """Name → function that gives a loader; a persistent one gives the same every time. Ours comes first."""
    train: Any = datamodule.splits["train"]
    many = [count for count in workers if count > 0]
    pinned = device.type == "cuda"
    per_sample = partial(per_sample_loader, datamodule, "train")
    collated = partial(DataLoader, TensorDataset(train.images, train.labels), datamodule.batch_size, shuffle=True)
    ways: dict[str, Callable[[], DataLoader[Any]]] = {"ours": partial(our_loader, datamodule, 0, pinned)}
    if pinned:
        ways["ours, not pinned"] = partial(our_loader, datamodule, 0, False)
    for count in many[:1]:
        kept = our_loader(datamodule, count, pinned)
        ways[f"ours, {count} workers"] = partial(_same, kept)
    ways["tensors, one sample at a time"] = collated
    for count in workers:
        ways[f"course, {count} workers"] = partial(per_sample, num_workers=count)
    for count in many[:1]:
        ways[f"course, {count} workers, persistent"] = partial(
            _same, per_sample(num_workers=count, persistent_workers=True)
        )
        ways[f"course, {count} workers, prefetch 8"] = partial(per_sample, num_workers=count, prefetch_factor=8)
        if pinned:
            ways[f"course, {count} workers, pinned"] = partial(per_sample, num_workers=count, pin_memory=True)
    return ways


def our_loader(datamodule: BatchedDataModule, workers: int, pinned: bool) -> DataLoader[Any]:
    """The data module's training loader with another number of workers."""
    dataset: Any = datamodule.splits["train"]
    sampler = TrainBatchSampler(len(dataset), datamodule.batch_size)
    return make_loader(
        dataset,
        sampler,
        num_workers=workers,
        pin_memory=pinned,
        prefetch_factor=datamodule.prefetch_factor,
        seed=0,
        image_shape=datamodule.image_shape,
    )


def time_epoch(
    way: Callable[[], DataLoader[Any]], datamodule: BatchedDataModule, device: torch.device, batches: int
) -> tuple[float, float]:
    """Milliseconds per batch after the first one, and until the first one."""
    began = time.perf_counter()
    iterator = iter(way())
    _to_device(next(iterator), datamodule, device)
    synchronize(device)
    first = time.perf_counter()
    for _ in range(batches - 1):
        _to_device(next(iterator), datamodule, device)
    synchronize(device)
    ended = time.perf_counter()
    return 1000 * (ended - first) / max(1, batches - 1), 1000 * (first - began)


def _to_device(batch: Any, datamodule: BatchedDataModule, device: torch.device) -> None:
    images, _ = (part.to(device, non_blocking=True) for part in batch)
    if images.dtype == torch.uint8:  # the per-sample transforms have normalised already
        datamodule.normalize(images)


def _same(loader: DataLoader[Any]) -> DataLoader[Any]:
    return loader
