"""What this machine has: CPU, memory and accelerators, as rows. An unknown fact is left out."""

import os
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from unbroken.machine import threads

GIB = 1024**3


# Instructions that multiply bfloat16 matrices, by Linux's names: of x86 and, last, of Arm.
BF16_INSTRUCTIONS = {"avx512_bf16", "avx_ne_convert", "amx_bf16", "bf16"}

# A load above this share of one core means that others were computing when the measurement began.
QUIET_LOAD = 0.5

# What the comparison of two precisions may take, its most pairs of steps, and their batch size.
COST_SECONDS = 0.4
MOST_RATIOS = 9
COST_BATCH = 4


def cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, Any]:
    """Name, cores this process may use, cores of the machine, and whether bfloat16 and AMX are in
    the hardware.
    """
    features = cpu_features(cpuinfo)
    return {
        "name": cpu_name(cpuinfo),
        "cores": threads.available_cores(),
        "cores_of_machine": os.cpu_count(),
        "bf16": bool(features & BF16_INSTRUCTIONS),
        "amx": "amx_tile" in features,
    }


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The CPU's name as its maker writes it, else its architecture."""
    name = re.search(r"^model name\s*:[ \t]*(\S.*)", _text_of(cpuinfo), re.MULTILINE)
    if name is not None:
        return name.group(1)
    return _sysctl("machdep.cpu.brand_string") or platform.processor() or platform.machine()


def cpu_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> set[str]:
    """The CPU's instruction sets, by Linux's names; empty where the system does not tell."""
    # x86 calls the line "flags", Arm "Features".
    lines = re.findall(r"^(?:flags|Features)\s*:(.*)", _text_of(cpuinfo), re.MULTILINE)
    features = set(" ".join(lines).split())
    if _sysctl("hw.optional.arm.FEAT_BF16") == "1":
        features.add("bf16")
    return features


def cpu_computes(precision: str) -> bool:
    """Whether this CPU has instructions for a precision of the Trainer, such as ``bf16-mixed``.

    A precision without instructions works as well, by converting to float32 and back, and is slower
    than float32.
    """
    if precision.startswith("bf16"):
        return bool(cpu_features() & BF16_INSTRUCTIONS)
    return not precision.startswith("16")


def cost_on_cpu(precision: str) -> float:
    """How many times as long a training step takes in a half precision as in 32-true, on this CPU.

    It is measured on a small network, in less than a second. A value below 1 means that half
    precision is faster. No random number of the caller's is drawn.
    """
    import torch

    threads_before = torch.get_num_threads()
    # One thread does not wait for others, so that a busy machine slows both precisions down alike.
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            return _median_ratio(_step_of_small_network(precision))
    finally:
        torch.set_num_threads(threads_before)


def _step_of_small_network(precision: str) -> Callable[[bool], None]:
    """A function that takes a training step, in half precision or in float32."""
    import torch

    dtype = torch.bfloat16 if precision.startswith("bf16") else torch.float16
    network = torch.nn.Sequential(
        torch.nn.Conv2d(16, 32, 3), torch.nn.ReLU(), torch.nn.Conv2d(32, 32, 3)
    )
    network.to(memory_format=torch.channels_last)
    # (batch, channels, height, width)
    images = torch.full((COST_BATCH, 16, 28, 28), 0.5)
    images = images.contiguous(memory_format=torch.channels_last)

    def step(is_half: bool) -> None:
        with torch.autocast("cpu", dtype=dtype, enabled=is_half):
            loss = network(images).float().mean()
        loss.backward()

    return step


def _median_ratio(step: Callable[[bool], None]) -> float:
    """The median of a step's time in half precision to its time in float32."""

    def seconds_of_step(is_half: bool) -> float:
        began = time.perf_counter()
        step(is_half)
        return time.perf_counter() - began

    ends = time.perf_counter() + COST_SECONDS
    # The first step of each makes buffers and chooses kernels.
    seconds_of_step(False)
    seconds_of_step(True)
    ratios: list[float] = []
    while len(ratios) < MOST_RATIOS:
        # Both are measured in turn, because a machine's speed may change.
        whole = seconds_of_step(False)
        half = seconds_of_step(True)
        ratios.append(half / whole)
        if time.perf_counter() > ends:
            break
    return statistics.median(ratios)


def load_average() -> float | None:
    """How many processes wanted a core, on average over the last minute; None where the system does
    not tell.
    """
    if not hasattr(os, "getloadavg"):
        return None
    return round(os.getloadavg()[0], 2)


def _text_of(cpuinfo: Path) -> str:
    return cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else ""


