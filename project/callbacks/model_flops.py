"""How many floating-point operations a network needs to learn from one sample, counted by PyTorch's own counter."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from project.callbacks.peak_flops import peak_flops


def mfu_per_sample_per_sec(trainer: Trainer, module: LightningModule, batch: Any) -> float | None:
    """Model FLOPs utilization (0-100) that a device reaches per sample per second.

    None, and a warning that says why, where the GPU or the precision has no known peak or the network's FLOPs cannot be
    counted; None without a word on anything but CUDA.
    """
    device = trainer.strategy.root_device
    if device.type != "cuda":
        return None
    name, dtype = torch.cuda.get_device_name(device), matmul_dtype(trainer.precision)
    peak = peak_flops(name, dtype, tf32=may_use_tf32(module)) if dtype else None
    if peak is None:
        rank_zero_warn(f"throughput/mfu_pct is left out: no known peak of {name} at precision {trainer.precision}.")
        return None
    try:
        return 100 * training_flops_per_sample(module, batch) / peak
    except Exception as error:
        rank_zero_warn(f"throughput/mfu_pct is left out: the network's FLOPs cannot be counted ({error}).")
        return None


def training_flops_per_sample(module: LightningModule, batch: Any) -> float:
    """FLOPs of one forward and backward pass per sample (a multiply-add counts 2).

    Counted on the meta device: no memory, no arithmetic, no random number, no weight or running mean is touched. In
    evaluation mode, so that what activation checkpointing computes again is not counted as useful work.

    Args:
        module: Its ``forward`` takes the batch's first tensor.
        batch: A batch as ``training_step`` gets it.

    Raises:
        Exception: The network cannot run that way (custom kernels, sharded weights, another forward).
    """
    inputs = batch[0] if isinstance(batch, (tuple, list)) else batch
    if not isinstance(inputs, Tensor):
        raise TypeError(f"the batch must begin with a tensor to count FLOPs, not {type(inputs).__name__}")
    modes = [(part, part.training) for part in module.modules()]
    state = {
        name: torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad)
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
    }
    try:
        module.eval()
        with (
            torch.compiler.set_stance("force_eager"),
            torch.enable_grad(),
            FlopCounterMode(display=False) as counter,
        ):
            outputs = torch.func.functional_call(module, state, (torch.empty_like(inputs, device="meta"),))
            outputs.float().sum().backward()
    finally:
        for part, training in modes:
            part.training = training
    return counter.get_total_flops() / len(inputs)


def matmul_dtype(precision: object) -> torch.dtype | None:
    """Data type of the matrix products under a Trainer's ``precision``, None where no peak rate is known for it."""
    kinds = {"32": torch.float32, "16": torch.float16, "bf16": torch.bfloat16}
    return kinds.get(str(precision).split("-")[0])


def may_use_tf32(module: nn.Module) -> bool:
    """Whether float32 products of a network may run in TF32 (``--matmul_precision``; convolutions do by default)."""
    convolves = any(isinstance(part, nn.modules.conv._ConvNd) for part in module.modules())
    return torch.get_float32_matmul_precision() != "highest" or (
        convolves and torch.backends.cudnn.conv.fp32_precision == "tf32"  # type: ignore[attr-defined]
    )
