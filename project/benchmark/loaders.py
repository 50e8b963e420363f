"""How fast batches come: this project's loader beside those of a plain PyTorch loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from project.benchmark import Row, Settings
from project.benchmark.devices import best_device
from project.benchmark.overhead import InMemory, PerSampleImages
from project.benchmark.timing import alternate, median_and_spread, progress, synchronize
from project.engine.cli import Configuration
from project.engine.exact_loading import ExactLoader

BATCHES = 200  # per measurement, at most one epoch
Way = Callable[[], "DataLoader[Any]"]


def measure(config: Configuration, settings: Settings) -> list[Row]:
    """One row per way to load: milliseconds until a float32, normalised batch is on the device.

    ``start_ms`` is what the first batch of an epoch takes: starting workers, unless they persist. It is not part of
    ``ms_per_batch``.
    """
    device, samples = best_device(config), InMemory.of(config, "train")
    batches = min(20 if settings.quick else BATCHES, max(1, len(samples.labels) // settings.batch_size))
    ways = ways_to_load(config, samples, settings, pinned=device.type == "cuda")
    normalize = samples.normalizer(device)
    timed = {name: partial(time_epoch, way, normalize, device, batches) for name, way in ways.items()}
    with progress("loaders", len(ways) * (settings.n + 1)) as bar:
        alternate(timed, 1, bar)  # warms files, caches and persistent workers up
        results = alternate(timed, settings.n, bar)
    rows: list[Row] = []
    for name, measured in results.items():
        row: Row = {"loader": name, "device": device.type, "batch_size": settings.batch_size, "batches": batches}
        row |= median_and_spread("ms_per_batch", [ms for ms, _ in measured])
        row["start_ms"] = median_and_spread("start_ms", [start for _, start in measured])["start_ms"]
        row["batches_per_sec"] = 1000 / row["ms_per_batch"]
        row["times_ours"] = row["ms_per_batch"] / (rows[0] if rows else row)["ms_per_batch"]
        rows.append(row)
    return rows


def ways_to_load(config: Configuration, samples: InMemory, settings: Settings, pinned: bool) -> dict[str, Way]:
    """Name → function that gives a loader; a persistent one gives the same every time. Ours comes first."""
    ours = partial(our_loader, config.datamodule)
    shuffled = partial(DataLoader, batch_size=settings.batch_size, shuffle=True)
    plain = partial(shuffled, PerSampleImages(samples))
    ways: dict[str, Way] = {"ours": partial(ours, 0, pinned)}
    if pinned:
        ways["ours, not pinned"] = partial(ours, 0, False)
    some = next((count for count in settings.workers if count > 0), None)
    if some:
        kept = ours(some, pinned)
        ways[f"ours, {some} workers"] = lambda: kept
    ways["tensors, one sample at a time"] = partial(shuffled, TensorDataset(samples.images, samples.labels))
    for count in settings.workers:
        ways[f"plain PyTorch, {count} workers"] = partial(plain, num_workers=count)
    if some:
        name, persistent = f"plain PyTorch, {some} workers", plain(num_workers=some, persistent_workers=True)
        ways[f"{name}, persistent"] = lambda: persistent
        ways[f"{name}, prefetch 8"] = partial(plain, num_workers=some, prefetch_factor=8)
        if pinned:
            ways[f"{name}, pinned"] = partial(plain, num_workers=some, pin_memory=True)
    return ways


def our_loader(datamodule: Any, workers: int, pinned: bool) -> DataLoader[Any]:
    """The training loader of a run with another number of workers."""
    given = datamodule.train_dataloader()
    plain: DataLoader[Any] = DataLoader(
        given.dataset,
        given.batch_size,
        shuffle=True,
        drop_last=given.drop_last,
        num_workers=workers,
        pin_memory=pinned,
        collate_fn=given.collate_fn,
        persistent_workers=workers > 0,
    )
    return ExactLoader.of(plain, training=True, seed=0)


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
