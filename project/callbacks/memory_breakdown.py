"""What the memory of a training run is used for, and what could be saved of it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from lightning.pytorch import Trainer
from torch import Tensor

GIB = 1024**3
ACTIVATIONS = "activations and the rest"


def memory_breakdown(trainer: Trainer) -> dict[str, float]:
    """GiB of this rank's ``weights`` (with buffers), ``gradients`` and ``optimizer state``: exact, from the tensors.

    Taken right after an optimizer step: Lightning clears gradients in the next one, and some optimizers make their
    state in the first.
    """
    module = trainer.lightning_module
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    states = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
    return {
        "weights": size_gib([*module.parameters(), *module.buffers()]),
        "gradients": size_gib(gradients),
        "optimizer state": size_gib(value for state in states for value in state.values() if isinstance(value, Tensor)),
    }


def add_activations(parts: dict[str, float], peak_bytes: int | None) -> dict[str, float]:
    """The parts with ``activations and the rest``: the training peak less those, where it is known."""
    if peak_bytes is None or not parts:
        return dict(parts)
    return {**parts, ACTIVATIONS: max(0.0, peak_bytes / GIB - sum(parts.values()))}


def size_gib(tensors: Iterable[Tensor]) -> float:
    """GiB that tensors take on this rank; of a sharded tensor its own shard."""
    total = 0
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        total += local.numel() * local.element_size()
    return total / GIB


def possible_savings(breakdown: dict[str, float], precision: str, dtype: torch.dtype) -> dict[str, float]:
    """Share of the whole (0-100) that each flag would save at most, where that can be computed.

    Args:
        breakdown: Of :func:`memory_breakdown`.
        precision: The Trainer's, such as ``32-true``.
        dtype: The weights' data type.
    """
    total = sum(breakdown.values())
    if not total:
        return {}
    activations = breakdown.get(ACTIVATIONS)
    full = precision.startswith("32")
    saved: dict[str, float] = {}
    if activations is not None:
        if full:
            saved["--precision bf16-mixed"] = activations / 2  # 16-bit activations; weights stay float32
        saved["--data.batch_size halved, --accumulate_grad_batches doubled"] = activations / 2
        saved["--model.activation_checkpointing true"] = activations  # what it leaves depends on the network
    if dtype is torch.float32:
        kept = total - (activations or 0.0)
        saved["--precision bf16-true"] = (total if full else kept) / 2
    return {flag: 100 * gib / total for flag, gib in saved.items()}


def table(breakdown: dict[str, float]) -> str:
    """The breakdown in one line, largest first, in MiB below one GiB."""
    parts = sorted(breakdown.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {_readable(gib)}" for name, gib in parts)


def _readable(gib: float) -> str:
    return f"{gib:.2f} GiB" if gib >= 1 else f"{1024 * gib:.1f} MiB"
