"""Loaders' worker processes: how they start, and how they end with Python."""

import atexit
import functools
import multiprocessing
import os
import signal
from collections.abc import Callable
from typing import Any

from torch.utils import data


def prepare_worker(worker: int, further: Callable[[int], Any] | None) -> None:
    """Let a loader's worker ignore stop signals, which the trainer handles, and use one core.

    Args:
        worker: Its number.
        further: The user's own ``worker_init_fn``.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # For other libraries. Torch sees to itself.
    os.environ["OMP_NUM_THREADS"] = "1"
    info: Any = data.get_worker_info()
    if info is not None:
        # The user's code expects its own dataset there, not the one that we have put around it.
        object.__setattr__(info, "dataset", info.dataset.dataset)
    if further is not None:
        further(worker)


@functools.cache
def end_workers_at_exit() -> None:
    """From now on :func:`end_workers` is called as Python ends."""
    atexit.register(end_workers)


def end_workers() -> None:
    """Kill the workers that are left. Python would wait for them, since they ignore the signal that
    it sends.
    """
    # Torch's handler would raise an error because a worker is killed. Windows has no such signal.
    if hasattr(signal, "SIGCHLD"):
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for worker in multiprocessing.active_children():
        if worker.daemon:
            worker.kill()
