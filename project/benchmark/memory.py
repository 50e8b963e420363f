"""What precision, activation checkpointing, accumulation and batch size do to the memory of a training step."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch

from project.benchmark.devices import available_devices, usable
from project.benchmark.flags import Settings
from project.benchmark.peak_memory import PeakMemory
from project.benchmark.steps import Steps
from project.benchmark.with_lightning import Features, run_epochs
from project.engine.cli import ProjectCLI

MIB = 1024**2
ACCUMULATIONS = (1, 4)
BATCH_SIZES = (256, 1024)


def measure(cli: ProjectCLI, settings: Settings) -> list[dict[str, Any]]:
    """One row per combination on the best device here, each one measured once: the peak is no matter of chance.

    ``batch_size`` is what one optimizer step sees; with accumulation it comes in that many parts. The peak is that of
    the whole optimizer step; ``activations_mib`` is what it holds besides weights, gradients and optimizer state.
    """
    device = available_devices()[-1] if cli.config_init.trainer.accelerator == "auto" else "cpu"
    sizes = settings.batch_sizes or ([64] if settings.quick else list(BATCH_SIZES))
    cases = list(product(usable(device, settings.precisions), (False, True), ACCUMULATIONS, sizes))
    steps = Steps("memory", len(cases))
    rows = []
    for precision, recompute, parts, size in cases:
        steps.begin(f"{precision}, checkpointing {recompute}, {parts} × {size // parts}")
        one = case_cli(settings, device, precision, recompute, parts, size)
        probe = PeakMemory()
        run_epochs(one, 1, Features(extra=[probe]))
        rows.append(
            {
                "device": torch.cuda.get_device_name() if device == "cuda" else device,
                "network": type(one.model.network).__name__,
                "precision": precision,
                "activation_checkpointing": recompute,
                "accumulation": parts,
                "batch_size": size,
                "peak_mib": probe.peak / MIB,
                "n": 1,
                **{f"{name}_mib": size / MIB for name, size in probe.parts.items()},
                "activations_mib": max(0.0, probe.peak - sum(probe.parts.values())) / MIB,
            }
        )
    steps.finish()
    return rows


def case_cli(settings: Settings, device: str, precision: str, recompute: bool, parts: int, size: int) -> ProjectCLI:
    """A run of three optimizer steps of one combination."""
    flags = ["--accelerator", {"cuda": "gpu"}.get(device, device), "--devices", "1", "--limit_val_batches", "0"]
    flags += ["--precision", "32-true" if precision == "tf32" else precision]
    flags += ["--matmul_precision", "high" if precision == "tf32" else "highest"]
    flags += ["--model.activation_checkpointing", str(recompute).lower()]
    flags += ["--accumulate_grad_batches", str(parts), "--limit_train_batches", str(3 * parts)]
    flags += ["--data.batch_size", str(max(1, size // parts))]
    return ProjectCLI([*settings.fit_flags, *flags], "project.benchmark")
