"""Host memory of this process and its loader workers, cheap enough to be read at every log step."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import psutil

STATUS = Path("/proc/self/status")


class HostMemory:
    """Resident set sizes (bytes) of this rank. Pages that processes share count once in each of them."""

    def __init__(self) -> None:
        self._processes: dict[int, psutil.Process] = {}

    def process_rss(self) -> int:
        """Of this process alone."""
        return self._rss(os.getpid())

    def rss(self) -> int:
        """Of this process and the workers that its loaders have started."""
        # Python's own list of children: psutil's walks through all processes of the machine, some milliseconds
        workers = [child.pid for child in multiprocessing.active_children() if child.pid is not None]
        return self.process_rss() + sum(map(self._rss, workers))

    def peak_rss(self) -> int:
        """The most this process has had since it was started, 0 where the system does not tell.

        Not ``getrusage``: its ``ru_maxrss`` begins with the size of the process that started this one.
        """
        try:
            for line in STATUS.read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        except OSError:
            pass
        return 0

    def _rss(self, pid: int) -> int:
        try:
            if pid not in self._processes:
                self._processes[pid] = psutil.Process(pid)
            return int(self._processes[pid].memory_info().rss)
        except psutil.NoSuchProcess:  # a worker that has just ended
            self._processes.pop(pid, None)
            return 0
