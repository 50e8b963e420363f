"""SIGTERM, Ctrl-C, SIGHUP and SLURM's signal: what this process does as it gets one.

It depends on the phase in which the process is (:class:`Phase`):

| phase | from | a signal, if it is the process's first | a further one |
| --- | --- | --- | --- |
| IMPORTS | :func:`install`: a command starts | ends the process at once | (it has ended) |
| STARTS | :func:`imports_are_done`; in a script the callback's setup | raises Stopped | nothing |
| RUNS | :func:`note_from_now_on`: training, or a validation or test, begins | is noted | nothing |
| REPORTS | :func:`raise_from_now_on`: a report is written (one rank) | raises Stopped | the same |
| ENDS | :func:`command_is_done` | ends the process at once | the same |

What follows when a signal was noted, and what a second Ctrl-C does in commands and scripts, stands
in stopping/__init__.py. The sanity check comes before training begins: it belongs to STARTS. In
IMPORTS and STARTS a rank that another one has started only tells rank zero, which ends it, as long
as that one lives; a command's, after its imports, ends itself if it is still there 3 s later.

``Stopped`` ends the process with 130 (Ctrl-C) or 143. SLURM's signal, unless the script handles it
itself, is only noted, in every phase from the Trainer's setup on: the run stops before its next
batch, and its job is queued again.
In RUNS no number of these signals ends the process, whatever hangs, such as a disk; SIGQUIT and
SIGKILL do. A process that the user's code has forked, such as a pool's, is ended by SIGTERM;
loaders' workers ignore all of them, because the step needs its batches. A rank of a command gets
SIGTERM from Linux when the process that has started it dies (:func:`end_with_parent`). If other
ranks have died, too, its next exchange with them fails and ends it; nothing is saved then.

Before training has begun there is nothing to save. In a command a thread ends the process if the
start is not over 1.5 s after the signal, whatever it does then, such as to wait in a library
(:func:`watch`); a rank that another one has started has twice as long. Before rank zero ends
itself, it kills the ranks that it has started, since they would fail without it.

The first signal of a process says how it ends (in ENDS the newest). With several ranks the first
signal of each counts, and of these SLURM's before SIGTERM before Ctrl-C (agreement.py). A script's
own handlers (not Python's own of Ctrl-C) are called at every signal, in every phase. In RUNS the
last exception that they raise ends the run instead of ``Stopped``, when the step is saved (one that
comes when ``Stopped`` is on its way is dropped); at other times it is raised at once.

A command with one rank REPORTS when its test is done, or when Lightning has ended a run that was
stopped (``train`` in ``unbroken/run/main_job.py``). A signal then gives up report and summary. The
mirror then gets what is left of 8 s since the first signal, but no time at all where the run had
been stopped before its end and a second signal cuts its report. With several ranks it stays in RUNS
although training is over: torchrun signals the others as soon as one has ended, and rank zero must
not give up its report for that.

This file imports neither torch nor Lightning: a command sets its signals up before it imports them.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from enum import Enum, auto
from types import FrameType
from typing import Any, NamedTuple

from unbroken.stopping.ranks import RANK_ZERO_VARIABLE, is_child

# SIGHUP: the terminal was closed. SIGBREAK: Ctrl-Break on Windows. A platform has those of these
# that it knows.
NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK")
STOP_SIGNALS = tuple(getattr(signal, name) for name in NAMES if hasattr(signal, name))
# A process that is asked to stop while it starts has so long to end by itself. Then a thread ends
# it: inside a library Python runs no handler.
START_UP_PATIENCE_S = 1.5
# A run should end within 10 s after a signal. So many of them are for the save and the mirror: what
# the mirror lacks then stays missing, and a save that takes longer is told.
STOP_S = 8.0


class Stopped(SystemExit):
    """The run was asked to stop and has done so. Where nobody catches it, the process ends with its
    exit code.

    It is no ``Exception``, so that no ``except Exception`` swallows it.
    """

    def __init__(self, signum: int) -> None:
        # Lightning's exception, which a subclass inherits as well, takes no code since 2.7.
        SystemExit.__init__(self, 128 + signum)
        self.signum = signum
        self.exit_code = 128 + signum

    def __str__(self) -> str:
        return f"stopped by {signal.Signals(self.signum).name}"


class Phase(Enum):
    """What a signal does to the process at the moment: see the table above."""

    IMPORTS = auto()
    STARTS = auto()
    RUNS = auto()
    REPORTS = auto()
    ENDS = auto()


class State:
    """What this process was asked to do.

    It is global because a signal handler has no other place to note it.
    """

    # The first signal that was received: SIGINT or SIGTERM, or SLURM's by its own number.
    requested: int = 0
    # When it was received, on the clock of time.monotonic().
    requested_at: float | None = None
    phase = Phase.STARTS
    # Whether a thread ends the process where Python runs no handler.
    watched: bool = False
    # What a script's own handler has raised, such as an exit. It ends the run instead of Stopped,
    # as soon as the step is saved.
    raised: BaseException | None = None
    # The process that has started this one: its end gives it another parent.
    parent: int = 0
    clean_up: Callable[[], None] | None = None

    def __init__(self) -> None:
        # The process that handles the signals. One that is forked from it has copies of handlers.
        self.process = os.getpid()
        # The script's own handlers, by signal. They are called as well.
        self.scripts_handlers: dict[int, Any] = {}

    @property
    def start_is_over(self) -> bool:
        """Whether training or a test has begun."""
        return self.phase not in (Phase.IMPORTS, Phase.STARTS)


state = State()


def install() -> None:
    """Take over the signals in the main thread of a command.

    In the phase IMPORTS they end the process: an exception inside an import would show up as an
    ImportError. It lasts until :func:`imports_are_done`.
    """
    if threading.current_thread() is threading.main_thread():
        state.phase = Phase.IMPORTS
        state.process = os.getpid()
        for number in STOP_SIGNALS:
            # nohup wants no SIGHUP.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, _handle)
        state.parent = os.getppid()
        if "TORCHELASTIC_RUN_ID" in os.environ or is_child():
            # A rank would train on without its agent, or wait for rank zero, and nobody could stop
            # it.
            end_with_parent()
        rank_zero = os.environ.get(RANK_ZERO_VARIABLE)
        if sys.platform == "linux" and is_child() and rank_zero not in (None, str(state.parent)):
            # It has ended already, and nobody tells this process of it.
            os._exit(Stopped(signal.SIGTERM).exit_code)


class Asked(NamedTuple):
    """What signals have asked of a script."""

    # The first signal, as State.requested. 0: none.
    requested: int = 0
    # What the script's own handler has raised.
    raised: BaseException | None = None


class ScriptSignals:
    """The handlers of a script, notebook or test, which are replaced while a Trainer runs.

    A command has replaced its handlers for good (:func:`install`).
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}

    def begin(self, requeue_signal: int | None = None) -> None:
        """Replace the handlers, in the main thread and where no command has done so.

        ``requeue_signal``: SLURM's, at which the job is queued again. A command notes it, too.
        """
        if threading.current_thread() is not threading.main_thread() or self._handlers:
            return
        # A launcher may have forked this rank.
        state.process = os.getpid()
        for number in STOP_SIGNALS:
            handler = signal.getsignal(number)
            # None: a handler that was not set from Python.
            if handler not in (signal.SIG_IGN, _handle, None):
                self._handlers[number] = handler
                signal.signal(number, _handle)
                # Python's own handler of Ctrl-C only raises KeyboardInterrupt.
                if callable(handler) and handler is not signal.default_int_handler:
                    state.scripts_handlers[number] = handler
        if self._handlers:
            # A run before this one, in a notebook, may have ended in another phase.
            state.phase = Phase.STARTS
            state.parent = os.getppid()
        if requeue_signal is None:
            return
        # SIGHUP may be the one, and was taken over above.
        handler = self._handlers.get(requeue_signal, signal.getsignal(requeue_signal))
        if self._handlers and handler not in (signal.SIG_DFL, None):
            # As in a plain Trainer: a script that handles SLURM's signal itself queues itself.
            return
        _note_requeue(requeue_signal)
        if self._handlers:
            self._handlers[requeue_signal] = signal.SIG_DFL

    def end(self) -> Asked:
        """Let the script have its own handlers again; returns what it was asked until then.

        That is read when the handlers are back, so no signal is lost between the two. A command
        keeps the signals for good, and what it was asked: nothing is returned there.
        """
        if not self._handlers:
            return Asked()
        try:
            # SIGINT was taken first and is given back last: Python's own handler of it raises, also
            # between two of these lines.
            for number, handler in reversed(self._handlers.items()):
                signal.signal(number, handler)
        finally:
            asked = Asked(state.requested, state.raised)
            self._handlers = {}
            state.scripts_handlers = {}
            state.raised = None
            state.requested = 0
            state.requested_at = None
            state.phase = Phase.STARTS
        return asked


