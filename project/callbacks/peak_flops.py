"""Peak arithmetic rates of GPUs, from NVIDIA's data sheets and architecture white papers: dense, per data type.

Lightning's table (``lightning.fabric.utilities.throughput``) is not used: it gives figures with 2:4 sparsity for
H200 and H100 NVL, twice what dense products can reach; rates without tensor cores for the RTX 30 and 40 series and the
A6000, so that more than 100 % is "used"; and it does not know a plain "NVIDIA H200".
"""

from __future__ import annotations

import re

import torch

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
