"""How many CPU threads a process computes with, and how it keeps freed memory. ``OMP_NUM_THREADS`` in the environment
wins, as do ``OMP_WAIT_POLICY`` and ``GOMP_SPINCOUNT``.
"""

import contextlib
import ctypes
import math
import os
import sys
from pathlib import Path

OURS = "PROJECT_OMP_NUM_THREADS"  # a thread count chosen here, not by the user
# which this process may use when it starts; later it may keep to one
CORES = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


def available_cores() -> int:
    """CPU cores this process may use: its affinity mask, cut to the container's CPU quota, at least 1."""
    return max(1, int(min(len(CORES) or os.cpu_count() or 1, container_quota())))


def container_quota(cgroup: Path = Path("/sys/fs/cgroup")) -> float:
    """Cores granted by the container's control group (v2 ``cpu.max``, v1 ``cpu.cfs_*``), infinity when unlimited."""
    for names in (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]):
        with contextlib.suppress(OSError, ValueError):
            quota, period = " ".join((cgroup / name).read_text() for name in names).split()
            return math.inf if quota in ("max", "-1") else max(1.0, int(quota) / int(period))
    return math.inf


def configure() -> int:
    """Set this process's OpenMP thread count, before torch is imported, unless the user did; returns it."""
    # torchrun sets OMP_NUM_THREADS=1 for its workers when the user did not, so this is not the user's choice.
    guessed = "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("OMP_NUM_THREADS") == "1"
    # processes of this job that share this machine, as torchrun or SLURM announce them
    announced = [os.environ.get(name, "") for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE")]
    ranks = max(1, next((int(count) for count in announced if count.isdigit()), 1))
    threads = max(1, available_cores() // ranks)
    if "OMP_NUM_THREADS" not in os.environ or guessed or chosen_here():
        os.environ["OMP_NUM_THREADS"] = os.environ[OURS] = str(threads)
    if not sys.platform.startswith("linux"):
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    elif "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        # glibc reuses freed blocks above 128 KiB, such as a batch's activations (mallopt(3)), not unmaps them at a step
        with contextlib.suppress(OSError, AttributeError):  # another C library
            for threshold in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
                ctypes.CDLL(None).mallopt(threshold, 1 << 30)
    return (
        int(os.environ["OMP_NUM_THREADS"]) if os.environ["OMP_NUM_THREADS"].isdigit() else threads
    )


def chosen_here() -> bool:
    """Whether this module chose ``OMP_NUM_THREADS``, in this process or in its parent."""
    return os.environ.get("OMP_NUM_THREADS") == os.environ.get(OURS, "")


def share(processes: int) -> dict[str, str]:
    """The environment in which one of several processes here takes its part of the cores; empty if the user set it."""
    return (
        {"OMP_NUM_THREADS": str(max(1, available_cores() // processes)), OURS: ""}
        if chosen_here()
        else {}
    )
