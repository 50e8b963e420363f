"""The tables: devices, memory, overhead and loaders. Each is a function of a configuration → rows."""

import statistics
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import resnet18
from tqdm import tqdm  # type: ignore[import-untyped]  # feature: memory

from project.benchmark import timing
from project.callbacks.memory import ACTIVATIONS  # feature: memory
from project.engine.cli import Configuration, configure
from project.engine.exact_loading import ExactLoader
from project.engine.log_steps import synchronize
from project.engine.summary import network_of
from project.errors import UserError, require
from project.tables import Row

# On a CPU a whole epoch of ResNet-18 would take minutes.
RESNET_ON_CPU = [
    "--limit_train_batches",
    "2",
    "--limit_val_batches",
    "0",
    "--model.network.image_size",
    "32",
]
RESNET_BATCH = {"cpu": 32, "cuda": 256, "mps": 256}
BATCH_SIZES = {"cpu": [64, 256, 1024], "cuda": [64, 256, 1024, 4096, 16384], "mps": [64, 256, 1024]}
BATCHES = 200  # of a loader, per measurement; at most one epoch


def usable(device: str, precisions: Sequence[str]) -> list[str]:
    """The precisions a device has: on the CPU Lightning replaces 16-mixed by bf16-mixed, and only CUDA has TF32."""
    has_tf32 = device == "cuda" and torch.cuda.get_device_capability() >= (8, 0)
    missing = {"16-mixed": device == "cpu", "tf32": not has_tf32}
    return [precision for precision in precisions if not missing.get(precision)] or ["32-true"]


def configure_for(
    fit_flags: Sequence[str], device: str, precision: str, batch_size: int, *flags: str
) -> Configuration:
    """A configuration with a device ("cpu", "cuda", "mps"), a precision (Lightning's or "tf32") and a batch size."""
    tf32 = precision == "tf32"
    more = ["--accelerator", "gpu" if device == "cuda" else device, "--devices", "1"]
    more += [
        "--precision",
        "32-true" if tf32 else precision,
        "--matmul_precision",
        "high" if tf32 else "highest",
    ]
    return configure(
        [*fit_flags, *more, "--data.batch_size", str(batch_size), *flags], "project.benchmark"
    )


class ResNet18(nn.Sequential):
    """torchvision's ResNet-18 on images enlarged to ``image_size``: large enough to show the effect of precision.
    He et al. 2015, arXiv 1512.03385; 11.2 million parameters. (batch, in_channels, height, width) → logits.
    """

    def __init__(self, image_size: int = 64, in_channels: int = 1, num_classes: int = 10) -> None:
        blocks = resnet18(num_classes=num_classes)
        blocks.conv1 = nn.Conv2d(in_channels, 64, kernel_size=7, stride=2, padding=3, bias=False)
        super().__init__(nn.Upsample((image_size, image_size), mode="bilinear"), blocks)


def measure_devices(config: Configuration, options: Namespace) -> list[Row]:
    """Networks × devices × precisions at the configured batch size, then other batch sizes of the chosen network."""
    images = len(getattr(config.datamodule, "image_shape", ())) == 3
    if "ResNet18" in options.networks and not (images and hasattr(config.module, "network")):
        raise UserError(
            "--networks ResNet18 needs images and a module.network. Leave it out: --networks chosen."
        )
    rows: list[Row] = []
    for (_, _, precision, size), runs in timing.alternate(
        "devices", device_runs(config, options), options.n
    ).items():
        row: dict[str, Any] = {**runs[0].names, "precision": precision, "batch_size": size}
        train_samples = runs[0].train_samples
        samples = runs[0].batches * min(size, train_samples or size)
        row |= timing.median_and_spread(
            "samples_per_sec", [samples / run.epochs[-1].train_s for run in runs]
        )
        if train_samples is not None:
            row["epoch_s"] = train_samples / row["samples_per_sec"]  # without validation
        if accuracies := [float(run.accuracy) for run in runs if run.accuracy is not None]:
            row["val/accuracy"] = statistics.mean(accuracies)  # after two epochs
        if peaks := [run.peak_allocated_gib for run in runs if run.peak_allocated_gib is not None]:
            row["peak_allocated_gib"] = max(peaks)
        # the same network and batch size on the CPU in float32, which is measured first
        like = {
            "device": "cpu",
            "precision": "32-true",
            "network": row["network"],
            "batch_size": size,
        }
        if base := next((other for other in [*rows, row] if like.items() <= other.items()), None):
            row["speed_up"] = row["samples_per_sec"] / base["samples_per_sec"]
            if "val/accuracy" in row and "val/accuracy" in base:
                row["accuracy_difference"] = row["val/accuracy"] - base["val/accuracy"]
        rows.append(row)
    return rows


