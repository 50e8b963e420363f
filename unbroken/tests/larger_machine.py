"""Shows a test session a larger machine: ``pytest -p tests.larger_machine``.

It has 16 cores, and a GPU of which Lightning knows and that no test uses. Lightning and torch warn
of more there than on two cores.
"""

from __future__ import annotations

import os

from lightning.pytorch.trainer import setup

CORES = 16


class Unused(setup.CUDAAccelerator):
    """A GPU that is here. Its name stands only where Lightning says what a run does not use."""

    @staticmethod
    def is_available() -> bool:
        return True


os.cpu_count = lambda: CORES
os.sched_getaffinity = lambda pid: set(range(CORES))
setup.CUDAAccelerator = Unused
