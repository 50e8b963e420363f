"""Which devices and precisions this machine has, and two tables of them: devices (speed) and memory."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from itertools import chain, product
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torchvision.models import resnet18

from project.benchmark import Row, Settings
from project.benchmark.timing import alternate, median_and_spread, progress, run_epochs
from project.callbacks.memory import memory_breakdown  # feature: memory
from project.engine.cli import Configuration, configure
from project.errors import UserError
from project.hardware import GIB  # feature: memory
from project.live_memory import LiveMemory  # feature: memory

# On a CPU a whole epoch of ResNet-18 would take minutes.
RESNET_ON_CPU = ["--limit_train_batches", "2", "--limit_val_batches", "0", "--model.network.image_size", "32"]
RESNET_BATCH = {"cpu": 32, "cuda": 256, "mps": 256}
BATCH_SIZES = {"cpu": [64, 256, 1024], "cuda": [64, 256, 1024, 4096, 16384], "mps": [64, 256, 1024]}
PATIENCE_S = 15.0  # a run that takes longer is not repeated: its row says n = 1


def wanted_devices(config: Configuration) -> list[str]:
    """The CPU and the kind of accelerator that is here, as far as ``--accelerator`` names them; the best comes last."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    found = ["cpu", *([accelerator.type] if accelerator is not None and accelerator.type in BATCH_SIZES else [])]
    asked = config.trainer["accelerator"]
    wanted = [name for name in found if asked in ("auto", name) or (asked == "gpu" and name != "cpu")]
    if not wanted:
        raise UserError(f"--accelerator must be auto or what this machine has ({', '.join(found)}), got {asked}.")
    return wanted


def usable(device: str, precisions: Sequence[str]) -> list[str]:
    """The precisions a device really has: on the CPU 16-mixed becomes bf16-mixed, and TF32 is CUDA's."""
    missing = ["16-mixed"] if device == "cpu" else []
    if device != "cuda" or torch.cuda.get_device_capability() < (8, 0):
        missing.append("tf32")
    return [precision for precision in precisions if precision not in missing] or ["32-true"]


def configure_for(fit_flags: Sequence[str], device: str, precision: str, batch_size: int, *flags: str) -> Configuration:
    """A configuration with a device ("cpu", "cuda", "mps"), a precision (the Trainer's or "tf32") and a batch size."""
    tf32 = precision == "tf32"
    more = ["--accelerator", "gpu" if device == "cuda" else device, "--devices", "1"]
    more += ["--precision", "32-true" if tf32 else precision, "--matmul_precision", "high" if tf32 else "highest"]
    return configure([*fit_flags, *more, "--data.batch_size", str(batch_size), *flags], "project.benchmark")


def network_name(config: Configuration) -> str:
    """The class of the module's network, or of the module where that is its own network."""
    return type(getattr(config.module, "network", config.module)).__name__


class ResNet18(nn.Sequential):
    """A network large enough that precision shows: torchvision's ResNet-18 on images enlarged to ``image_size``.

    He et al. 2015, arXiv 1512.03385; 11.2 million parameters. (batch, in_channels, height, width) → logits.
    """

    def __init__(self, image_size: int = 64, in_channels: int = 1, num_classes: int = 10) -> None:
        blocks = resnet18(num_classes=num_classes)
        blocks.conv1 = nn.Conv2d(in_channels, 64, kernel_size=7, stride=2, padding=3, bias=False)
        super().__init__(nn.Upsample((image_size, image_size), mode="bilinear"), blocks)


def measure_devices(config: Configuration, settings: Settings) -> list[Row]:
    """Networks × devices × precisions at the configured batch size, then batch sizes of the chosen network: a row each.

    A measurement is the second epoch of a real run; its first one is the warm-up. ``epoch_s``: seconds for the training
    set at the measured rate, without validation.
    """
    images = len(getattr(config.datamodule, "image_shape", ())) == 3
    if "ResNet18" in settings.networks and not (images and hasattr(config.module, "network")):
        needs = "images and a module with a network. Leave it out: --networks chosen."
        raise UserError(f"--networks ResNet18 needs {needs}")
    configs = all_cases(config, settings)
    variants = {" ".join(map(str, case)): partial(run_epochs, config, 2) for case, config in configs.items()}
    rows: list[Row] = []
    measured = alternate("devices", variants, settings.n, PATIENCE_S).values()
    for (case, of_case), runs in zip(configs.items(), measured, strict=True):
        train_samples = runs[0].train_samples
        samples = runs[0].batches * min(case[3], train_samples or case[3])
        row: Row = {"device": runs[0].device, "network": network_name(of_case)}
        row |= {"precision": case[2], "batch_size": case[3]}
        row |= median_and_spread("samples_per_sec", [samples / run.epochs[-1].train_s for run in runs])
        if train_samples is not None:
            row["epoch_s"] = train_samples / row["samples_per_sec"]
        if accuracies := [run.val_accuracy for run in runs if run.val_accuracy is not None]:
            row["val/accuracy"] = statistics.mean(accuracies)  # after two epochs
        if peaks := [run.peak_allocated_gib for run in runs if run.peak_allocated_gib is not None]:
            row["peak_allocated_gib"] = max(peaks)
        # against the CPU in float32, which comes first, where it was measured alike
        like = {"device": "cpu", "precision": "32-true", "network": row["network"], "batch_size": row["batch_size"]}
        if base := next((other for other in [*rows, row] if like.items() <= other.items()), None):
            row["speed_up"] = row["samples_per_sec"] / base["samples_per_sec"]
            if "val/accuracy" in row and "val/accuracy" in base:
                row["accuracy_difference"] = row["val/accuracy"] - base["val/accuracy"]
        rows.append(row)
    return rows


