"""CPU threads for a process: how many, and what they do while they wait.

PyTorch's default is one spinning OpenMP thread per core: the fastest on an idle machine and a trap on a busy one, where
every tiny operation waits for a thread that is not running. Here a waiting thread spins for microseconds and then
sleeps. ``OMP_NUM_THREADS``, ``OMP_WAIT_POLICY`` and ``GOMP_SPINCOUNT`` in the environment win.

Milliseconds per step on two idle cores, then beside a process that keeps one busy (2026-11-21, medians of 5 and of 3):

- two threads that never spin (PASSIVE): MLP at batch 64 2.5, 1.9; ConvNet at batch 128 18.3, 28
- spin 1,000 times: 1.8, 3.6; 13.8, 30
- spin 2,000 times: 1.4, 4.9; 13.6, 35
- spin (the default): 1.3, 190; 13.0, 600
- one thread: 1.6, 1.6; 21.5, 21
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import sys
from pathlib import Path

OURS = "PROJECT_OMP_NUM_THREADS"  # a thread count chosen here, not by the user
SPINS = "1000"  # the largest count with which a busy machine costs less than 2.5 times, see above
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


def available_cores() -> int:
    """CPU cores this process may use: its affinity mask, cut to the container's CPU quota, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min(cores, container_quota())))


def container_quota(cgroup: Path = Path("/sys/fs/cgroup")) -> float:
    """Cores granted by the container's control group (v2 ``cpu.max``, v1 ``cpu.cfs_*``), infinity when unlimited."""
    for names in (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]):
        with contextlib.suppress(OSError, ValueError):
            quota, period = " ".join((cgroup / name).read_text() for name in names).split()
            return math.inf if quota in ("max", "-1") else max(1.0, int(quota) / int(period))
    return math.inf


def configure() -> int:
    """Set this process's OpenMP thread count and wait policy; must run before torch is imported.

    What the user has set in the environment wins. Returns the number of threads.
    """
    # torchrun sets OMP_NUM_THREADS=1 for its workers when the user did not, so this is not the user's choice.
    guessed = "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("OMP_NUM_THREADS") == "1"
    # processes of this job that share this machine, as torchrun or SLURM announce them
    announced = [os.environ.get(name, "") for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE")]
    ranks = max(1, next((int(count) for count in announced if count.isdigit()), 1))
    threads = max(1, available_cores() // ranks)
    if "OMP_NUM_THREADS" not in os.environ or guessed or chosen_here():
        os.environ["OMP_NUM_THREADS"] = os.environ[OURS] = str(threads)
    if sys.platform.startswith("linux") and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)  # of GNU's OpenMP
    else:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    keep_freed_memory()
    return int(os.environ["OMP_NUM_THREADS"]) if os.environ["OMP_NUM_THREADS"].isdigit() else threads


def chosen_here() -> bool:
    """Whether this module chose ``OMP_NUM_THREADS``, in this process or in its parent."""
    return os.environ.get("OMP_NUM_THREADS") == os.environ.get(OURS, "")


def share(processes: int) -> dict[str, str]:
    """The environment in which one of several processes here takes its part of the cores; empty if the user set it."""
    return {"OMP_NUM_THREADS": str(max(1, available_cores() // processes)), OURS: ""} if chosen_here() else {}


def keep_freed_memory() -> None:
    """Let glibc reuse freed blocks above 128 KiB, such as a batch's activations (mallopt(3)).

    It otherwise maps, zeroes and unmaps them at every step. ``MALLOC_MMAP_THRESHOLD_`` in the environment wins.
    """
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ and sys.platform.startswith("linux"):
        with contextlib.suppress(OSError, AttributeError):  # another C library
            for threshold in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
                ctypes.CDLL(None).mallopt(threshold, 1 << 30)