def end_with_parent() -> None:
    """On Linux, get SIGTERM when the parent dies, also by SIGKILL. Elsewhere this process runs to
    its end. It is called for the ranks of a command alone.
    """
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)


def watch(clean_up: Callable[[], None] | None = None) -> None:
    """In a command, until training begins: end the process soon after a signal, also inside a
    library.

    ``clean_up`` removes what the start has made. Where a pipe cannot wake a thread (Windows), the
    handler alone acts.
    """
    state.clean_up = clean_up
    is_ours = signal.getsignal(signal.SIGTERM) is _handle
    if state.watched or state.start_is_over or not is_ours or sys.platform == "win32":
        return
    state.watched = True
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    # A loader's worker must not write into this pipe.
    os.register_at_fork(after_in_child=_stop_watching)
    threading.Thread(target=_watch, args=(reading,), name="start-up-signals", daemon=True).start()


def imports_are_done() -> None:
    """From now on a signal is raised."""
    state.phase = Phase.STARTS


def note_from_now_on() -> None:
    """Only note a signal from now on. Called when training begins (after its sanity check), or a
    validation or test of its own.
    """
    state.phase = Phase.RUNS
    _stop_watching()


def raise_from_now_on() -> None:
    """What can be saved is saved: from now on a signal is raised when it comes."""
    state.phase = Phase.REPORTS


