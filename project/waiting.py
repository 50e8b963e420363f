"""What CPU threads do while they wait.

PyTorch's OpenMP threads spin while they wait for each other: the fastest on an idle machine, and a trap on a busy one,
where every tiny operation waits for a thread that is not running. So they sleep while the machine is busy: see
:class:`Waiting`. ``OMP_WAIT_POLICY`` and ``GOMP_SPINCOUNT`` in the environment win.
"""

import contextlib
import ctypes
import multiprocessing
import os
import random
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

from project import threads

LOOK_SECONDS = 0.25  # how long other processes may slow a spinning thread down before it is seen
FIRST_SLEEP = 0.25  # seconds; short, for at its start a run's own W&B looks like another process
BEAT_SECONDS = 3e-4  # between two choices of the kernel who runs on a core that threads share
FREE_SHARE = 0.3  # what other processes may use of a core that counts as free
BUSY_SHARE = (
    0.4  # measured on two cores: 0.01 on an idle machine, 0.65 to 1 beside one busy process
)


class Waiting:
    """Lets OpenMP's threads spin while they wait if the cores are free, and sleep if other processes use them.

    GNU's OpenMP spins 300,000 times before it sleeps, and 100 times while the process has more OpenMP threads than the
    machine has cores (its manual, GOMP_SPINCOUNT). A second team of threads that has nothing to do makes it so, and its
    end undoes it, at once. The sign of other processes is the time that this process' threads were ready to run and had
    no core (``/proc/self/task/*/schedstat``). Sleeping threads show less of it: they spin again, ever later, to see.

    On two cores, a thread that shares its core with another process would hold up the other thread in every operation.
    So both move to one core and leave the other one to that process, until ``/proc/stat`` shows that it has gone. In
    oneDNN's barriers a thread never sleeps, and would keep the core for a whole tick of the kernel (4 ms); but the
    thread of this object wakes up there every ``BEAT_SECONDS``, and the kernel chooses anew who runs.

    Neither changes a result: there are as many threads as before. Milliseconds per step of the ConvNet at batch 192 and
    the MLP at 64 beside a busy process on two cores of a Zen 5 (2026-11-24, medians of 5): spinning 23.5 and 1.55,
    sleeping 25 and 1.45, on one core with the beat 12.3 and 1.5, without it 16.7 and 1.4; idle 5.7 to 11 and 0.8.
    """

    def __init__(self) -> None:
        self.cores = threads.CORES
        self.core: int | None = None  # on which all threads are, to leave the other to others
        self.sleeping_since: float | None = None
        self.slept = 0.0  # seconds of former sleeps
        self.patience = FIRST_SLEEP  # seconds of sleep before the next try
        self.team_may_end = threading.Event()
        self.openmp: Any = None
        self._draw = random.Random()  # not the one that training draws from

    def start(self) -> None:
        """Watch from a thread of its own, unless the environment says how threads wait, or that there is only one."""
        chosen = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & set(os.environ)
        if (
            sys.platform.startswith("linux")
            and not chosen
            and os.environ.get("OMP_NUM_THREADS") != "1"
        ):
            os.register_at_fork(
                after_in_child=lambda: self._move_to(None)
            )  # such as a loader's worker
            threading.Thread(target=self._watch, name="waiting", daemon=True).start()

    def _watch(self) -> None:
        while not hasattr(
            sys.modules.get("torch"), "compile"
        ):  # one of the last names that its import defines
            time.sleep(LOOK_SECONDS)
        if not self.find_openmp():
            return  # another runtime, which waits in its own way
        before = Reading()
        while True:
            time.sleep(LOOK_SECONDS if self.core is None else BEAT_SECONDS)
            if time.monotonic() - before.at >= LOOK_SECONDS:
                now = Reading()
                self.look(now.at, *now.shares_since(before, self.cores, self.core))
                before = now

    def look(self, now: float, waited: float, here: float = 0.0, elsewhere: float = 0.0) -> None:
        """Decide, by seconds per second since the last look: ``waited``, that threads waited for a core; ``here`` and
        ``elsewhere``, that other processes used the core which all threads share, and the other one.
        """
        if self.sleeping_since is None:
            if waited > BUSY_SHARE:
                self.sleeping_since = now
                self.sleep()
            else:
                self.patience = FIRST_SLEEP
        elif self.core is None and now - self.sleeping_since >= self.patience:
            self.patience = min(2 * self.patience, 60.0)
            self._wake(now)
        elif self.core is not None and here + elsewhere < FREE_SHARE:
            self._wake(now)
        elif self.core is not None and here > FREE_SHARE + elsewhere and self._draw.random() < 0.5:
            self._move_to(
                *self.cores - {self.core}
            )  # a run beside this one may be about to do the same

    def _wake(self, now: float) -> None:
        self.slept += now - (self.sleeping_since or now)
        self.sleeping_since = None
        self.spin()

    def sleep(self) -> None:
        """Threads that wait sleep after 100 spins; two threads on two cores take turns on one of them."""
        torch: Any = sys.modules["torch"]
        is_told = self.cores <= time_used().keys()  # when the other core is free again
        if (
            is_told
            and len(self.cores) == torch.get_num_threads() == 2
            and not multiprocessing.active_children()
        ):
            self._move_to(self._draw.choice([*self.cores]))
        self.team_may_end.clear()
        threading.Thread(
            target=self._idle_team, name="idle team", daemon=True
        ).start()  # where this thread may run

    def spin(self) -> None:
        """Threads that wait spin, on all cores."""
        self._move_to(None)
        self.team_may_end.set()

    def seconds_slept(self) -> float:
        """For how long other processes have kept the cores busy."""
        return self.slept + (
            0.0 if self.sleeping_since is None else time.monotonic() - self.sleeping_since
        )

    def _move_to(self, core: int | None) -> None:
        if core == self.core:  # on all: what a user's own code has chosen stays
            return
        self.core = core
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):  # it has ended
                os.sched_setaffinity(int(thread), self.cores if core is None else {core})

    def _idle_team(self) -> None:
        more_than_cores = ctypes.c_uint(len(self.cores) + 1)
        self.openmp.GOMP_parallel(
            ctypes.CDLL(None).sched_yield, None, more_than_cores, ctypes.c_uint(0)
        )
        self.team_may_end.wait()

    def find_openmp(self) -> bool:
        """Whether GNU's OpenMP is what torch, which has been imported, computes with."""
        with contextlib.suppress(OSError):  # no /proc
            mapped = re.search(r"/\S*libgomp\S*", Path("/proc/self/maps").read_text())
            self.openmp = ctypes.CDLL(mapped.group()) if mapped else None
        return self.openmp is not None


