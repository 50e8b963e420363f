"""What CPU threads do while they wait.

PyTorch's OpenMP threads spin while they wait for each other. That is the fastest on an idle
machine, and a trap on a busy one, where every tiny operation waits for a thread that is not
running. So they sleep while the machine is busy: see :class:`Waiting`. ``OMP_WAIT_POLICY`` and
``GOMP_SPINCOUNT`` in the environment win. Linux only; elsewhere threads.py, beside this file, lets
threads sleep always. The other reasons why a run is fast on a CPU stand there, too.
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
from typing import Any, NamedTuple

from unbroken.machine import threads

# How long other processes may slow a spinning thread down before it is seen.
LOOK_SECONDS = 0.25
# Seconds of the first sleep. It is short, because a run's own W&B process looks like another
# process at its start.
FIRST_SLEEP = 0.25
LONGEST_SLEEP = 60.0
# Seconds between two choices of the kernel who runs on a core that threads share.
BEAT_SECONDS = 3e-4
# What other processes may use of a core that counts as free.
FREE_SHARE = 0.3
# Above this share of its time waited for a core, a process counts as disturbed. Measured on two
# cores: 0.01 on an idle machine, 0.65 to 1 beside one busy process.
BUSY_SHARE = 0.4


class Shares(NamedTuple):
    """What the kernel has counted between two looks, in seconds per second."""

    waited: float  # this process's threads were ready to run and had no core
    here: float = 0.0  # other processes used the core on which all our threads are
    elsewhere: float = 0.0  # other processes used our other core


class Waiting:
    """Lets OpenMP's threads spin while they wait if the cores are free, and sleep if other
    processes use them.

    **How threads are told.** GNU's OpenMP spins 300,000 times before it sleeps, and 100 times while
    the process has more OpenMP threads than the machine has cores (its manual, GOMP_SPINCOUNT). A
    second team of threads that has nothing to do makes it so, and its end undoes it, at once.

    **How other processes are seen.** The sign is the time that this process's threads were ready to
    run and had no core (``/proc/self/task/*/schedstat``). Sleeping threads show less of it. So they
    spin again to see, each time later.

    **Two cores.** A thread that shares its core with another process would hold up the other thread
    in every operation. So both move to one core and leave the other one to that process, until
    ``/proc/stat`` shows that it has gone. In oneDNN's barriers a thread never sleeps, and would
    keep the core for a whole tick of the kernel (4 ms). The thread of this object wakes up on that
    core every ``BEAT_SECONDS``, and the kernel chooses anew who runs.

    Neither changes a result: there are as many threads as before. Milliseconds per step of the
    ConvNet at batch 192 and the MLP at 64 beside a busy process on two cores of a Zen 5
    (2026-11-24, medians of 5): spinning 23.5 and 1.55, sleeping 25 and 1.45, on one core with the
    beat 12.3 and 1.5, without it 16.7 and 1.4; idle 5.7 to 11 and 0.8.
    """

    def __init__(self) -> None:
        self.cores = threads.CORES
        # The core on which all threads are, to leave the other one to others; None: they are on all
        # cores.
        self.core: int | None = None
        # The time at which the threads began to sleep; None: they spin.
        self.sleeping_since: float | None = None
        # Seconds of former sleeps.
        self.slept = 0.0
        # Seconds of sleep that do not count: those before the training.
        self.slept_before = 0.0
        # Seconds of sleep before the threads spin again to see.
        self.patience = FIRST_SLEEP
        self.team_may_end = threading.Event()
        # Set when nobody needs the threads to be watched any more. None: they are not watched.
        self._is_over: threading.Event | None = None
        self._is_registered = False
        # GNU's OpenMP as a library of ctypes, once it is found.
        self.openmp: Any = None
        # A generator of its own, because training draws from the global one.
        self._draw = random.Random()

    def start(self) -> bool:
        """Watch from a thread of its own, unless the environment says how threads wait, or that
        there is only one.

        Returns:
            Whether the watch begins with this call. Whoever has begun it ends it.
        """
        is_linux = sys.platform.startswith("linux") and hasattr(os, "register_at_fork")
        user_chose = "OMP_WAIT_POLICY" in os.environ or "GOMP_SPINCOUNT" in os.environ
        has_one_thread = os.environ.get("OMP_NUM_THREADS") == "1"
        if not is_linux or user_chose or has_one_thread or self._is_over is not None:
            return False
        if not self._is_registered:
            self._is_registered = True
            # A forked child, such as a loader's worker, would inherit the one core.
            os.register_at_fork(after_in_child=self._use_all_cores)
        self._is_over = threading.Event()
        threading.Thread(target=self._watch, name="waiting", daemon=True).start()
        return True

    def end(self) -> None:
        """Watch no more. From now on threads spin, on all cores, as they did before."""
        if self._is_over is not None:
            self._is_over.set()
            self._is_over = None

    def _watch(self) -> None:
        is_over = self._is_over
        if is_over is None:
            return
        # ``compile`` is one of the last names that the import of torch defines.
        while not hasattr(sys.modules.get("torch"), "compile"):
            time.sleep(LOOK_SECONDS)
        if not self.find_openmp():
            # torch computes with another runtime, which waits in its own way.
            return
        before = Reading()
        while not is_over.wait(LOOK_SECONDS if self.core is None else BEAT_SECONDS):
            if time.monotonic() - before.at >= LOOK_SECONDS:
                now = Reading()
                self.look(now.at, now.shares_since(before, self.cores, self.core))
                before = now
        # This thread alone moves the others, so it also puts them back.
        if self.sleeping_since is not None:
            self._end_sleep(time.monotonic())

    def look(self, now: float, shares: Shares) -> None:
        """Decide what threads do from ``now`` (seconds) on, by what the last look has shown."""
        if self.sleeping_since is None:
            self._look_while_spinning(now, shares)
        elif self.core is None:
            self._look_while_sleeping(now, self.sleeping_since)
        else:
            self._look_while_on_one_core(now, shares, self.core)

    def _look_while_spinning(self, now: float, shares: Shares) -> None:
        if shares.waited > BUSY_SHARE:
            self.sleeping_since = now
            self.sleep()
        else:
            self.patience = FIRST_SLEEP

    def _look_while_sleeping(self, now: float, sleeping_since: float) -> None:
        if now - sleeping_since >= self.patience:
            self.patience = min(2 * self.patience, LONGEST_SLEEP)
            self._end_sleep(now)

    def _look_while_on_one_core(self, now: float, shares: Shares, core: int) -> None:
        if shares.here + shares.elsewhere < FREE_SHARE:
            self._end_sleep(now)
            return
        other_core_is_freer = shares.here > FREE_SHARE + shares.elsewhere
        # A second run on this core may be about to go there as well. So both draw whether they go.
        if other_core_is_freer and self._draw.random() < 0.5:
            (other_core,) = self.cores - {core}
            self._move_to(other_core)

    def _end_sleep(self, now: float) -> None:
        if self.sleeping_since is not None:
            self.slept += now - self.sleeping_since
        self.sleeping_since = None
        self.spin()

    def sleep(self) -> None:
        """Threads that wait sleep after 100 spins. Two threads on two cores take turns on one of
        them.
        """
        if self._can_share_a_core():
            self._move_to(self._draw.choice(sorted(self.cores)))
        self.team_may_end.clear()
        # The thread starts on the cores on which this thread is.
        threading.Thread(target=self._idle_team, name="idle team", daemon=True).start()

    def _can_share_a_core(self) -> bool:
        torch: Any = sys.modules["torch"]
        has_two_of_both = len(self.cores) == torch.get_num_threads() == 2
        # Else nobody could tell when the other core is free again.
        is_told = self.cores <= time_used().keys()
        # A loader's workers are what the cores are busy with. They need both.
        has_workers = bool(multiprocessing.active_children())
        return has_two_of_both and is_told and not has_workers

    def spin(self) -> None:
        """Threads that wait spin, on all cores."""
        self._use_all_cores()
        self.team_may_end.set()

    def count_anew(self) -> None:
        """Count from now on for how long other processes keep the cores busy."""
        self.slept_before = 0.0
        self.slept_before = self.seconds_slept()

    def seconds_slept(self) -> float:
        """For how long other processes have kept the cores busy, since :meth:`count_anew`."""
        slept = self.slept - self.slept_before
        sleeping_since = self.sleeping_since
        if sleeping_since is None:
            return slept
        return slept + time.monotonic() - sleeping_since

    def _use_all_cores(self) -> None:
        self._move_to(None)

    def _move_to(self, core: int | None) -> None:
        """Let all threads of this process run on one core alone; None: on all cores."""
        if core == self.core:
            # On all cores: what a user's own code has chosen since stays.
            return
        self.core = core
        cores = self.cores if core is None else {core}
        for thread in os.listdir("/proc/self/task"):
            # The thread may have ended.
            with contextlib.suppress(OSError):
                os.sched_setaffinity(int(thread), cores)

    def _idle_team(self) -> None:
        """A team of one thread more than there are cores: it does nothing, and ends when threads
        shall spin.
        """
        more_than_cores = ctypes.c_uint(len(self.cores) + 1)
        do_nothing = ctypes.CDLL(None).sched_yield
        self.openmp.GOMP_parallel(do_nothing, None, more_than_cores, ctypes.c_uint(0))
        self.team_may_end.wait()

    def find_openmp(self) -> bool:
        """Whether GNU's OpenMP is what torch, which has been imported, computes with."""
        # There may be no /proc.
        with contextlib.suppress(OSError):
            mapped = re.search(
                r"/\S*libgomp\S*", Path("/proc/self/maps").read_text(encoding="utf-8")
            )
            if mapped is not None:
                self.openmp = ctypes.CDLL(mapped.group())
        return self.openmp is not None


class Reading:
    """What the kernel has counted so far, in seconds. Linux only."""

    def __init__(self) -> None:
        self.at = time.monotonic()
        self.own = time.process_time()
        self.used = time_used()
        # For each thread of this process, how long it was ready to run and had no core.
        self.without_core: dict[str, float] = {}
        for thread in Path("/proc/self/task").glob("*/schedstat"):
            # The thread may have ended.
            with contextlib.suppress(OSError):
                nanoseconds = int(thread.read_text().split()[1])
                self.without_core[thread.parent.name] = nanoseconds / 1e9

    def shares_since(self, before: "Reading", cores: set[int], core: int | None) -> Shares:
        """What has happened on these ``cores`` since ``before``. On ``core``, if given, were all
        our own threads.
        """
        waited = 0.0
        for thread, seconds in self.without_core.items():
            # A thread that is new since then counts from now on.
            waited += seconds - before.without_core.get(thread, seconds)
        here = 0.0
        elsewhere = 0.0
        for number in cores & self.used.keys():
            used = self.used[number] - before.used[number]
            if number == core:
                here = used - (self.own - before.own)
            else:
                elsewhere += used
        passed = self.at - before.at
        return Shares(waited / passed, here / passed, elsewhere / passed)


def time_used() -> dict[int, float]:
    """Seconds for which each core has worked for processes, by its number; empty without Linux's
    ``/proc/stat``.
    """
    try:
        text = Path("/proc/stat").read_text(encoding="utf-8")
    except OSError:
        return {}
    ticks_per_second = os.sysconf("SC_CLK_TCK")
    used = {}
    # A core's line begins with the ticks spent on processes, on processes of low priority, and in
    # the kernel.
    for core, *ticks in re.findall(r"(?m)^cpu(\d+) (\d+) (\d+) (\d+)", text):
        used[int(core)] = sum(map(int, ticks)) / ticks_per_second
    return used


# The one object of a process, which every command starts.
waiting = Waiting()
