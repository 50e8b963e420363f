"""How busy the GPU is, and how much of its peak arithmetic a network uses (model FLOPs utilization, MFU)."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

# First word of a Trainer's precision → data type of the matrix products, where peak rates are known for it
MATMUL_DTYPES = {"32": torch.float32, "16": torch.float16, "bf16": torch.bfloat16}


class GpuUtilization:
    """Samples the share of time in which the GPU ran a kernel, in a thread of its own, so that training never waits.

    ``read`` returns percent (0-100), or raises if there is no value (MIG, no driver access); None: there is no GPU.
    NVML averages over 1/6 to 1 s, so an interval shorter than half a second gives nothing new.
    """

    def __init__(self, read: Callable[[], float] | None, interval_seconds: float = 0.5) -> None:
        self.paused = False  # whether what the GPU does now is not to be counted
        self._samples: list[float] = []
        self._mean: float | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(read, interval_seconds), daemon=True)
        if read is not None:
            self._thread.start()

    @classmethod
    def of(cls, device: torch.device) -> GpuUtilization:
        """A sampler for a device; one that knows nothing where that is no CUDA device."""
        return cls((lambda: torch.cuda.utilization(device)) if device.type == "cuda" else None)

    def stop(self) -> None:
        """End the thread; returns when it has."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def mean(self) -> float | None:
        """Mean (percent) of the samples since the last call, or the last mean; None if the driver gives none."""
        samples, self._samples = self._samples, []
        if samples:
            self._mean = sum(samples) / len(samples)
        return self._mean

    def forget(self) -> None:
        """Drop what was sampled so far."""
        self._samples, self._mean = [], None

    def _run(self, read: Callable[[], float], interval_seconds: float) -> None:
        while not self._ended.wait(interval_seconds):
            try:
                sample = float(read())
            except Exception:  # whatever the driver's library raises: the metric is left out
                self.forget()
                return
            if not self.paused:
                self._samples.append(sample)


def mfu_per_sample_per_sec(trainer: Trainer, module: LightningModule, batch: Any) -> float | None:
    """Model FLOPs utilization (0-100) that a CUDA device reaches per sample per second; None on any other device.

    None, and a warning that says why, where there is no known peak or the network's FLOPs cannot be counted.
    """
    device = trainer.strategy.root_device
    if device.type != "cuda":
        return None
    if isinstance(trainer.strategy, (DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy)):
        why = "FLOPs cannot be counted where a strategy shards the weights"
    else:
        name, dtype = torch.cuda.get_device_name(device), MATMUL_DTYPES.get(str(trainer.precision).split("-")[0])
        peak = peak_flops(name, dtype, tf32=may_use_tf32(module)) if dtype else None
        why = f"no known peak of {name} at precision {trainer.precision}"
        if peak is not None:
            try:
                return 100 * training_flops_per_sample(module, batch) / peak
            except Exception as error:
                why = f"the network's FLOPs cannot be counted ({error})"
    rank_zero_warn(f"throughput/mfu_pct is left out: {why}.")
    return None


def training_flops_per_sample(module: LightningModule, batch: Any) -> float:
    """FLOPs of one forward and backward pass per sample (a multiply-add counts 2).

    Counted on the meta device: no memory, no arithmetic, no random number, no weight or running mean is touched. In
    evaluation mode, so that the second forward pass of activation checkpointing is not counted.

    Raises:
        Exception: The module's ``forward`` does not take the batch's first tensor, or cannot run that way.
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
        eager = torch.compiler.set_stance("force_eager")
        with eager, torch.enable_grad(), FlopCounterMode(display=False) as counter:
            outputs = torch.func.functional_call(module, state, (torch.empty_like(inputs, device="meta"),))
            outputs.float().sum().backward()
    finally:
        for part, training in modes:
            part.training = training
    return counter.get_total_flops() / len(inputs)


def may_use_tf32(module: nn.Module) -> bool:
    """Whether float32 products of a network may run in TF32 (``--matmul_precision``; convolutions do by default)."""
    products = torch.backends.cuda.matmul.fp32_precision == "tf32"  # the older getters raise here
    convolves = any(isinstance(part, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) for part in module.modules())
    return products or (convolves and torch.backends.cudnn.conv.fp32_precision == "tf32")  # type: ignore[attr-defined]


# Dense TFLOP/s: float32, TF32, 16 bits with float32 accumulation (as cuBLAS and cuDNN do). From NVIDIA's data sheets,
# half of the figures that are printed "with sparsity" only, and from the appendices of the white papers on GA102, Ada
# and RTX Blackwell. 0: the chip has no such mode. Names as the devices call themselves: "h100" is the SXM form.
PEAK_TFLOPS = """
    b200 75 1125 2250, h200 67 494.5 989.5, h200 nvl 60 417.5 835.5, gh200 67 494.5 989.5, h100 66.9 494.7 989.4,
    h100 pcie 51.2 378 756, h100 nvl 60 417.5 835.5, a100 19.5 156 312, a30 10.3 82 165, a40 37.4 74.8 149.7,
    a10 31.2 62.5 125, a10g 31.5 35 70, l4 30.3 60 121, l40 90.5 90.5 181, l40s 91.6 183 362, t4 8.1 0 65,
    v100 sxm2 15.7 0 125, v100 pcie 14 0 112, rtx 5090 104.8 104.8 209.6, rtx 5080 56.3 56.3 112.6,
    rtx 5070 ti 43.9 43.9 87.8, rtx 4090 82.6 82.6 165.2, rtx 4080 super 52.2 52.2 104.4, rtx 4080 48.7 48.7 97.4,
    rtx 4070 29.1 29.1 58.2, rtx 4060 15.1 15.1 30.2, rtx 3090 ti 40 40 80, rtx 3090 35.6 35.6 71.2,
    rtx 3080 29.8 29.8 59.6, rtx 3070 20.3 20.3 40.6, rtx 3060 12.7 12.7 25.4
"""


def peak_flops(device_name: str, dtype: torch.dtype, tf32: bool = False) -> float | None:
    """FLOP/s that a GPU can do in dense matrix products, None for a device or a data type without a known peak.

    ``device_name`` is CUDA's, such as ``NVIDIA A100-SXM4-40GB``: a laptop's, a slice's (MIG) or a variant's chip is
    not the one with the similar name. ``tf32``: whether float32 products may be done in TF32.
    """
    # without maker, brand, memory size and memory kind: NVIDIA H100 80GB HBM3 → h100
    words = re.split(r"[\s\-]+", device_name.lower())
    chip = " ".join(word for word in words if not re.fullmatch(r"nvidia|tesla|geforce|\d+gb|hbm3e?", word))
    chip = re.sub(r"^(a100|a30) (sxm4|pcie)$", r"\1", chip)  # equally fast in either form
    rows = (row.strip().rsplit(None, 3) for row in PEAK_TFLOPS.split(","))
    full, with_tf32, half = map(float, {name: rates for name, *rates in rows}.get(chip, [0, 0, 0]))
    if dtype is torch.bfloat16 and chip.startswith(("t4", "v100")):  # tensor cores before Ampere do not multiply it
        half = 0.0
    rate = {torch.float32: (tf32 and with_tf32) or full, torch.float16: half, torch.bfloat16: half}.get(dtype)
    return 1e12 * rate if rate else None