def command_is_done() -> None:
    """The command is done: from now on a signal ends the process, and is not raised."""
    state.phase = Phase.ENDS


def _note_requeue(number: int) -> None:
    """Note SLURM's signal like a stop, under its own number."""

    def note(received: int, _: FrameType | None) -> None:
        _keep_first(received)

    signal.signal(number, note)


def _keep_first(signum: int) -> bool:
    """Keep what the run is asked for, and since when; returns whether it is the first time.

    A later signal changes nothing, since the first is being done: the SIGTERM that a scheduler
    sends a while after SLURM's signal does not cancel the requeue.
    """
    if state.requested:
        return False
    state.requested_at = time.monotonic()
    state.requested = signum
    return True


def seconds_left() -> float:
    """How long something may still take when a run ends before its time."""
    if state.requested_at is None:
        # Another rank had the signal, or there was an error.
        return STOP_S
    return max(0.0, state.requested_at + STOP_S - time.monotonic())


def as_stop(number: int) -> int:
    """SIGINT or SIGTERM: what a received signal is handled as."""
    if number == signal.SIGINT or number == getattr(signal, "SIGBREAK", None):
        return signal.SIGINT
    return signal.SIGTERM


def _handle(number: int, frame: FrameType | None) -> None:
    if os.getpid() != state.process:
        _handle_in_a_fork(number)
        return
    signum = as_stop(number)
    is_first = _keep_first(signum)
    _call_the_scripts(number, frame)
    if not state.start_is_over and is_child() and _tell_rank_zero(signum):
        # Rank zero ends this process, and would be killed itself if this one ended first.
        return
    if state.phase in (Phase.IMPORTS, Phase.ENDS):
        os._exit(Stopped(signum).exit_code)
    if state.phase is Phase.STARTS:
        if not is_first:
            # It is ending already. Or SLURM's signal came first: then the run stops at its first
            # step, and its job is queued again.
            return
        _end_ranks()
    if state.phase in (Phase.STARTS, Phase.REPORTS):
        raise Stopped(as_stop(state.requested))
    if is_first and os.environ.get("LOCAL_RANK", "0") == "0":
        name = signal.Signals(number).name
        # Whether it is saved is told when it is: some runs save nothing.
        told = f"\n{name}: finishing what is under way, then stopping ...\n"
        # The stream may be closed, or have no file.
        with suppress(OSError, AttributeError, ValueError):
            # Not print(): a signal may interrupt it, and it cannot call itself.
            os.write(sys.stderr.fileno(), told.encode())


def _handle_in_a_fork(number: int) -> None:
    """Let a process that the user's code has forked, such as a pool's, do what it does without us
    at SIGTERM: ``terminate`` sends that. What a terminal sends to all processes is the run's.
    """
    data: Any = sys.modules.get("torch.utils.data")
    # A launcher sends SIGTERM to all processes, and the step needs its batches.
    is_of_a_loader = data is not None and data.get_worker_info() is not None
    if number == signal.SIGTERM and not is_of_a_loader:
        signal.signal(number, state.scripts_handlers.get(number, signal.SIG_DFL))
        os.kill(os.getpid(), number)


def _call_the_scripts(number: int, frame: FrameType | None) -> None:
    """Call the script's own handler. What it raises, such as an exit, waits for the save."""
    handler = state.scripts_handlers.get(number)
    if handler is None:
        return
    try:
        handler(number, frame)
    except BaseException as error:
        if state.phase is Phase.RUNS:
            state.raised = error
            return
        if state.phase is Phase.STARTS:
            _end_ranks()
        raise


def _watch(reading: int) -> None:
    while not state.start_is_over:
        number = os.read(reading, 1)[0]
        # After SLURM's signal the run stops at its first step.
        if number not in STOP_SIGNALS or state.start_is_over or is_requeue(state.requested):
            continue
        patience = START_UP_PATIENCE_S
        if is_child():
            _tell_rank_zero(number)
            # Rank zero is the first to act.
            patience *= 2
        time.sleep(patience)
        if not state.start_is_over:
            _end_ranks()
            if state.clean_up is not None:
                state.clean_up()
            os._exit(Stopped(as_stop(number)).exit_code)


def _stop_watching() -> None:
    if state.watched:
        # In another thread than the main one it cannot be done, and need not.
        with suppress(ValueError):
            signal.set_wakeup_fd(-1)


def is_requeue(signum: int) -> bool:
    """Whether what a run is asked for, as :attr:`State.requested` has it, is to be queued again."""
    return signum not in (0, signal.SIGINT, signal.SIGTERM)


def _tell_rank_zero(signum: int) -> bool:
    """Pass a signal on to rank zero; returns whether it is still there."""
    if os.getppid() != state.parent:
        return False
    with suppress(ProcessLookupError):
        os.kill(state.parent, signum)
        return True
    return False


def _end_ranks() -> None:
    """Kill the ranks that Lightning has started from this process."""
    if "lightning.pytorch" in sys.modules:
        from unbroken.lightning_internals import release_child_processes

        for rank in release_child_processes():
            rank.kill()
