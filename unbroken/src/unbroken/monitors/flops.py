"""Model FLOPs utilization: which share of a GPU's peak a network needs (PaLM, arXiv 2204.02311,
appendix B).
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.throughput import measure_flops
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from unbroken.loading.log_steps import SHARDING

# By the first word of Trainer(precision=...): the type in which matrix products are computed.
MATMUL_DTYPES = {"32": torch.float32, "16": torch.float16, "bf16": torch.bfloat16}
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class UnknownFlopsError(Exception):
    """FLOPs or a peak that nobody knows; the message says why."""


def mfu_per_sample_per_sec(trainer: Trainer, module: LightningModule, batch: Any) -> float | None:
    """Model FLOPs utilization (0-100) of a CUDA device per sample per second; None, with a warning,
    where unknown.
    """
    if trainer.strategy.root_device.type != "cuda":
        return None
    try:
        peak = peak_of(trainer, module)
        return 100 * _counted_flops(module, batch) / peak
    except UnknownFlopsError as why:
        rank_zero_warn(f"throughput/mfu_pct is left out: {why}.")
        return None


def peak_of(trainer: Trainer, module: LightningModule) -> float:
    """Peak FLOP/s of a run's GPU at its precision."""
    if isinstance(trainer.strategy, SHARDING):
        raise UnknownFlopsError("FLOPs cannot be counted where a strategy shards the weights")
    name = torch.cuda.get_device_name(trainer.strategy.root_device)
    dtype = MATMUL_DTYPES.get(str(trainer.precision).split("-")[0])
    peak = None
    if dtype is not None:
        peak = peak_flops(name, dtype, tf32=may_use_tf32(module))
    if peak is None:
        raise UnknownFlopsError(f"no known peak of {name} at precision {trainer.precision}")
    return peak


def _counted_flops(module: LightningModule, batch: Any) -> float:
    try:
        return training_flops_per_sample(module, batch)
    except Exception as error:
        raise UnknownFlopsError(f"the network's FLOPs cannot be counted ({error})") from error


def training_flops_per_sample(module: LightningModule, batch: Any) -> float:
    """FLOPs of one forward and backward pass per sample; a multiply-add counts 2.

    They are counted on the meta device, where nothing is computed, and in evaluation mode, without
    the second forward pass of activation checkpointing. A TypeError where the batch does not begin
    with a tensor.
    """
    inputs = batch[0] if isinstance(batch, (tuple, list)) else batch
    if not isinstance(inputs, Tensor):
        kind = type(inputs).__name__
        raise TypeError(f"the batch must begin with a tensor to count FLOPs, not {kind}")
    state: dict[str, Tensor] = {}
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        without_data = torch.empty_like(tensor, device="meta")
        state[name] = without_data.requires_grad_(tensor.requires_grad)
    meta_inputs = torch.empty_like(inputs, device="meta")
    forward = partial(torch.func.functional_call, module, state, (meta_inputs,))
    with isolate_rng(), attributes_stay(module):
        module.eval()
        with torch.compiler.set_stance("force_eager"), torch.enable_grad():
            flops = measure_flops(module, forward, lambda outputs: outputs.float().sum())
    return flops / len(inputs)


@contextmanager
def attributes_stay(module: nn.Module) -> Iterator[None]:
    """Put the attributes of a module and its parts back, whether they train among them: a forward
    pass may keep what it has computed.
    """
    before = [(part, dict(vars(part))) for part in module.modules()]
    try:
        yield
    finally:
        for part, attributes in before:
            vars(part).clear()
            vars(part).update(attributes)


def may_use_tf32(module: nn.Module) -> bool:
    """Whether a network's float32 products may run in TF32 (``--matmul_precision``; convolutions do
    by default).
    """
    # The older getters raise where the newer setting was used.
    if torch.backends.cuda.matmul.fp32_precision == "tf32":
        return True
    by_convolutions = torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
    convolves = any(isinstance(part, CONVOLUTIONS) for part in module.modules())
    return convolves and bool(by_convolutions == "tf32")


def peak_flops(device_name: str, dtype: torch.dtype, tf32: bool = False) -> float | None:
    """FLOP/s of a GPU, by CUDA's name, in dense matrix products; None: unknown.

    ``tf32``: for float32, those in TF32. Lightning's get_available_flops lacks the H200, and is
    wrong for L40S, A40 and RTX.
    """
    # Only what does not change the chip is dropped: a laptop's or a slice's (MIG) chip is another
    # one.
    chip = re.sub(r"\b(nvidia|tesla|geforce|\d+gb|hbm3e?)\b|-", " ", device_name.lower())
    peaks = known_peaks().get(" ".join(chip.split()), {})
    mode = str(dtype).removeprefix("torch.")
    tflops = peaks.get(mode)
    if tf32 and mode == "float32":
        tflops = peaks.get("tf32") or tflops
    if not tflops:
        return None
    return 1e12 * float(tflops)


def known_peaks() -> dict[str, dict[str, str]]:
    """The rows of gpu_peaks.csv by chip: TFLOP/s by type, empty where unknown."""
    lines = Path(__file__).with_name("gpu_peaks.csv").read_text().splitlines()
    table = csv.DictReader(line for line in lines if not line.startswith("#"))
    return {row["chip"]: row for row in table}