class Reading:
    """What the kernel has counted so far, in seconds; Linux only."""

    def __init__(self) -> None:
        self.at, self.own, self.used = time.monotonic(), time.process_time(), time_used()
        self.without_core: dict[
            str, float
        ] = {}  # for which each thread was ready to run and had no core
        for thread in Path("/proc/self/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):  # it has ended
                self.without_core[thread.parent.name] = int(thread.read_text().split()[1]) / 1e9

    def shares_since(
        self, before: "Reading", cores: set[int], core: int | None
    ) -> tuple[float, ...]:
        """What :meth:`Waiting.look` takes, of these ``cores``; all of this process' own time was on ``core``."""
        waited = sum(
            now - before.without_core.get(thread, now) for thread, now in self.without_core.items()
        )
        used = {
            number: self.used[number] - before.used[number] for number in cores & self.used.keys()
        }
        here = used.pop(core) - (self.own - before.own) if core in used else 0.0
        return tuple(
            seconds / (self.at - before.at) for seconds in (waited, here, sum(used.values()))
        )


def time_used() -> dict[int, float]:
    """Seconds for which each core has worked for processes, by its number; empty without Linux's ``/proc/stat``."""
    with contextlib.suppress(OSError):
        rows = re.findall(r"(?m)^cpu(\d+) (\d+) (\d+) (\d+)", Path("/proc/stat").read_text())
        return {int(core): sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK") for core, *ticks in rows}
    return {}


waiting = Waiting()
