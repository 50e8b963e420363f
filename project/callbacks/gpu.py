"""How busy the GPU is, asked of the driver (NVML) by a thread of its own: never on the training's path."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

# NVML averages over 1/6 to 1 s itself; asking more often tells nothing new.
INTERVAL_SECONDS = 0.5


class GpuUtilization:
    """Samples the share of time in which the GPU ran a kernel.

    Args:
        read: Returns the utilization in percent (0-100), or raises where it cannot be had (MIG, no driver access).
        interval_seconds: Time between two samples.
    """

    def __init__(self, read: Callable[[], float], interval_seconds: float = INTERVAL_SECONDS) -> None:
        self._read = read
        self._interval = interval_seconds
        self._samples: list[float] = []
        self.paused = False  # what the GPU does now is not to be counted
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu-utilization", daemon=True)

    @classmethod
    def of(cls, device: torch.device) -> GpuUtilization | None:
        """A running sampler for a CUDA device, None for any other device."""
        if device.type != "cuda":
            return None
        sampler = cls(lambda: torch.cuda.utilization(device))
        sampler.start()
        return sampler

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread; returns when it has."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def take_mean(self) -> float | None:
        """Mean of the samples (percent) since the last call, None where there were none."""
        with self._lock:
            samples, self._samples = self._samples, []
        return sum(samples) / len(samples) if samples else None

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            try:
                sample = float(self._read())
            except Exception:  # whatever the driver's library raises: the metric is left out
                return
            if not self.paused:
                with self._lock:
                    self._samples.append(sample)


# How many floating-point operations a network needs to learn from one sample, counted by PyTorch's own counter.


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


# Peak arithmetic rates of GPUs, from NVIDIA's data sheets and architecture white papers: dense, per data type.


# TFLOP/s: float32 on CUDA cores, TF32 and 16-bit on tensor cores (with float32 accumulation, as cuBLAS and cuDNN do).
# Where NVIDIA prints figures "with sparsity" only, half of them. 0: the chip has no such mode.
_DATA_CENTER: dict[str, tuple[float, float, float]] = {
    # Blackwell: HGX B200 data sheet, an eighth of the eight-GPU figures
    "b200": (75, 1125, 2250),
    # Hopper: H100, H200 and GH200 data sheets
    "h200": (67, 494.5, 989.5),
    "h200 nvl": (60, 417.5, 835.5),
    "gh200": (67, 494.5, 989.5),
    "h100": (66.9, 494.7, 989.4),  # SXM, which calls itself "H100 80GB HBM3"
    "h100 pcie": (51.2, 378, 756),
    "h100 nvl": (60, 417.5, 835.5),
    "h800": (66.9, 494.7, 989.4),
    "h20": (44, 74, 148),
    # Ampere: A100, A30, A40, A10, A10G data sheets; A6000: GA102 white paper, appendix
    "a100": (19.5, 156, 312),
    "a800": (19.5, 156, 312),
    "a30": (10.3, 82, 165),
    "a40": (37.4, 74.8, 149.7),
    "a10": (31.2, 62.5, 125),
    "a10g": (31.5, 35, 70),
    "rtx a6000": (38.7, 77.4, 154.8),
    # Ada: L4, L40, L40S and RTX 6000 Ada data sheets
    "l4": (30.3, 60, 121),
    "l40": (90.5, 90.5, 181),
    "l40s": (91.6, 183, 362),
    "rtx 6000 ada generation": (91.1, 182.1, 364.2),
    # Turing, Volta and Pascal: T4, V100 and P100 data sheets
    "t4": (8.1, 0, 65),
    "v100 sxm2": (15.7, 0, 125),
    "v100 sxm3": (15.7, 0, 125),
    "v100 pcie": (14, 0, 112),
    "v100s pcie": (16.4, 0, 130),
    "p100 pcie": (9.3, 0, 18.7),
    "p100 sxm2": (10.6, 0, 21.2),
}

# float32 TFLOP/s: GA102, Ada and RTX Blackwell white papers, appendices. On all of these TF32 runs as fast as float32,
# and 16 bits with float32 accumulation twice as fast.
_GEFORCE: dict[str, float] = {
    "rtx 5090": 104.8,
    "rtx 5080": 56.3,
    "rtx 5070 ti": 43.9,
    "rtx 5070": 30.9,
    "rtx 5060 ti": 23.7,
    "rtx 5060": 19.2,
    "rtx 4090": 82.6,
    "rtx 4080 super": 52.2,
    "rtx 4080": 48.7,
    "rtx 4070 ti super": 44.1,
    "rtx 4070 ti": 40.1,
    "rtx 4070 super": 35.5,
    "rtx 4070": 29.1,
    "rtx 4060 ti": 22.1,
    "rtx 4060": 15.1,
    "rtx 3090 ti": 40.0,
    "rtx 3090": 35.6,
    "rtx 3080 ti": 34.1,
    "rtx 3080": 29.8,
    "rtx 3070 ti": 21.7,
    "rtx 3070": 20.3,
    "rtx 3060 ti": 16.2,
    "rtx 3060": 12.7,
}

# Tensor cores before Ampere do not multiply bfloat16.
_WITHOUT_BFLOAT16 = ("t4", "v100", "p100")


def peak_flops(device_name: str, dtype: torch.dtype, tf32: bool = False) -> float | None:
    """Most floating-point operations per second that a GPU can do in dense matrix products.

    Args:
        device_name: As CUDA gives it, such as ``NVIDIA A100-SXM4-40GB``.
        dtype: float32, float16 or bfloat16.
        tf32: Whether float32 products may be done in TF32.

    Returns:
        FLOP/s, or None for a device or a data type that the table does not know. A laptop's, a slice's (MIG) or a
        variant's chip is not the one with the similar name, and is unknown.
    """
    chip = chip_name(device_name)
    if chip in _GEFORCE:
        float32 = _GEFORCE[chip]
        rates = {"float32": float32, "tf32": float32, "16": 2 * float32}
    elif chip in _DATA_CENTER:
        rates = dict(zip(("float32", "tf32", "16"), _DATA_CENTER[chip], strict=True))
    else:
        return None
    if dtype is torch.float32:
        return 1e12 * (rates["tf32"] if tf32 and rates["tf32"] else rates["float32"])
    if dtype is torch.float16 or (dtype is torch.bfloat16 and not chip.startswith(_WITHOUT_BFLOAT16)):
        return 1e12 * rates["16"]
    return None


def chip_name(device_name: str) -> str:
    """The device's name without maker, brand, memory size and memory kind: ``NVIDIA H100 80GB HBM3`` → ``h100``."""
    words = re.split(r"[\s\-]+", device_name.lower())
    noise = r"nvidia|tesla|geforce|\d+gb|hbm3e?"
    chip = " ".join(word for word in words if not re.fullmatch(noise, word))
    # A100 and A800 run equally fast in either form, and a100-sxm4 or a100-pcie is how they call themselves
    return re.sub(r"^(a100|a800|a30) (sxm4|pcie)$", r"\1", chip)
