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
        driver = {"driver": version} if (version := nvidia_driver()) else {}
        rows = []
        for index in range(torch.cuda.device_count()):
            facts = cuda_facts(torch.cuda.get_device_properties(index), torch.version.hip is not None)
            rows.append({"index": index, **facts, **gpu_load(index), **driver})
        return rows
    if torch.backends.mps.is_available():
        total = torch.mps.recommended_max_memory()
        free = total - torch.mps.driver_allocated_memory()
        name = _sysctl("machdep.cpu.brand_string") or "Apple GPU"
        sizes = {"memory_total_gib": total / GIB, "memory_free_gib": free / GIB}
        return [{"index": 0, "type": "mps", "name": name, **sizes}]
    return []


def cuda_facts(properties: Any, rocm: bool = False) -> dict[str, Any]:
    """What follows from ``torch.cuda.get_device_properties``.

    Tensor cores came with compute capability 7.0, bfloat16 and TF32 with 8.0 (CUDA C++ programming guide, "Compute
    Capabilities"). Of an AMD GPU only name and memory are told.
    """
    name, capability = properties.name, (properties.major, properties.minor)
    facts = {"type": "rocm" if rocm else "cuda", "name": name, "memory_total_gib": properties.total_memory / GIB}
    if rocm:
        return facts
    return facts | {
        "compute_capability": f"{properties.major}.{properties.minor}",
        "tensor_cores": capability >= (7, 0) and not WITHOUT_TENSOR_CORES.search(name),
        "bf16": capability >= (8, 0),
        "tf32": capability >= (8, 0),
    }


def gpu_load(index: int) -> dict[str, Any]:
    """Free memory and utilisation of a GPU, by whomever it is used."""
    import torch

    facts: dict[str, Any] = {}
    # each fails without its library, driver or permission, and on a slice (MIG) without the counter
    with suppress(Exception):
        total = torch.cuda.get_device_properties(index).total_memory
        facts["memory_free_gib"] = (total - torch.cuda.device_memory_used(index)) / GIB
    with suppress(Exception):
        facts["utilization_pct"] = int(torch.cuda.utilization(index))
    if "memory_free_gib" not in facts:
        with suppress(Exception):
            facts["memory_free_gib"] = torch.cuda.mem_get_info(index)[0] / GIB  # costs a CUDA context, half a GiB
    return facts


def nvidia_driver() -> str | None:
    """Version of NVIDIA's driver, None without one or without its library."""
    with suppress(Exception):
        import pynvml

        pynvml.nvmlInit()
        try:
            return str(pynvml.nvmlSystemGetDriverVersion())
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
