"""Every device and precision this machine has: speed, speed-up over the CPU in float32, accuracy, peak memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import resnet18

from project.benchmark import Row, Settings
from project.benchmark.timing import RealRun, alternate, median_and_spread, progress, run_epochs
from project.engine.cli import Configuration, configure
from project.errors import UserError

RESNET = ["--model.network", "project.benchmark.devices.ResNet18", "--model.lr", "1e-3"]
# On a CPU a whole epoch of it would take minutes.
RESNET_ON_CPU = ["--limit_train_batches", "2", "--limit_val_batches", "0", "--model.network.image_size", "32"]
RESNET_BATCH = {"cpu": 32, "cuda": 256, "mps": 256}
BATCH_SIZES = {"cpu": [64, 256, 1024], "cuda": [64, 256, 1024, 4096, 16384], "mps": [64, 256, 1024]}
PATIENCE_S = 15.0  # a run that takes longer is not repeated: its row says n = 1


class ResNet18(nn.Module):
    """A network large enough that precision shows: torchvision's ResNet-18 on images enlarged to ``image_size``.

    He et al. 2015, arXiv 1512.03385; 11.2 million parameters.
    """

    def __init__(self, image_size: int = 64, in_channels: int = 1, num_classes: int = 10) -> None:
        super().__init__()
        self.size = (image_size, image_size)
        self.blocks = resnet18(num_classes=num_classes)
        self.blocks.conv1 = nn.Conv2d(in_channels, 64, kernel_size=7, stride=2, padding=3, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, in_channels, height, width) → logits (batch, num_classes)."""
        return self.blocks(F.interpolate(images, size=self.size, mode="bilinear", align_corners=False))


# Which devices and precisions there are, for every table.


def available_devices() -> list[str]:
    """The CPU, and the kind of accelerator that can be used."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return ["cpu", *([found.type] if found is not None and found.type in BATCH_SIZES else [])]


def wanted_devices(config: Configuration) -> list[str]:
    """The available devices that ``--accelerator`` names; a UserError where there is none."""
    asked, found = config.trainer["accelerator"], available_devices()
    wanted = [name for name in found if asked in ("auto", name) or (asked == "gpu" and name != "cpu")]
    if not wanted:
        raise UserError(f"--accelerator must be auto or what this machine has ({', '.join(found)}), got {asked}.")
    return wanted


def best_device(config: Configuration) -> torch.device:
    """The device that ``--accelerator`` trains on."""
    return torch.device(wanted_devices(config)[-1])


def usable(device: str, precisions: Sequence[str]) -> list[str]:
    """The precisions a device really has: on the CPU 16-mixed becomes bf16-mixed, and TF32 is CUDA's."""
    known = {"cpu": ("32-true", "bf16-mixed"), "mps": ("32-true", "16-mixed", "bf16-mixed")}
    has_tf32 = device == "cuda" and torch.cuda.get_device_capability() >= (8, 0)
    allowed = known.get(device, ("32-true", *(("tf32",) if has_tf32 else ()), "16-mixed", "bf16-mixed"))
    return [precision for precision in precisions if precision in allowed] or ["32-true"]


def device_flags(device: str, precision: str, batch_size: int) -> list[str]:
    """Flags of ``fit`` for a device ("cpu", "cuda", "mps"), a precision (the Trainer's or "tf32") and a batch size."""
    flags = ["--accelerator", "gpu" if device == "cuda" else device, "--devices", "1"]
    flags += ["--precision", "32-true" if precision == "tf32" else precision]
    flags += ["--matmul_precision", "high" if precision == "tf32" else "highest"]
    return [*flags, "--data.batch_size", str(batch_size)]


def network_name(config: Configuration) -> str:
    """The class of the module's network, or of the module where that is its own network."""
    return type(getattr(config.module, "network", config.module)).__name__


# The table.


