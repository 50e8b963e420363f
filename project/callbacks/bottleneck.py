"""What a run waits for, in one sentence with the flag to try."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Trainer

from project import threads

# A loader that takes a fifth of the time is worth a flag.
LOADER_BOUND_PCT = 20.0
# Below it the GPU is idle often enough that the CPU, which feeds it, sets the pace.
GPU_BUSY_PCT = 70.0
# Lightning's loop and Python take 0.4 to 0.7 ms a batch: a tenth or more of a batch that takes no longer than this.
TINY_BATCH_MS = 5.0


def bottleneck(
    metrics: Mapping[str, float],
    *,
    device: str,
    precision: str,
    world_size: int,
    batch_size: int | None,
    num_workers: int,
    compiled: bool,
) -> str:
    """Whether a run is bound by its loader, by overhead or by arithmetic.

    Args:
        metrics: ``throughput/*`` (medians).
        device: ``cpu``, ``cuda`` or ``mps``.
        precision: The Trainer's, such as ``32-true``.
        world_size: Number of devices.
        batch_size: Samples per batch and device, None where unknown.
        num_workers: The training loader's.
        compiled: Whether the network is compiled.
    """
    waited = metrics["throughput/data_wait_pct"]
    batch_ms = 1000 * world_size / metrics["throughput/batches_per_sec"]
    busy = metrics.get("throughput/gpu_utilization_pct")
    if waited >= LOADER_BOUND_PCT:
        return f"loader-bound: {waited:.0f} % of the time is spent waiting for data. Try {_loader_flag(num_workers)}."
    if (busy < GPU_BUSY_PCT) if busy is not None else (batch_ms < TINY_BATCH_MS):
        idle = f", the GPU busy {busy:.0f} % of the time" if busy is not None else ""
        size = f"--data.batch_size {4 * batch_size}" if batch_size else "a larger --data.batch_size"
        return f"overhead-bound: {batch_ms:.1f} ms a batch{idle}, much of it Python and launches. Try {size}."
    if device == "cuda" and precision.startswith("32"):
        flag = "--precision bf16-mixed (16-mixed before Ampere)"
    elif not compiled:
        flag = "--model.compile true"
    else:
        flag = "more devices (--devices)"
    return f"compute-bound: {batch_ms:.1f} ms a batch, {waited:.0f} % of it waiting for data. Try {flag}."


def _loader_flag(num_workers: int) -> str:
    cores = threads.available_cores()
    if num_workers < cores:
        return f"--data.num_workers {cores}"
    return "less work per sample in the dataset (augment on the device: --data.rotate_degrees and its kin)"


def facts_for_advice(trainer: Trainer) -> dict[str, Any]:
    """What :func:`bottleneck` needs to know besides the rates."""
    return {
        "device": trainer.strategy.root_device.type,
        "precision": str(trainer.precision),
        "world_size": trainer.world_size,
        "batch_size": getattr(trainer.datamodule, "batch_size", None),  # type: ignore[attr-defined]
        "num_workers": getattr(trainer.train_dataloader, "num_workers", 0),
        "compiled": any(part._compiled_call_impl is not None for part in trainer.lightning_module.modules()),
    }