def _sysctl(name: str) -> str:
    """A fact of macOS; empty on any other system."""
    if platform.system() != "Darwin":
        return ""
    with suppress(OSError, subprocess.SubprocessError):
        words = ["sysctl", "-n", name]
        told = subprocess.run(words, capture_output=True, text=True, timeout=2)
        return told.stdout.strip()
    return ""


# Turing GPUs without tensor cores: GTX 1650 and 1660, MX450 and MX550, and the laptop chips T500 to
# T1200 (NVIDIA's TU116 and TU117).
WITHOUT_TENSOR_CORES = re.compile(r"GTX 16|MX[45]50|T[5-9]00|T1[02]00|T1000|T400")


def memory(cgroup: Path = Path("/sys/fs/cgroup")) -> dict[str, float]:
    """Host memory in GiB, total and available, cut to the container's limit (control group v2, else
    v1).
    """
    host = psutil.virtual_memory()
    total = host.total
    available = host.available
    version_2 = (cgroup / "memory.max", cgroup / "memory.current")
    version_1 = (
        cgroup / "memory/memory.limit_in_bytes",
        cgroup / "memory/memory.usage_in_bytes",
    )
    for limit_file, used_file in (version_2, version_1):
        # The files of the other version do not exist. The limit "max" is no number and no limit.
        with suppress(OSError, ValueError):
            limit = int(limit_file.read_text())
            used = int(used_file.read_text())
            total = min(total, limit)
            available = max(0, min(available, limit - used))
            break
    return {"total_gib": total / GIB, "available_gib": available / GIB}


def accelerators() -> list[dict[str, Any]]:
    """One row per accelerator that PyTorch can use: ``type`` (cuda, rocm, mps), ``name``, memory,
    what it can do.
    """
    import torch

    if torch.backends.mps.is_available():
        return [_apple_gpu()]
    if not torch.cuda.is_available():
        return []
    return [_gpu(index) for index in range(torch.cuda.device_count())]


def _apple_gpu() -> dict[str, Any]:
    import torch

    total = torch.mps.recommended_max_memory()
    used = torch.mps.driver_allocated_memory()
    return {
        "index": 0,
        "type": "mps",
        "name": _sysctl("machdep.cpu.brand_string") or "Apple GPU",
        "memory_total_gib": total / GIB,
        "memory_free_gib": (total - used) / GIB,
    }


def _gpu(index: int) -> dict[str, Any]:
    """The row of one GPU of NVIDIA or AMD."""
    import torch

    gpu = torch.cuda.get_device_properties(index)
    row = {
        "index": index,
        "type": "rocm",
        "name": gpu.name,
        "memory_total_gib": gpu.total_memory / GIB,
    }
    if torch.version.hip is None:
        row["type"] = "cuda"
        row["compute_capability"] = f"{gpu.major}.{gpu.minor}"
        # Tensor cores came with compute capability 7.0, bfloat16 and TF32 with 8.0 (CUDA
        # programming guide).
        row["tensor_cores"] = gpu.major >= 7 and not WITHOUT_TENSOR_CORES.search(gpu.name)
        row["bf16"] = gpu.major >= 8
        row["tf32"] = gpu.major >= 8
    # A library, the driver or a permission may be missing. The utilization is missing on a slice of
    # a GPU (MIG).
    with suppress(Exception):
        used = torch.cuda.device_memory_used(index)
        row["memory_free_gib"] = (gpu.total_memory - used) / GIB
        row["utilization_pct"] = int(torch.cuda.utilization(index))
    if "memory_free_gib" not in row:
        # This way costs a context on the GPU, half a GiB.
        with suppress(Exception):
            row["memory_free_gib"] = torch.cuda.mem_get_info(index)[0] / GIB
    driver = nvidia_driver()
    if driver is not None:
        row["driver"] = driver
    return row


def nvidia_driver() -> str | None:
    """Version of NVIDIA's driver, None without one or without its library."""
    with suppress(Exception):
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    return None


def unusable_gpus() -> str | None:
    """Why this PyTorch cannot use the GPUs that the driver shows; None where it can, or there is no
    driver.
    """
    import torch

    if torch.cuda.is_available():
        return None
    driver = nvidia_driver()
    if driver is None:
        return None
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None:
        reason = f"CUDA_VISIBLE_DEVICES={hidden!r} hides its GPUs."
    elif torch.version.cuda is None:
        reason = "this PyTorch was built without CUDA: install one with it."
    else:
        built = f"PyTorch (built for CUDA {torch.version.cuda})"
        reason = f"{built} cannot use its GPUs: the driver may be too old."
    return f"NVIDIA driver {driver} is here, but {reason}"
