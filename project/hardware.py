"""What this machine has: CPU, memory and accelerators, as plain rows. An unknown fact is left out."""

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


def cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, Any]:
    """Name, cores this process may use, cores of the machine, and whether bfloat16 and AMX are in the hardware."""
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    names = re.findall(r"^model name\s*:[ \t]*(\S.*)", text, re.MULTILINE) or [
        _sysctl("machdep.cpu.brand_string")
    ]
    features = set(
        " ".join(re.findall(r"^(?:flags|Features)\s*:(.*)", text, re.MULTILINE)).split()
    )  # x86, Arm
    apple = _sysctl("hw.optional.arm.FEAT_BF16") == "1"
    return {
        "name": names[0] or platform.processor() or platform.machine(),
        "cores": threads.available_cores(),
        "cores_of_machine": os.cpu_count(),
        "bf16": apple or bool(features & {"avx512_bf16", "avx_ne_convert", "amx_bf16", "bf16"}),
        "amx": "amx_tile" in features,
    }


def _sysctl(name: str) -> str:
    """A fact of macOS; empty on any other system."""
    if platform.system() == "Darwin":
        with suppress(OSError, subprocess.SubprocessError):
            return subprocess.run(
                ["sysctl", "-n", name], capture_output=True, text=True, timeout=2
            ).stdout.strip()
    return ""


# feature: tune, benchmark, devices
# Turing without tensor cores: GTX 1650 and 1660, MX450 and MX550, T500 to T1200 laptop chips (NVIDIA's TU116, TU117)
WITHOUT_TENSOR_CORES = re.compile(r"GTX 16|MX[45]50|T[5-9]00|T1[02]00|T1000|T400")


def memory(cgroup: Path = Path("/sys/fs/cgroup")) -> dict[str, float]:
    """Host memory in GiB, total and available, cut to the container's limit (control group v2, else v1)."""
    host = psutil.virtual_memory()
    total, available = host.total, host.available
    for files in (
        "memory.max memory.current",
        "memory/memory.limit_in_bytes memory/memory.usage_in_bytes",
    ):
        with suppress(OSError, ValueError):  # "max" is no number: no limit
            limit, used = (int((cgroup / name).read_text()) for name in files.split())
            total, available = min(total, limit), max(0, min(available, limit - used))
            break
    return {"total_gib": total / GIB, "available_gib": available / GIB}


def accelerators() -> list[dict[str, Any]]:
    """One row per accelerator that PyTorch can use: ``type`` (cuda, rocm, mps), ``name``, memory, what it can do."""
    import torch

    if torch.backends.mps.is_available():
        total, used = torch.mps.recommended_max_memory(), torch.mps.driver_allocated_memory()
        sizes = {"memory_total_gib": total / GIB, "memory_free_gib": (total - used) / GIB}
        return [
            {
                "index": 0,
                "type": "mps",
                "name": _sysctl("machdep.cpu.brand_string") or "Apple GPU",
                **sizes,
            }
        ]
    rows: list[dict[str, Any]] = []
    driver = {"driver": version} if (version := nvidia_driver()) else {}
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        gpu = torch.cuda.get_device_properties(index)
        row = {
            "index": index,
            "type": "rocm",
            "name": gpu.name,
            "memory_total_gib": gpu.total_memory / GIB,
        }
        if torch.version.hip is None:
            # tensor cores came with compute capability 7.0, bfloat16 and TF32 with 8.0 (CUDA programming guide)
            row |= {"type": "cuda", "compute_capability": f"{gpu.major}.{gpu.minor}"}
            row["tensor_cores"] = gpu.major >= 7 and not WITHOUT_TENSOR_CORES.search(gpu.name)
            row |= {"bf16": gpu.major >= 8, "tf32": gpu.major >= 8}
        with suppress(
            Exception
        ):  # without a library, driver or permission; the second on a slice of a GPU (MIG)
            row["memory_free_gib"] = (gpu.total_memory - torch.cuda.device_memory_used(index)) / GIB
            row["utilization_pct"] = int(torch.cuda.utilization(index))
        with suppress(Exception):
            if "memory_free_gib" not in row:
                row["memory_free_gib"] = (
                    torch.cuda.mem_get_info(index)[0] / GIB
                )  # costs a context, half a GiB
        rows.append(row | driver)
    return rows


def nvidia_driver() -> str | None:
    """Version of NVIDIA's driver, None without one or without its library."""
    with suppress(Exception):
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    return None


def unusable_gpus() -> str | None:
    """Why this PyTorch cannot use the GPUs that the driver shows; None where it can, or there is no driver."""
    import torch

    if torch.cuda.is_available() or (driver := nvidia_driver()) is None:
        return None
    reason = f"PyTorch (built for CUDA {torch.version.cuda}) cannot use its GPUs: the driver may be too old."
    if torch.version.cuda is None:
        reason = "this PyTorch was built without CUDA: install one with it."
    if (hidden := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        reason = f"CUDA_VISIBLE_DEVICES={hidden!r} hides its GPUs."
    return f"NVIDIA driver {driver} is here, but {reason}"


# end feature: tune, benchmark, devices
