"""SIGTERM, Ctrl-C, SIGHUP and SLURM's signal: noted at once, handled at the next step boundary.

Lightning's own handler broadcasts to the other ranks from inside the signal handler, which can interrupt a collective
and hang, and ends a terminated run with exit code 0. Here a handler only notes the signal.
:class:`project.engine.stop.GracefulStop` lets the ranks agree on it after a step, saves, and raises :class:`Stopped`,
which :mod:`project.engine.command` turns into the exit code.

Before training has begun there is nothing to save, and the process ends right away. Rank 0 decides for the ranks that
it started: it ends them first, since they would fail without it; a signal to one of them is passed on to rank 0.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

from project.engine.ranks import is_child

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # SIGHUP: the terminal was closed
# Python runs no handler while it waits inside a library, as for the other ranks: then a thread ends the process.
START_UP_PATIENCE_S = 1.5


class Stopped(BaseException):
    """The run was asked to stop and has done so. Not an Exception, so that no ``except Exception`` swallows it."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum
        self.exit_code = 128 + signum


class _State:
    """What this process was asked to do. It is global because a signal handler has no other place to note it."""

    requested: int = 0
    importing: bool = False
    deferring: bool = False
    begun: bool = False  # training or a test
    watched: bool = False
    clean_up: Callable[[], None] | None = None


def install() -> None:
    """Take over the signals in the main thread. Until :func:`imports_are_done` a signal ends the process: there is
    nothing to save yet, and an exception inside an import would show up as an ImportError.

    A rank of torchrun is asked to stop when its agent has died; it would train on, and nobody could stop it.
    """
    if threading.current_thread() is threading.main_thread():
        _State.importing = True
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup wants no SIGHUP
                signal.signal(number, _note)
        if "TORCHELASTIC_RUN_ID" in os.environ:
            end_with_parent()


def end_with_parent() -> None:
    """Linux: SIGTERM for this process when its parent dies, also by SIGKILL. Elsewhere it runs to its end."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # 1: PR_SET_PDEATHSIG


def imports_are_done() -> None:
    """From now on a signal is raised as :class:`Stopped`."""
    _State.importing = False


def requested() -> int:
    """The signal that was received, or 0."""
    return _State.requested


def note(signum: int) -> None:
    """Record a request to stop, as if ``signum`` had been received."""
    _State.requested = signum


def watch(clean_up: Callable[[], None] | None = None) -> None:
    """Until training begins, end the process soon after a signal, also where Python waits inside a library.

    Args:
        clean_up: What takes back the files that were made so far.
    """
    _State.clean_up = clean_up
    if _State.watched or _State.begun or signal.getsignal(signal.SIGTERM) is not _note:
        return
    _State.watched = True
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=_stop_watching)  # a loader's worker must not write into this pipe
    threading.Thread(target=_watch, args=(reading,), name="start-up-signals", daemon=True).start()


def defer() -> None:
    """Training or a test has begun: from now on a signal waits for the next step boundary."""
    _State.deferring = _State.begun = True
    _stop_watching()


def begun() -> bool:
    """Whether training or a test has begun."""
    return _State.begun


def resume_immediate() -> None:
    """Training is over: from now on a signal ends the process at once."""
    _State.deferring = False


def _note(number: int, _: FrameType | None) -> None:
    first = not _State.requested
    signum = signal.SIGTERM if number == signal.SIGHUP else number  # and a number of its own for a save: stop.SAVE_DUE
    _State.requested = signum
    if not _State.begun and is_child() and _tell_rank_zero(signum):
        return  # rank 0 ends it, and would be killed if it ended first
    if _State.importing:
        os._exit(Stopped(signum).exit_code)
    if not _State.deferring:
        if not _State.begun:
            if not first:  # it is ending
                return
            _end_ranks()
        raise Stopped(signum)
    if first and os.environ.get("LOCAL_RANK", "0") == "0":
        # os.write: a signal may interrupt print(), which cannot be called inside itself
        with suppress(OSError, AttributeError):  # it may be closed
            os.write(
                sys.stderr.fileno(), f"\n{signal.Signals(number).name}: saving this step, then stopping ...\n".encode()
            )


def _watch(reading: int) -> None:
    while not _State.begun:
        number = os.read(reading, 1)[0]
        if number not in STOP_SIGNALS or _State.begun:
            continue
        if is_child():
            _tell_rank_zero(number)
        time.sleep(START_UP_PATIENCE_S * (2 if is_child() else 1))  # rank 0 is the first to act
        if not _State.begun:
            _end_ranks()
            if _State.clean_up is not None:
                _State.clean_up()
            os._exit(130 if number == signal.SIGINT else 143)


def _stop_watching() -> None:
    if _State.watched:
        with suppress(ValueError):  # in another thread than the main one
            signal.set_wakeup_fd(-1)


def _tell_rank_zero(signum: int) -> bool:
    """Pass a signal on to rank 0; returns whether it is still there."""
    if (parent := os.getppid()) != 1:
        with suppress(ProcessLookupError):
            os.kill(parent, signum)
            return True
    return False


def _end_ranks() -> None:
    """Kill the ranks that Lightning has started from this process."""
    if "lightning.pytorch" in sys.modules:
        from project.engine.lightning_internals import release_child_processes

        for rank in release_child_processes():
            rank.kill()
