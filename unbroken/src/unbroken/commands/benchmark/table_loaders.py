"""The table ``loaders``: a run's own loader and those of plain PyTorch."""

import statistics
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from unbroken.cli.cli import Configuration
from unbroken.commands.benchmark import timing
from unbroken.commands.benchmark.loops_by_hand import PerSampleImages, in_memory, normalizer
from unbroken.commands.benchmark.real_runs import wanted_devices
from unbroken.errors import require
from unbroken.loading import exact_form
from unbroken.loading.log_steps import synchronize
from unbroken.tables import Row

# Batches of a loader, per measurement; at most one epoch.
BATCHES = 200
QUICK_BATCHES = 20


def measure_loaders(config: Configuration, options: Namespace) -> list[Row]:
    """One row per way to load: milliseconds until a float32, normalised batch is on the device."""
    # More workers than there are cores belong to the comparison.
    warnings.filterwarnings("ignore", "This DataLoader will create")
    device = torch.device(wanted_devices(config)[-1])
    samples = in_memory(config, "train")
    most = QUICK_BATCHES if options.quick else BATCHES
    batches = min(most, len(samples.labels) // options.batch_size)
    # The first batch is timed apart.
    must = f"be at most half of {len(samples.labels)} samples"
    require(batches >= 2, "--data.batch_size", must, options.batch_size)
    normalize = normalizer(config.datamodule, samples.images, device)
    timed = {}
    for name, loader in loaders(config.datamodule, samples, options, device).items():
        timed[name] = partial(time_epoch, loader, normalize, device, batches)
    # This warms files, caches and persistent workers up.
    timing.alternate("loaders", timed, 1)
    rows: list[Row] = []
    for name, measured in timing.alternate("loaders", timed, options.n).items():
        row: dict[str, Any] = {
            "loader": name,
            "device": device.type,
            "batch_size": options.batch_size,
            "batches": batches,
        }
        row |= timing.median_and_spread("ms_per_batch", [batch_ms for batch_ms, _ in measured])
        # To the first batch. It may start workers.
        row["start_ms"] = statistics.median(start_ms for _, start_ms in measured)
        row["batches_per_sec"] = 1000 / row["ms_per_batch"]
        # Ours comes first.
        ours = rows[0] if rows else row
        row["times_ours"] = row["ms_per_batch"] / ours["ms_per_batch"]
        rows.append(row)
    return rows


def loaders(
    data: Any, samples: Any, options: Namespace, device: torch.device
) -> dict[str, DataLoader[Any]]:
    """The ways to load, by name; ours comes first."""
    is_cuda = device.type == "cuda"
    given = data.train_dataloader()
    # A loader of ours with other arguments.
    own = partial(
        DataLoader,
        given.dataset,
        given.batch_size,
        shuffle=True,
        drop_last=given.drop_last,
        collate_fn=given.collate_fn,
    )
    exact = partial(exact_form, training=True, seed=0)
    images = PerSampleImages(data, samples)
    plain = partial(DataLoader, images, options.batch_size, shuffle=True)
    ways: dict[str, DataLoader[Any]] = {"ours": exact(own(pin_memory=is_cuda))}
    if is_cuda:
        ways["ours, not pinned"] = exact(own())
    tensors = TensorDataset(samples.images, samples.labels)
    ways["tensors, one sample at a time"] = DataLoader(tensors, options.batch_size, shuffle=True)
    for count in options.workers:
        ways[f"plain PyTorch, {count} workers"] = plain(num_workers=count)
    some = first_above_zero(options.workers)
    if some is not None:
        ours_persistent = own(num_workers=some, persistent_workers=True, pin_memory=is_cuda)
        ways[f"ours, {some} workers"] = exact(ours_persistent)
        name = f"plain PyTorch, {some} workers"
        ways[f"{name}, persistent"] = plain(num_workers=some, persistent_workers=True)
        ways[f"{name}, prefetch 8"] = plain(num_workers=some, prefetch_factor=8)
        if is_cuda:
            ways[f"{name}, pinned"] = plain(num_workers=some, pin_memory=True)
    return ways


def first_above_zero(counts: Sequence[int]) -> int | None:
    """The first count of workers that are processes."""
    for count in counts:
        if count > 0:
            return count
    return None


def time_epoch(
    loader: Iterable[Any], normalize: Callable[[Tensor], Tensor], device: torch.device, batches: int
) -> tuple[float, float]:
    """Milliseconds per batch after the first one, and until the first one."""
    # Elsewhere than on CUDA a batch could be read before it has been copied (pytorch issue 189690).
    can_go_on = device.type == "cuda"
    began = time.perf_counter()
    after_first = began
    for index, (images, labels) in zip(range(batches), loader, strict=False):
        on_device = images.to(device, non_blocking=can_go_on)
        labels.to(device, non_blocking=can_go_on)
        # The transforms of single samples have normalised already.
        if on_device.dtype == torch.uint8:
            normalize(on_device)
        if index == 0:
            synchronize(device)
            after_first = time.perf_counter()
    synchronize(device)
    ended = time.perf_counter()
    batch_ms = 1000 * (ended - after_first) / max(1, batches - 1)
    return batch_ms, 1000 * (after_first - began)
