"""What a result means nothing without: hardware, versions, commit, date, command, and how busy the machine was."""

from __future__ import annotations

import datetime
import os
import platform
from pathlib import Path
from typing import Any

import psutil
import torch

from project import threads
from project.engine import summary


def conditions() -> dict[str, Any]:
    """Plain values, of this moment and this process."""
    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": summary.command_line().replace(".__main__", "", 1),
        **summary.git_state(),
        "hardware": hardware(),
        "versions": summary.versions(),
        "cpu_threads": torch.get_num_threads(),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "default"),
        "omp_spin_count": os.environ.get("GOMP_SPINCOUNT", "default"),
    }
    if hasattr(os, "getloadavg"):
        found["load_average"] = round(os.getloadavg()[0], 2)
        found["quiet"] = found["load_average"] < 0.5  # before the benchmark began: others' work, not ours
    return found


def hardware() -> dict[str, Any]:
    """CPU, cores this process may use, memory, and every GPU with its driver."""
    found: dict[str, Any] = {
        "cpu": cpu_name(),
        "cpu_cores": threads.available_cores(),
        "memory_gib": round(psutil.virtual_memory().total / 1024**3, 1),
    }
    if torch.cuda.is_available():
        found["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        found["cuda"] = torch.version.cuda
        if driver := nvidia_driver():
            found["driver"] = driver
    elif torch.backends.mps.is_available():
        found["gpus"] = ["Apple MPS"]
    return found


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name, else its architecture."""
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def nvidia_driver() -> str | None:
    """Version of the NVIDIA driver, None where it does not tell."""
    import pynvml

    try:
        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None
    return version.decode() if isinstance(version, bytes) else str(version)


def one_line(facts: dict[str, Any]) -> str:
    """The conditions for a person, above the tables."""
    machine = facts["hardware"]
    parts = [f"{machine['cpu']}, {machine['cpu_cores']} cores", *machine.get("gpus", [])]
    parts += [f"{name} {facts['versions'][name]}" for name in ("torch", "lightning") if name in facts["versions"]]
    parts += [f"commit {facts.get('git_commit', 'unknown')[:7]}", facts["date"]]
    line = " | ".join(parts)
    if not facts.get("quiet", True):
        line += f"\nthe machine was busy (load average {facts['load_average']}): compare ratios, not seconds"
    return line
