"""SIGTERM, Ctrl-C, SIGHUP and SLURM's signal: noted at once, handled at the next step boundary (see ``stop.py``).

Before training has begun there is nothing to save, and the process ends right away. Rank 0 ends the ranks that it
started first, since they would fail without it; a signal to one of them is passed on to rank 0.
"""

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
START_UP_PATIENCE_S = (
    1.5  # then a thread ends what waits inside a library, where Python runs no handler
)


class Stopped(BaseException):
    """The run was asked to stop and has done so. Not an Exception, so that no ``except Exception`` swallows it."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum
        self.exit_code = 128 + signum


class State:
    """What this process was asked to do. It is global because a signal handler has no other place to note it."""

    requested: int = 0  # the signal that was received
    importing: bool = False  # a signal ends the process; later it is raised as Stopped
    deferring: bool = False  # a signal waits for the next step boundary
    begun: bool = False  # training or a test
    watched: bool = False
    clean_up: Callable[[], None] | None = None


state = State()


def install() -> None:
    """Take over the signals in the main thread. Until :func:`project.engine.command.run` they end the process: an
    exception inside an import would show up as an ImportError.
    """
    if threading.current_thread() is threading.main_thread():
        state.importing = True
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup wants no SIGHUP
                signal.signal(number, _note)
        if (
            "TORCHELASTIC_RUN_ID" in os.environ
        ):  # a rank would train on without its agent, and nobody could stop it
            end_with_parent()


def end_with_parent() -> None:
    """Linux: SIGTERM for this process when its parent dies, also by SIGKILL. Elsewhere it runs to its end."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # 1: PR_SET_PDEATHSIG


def watch(clean_up: Callable[[], None] | None = None) -> None:
    """Until training begins, end the process soon after a signal, also inside a library; ``clean_up`` removes files."""
    state.clean_up = clean_up
    if state.watched or state.begun or signal.getsignal(signal.SIGTERM) is not _note:
        return
    state.watched = True
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    os.register_at_fork(
        after_in_child=_stop_watching
    )  # a loader's worker must not write into this pipe
    threading.Thread(target=_watch, args=(reading,), name="start-up-signals", daemon=True).start()


def defer() -> None:
    """Training or a test has begun: from now on a signal waits for the next step boundary."""
    state.deferring = state.begun = True
    _stop_watching()


def _note(number: int, _: FrameType | None) -> None:
    is_first = not state.requested
    signum = (
        signal.SIGTERM if number == signal.SIGHUP else number
    )  # and a number of its own for a save: stop.SAVE_DUE
    state.requested = signum
    if not state.begun and is_child() and _tell_rank_zero(signum):
        return  # rank 0 ends it, and would be killed if it ended first
    if state.importing:
        os._exit(Stopped(signum).exit_code)
    if not state.begun:
        if not is_first:  # it is ending
            return
        _end_ranks()
    if not state.deferring:
        raise Stopped(signum)
    if is_first and os.environ.get("LOCAL_RANK", "0") == "0":
        told = f"\n{signal.Signals(number).name}: saving this step, then stopping ...\n"
        with suppress(OSError, AttributeError):  # it may be closed
            os.write(
                sys.stderr.fileno(), told.encode()
            )  # a signal may interrupt print(), which cannot call itself


def _watch(reading: int) -> None:
    while not state.begun:
        number = os.read(reading, 1)[0]
        if number not in STOP_SIGNALS or state.begun:
            continue
        if is_child():
            _tell_rank_zero(number)
        time.sleep(START_UP_PATIENCE_S * (2 if is_child() else 1))  # rank 0 is the first to act
        if not state.begun:
            _end_ranks()
            if state.clean_up is not None:
                state.clean_up()
            os._exit(130 if number == signal.SIGINT else 143)


def _stop_watching() -> None:
    if state.watched:
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
