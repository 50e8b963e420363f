"""How every command starts and ends: threads before torch, signals, errors as one line, exit codes.

Exit codes: 0 done, 2 bad input, 130 interrupted (Ctrl-C), 143 terminated (SIGTERM), 1 anything
else.
"""

import atexit
import errno
import gc
import logging
import multiprocessing
import os
import re
import select
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from unbroken.cli.output import open_streams, told_of_lost
from unbroken.cli.shown_warnings import show_in_one_line
from unbroken.cli.words import as_typed, settled
from unbroken.errors import NotSaved, UserError, without_control_characters
from unbroken.machine import threads
from unbroken.machine.waiting import waiting
from unbroken.stopping import signals
from unbroken.stopping.ranks import ignore_rank_without_launcher, settle_launcher

# What the user can repair, and how. First: no space, no quota, no permission, read-only.
FULL_OR_CLOSED = [errno.ENOSPC, errno.EACCES, errno.EPERM, errno.EROFS]
if sys.platform != "win32":
    FULL_OR_CLOSED.append(errno.EDQUOT)
IMPOSSIBLE_NAME = [errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.EEXIST]
ADVICE = dict.fromkeys(FULL_OR_CLOSED, "Free space or choose a folder you may write to.")
ADVICE |= dict.fromkeys(IMPOSSIBLE_NAME, "Name another file.")
ADVICE[errno.EIO] = "The disk or the network drive fails."

# What torch on the CPU and the loader of libraries say where memory is used up
NO_MEMORY = "t allocate memory|failed to map segment|bad_alloc"
# What torch says where a process that loads data was killed
DEAD_WORKER = "DataLoader worker (pid"
# What gloo says where the process of another rank has ended
ENDED_RANK = r"gloo/.*Connection (closed|reset) by peer"
# The module that waits for what such processes send
LOADER = "torch.utils.data.dataloader"
# Seconds that a worker process has to end itself when the command has ended
CHILD_PATIENCE = 2.0
# Characters of an error. A value of a thousand characters is not shown whole.
LONGEST = 800


def end_after_all_others() -> None:
    """Register the exit handler of commands, once. It comes last if it is registered first."""
    if not End.is_registered:
        End.is_registered = True
        atexit.register(_end_process)


class End:
    """How this process ends. It is global because an exit handler has no other place to find the
    code.
    """

    code: int | None = None  # None until the command has ended
    is_registered = False


def prepare_process(name: str) -> None:
    """Set up the process of a command.

    Call it above the command's imports: torch reads its thread settings only once. The garbage
    collector stays off until :func:`run`: it would visit the 650,000 objects that torch and
    Lightning make again and again while they are imported (4.3 s against 2.8 s; 2 cores, median of
    3).

    Args:
        name: The module's ``__name__``. Nothing happens unless it is ``"__main__"``, or when the
            process is set up already.
    """
    is_prepared = signals.state.phase in (signals.Phase.IMPORTS, signals.Phase.ENDS)
    if name != "__main__" or is_prepared:
        return
    gc.disable()
    end_after_all_others()
    open_streams()
    sys.excepthook = _report_and_end
    # Each of the next lines reads them.
    settle_launcher()
    signals.install()
    # Pictures go to files. The backend of a notebook is not installed in every environment.
    os.environ.pop("MPLBACKEND", None)
    ignore_rank_without_launcher()
    threads.configure()
    waiting.start()


def run(main: Callable[[list[str]], int | None]) -> None:
    """Run a command's ``main(argv)`` and end the process with the matching exit code."""
    prepare_process("__main__")
    signals.imports_are_done()
    gc.freeze()
    gc.enable()
    # PYTHONWARNINGS wins. Otherwise users see no deprecation notes of other packages.
    if not sys.warnoptions:
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
    show_in_one_line()
    try:
        code = exit_code(main, sys.argv[1:])
        signals.command_is_done()
    except signals.Stopped as stop:
        # It came while an error was printed, or as the end was told.
        signals.command_is_done()
        code = stop.exit_code
    End.code = _flush(code)
    sys.exit(End.code)


def exit_code(main: Callable[[list[str]], int | None], argv: list[str]) -> int:
    """Exit code of ``main(argv)``. Prints every error on stderr."""
    try:
        return exit_code_or_error(main, argv)
    except Exception as error:
        return report(error)


def exit_code_or_error(main: Callable[[list[str]], int | None], argv: list[str]) -> int:
    """Exit code of ``main(argv)``, as a notebook or a script gets it.

    An error that the user can mend is printed in one line. Any other is raised: its traceback is
    what somebody looks for there.
    """
    try:
        return main(settled(argv)) or 0
    except signals.Stopped as stop:
        return stop.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # `... | head` is no error. Somebody else's pipe, such as a dataset's, is one.
        if _nobody_reads_stdout():
            return 0
        raise
    except SystemExit as end:
        return _code_of(end)
    except Exception as error:
        if _line_of(error) is None:
            raise
        return report(error)


