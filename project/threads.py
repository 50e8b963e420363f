"""CPU threads for a process: how many, and what they do while they wait.

PyTorch's default is one spinning OpenMP thread per core. This is fastest on an idle machine and very slow on a busy
one: if another process uses one core, every small operation waits for a thread that does not run, and an epoch of one
second takes thirty. Here a waiting thread spins for some microseconds and then sleeps.
Everything stays overridable through the usual variables (``OMP_NUM_THREADS``, ``OMP_WAIT_POLICY``, ``GOMP_SPINCOUNT``).

Measured on 2026-11-21: milliseconds per step of a plain PyTorch loop on two cores, on an idle machine and beside a
process that keeps one core busy (MLP at batch 64, median of 5; ConvNet at batch 128, median of 3):

=====================  ===========  ============
two threads that       MLP          ConvNet
=====================  ===========  ============
never spin (PASSIVE)   2.5, 1.9     18.3, 28
spin 500 times         2.0, 2.7     15.8, 30
spin 1,000 times       1.8, 3.6     13.8, 30
spin 2,000 times       1.4, 4.9     13.6, 35
spin 10,000 times      1.4, 16      13.0, 64
spin (the default)     1.3, 190     13.0, 600
one thread             1.6, 1.6     21.5, 21
=====================  ===========  ============
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
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (cgroup / "cpu/cpu.cfs_quota_us").read_text().strip()
            period = (cgroup / "cpu/cpu.cfs_period_us").read_text().strip()
        except OSError:
            return math.inf
    if quota in ("max", "-1"):
        return math.inf
    return max(1.0, int(quota) / int(period))


def local_ranks() -> int:
    """Processes of this job that share this machine, as torchrun or SLURM announce them, else 1."""
    for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE"):
        if os.environ.get(name, "").isdigit():
            return max(1, int(os.environ[name]))
    return 1


def configure(ranks: int | None = None) -> int:
    """Set this process's OpenMP thread count and wait policy; must run before torch is imported.

    What the user has set in the environment wins. Returns the number of threads.

    Args:
        ranks: Processes that share this machine; read from the launcher's variables when None.
    """
    # torchrun sets OMP_NUM_THREADS=1 for its workers when the user did not, so this is not the user's choice.
    guessed = "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("OMP_NUM_THREADS") == "1"
    threads = max(1, available_cores() // (ranks or local_ranks()))
    if "OMP_NUM_THREADS" not in os.environ or guessed or chosen_here():
        os.environ["OMP_NUM_THREADS"] = os.environ[OURS] = str(threads)
    if "OMP_WAIT_POLICY" not in os.environ:
        if sys.platform.startswith("linux"):  # GNU's OpenMP
            os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
        else:
            os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    keep_freed_memory()
    return int(os.environ["OMP_NUM_THREADS"]) if os.environ["OMP_NUM_THREADS"].isdigit() else threads


def chosen_here() -> bool:
    """Whether this module chose ``OMP_NUM_THREADS``, in this process or in its parent."""
    return os.environ.get("OMP_NUM_THREADS") == os.environ.get(OURS, "")


def share(processes: int) -> dict[str, str]:
    """Environment variables that give one of several processes its share of the cores.

    Empty where the user has set ``OMP_NUM_THREADS``.
    """
    return {"OMP_NUM_THREADS": str(max(1, available_cores() // processes)), OURS: ""} if chosen_here() else {}


def keep_freed_memory() -> None:
    """Let glibc's allocator reuse freed memory instead of returning it to the kernel at every step.

    Blocks above 128 KiB, such as a batch's activations, are otherwise mapped and unmapped each time, and every page of
    them is faulted in and zeroed anew (mallopt(3); ``MALLOC_MMAP_THRESHOLD_`` in the environment wins).
    """
    if "MALLOC_MMAP_THRESHOLD_" in os.environ or not sys.platform.startswith("linux"):
        return
    with contextlib.suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(M_TRIM_THRESHOLD, 1 << 30)
