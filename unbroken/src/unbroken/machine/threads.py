"""Why a run is fast on a CPU, and a good neighbour: how many threads compute, and where freed
memory goes.

Everything that makes a run fast on a CPU stands in these places:

1. **As many threads as this process has cores** (:func:`configure`, below). PyTorch counts the
   cores of the machine; we count those of the process: its affinity mask, its container's quota,
   and its share among the ranks beside it. More threads than cores would wait for each other in
   every operation.
2. **Freed memory is used again** (:func:`keep_freed_memory`, below). Without it, the C library
   would give the memory of each step's activations back to the kernel, and get it page by page in
   the next step.
3. **Threads spin while they wait, and sleep while others need the cores** (waiting.py).
   Spinning is the fastest on an idle machine, and many times slower beside a busy process.
4. **A batch is gathered in one call** (base.py in the data folder): there is no Python per sample
   and no worker process. The loader that keeps a run's order (``unbroken.loading``) asks for whole
   batches, too.
5. **Images lie in memory channel by channel per pixel** where a network wants that
   (``memory_format`` in ``project/model``), and optimizers step in one fused operation.
6. **Metrics stay on the device** until a log step, and the monitors cost at most 2 %
   (``unbroken/monitors``).
7. **Half precision where it pays, and nowhere else.** A CPU without instructions for it is slower
   with it; a run that asks for it is told what it costs (``unbroken/monitors/slow_precision.py``).
8. **The garbage collector is off while modules are imported** (``prepare_process``, which every
   command calls first).

What a user sets in the environment wins: ``OMP_NUM_THREADS``, ``OMP_WAIT_POLICY``,
``GOMP_SPINCOUNT``, ``MALLOC_MMAP_THRESHOLD_``. The command ``benchmark overhead`` measures what all
this is worth on a machine.
"""

import contextlib
import ctypes
import math
import os
import sys
from pathlib import Path

# This variable holds a thread count that was chosen here. Where it equals OMP_NUM_THREADS, the user
# chose nothing.
OURS = "UNBROKEN_OMP_NUM_THREADS"

# mallopt's numbers for two of its settings, from glibc's malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
ONE_GIB = 1 << 30


def cores_at_start() -> set[int]:
    """The numbers of the cores that this process may use; empty where the system does not tell
    (macOS, Windows).
    """
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set()


# The cores that this process was allowed to use at its start. Later it may keep to one of them
# (waiting.py).
CORES = cores_at_start()


def available_cores() -> int:
    """CPU cores this process may use: its affinity mask, cut to the container's CPU quota, at least
    1.
    """
    cores = len(CORES) or os.cpu_count() or 1
    return max(1, int(min(cores, container_quota())))


def container_quota(cgroup: Path = Path("/sys/fs/cgroup")) -> float:
    """Cores granted by the container's control group, which may be a fraction; infinity when
    unlimited.
    """
    version_2 = [cgroup / "cpu.max"]
    version_1 = [cgroup / "cpu/cpu.cfs_quota_us", cgroup / "cpu/cpu.cfs_period_us"]
    for files in (version_2, version_1):
        # The files of the other version do not exist.
        with contextlib.suppress(OSError, ValueError):
            quota, period = " ".join(file.read_text() for file in files).split()
            if quota in ("max", "-1"):
                return math.inf
            return max(1.0, int(quota) / int(period))
    return math.inf


def configure() -> int:
    """Set this process's OpenMP thread count, unless the user did, and how it keeps memory. Returns
    the thread count.

    Call it before torch is imported: torch reads the environment once.
    """
    threads = max(1, available_cores() // ranks_on_this_machine())
    if "OMP_NUM_THREADS" not in os.environ or guessed_by_torchrun() or chosen_here():
        os.environ["OMP_NUM_THREADS"] = str(threads)
        os.environ[OURS] = str(threads)
    if sys.platform.startswith("linux"):
        keep_freed_memory()
    else:
        # waiting.py lets threads sleep on a busy machine, but knows Linux alone.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    chosen = os.environ["OMP_NUM_THREADS"]
    # OpenMP also understands a list, such as "4,2".
    return int(chosen) if chosen.isdigit() else threads


def configure_later() -> None:
    """What :func:`configure` does, as far as it can still be done where torch is imported already:
    in a notebook, or in a script of one's own.

    Threads are taken away where there are more than cores, as in a container that may use fewer
    cores than the machine has. Fewer threads are left as they are: somebody has chosen them.
    """
    torch = sys.modules["torch"]
    cores = max(1, available_cores() // ranks_on_this_machine())
    if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > cores:
        torch.set_num_threads(cores)
    if sys.platform.startswith("linux"):
        keep_freed_memory()


def ranks_on_this_machine() -> int:
    """How many processes of this job share the machine, as torchrun or SLURM announces it; at least
    1.
    """
    for variable in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE"):
        count = os.environ.get(variable, "")
        if count.isdigit():
            return max(1, int(count))
    return 1


def guessed_by_torchrun() -> bool:
    """Whether ``OMP_NUM_THREADS`` is the 1 that torchrun sets for its workers when the user set
    nothing.
    """
    return "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("OMP_NUM_THREADS") == "1"


def chosen_here() -> bool:
    """Whether this module chose ``OMP_NUM_THREADS``, in this process or in its parent."""
    return os.environ.get("OMP_NUM_THREADS") == os.environ.get(OURS, "")


def user_chose() -> bool:
    """Whether the user set ``OMP_NUM_THREADS``, and neither this module nor :func:`share`."""
    return os.environ.get(OURS) not in ("", os.environ.get("OMP_NUM_THREADS"))


def keep_freed_memory() -> None:
    """Let the C library keep what is freed for the next step, unless the user has set it (Linux
    with glibc).

    A block above 128 KiB, such as a batch's activations, would else be unmapped as it is freed
    (mallopt(3)).
    """
    if "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return
    # Another C library, such as musl, has no mallopt.
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, ONE_GIB)
        mallopt(M_TRIM_THRESHOLD, ONE_GIB)


def share(processes: int) -> dict[str, str]:
    """The environment in which one of several processes here takes its part of the cores.

    It is empty where the user has set the number of threads.
    """
    if not chosen_here():
        return {}
    part = max(1, available_cores() // processes)
    # The mark is removed: the process that is started keeps to its part, and chooses nothing
    # itself.
    return {"OMP_NUM_THREADS": str(part), OURS: ""}
