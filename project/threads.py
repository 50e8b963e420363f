"""CPU threads for a process: how many, and what they do while they wait.

PyTorch's OpenMP threads spin while they wait for each other: the fastest on an idle machine, and a trap on a busy one,
where every tiny operation waits for a thread that is not running. So they sleep while the machine is busy: see
:class:`Waiting`. ``OMP_NUM_THREADS``, ``OMP_WAIT_POLICY`` and ``GOMP_SPINCOUNT`` in the environment win.
"""

import contextlib
import ctypes
import math
import os
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

OURS = "PROJECT_OMP_NUM_THREADS"  # a thread count chosen here, not by the user
LOOK_SECONDS = 0.25  # how long other processes may slow a spinning thread down before it is seen
FIRST_SLEEP = 0.25  # seconds; short, for at its start a run's own W&B looks like another process
BUSY_SHARE = 0.4  # measured on two cores: 0.01 on an idle machine, 0.65 to 1 beside one busy process
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
    return int(os.environ["OMP_NUM_THREADS"]) if os.environ["OMP_NUM_THREADS"].isdigit() else threads


def chosen_here() -> bool:
    """Whether this module chose ``OMP_NUM_THREADS``, in this process or in its parent."""
    return os.environ.get("OMP_NUM_THREADS") == os.environ.get(OURS, "")


def share(processes: int) -> dict[str, str]:
    """The environment in which one of several processes here takes its part of the cores; empty if the user set it."""
    return {"OMP_NUM_THREADS": str(max(1, available_cores() // processes)), OURS: ""} if chosen_here() else {}


class Waiting:
    """Lets OpenMP's threads spin while they wait if the cores are free, and sleep if other processes use them.

    GNU's OpenMP spins 300,000 times before it sleeps, and 100 times while the process has more OpenMP threads than the
    machine has cores (its manual, GOMP_SPINCOUNT). A second team of threads that has nothing to do makes it so, and its
    end undoes it, at once. The sign of other processes is the time that this process' threads were ready to run and had
    no core (``/proc/self/task/*/schedstat``). Threads that sleep show less of it, so after a while they spin again to
    see; each time in vain doubles the while.

    Milliseconds per step of an MLP at batch 64 on two cores (2026-11-22, 4 turns of 150 steps each): 31 to 85 spinning
    and 2 to 11 sleeping under a load average of 4.5; 1.4 to 2.5 and 3.7 to 4.4 on the idle machine.
    """

    def __init__(self) -> None:
        self.sleeping_since: float | None = None
        self.slept = 0.0  # seconds of former sleeps
        self.patience = FIRST_SLEEP  # seconds of sleep before the next try
        self.team_may_end = threading.Event()
        self.openmp: Any = None

    def start(self) -> None:
        """Watch from a thread of its own, unless the environment says how threads wait, or that there is only one."""
        chosen = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & set(os.environ)
        if sys.platform.startswith("linux") and not chosen and os.environ.get("OMP_NUM_THREADS") != "1":
            threading.Thread(target=self._watch, name="waiting", daemon=True).start()

    def _watch(self) -> None:
        while not hasattr(sys.modules.get("torch"), "compile"):  # one of the last names that its import defines
            time.sleep(LOOK_SECONDS)
        if not self.find_openmp():
            return  # another runtime, which waits in its own way
        seen, before = time.monotonic(), time_without_core()
        while True:
            time.sleep(LOOK_SECONDS)
            now, waits = time.monotonic(), time_without_core()
            waited = sum(waits[thread] - before[thread] for thread in waits.keys() & before.keys())
            self.look(now, waited / (now - seen))
            seen, before = now, waits

    def look(self, now: float, share: float) -> None:
        """Decide. ``share``: seconds that threads waited for a core, per second since the last look."""
        if self.sleeping_since is not None:
            if now - self.sleeping_since >= self.patience:
                self.slept += now - self.sleeping_since
                self.sleeping_since = None
                self.patience = min(2 * self.patience, 60.0)
                self.spin()
        elif share > BUSY_SHARE:
            self.sleeping_since = now
            self.sleep()
        else:
            self.patience = FIRST_SLEEP

    def sleep(self) -> None:
        """Threads that wait sleep after 100 spins."""
        self.team_may_end.clear()
        threading.Thread(target=self._idle_team, name="idle team", daemon=True).start()

    def spin(self) -> None:
        """Threads that wait spin."""
        self.team_may_end.set()

    def seconds_slept(self) -> float:
        """For how long other processes have kept the cores busy."""
        return self.slept + (0.0 if self.sleeping_since is None else time.monotonic() - self.sleeping_since)

    def _idle_team(self) -> None:
        more_than_cores = ctypes.c_uint(self.openmp.omp_get_num_procs() + 1)
        self.openmp.GOMP_parallel(ctypes.CDLL(None).sched_yield, None, more_than_cores, ctypes.c_uint(0))
        self.team_may_end.wait()

    def find_openmp(self) -> bool:
        """Whether GNU's OpenMP is what torch, which has been imported, computes with."""
        with contextlib.suppress(OSError):  # no /proc
            mapped = re.search(r"/\S*libgomp\S*", Path("/proc/self/maps").read_text())
            self.openmp = ctypes.CDLL(mapped.group()) if mapped else None
        return self.openmp is not None


def time_without_core() -> dict[str, float]:
    """Seconds that each thread of this process was ready to run and had no core, by its number; Linux only."""
    waits = {}
    for thread in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # it has ended
            waits[thread.parent.name] = int(thread.read_text().split()[1]) / 1e9
    return waits


waiting = Waiting()
