"""SIGTERM, Ctrl-C and SLURM's signal: noted at once, handled at the next step boundary.

Lightning's own handler broadcasts to the other ranks from inside the signal handler, which can interrupt a collective
and hang, and ends a terminated run with exit code 0. Here a handler only notes the signal.
:class:`project.engine.stop.GracefulStop` lets the ranks agree on it after a step, saves, and raises :class:`Stopped`,
which :mod:`project.engine.command` turns into the exit code. Before training has begun there is nothing to save and the
process ends right away.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # SIGHUP: the terminal was closed
# Ranks that receive a signal during start-up stop together at the first step, or each one after this time.
START_UP_PATIENCE_S = 8.0


class Stopped(BaseException):
    """The run was asked to stop and has done so. Not an Exception, so that no ``except Exception`` swallows it."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum
        self.exit_code = 143 if signum == signal.SIGHUP else 128 + signum


class _State:
    """What this process was asked to do. It is global because a signal handler has no other place to note it."""

    requested: int = 0
    importing: bool = False
    deferring: bool = False
    shared: bool = False


def install() -> None:
    """Take over the signals in the main thread. Until :func:`imports_are_done` a signal ends the process: there is
    nothing to save yet, and an exception inside an import would show up as an ImportError.
    """
    if threading.current_thread() is threading.main_thread():
        _State.importing = True
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup wants no SIGHUP
                signal.signal(number, _note)


def imports_are_done() -> None:
    """From now on a signal is raised as :class:`Stopped`."""
    _State.importing = False


def requested() -> int:
    """The signal that was received, or 0."""
    return _State.requested


def note(signum: int) -> None:
    """Record a request to stop, as if ``signum`` had been received."""
    _State.requested = signum


def defer(shared: bool = False) -> None:
    """From now on a signal waits for the next step boundary.

    Args:
        shared: The job has several ranks. Then also a signal during start-up waits, for at most
            ``START_UP_PATIENCE_S`` seconds, until the ranks can agree on it.
    """
    _State.deferring, _State.shared = True, shared


def resume_immediate() -> None:
    """Training is over: from now on a signal ends the process at once."""
    _State.deferring = False


def training_begins() -> None:
    """All ranks have started and step boundaries follow: the time limit of the start-up ends."""
    _State.shared = False


def _note(signum: int, _: FrameType | None) -> None:
    first = not _State.requested
    _State.requested = signum
    if _State.importing:
        os._exit(Stopped(signum).exit_code)
    if not _State.deferring:
        raise Stopped(signum)
    if first and os.environ.get("LOCAL_RANK", "0") == "0":
        # os.write: a signal may interrupt print(), which cannot be called inside itself
        os.write(
            sys.stderr.fileno(), f"\n{signal.Signals(signum).name}: saving this step, then stopping ...\n".encode()
        )
    if first and _State.shared:
        timer = threading.Timer(START_UP_PATIENCE_S, _give_up, args=(signum,))
        timer.daemon = True
        timer.start()


def _give_up(signum: int) -> None:
    if _State.shared:
        os._exit(Stopped(signum).exit_code)