class Case(NamedTuple):
    """One row."""

    device: str  # "cpu", "cuda" or "mps"
    network: str  # "chosen" or "ResNet18"
    precision: str  # one of the Trainer's, or "tf32"
    batch_size: int

    def configure(self, fit_flags: Sequence[str]) -> Configuration:
        """This case of any configuration."""
        flags = [*fit_flags, *device_flags(self.device, self.precision, self.batch_size)]
        if self.network == "ResNet18":
            flags += RESNET + (RESNET_ON_CPU if self.device == "cpu" else [])
        return configure(flags, "project.benchmark")


def measure(config: Configuration, settings: Settings) -> list[Row]:
    """One row per case. A measurement is the second epoch of a real run; its first one is the warm-up."""
    images = len(getattr(config.datamodule, "image_shape", ())) == 3
    if "ResNet18" in settings.networks and not (images and hasattr(config.module, "network")):
        raise UserError(
            "--networks ResNet18 needs images and a module with a network. Leave it out: --networks chosen."
        )
    configs = {case: case.configure(settings.fit_flags) for case in all_cases(config, settings)}
    too_slow: set[Case] = set()
    variants = {" ".join(map(str, case)): partial(one_run, case, configs[case], too_slow) for case in configs}
    with progress("devices", len(configs) * settings.n) as bar:
        results = alternate(variants, settings.n, bar)
    rows = [
        row_of(case, network_name(of_case), [run for run in runs if run])
        for (case, of_case), runs in zip(configs.items(), results.values(), strict=True)
    ]
    for row in rows:  # against the CPU in float32, where it was measured alike
        like = [r for r in rows if (r["network"], r["batch_size"]) == (row["network"], row["batch_size"])]
        base = next((r for r in like if (r["device"], r["precision"]) == ("cpu", "32-true")), None)
        if base is not None:
            row["speed_up"] = row["samples_per_sec"] / base["samples_per_sec"]
            if "val/accuracy" in row and "val/accuracy" in base:
                row["accuracy_difference"] = row["val/accuracy"] - base["val/accuracy"]
    return rows


def all_cases(config: Configuration, settings: Settings) -> Iterator[Case]:
    """Networks × devices × precisions at the configured batch size, then batch sizes of the chosen network."""
    devices = wanted_devices(config)
    for network in settings.networks:
        for device in devices:
            size = RESNET_BATCH[device] if network == "ResNet18" else settings.batch_size
            for precision in usable(device, settings.precisions):
                yield Case(device, network, precision, size)
    if "chosen" in settings.networks and not settings.quick:
        for device in devices:
            for size in settings.batch_sizes or BATCH_SIZES[device]:
                if size != settings.batch_size:
                    yield Case(device, "chosen", usable(device, settings.precisions)[0], size)


def one_run(case: Case, config: Configuration, too_slow: set[Case]) -> RealRun | None:
    """One run of two epochs; None for a case that has been found too slow."""
    if case in too_slow:
        return None
    began = time.perf_counter()
    if case.device == "cuda":
        torch.cuda.empty_cache()
    run = run_epochs(config, 2)
    if time.perf_counter() - began > PATIENCE_S:
        too_slow.add(case)
    return run


def row_of(case: Case, network: str, runs: list[RealRun]) -> Row:
    """The table's row. ``epoch_s``: seconds for the training set at the measured rate, without validation."""
    train_samples = runs[0].train_samples
    samples = runs[0].batches * min(case.batch_size, train_samples or case.batch_size)
    row: Row = {"device": runs[0].device, "network": network, "precision": case.precision}
    row["batch_size"] = case.batch_size
    row |= median_and_spread("samples_per_sec", [samples / run.epochs[-1].train_s for run in runs])
    if train_samples is not None:
        row["epoch_s"] = train_samples / row["samples_per_sec"]
    if accuracies := [run.val_accuracy for run in runs if run.val_accuracy is not None]:
        row["val/accuracy"] = statistics.mean(accuracies)  # after two epochs
    if peaks := [run.peak_allocated_gib for run in runs if run.peak_allocated_gib is not None]:
        row["peak_allocated_gib"] = max(peaks)
    return row
