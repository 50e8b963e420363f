"""What this machine has: CPU, memory and accelerators, as plain rows. A fact that cannot be had is left out.

Nothing here needs a GPU, NVIDIA's library (NVML) or a driver; torch is imported only by :func:`accelerators`.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from project import threads

GIB = 1024**3
# Turing without tensor cores: GTX 1650 and 1660, MX450 and MX550, T500 to T1200 laptop chips (NVIDIA's TU116, TU117)
WITHOUT_TENSOR_CORES = re.compile(r"GTX 16|MX[45]50|T[5-9]00|T1[02]00|T1000|T400")


def cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, Any]:
    """Name, cores this process may use, cores of the machine, and whether bfloat16 and AMX are in the hardware."""
    names, features = _cpuinfo(cpuinfo)
    if platform.system() == "Darwin":
        names.append(_sysctl("machdep.cpu.brand_string"))
        features |= {"bf16"} if _sysctl("hw.optional.arm.FEAT_BF16") == "1" else set()
    name = next((name for name in names if name), "") or platform.processor() or platform.machine()
    return {
        "name": name,
        "cores": threads.available_cores(),
        "cores_of_machine": os.cpu_count(),
        "bf16": bool(features & {"avx512_bf16", "avx_ne_convert", "amx_bf16", "bf16"}),
        "amx": "amx_tile" in features,
    }


def _cpuinfo(path: Path) -> tuple[list[str], set[str]]:
    names, features = [], set()
    with suppress(OSError):
        for line in path.read_text().splitlines():
            key, _, value = (part.strip() for part in line.partition(":"))
            if key == "model name":
                names.append(value)
            elif key in ("flags", "Features"):  # x86, Arm
                features |= set(value.split())
    return names, features


def _sysctl(name: str) -> str:
    try:
        return subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, timeout=2).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def memory(cgroup: Path = Path("/sys/fs/cgroup")) -> dict[str, float]:
    """Host memory in GiB, total and available, cut to the container's limit."""
    host = psutil.virtual_memory()
    total, available = host.total, host.available
    for limit_file, used_file in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with suppress(OSError, ValueError):  # "max" is no number: no limit
            limit, used = int((cgroup / limit_file).read_text()), int((cgroup / used_file).read_text())
            total, available = min(total, limit), max(0, min(available, limit - used))
            break
    return {"total_gib": total / GIB, "available_gib": available / GIB}


def accelerators() -> list[dict[str, Any]]:
    """One row per accelerator that PyTorch can use: ``type`` (cuda, rocm, mps), ``name``, memory, what it can do."""
    import torch

    if torch.cuda.is_available():
        driver = nvidia_driver()
        rows = []
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            row = {"index": index, **cuda_facts(properties, torch.version.hip is not None)}
            row |= nvml_facts(str(getattr(properties, "uuid", "")))
            if "memory_free_gib" not in row:
                row |= _cuda_memory(index)
            rows.append(row | ({"driver": driver} if driver else {}))
        return rows
    if torch.backends.mps.is_available():
        total = torch.mps.recommended_max_memory()
        return [
            {
                "index": 0,
                "type": "mps",
                "name": _sysctl("machdep.cpu.brand_string") or "Apple GPU",
                "memory_total_gib": total / GIB,
                "memory_free_gib": (total - torch.mps.driver_allocated_memory()) / GIB,
            }
        ]
    return []


def cuda_facts(properties: Any, rocm: bool = False) -> dict[str, Any]:
    """What follows from ``torch.cuda.get_device_properties``.

    Tensor cores came with compute capability 7.0, bfloat16 and TF32 with 8.0 (CUDA C++ programming guide, "Compute
    Capabilities"). Of an AMD GPU only name and memory are told.
    """
    facts = {
        "type": "rocm" if rocm else "cuda",
        "name": properties.name,
        "memory_total_gib": properties.total_memory / GIB,
    }
    if rocm:
        return facts
    capability = (properties.major, properties.minor)
    return facts | {
        "compute_capability": f"{properties.major}.{properties.minor}",
        "tensor_cores": capability >= (7, 0) and not WITHOUT_TENSOR_CORES.search(properties.name),
        "bf16": capability >= (8, 0),
        "tf32": capability >= (8, 0),
    }


def _cuda_memory(index: int) -> dict[str, float]:
    """Free memory without NVML's help; costs a CUDA context, half a GiB, on that GPU."""
    import torch

    try:
        free, _ = torch.cuda.mem_get_info(index)
    except (RuntimeError, AssertionError):  # the GPU is another process's alone, or has no memory left for a context
        return {}
    return {"memory_free_gib": free / GIB}


def nvml_facts(uuid: str) -> dict[str, Any]:
    """Free memory and utilisation of the GPU with this UUID, as NVIDIA's management library tells them, or {}."""
    facts: dict[str, Any] = {}
    with suppress(Exception):  # a missing package, library, driver or permission, or a slice (MIG) without the counter
        import pynvml

        pynvml.nvmlInit()
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")
            facts["memory_free_gib"] = pynvml.nvmlDeviceGetMemoryInfo(handle).free / GIB
            facts["utilization_pct"] = int(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        finally:
            pynvml.nvmlShutdown()
    return facts


def nvidia_driver() -> str | None:
    """Version of NVIDIA's driver, None without one or without its library."""
    with suppress(Exception):
        import pynvml

        pynvml.nvmlInit()
        try:
            version = pynvml.nvmlSystemGetDriverVersion()
            return version.decode() if isinstance(version, bytes) else str(version)
        finally:
            pynvml.nvmlShutdown()
    return None


def unusable_gpus() -> str | None:
    """Why GPUs that the driver shows cannot be used by this PyTorch; None where there is nothing to tell."""
    import torch

    if torch.cuda.is_available():
        return None
    driver = nvidia_driver()
    if driver is None:
        return None
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None:
        return f"NVIDIA driver {driver} is here, but CUDA_VISIBLE_DEVICES={hidden!r} hides its GPUs."
    if torch.version.cuda is None:
        return f"NVIDIA driver {driver} is here, but this PyTorch was built without CUDA: install one with it."
    return (
        f"NVIDIA driver {driver} is here, but PyTorch (built for CUDA {torch.version.cuda}) cannot use its GPUs: "
        "the driver may be too old."
    )