def all_cases(config: Configuration, settings: Settings) -> dict[tuple[str, str, str, int], Configuration]:
    """(device, network, precision, batch size) → its configuration."""
    configs: dict[tuple[str, str, str, int], Configuration] = {}
    for network, device in product(settings.networks, wanted_devices(config)):
        found, sizes, flags = usable(device, settings.precisions), [settings.batch_size], []
        if network == "ResNet18":
            sizes, flags = [RESNET_BATCH[device]], RESNET_ON_CPU if device == "cpu" else []
            flags = ["--model.network", "project.benchmark.devices.ResNet18", "--model.lr", "1e-3", *flags]
        elif not settings.quick:
            sizes += [size for size in settings.batch_sizes or BATCH_SIZES[device] if size != settings.batch_size]
        for size in sizes:
            for precision in found if size == sizes[0] else found[:1]:
                case = (device, network, precision, size)
                configs[case] = configure_for(settings.fit_flags, device, precision, size, *flags)
    return configs


# feature: memory
# What precision, activation checkpointing, accumulation and batch size do to the memory of a training step.

MIB = 1024**2
STEPS = 3  # optimizer steps; the last is measured, the others make the optimizer's state and choose algorithms


def measure_memory(config: Configuration, settings: Settings) -> list[Row]:
    """One row per combination on the best device here, each one measured once: the peak is no matter of chance.

    ``batch_size`` is what one optimizer step sees; with accumulation it comes in that many parts. The peak is that of
    the whole optimizer step; ``activations_mib`` is what it holds besides weights, gradients and optimizer state.
    """
    device, model = wanted_devices(config)[-1], config.resolved["model"]
    recomputes = (False, True) if "activation_checkpointing" in (model.get("init_args") or model) else (False,)
    sizes = settings.batch_sizes or ([64] if settings.quick else [256, 1024])
    rows: list[Row] = []
    cases = list(product(usable(device, settings.precisions), recomputes, (1, 4), sizes))
    for precision, recompute, parts, size in progress("memory", cases):
        flags = ["--accumulate_grad_batches", str(parts), "--limit_train_batches", str(STEPS * parts)]
        flags += ["--limit_val_batches", "0", *(["--model.activation_checkpointing", "true"] if recompute else [])]
        probe = PeakMemory()
        case = configure_for(settings.fit_flags, device, precision, max(1, size // parts), *flags)
        run = run_epochs(case, 1, extra=[probe])
        row: Row = {"device": run.device, "network": network_name(config), "precision": precision}
        row |= {"activation_checkpointing": recompute, "accumulation": parts, "batch_size": size}
        row |= {"peak_mib": probe.peak_bytes / MIB, "n": 1}
        row |= {f"{name.split()[0]}_mib": used / MIB for name, used in probe.parts.items()}
        row["activations_mib"] = max(0.0, probe.peak_bytes - sum(probe.parts.values())) / MIB
        rows.append(row)
    return rows


class PeakMemory(Callback):
    """The most memory that tensors take during a run's last optimizer step, by what they are for.

    On CUDA the allocator keeps the peak. On the CPU :class:`LiveMemory` counts tensors, without what a library takes
    for itself during an operation (oneDNN's scratch memory).
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self.parts: dict[str, float] = {}  # bytes by use after the step, as memory_breakdown names them
        self._meter: LiveMemory | None = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx != (STEPS - 1) * trainer.accumulate_grad_batches:
            return
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            return
        self._meter = LiveMemory()
        self._meter.__enter__()
        parameters = list(pl_module.parameters())
        states = [state.values() for optimizer in trainer.optimizers for state in optimizer.state.values()]
        self._meter.count([*parameters, *pl_module.buffers(), *(parameter.grad for parameter in parameters)])
        self._meter.count([*chain(*states), *(batch if isinstance(batch, (tuple, list)) else [batch])])

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx + 1 != STEPS * trainer.accumulate_grad_batches:
            return
        if self._meter is None:
            self.peak_bytes = torch.cuda.max_memory_allocated()
        else:
            self._meter.__exit__(None, None, None)
            self.peak_bytes = self._meter.peak_bytes
        self.parts = {name: GIB * size for name, size in memory_breakdown(trainer).items()}


# end feature: memory