def device_runs(config: Configuration, options: Namespace) -> dict[Any, partial[timing.RunClock]]:
    """Network, device, precision and batch size → measurement: what the table ``devices`` measures."""
    runs = {}
    for network, device in product(options.networks, timing.wanted_devices(config)):
        found, sizes, flags = usable(device, options.precisions), [options.batch_size], []
        if network == "ResNet18":
            sizes, flags = [RESNET_BATCH[device]], RESNET_ON_CPU if device == "cpu" else []
            flags = [
                "--model.network",
                "project.benchmark.tables.ResNet18",
                "--model.lr",
                "1e-3",
                *flags,
            ]
        elif not options.quick:
            sizes += [
                size
                for size in options.batch_sizes or BATCH_SIZES[device]
                if size != options.batch_size
            ]
        for precision, size in [*product(found, sizes[:1]), *product(found[:1], sizes[1:])]:
            case = configure_for(options.fit_flags, device, precision, size, *flags)
            runs[network, device, precision, size] = partial(
                timing.run_epochs, case, 2
            )  # the first epoch warms up
    return runs


def measure_memory(config: Configuration, options: Namespace) -> Iterator[Row]:  # feature: memory
    """One row per combination on the best device, measured once: the peak does not vary. ``batch_size`` is that of an
    optimizer step; accumulation divides it into parts. The CPU's peak lacks scratch memory of libraries such as oneDNN.
    """
    device, model = timing.wanted_devices(config)[-1], config.resolved["model"]
    recomputes = (
        (False, True)
        if "activation_checkpointing" in (model.get("init_args") or model)
        else (False,)
    )
    sizes = options.batch_sizes or ([64] if options.quick else [256, 1024])
    cases = list(product(usable(device, options.precisions), recomputes, (1, 4), sizes))
    for precision, recompute, parts, size in tqdm(cases, desc="memory", leave=False, disable=None):
        # three optimizer steps, of which the first makes the optimizer's state
        flags = ["--accumulate_grad_batches", str(parts), "--limit_train_batches", str(3 * parts)]
        flags += ["--limit_val_batches", "0", "--monitors", "memory"]
        flags += ["--model.activation_checkpointing", "true"] if recompute else []
        run = timing.run_epochs(
            configure_for(options.fit_flags, device, precision, max(1, size // parts), *flags), 1
        )
        row: dict[str, Any] = {
            **run.names,
            "precision": precision,
            "activation_checkpointing": recompute,
        }
        row |= {"accumulation": parts, "batch_size": size}
        row |= {
            "peak_mib": 1024 * sum(run.memory.values()) if ACTIVATIONS in run.memory else None,
            "n": 1,
        }
        yield row | {f"{name.split()[0]}_mib": 1024 * gib for name, gib in run.memory.items()}


def measure_overhead(config: Configuration, options: Namespace) -> Iterator[Row]:
    """One row per loop: seconds per epoch, and the median of its ratios to the floor's epoch of the same round. An
    epoch is training, validation and saving (the floor does not save, the plain PyTorch loop only trains).
    """
    timing.loops_by_hand(config)  # refuses other data before a process starts
    network = type(network_of(config.module)).__name__
    measured = timing.epochs_in_turn("overhead", timing.LOOPS, options.fit_flags, options.n)
    for name, epochs in measured.items():
        row: dict[str, Any] = {"loop": name, "network": network, "batch_size": options.batch_size}
        row |= timing.median_and_spread("epoch_s", [epoch.epoch_s for epoch in epochs])
        row["train_s"] = statistics.median(epoch.train_s for epoch in epochs)
        both = list(zip(epochs, measured[timing.FLOOR], strict=True))
        row["train_vs_floor"] = statistics.median(
            epoch.train_s / floor.train_s for epoch, floor in both
        )
        if name != timing.PLAIN:
            ratios = [epoch.epoch_s / floor.epoch_s for epoch, floor in both]
            row |= {
                "epoch_vs_floor": statistics.median(ratios),
                "lowest": min(ratios),
                "highest": max(ratios),
            }
        yield row


def measure_loaders(config: Configuration, options: Namespace) -> list[Row]:
    """One row per way to load: milliseconds until a float32, normalised batch is on the device."""
    warnings.filterwarnings(
        "ignore", "This DataLoader will create"
    )  # more workers than cores belong to the comparison
    device, samples = (
        torch.device(timing.wanted_devices(config)[-1]),
        timing.in_memory(config, "train"),
    )
    batches = min(20 if options.quick else BATCHES, len(samples.labels) // options.batch_size)
    # the first batch is timed apart
    require(
        batches >= 2,
        "--data.batch_size",
        f"be at most half of {len(samples.labels)} samples",
        options.batch_size,
    )
    normalize = timing.normalizer(config.datamodule, samples.images, device)
    ways = loaders(config.datamodule, samples, options, pinned=device.type == "cuda")
    timed = {
        name: partial(time_epoch, loader, normalize, device, batches)
        for name, loader in ways.items()
    }
    timing.alternate("loaders", timed, 1)  # warms files, caches and persistent workers up
    rows: list[Row] = []
    for name, measured in timing.alternate("loaders", timed, options.n).items():
        row = {
            "loader": name,
            "device": device.type,
            "batch_size": options.batch_size,
            "batches": batches,
        }
        row |= timing.median_and_spread("ms_per_batch", [ms for ms, _ in measured])
        row["start_ms"] = statistics.median(
            start for _, start in measured
        )  # to the first batch: may start workers
        row["batches_per_sec"] = 1000 / row["ms_per_batch"]
        rows.append(
            {**row, "times_ours": row["ms_per_batch"] / (rows[0] if rows else row)["ms_per_batch"]}
        )
    return rows


def loaders(
    data: Any, samples: Any, options: Namespace, pinned: bool
) -> dict[str, DataLoader[Any]]:
    """The ways to load, by name; ours comes first."""
    given = data.train_dataloader()
    kept = {"shuffle": True, "drop_last": given.drop_last, "collate_fn": given.collate_fn}
    own = partial(DataLoader, given.dataset, given.batch_size, **kept)
    exact = partial(ExactLoader, training=True, seed=0)
    plain = partial(
        DataLoader, timing.PerSampleImages(data, samples), options.batch_size, shuffle=True
    )
    tensors = TensorDataset(samples.images, samples.labels)
    ways: dict[str, DataLoader[Any]] = {"ours": exact(own(pin_memory=pinned))}
    if pinned:
        ways["ours, not pinned"] = exact(own())
    ways["tensors, one sample at a time"] = DataLoader(tensors, options.batch_size, shuffle=True)
    ways |= {
        f"plain PyTorch, {count} workers": plain(num_workers=count) for count in options.workers
    }
    if some := next((count for count in options.workers if count > 0), 0):
        name = f"plain PyTorch, {some} workers"
        ways[f"ours, {some} workers"] = exact(
            own(num_workers=some, persistent_workers=True, pin_memory=pinned)
        )
        ways[f"{name}, persistent"] = plain(num_workers=some, persistent_workers=True)
        ways[f"{name}, prefetch 8"] = plain(num_workers=some, prefetch_factor=8)
        if pinned:
            ways[f"{name}, pinned"] = plain(num_workers=some, pin_memory=True)
    return ways


def time_epoch(
    loader: Iterable[Any], normalize: Callable[[Tensor], Tensor], device: torch.device, batches: int
) -> tuple[float, float]:
    """Milliseconds per batch after the first one, and until the first one."""
    edges = [time.perf_counter()]
    for index, batch in zip(range(batches), loader, strict=False):
        # elsewhere than on CUDA a batch could be read before it has been copied (pytorch issue 189690)
        images, _ = (part.to(device, non_blocking=device.type == "cuda") for part in batch)
        if images.dtype == torch.uint8:  # the per-sample transforms have normalised already
            normalize(images)
        if index in (0, batches - 1):
            synchronize(device)
            edges.append(time.perf_counter())
    return 1000 * (edges[-1] - edges[1]) / max(1, batches - 1), 1000 * (edges[1] - edges[0])
