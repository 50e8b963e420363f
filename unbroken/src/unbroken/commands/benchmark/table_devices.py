"""The table ``devices``: networks × devices × precisions, and batch sizes."""

import statistics
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torchvision.models import resnet18
from unbroken import contract
from unbroken.cli.cli import Configuration, configure
from unbroken.cli.program import Program
from unbroken.commands.benchmark import real_runs, timing
from unbroken.errors import UserError
from unbroken.tables import Row

RESNET = "ResNet18"
RESNET_BATCH = {"cpu": 32, "cuda": 256, "mps": 256}
# On a CPU a whole epoch of ResNet-18 would take minutes.
RESNET_ON_CPU = [
    *("--limit_train_batches", "2"),
    *("--limit_val_batches", "0"),
    *("--model.network.image_size", "32"),
]
BATCH_SIZES = {"cpu": [64, 256, 1024], "cuda": [64, 256, 1024, 4096, 16384], "mps": [64, 256, 1024]}
# The first epoch warms up.
EPOCHS = 2


class ResNet18(nn.Sequential):
    """torchvision's ResNet-18 on images enlarged to ``image_size``: large enough to show the effect
    of precision.

    He et al. 2015, arXiv 1512.03385; 11.2 million parameters. (batch, in_channels, height, width) →
    logits (batch, num_classes).
    """

    def __init__(self, image_size: int = 64, in_channels: int = 1, num_classes: int = 10) -> None:
        blocks = resnet18(num_classes=num_classes)
        blocks.conv1 = nn.Conv2d(in_channels, 64, kernel_size=7, stride=2, padding=3, bias=False)
        super().__init__(nn.Upsample((image_size, image_size), mode="bilinear"), blocks)


class Case(NamedTuple):
    """A row of the table: what is trained, and where."""

    network: str
    device: str
    precision: str
    batch_size: int


def usable(device: str, precisions: Sequence[str]) -> list[str]:
    """The precisions that a device has; 32-true where it has none of them."""
    missing = set()
    if device == "cpu":
        # Lightning replaces it by bf16-mixed.
        missing.add("16-mixed")
    if device != "cuda" or torch.cuda.get_device_capability() < (8, 0):
        missing.add("tf32")
    return [precision for precision in precisions if precision not in missing] or ["32-true"]


def configure_for(
    program: Program,
    fit_flags: Sequence[str],
    device: str,
    precision: str,
    batch_size: int,
    *flags: str,
) -> Configuration:
    """A configuration for a device ("cpu", "cuda", "mps"), a precision and a batch size.

    The precision is one of Lightning's, or "tf32".
    """
    is_tf32 = precision == "tf32"
    words = [
        *fit_flags,
        *("--accelerator", "gpu" if device == "cuda" else device),
        *("--devices", "1"),
        *("--precision", "32-true" if is_tf32 else precision),
        *("--matmul_precision", "high" if is_tf32 else "highest"),
        *("--data.batch_size", str(batch_size)),
        *flags,
    ]
    return configure(program, "benchmark", words)


def measure_devices(config: Configuration, options: Namespace) -> list[Row]:
    """Networks × devices × precisions at the configured batch size, then other batch sizes of the
    chosen network.
    """
    if RESNET in options.networks:
        check_images(config)
    variants = device_runs(config, options)
    results = timing.alternate("devices", variants, options.n)
    rows: list[Row] = []
    for case, attempts in results.items():
        runs = [run for run in attempts if run is not None]
        if runs:
            row = row_of(case, runs)
            compare_with_cpu(row, rows)
            rows.append(row)
    return rows


def check_images(config: Configuration) -> None:
    """A UserError where ResNet-18 cannot be put in the place of the module's network."""
    data = config.datamodule
    has_images = isinstance(data, contract.ShapesImages) and len(data.image_shape) == 3
    if not has_images or not isinstance(config.module, contract.HasNetwork):
        raise UserError(
            "--networks ResNet18 needs images and a module.network. "
            "Leave it out: --networks chosen."
        )


def device_runs(
    config: Configuration, options: Namespace
) -> dict[Case, Callable[[], real_runs.RunClock | None]]:
    """What the table measures: case → measurement."""
    runs: dict[Case, Callable[[], real_runs.RunClock | None]] = {}
    for network in options.networks:
        for device in real_runs.wanted_devices(config):
            flags = resnet_flags(device) if network == RESNET else []
            for case in cases_of(network, device, options):
                configured = configure_for(
                    config.program,
                    options.fit_flags,
                    device,
                    case.precision,
                    case.batch_size,
                    *flags,
                )
                name = f"devices: {network}, {device}, {case.precision}, batch {case.batch_size}"
                measure = partial(real_runs.run_epochs, configured, EPOCHS)
                runs[case] = timing.Attempt(name, measure)
                # What the user has configured himself may fail with its own error.
                if case == Case("chosen", device, "32-true", options.batch_size):
                    runs[case] = measure
    return runs


def resnet_flags(device: str) -> list[str]:
    """The flags that train ResNet-18."""
    name = f"{ResNet18.__module__}.{ResNet18.__name__}"
    flags = ["--model.network", name, "--model.lr", "1e-3"]
    if device == "cpu":
        flags += RESNET_ON_CPU
    return flags


def cases_of(network: str, device: str, options: Namespace) -> list[Case]:
    """Every precision at the first batch size, then the other sizes in the first precision."""
    precisions = usable(device, options.precisions)
    others: list[int] = []
    first = options.batch_size
    if network == RESNET:
        first = RESNET_BATCH[device]
    elif not options.quick:
        others = options.batch_sizes or BATCH_SIZES[device]
    cases = [Case(network, device, precision, first) for precision in precisions]
    sizes = [size for size in others if size != first]
    return cases + [Case(network, device, precisions[0], size) for size in sizes]


def row_of(case: Case, runs: Sequence[real_runs.RunClock]) -> dict[str, Any]:
    """What the runs of one case have shown."""
    facts = {"precision": case.precision, "batch_size": case.batch_size}
    row: dict[str, Any] = {**runs[0].names, **facts}
    train_samples = runs[0].train_samples
    speeds = [run.samples / run.epochs[-1].train_s for run in runs]
    row |= timing.median_and_spread("samples_per_sec", speeds)
    if train_samples is not None:
        # Without validation.
        row["epoch_s"] = train_samples / row["samples_per_sec"]
    accuracies = [float(run.accuracy) for run in runs if run.accuracy is not None]
    if accuracies:
        row["val/accuracy"] = statistics.mean(accuracies)
    peaks = [run.peak_allocated_gib for run in runs if run.peak_allocated_gib is not None]
    if peaks:
        row["peak_allocated_gib"] = max(peaks)
    return row


def compare_with_cpu(row: dict[str, Any], before: Sequence[Row]) -> None:
    """Add the speed-up over the same network and batch size on the CPU in float32.

    That row is measured first.
    """
    like = {
        "device": "cpu",
        "precision": "32-true",
        "network": row["network"],
        "batch_size": row["batch_size"],
    }
    for base in [*before, row]:
        if like.items() <= base.items():
            row["speed_up"] = row["samples_per_sec"] / base["samples_per_sec"]
            if "val/accuracy" in row and "val/accuracy" in base:
                row["accuracy_difference"] = row["val/accuracy"] - base["val/accuracy"]
            return