def _code_of(end: SystemExit) -> int:
    """The exit code that ``sys.exit`` was given. A text is printed, and the code is 1."""
    # Lightning turns a Ctrl-C that reaches it into sys.exit(1).
    if signals.state.requested:
        return signals.Stopped(signals.as_stop(signals.state.requested)).exit_code
    if isinstance(end.code, str):
        with suppress(OSError):
            print(end.code, file=sys.stderr, flush=True)
    return end.code if isinstance(end.code, int) else 1


def _nobody_reads_stdout() -> bool:
    """Whether what this process prints goes into a pipe whose reader has ended."""
    try:
        sys.stdout.flush()
    except OSError:
        return True
    if sys.platform == "win32":
        return False
    watch = select.poll()
    try:
        watch.register(sys.stdout.fileno(), 0)
    except OSError:
        # It is no stream of the system, as in a notebook.
        return False
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in watch.poll(0))


def report(error: BaseException) -> int:
    """Print an error on stderr, as one readable line if the user can repair it; returns the exit
    code.
    """
    try:
        return _tell(error)
    except RuntimeError as later:
        # Torch's signal handler raises it where a worker has died, also while an error is told.
        return _tell(later)


def _tell(error: BaseException) -> int:
    if isinstance(error, signals.Stopped):
        return error.exit_code
    line = _line_of(error)
    if line is None:
        with suppress(OSError):
            # It may quote a file of somebody else.
            told = without_control_characters("".join(traceback.format_exception(error)))
            print(told, end="", file=sys.stderr, flush=True)
        return 1
    _print_error(line)
    return 1 if _what_the_user_can_do(error) is None else 2


def _line_of(error: BaseException) -> str | None:
    """What is printed of an error in one line; None for one that has its traceback printed."""
    if isinstance(error, RuntimeError) and re.search(ENDED_RANK, str(error)):
        return (
            "another process of this run has ended, and says why unless it was killed."
            " This one ends, too."
        )
    if isinstance(error, NotSaved):
        return str(error)
    return _what_the_user_can_do(error)


def _print_error(message: str) -> None:
    """Print an error in one line on stderr, which may be a file on the same full disk."""
    line = without_control_characters(" ".join(as_typed(message).split()))
    if len(line) > LONGEST:
        line = f"{line[:LONGEST]} ..."
    with suppress(OSError):
        print(f"error: {line}", file=sys.stderr, flush=True)


def _what_the_user_can_do(error: BaseException) -> str | None:
    """The message of an error that the user can repair; None for any other."""
    if isinstance(error, UserError):
        # Where a process that loads data has raised it, torch puts that one's traceback before it.
        told = re.search(
            r"^Caught UserError in DataLoader.*\bUserError: (.+)", str(error), re.DOTALL
        )
        return told[1] if told else str(error)
    if isinstance(error, OSError) and error.errno in ADVICE:
        return f"{error.filename or 'a file'}: {error.strerror}. {ADVICE[error.errno]}"
    if isinstance(error, MemoryError) or re.search(NO_MEMORY, str(error)):
        return f"not enough memory; a smaller --data.batch_size or network takes less. {error}"
    if _is_of_a_dead_worker(error):
        reason = str(error) or type(error).__name__
        return (
            f"a process that loads data has died ({reason}). Often the machine's memory was used"
            " up: use fewer --data.num_workers. --ckpt_path auto goes on with the run."
        )
    return None


def _is_of_a_dead_worker(error: BaseException) -> bool:
    """Whether an error says that a process that loads data was killed.

    Torch says so, unless the process died while it was sending a batch.
    """
    if isinstance(error, RuntimeError):
        return DEAD_WORKER in str(error)
    if not isinstance(error, (EOFError, ConnectionError)):
        return False
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_globals.get("__name__") == LOADER for frame, _ in frames)


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import a library inside, without the garbage collector: see :func:`prepare_process`."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _report_and_end(_: object, error: BaseException, __: object) -> None:
    """Report an error outside of :func:`run`, such as too little memory for an import."""
    os._exit(report(error))


def _flush(code: int) -> int:
    """Write out what was printed; returns the exit code, which changes where that fails."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            if not isinstance(error, BrokenPipeError):  # `... | head` is no error
                code = code or report(error)
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return told_of_lost(code)


def _end_process() -> None:
    """The last exit handler: end the process here, so that no thread is stopped inside a library.

    Python would go on and stop each thread that is still at work as soon as it asks for the
    interpreter. A thread inside matplotlib's, W&B's or torch's C++ code cannot be stopped so: the
    process aborts (SIGABRT, exit code -6) or crashes. Before this handler Python has waited for
    all threads that are no daemons, and the handlers of libraries have run.
    """
    if End.code is None:  # not a command, or one whose error was reported elsewhere
        return
    # Their own handler comes later than this one in a process that was forked.
    for child in multiprocessing.active_children():
        if child.daemon:
            child.terminate()
            child.join(CHILD_PATIENCE)
            child.kill()
    logging.shutdown()
    code = _flush(End.code)
    os._exit(code)
