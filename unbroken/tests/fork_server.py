"""Commands as real processes without their start: a server that has imported torch forks them.

A fresh ``python -m numerals.fit`` imports for four to six seconds. A fork begins at once. It is a
process like any other: it has its own pid, session, folder, environment, output and exit code, and
any signal kills it. :func:`tests.commands.popen` chooses. Where the start is what is tested, and on
systems that cannot fork, it starts a fresh interpreter.

The first test that needs the server starts it, one for each pytest process (and one more for
:mod:`tests.test_platforms`). The server has no threads: a forked child would lack them, and torch
would wait for them. Where imports have started some, each command is a fresh interpreter. The
server ends, and its children with it, when its end of a socket closes.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numerals

ROOT = Path(__file__).parents[2]
SEARCHED = os.pathsep.join(str(ROOT / each) for each in ("unbroken/tests", "unbroken", ""))
# What the server says when it has imported.
CAN_FORK, CANNOT_FORK = b"+", b"-"
# An option of prctl(2): a process gets a signal when its parent ends.
PR_SET_PDEATHSIG = 1
# Variables that Python and the libraries read as they start begin with these words. A command that
# needs another value of them needs a fresh interpreter.
READ_AT_START = (
    "PYTHON",
    "GOMP_",
    "OMP_WAIT",
    "MKL_",
    "MALLOC_",
    "LD_",
    "TMPDIR",
    "CUDA_",
    "TORCH_",
)
# The environment before any test. A test that runs a command in this process may change it.
OF_THE_SESSION = dict(os.environ)


# This part runs in the process of pytest.


class Forked:
    """A child of the server. The part of :class:`subprocess.Popen` that tests use.

    Args:
        words: ``[python, "-m", module, argument, ...]`` or ``[python, "-c", code, argument, ...]``.
        stdout: Open file descriptor for its output.
        stderr: The same for its errors.
        cwd: Its working folder; this process' own when None.
        env: Its environment; this process' own when None.
        start_up: A folder with a ``sitecustomize.py``, which its server runs as it starts.
    """

    def __init__(
        self,
        words: list[str],
        stdout: int,
        stderr: int,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
        start_up: Path | None = None,
    ) -> None:
        self.args = words
        self.returncode: int | None = None
        self._reports, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(_server(start_up).control, [b"+"], [theirs.fileno(), stdout, stderr])
        request = {
            "words": words,
            "cwd": str(cwd or os.getcwd()),
            "env": dict(os.environ if env is None else env),
        }
        self._reports.sendall(json.dumps(request).encode() + b"\n")
        self._lines = self._reports.makefile("rb")
        self.pid = self._next()

    def poll(self) -> int | None:
        """The exit code, negative for a signal, or None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended; returns the exit code."""
        if self.returncode is None:
            if not select.select([self._reports], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = self._next()
            self._lines.close()
            self._reports.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _next(self) -> int:
        line = self._lines.readline()
        if not line:
            raise RuntimeError("the fork server of the tests has died")
        return int(line)


class Server(NamedTuple):
    """A server that has been started.

    Attributes:
        control: Takes requests.
        env: The environment that it was started with.
        process: The server's.
        forks: Whether it can fork.
    """

    control: socket.socket
    env: dict[str, str]
    process: subprocess.Popen[bytes]
    forks: bool


@functools.cache
def _server(start_up: Path | None) -> Server:
    """The server, when it has imported. There is one for each folder with code that runs as Python
    starts.
    """
    ours, theirs = socket.socketpair()
    started_with = OF_THE_SESSION
    # With more than one thread, numpy would start them as it is imported.
    searched = SEARCHED if start_up is None else f"{start_up}{os.pathsep}{SEARCHED}"
    environment = {**started_with, "PYTHONPATH": searched, "OPENBLAS_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "tests.fork_server", str(theirs.fileno())]
    with theirs:
        process = subprocess.Popen(
            words,
            cwd=ROOT,
            env=environment,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
    return Server(ours, started_with, process, forks=ours.recv(1) == CAN_FORK)


def can_fork(
    words: list[str], env: dict[str, str] | None = None, start_up: Path | None = None
) -> bool:
    """Whether a fork of the server does the same as a fresh interpreter with these words.

    It does for ``-m`` with one of our modules, and for ``-c`` with any code.
    """
    # The server needs what only Linux has.
    if sys.platform != "linux":
        return False
    if words[0] != sys.executable or not _runs_our_code(words):
        return False
    server = _server(start_up)
    return server.forks and (env is None or _read_at_start(env) == _read_at_start(server.env))


def _runs_our_code(words: list[str]) -> bool:
    option, code = words[1:3]
    if option == "-m":
        return code.partition(".")[0] in (numerals.__name__, "tests")
    return option == "-c"


def _read_at_start(env: dict[str, str]) -> dict[str, str]:
    found = {name: value for name, value in env.items() if name.startswith(READ_AT_START)}
    # The child sets its search path itself. Every test has another value of this variable.
    found.pop("PYTHONPATH", None)
    return found


# This part runs in the server and its children.


class Child(NamedTuple):
    """A child of the server."""

    pid: int
    # The socket on which pytest learns of its end.
    reports: socket.socket


def serve(control: socket.socket) -> dict[str, Any]:
    """Fork a child for each request. Returns in the child, with what the child should run."""
    # A pidfd becomes readable when its process ends.
    alive: dict[int, Child] = {}
    while True:
        readable, _, _ = select.select([control.fileno(), *alive], [], [])
        for ready in readable:
            if ready != control.fileno():
                reap(ready, alive.pop(ready))
                continue
            message, descriptors, _, _ = socket.recv_fds(control, 1, 3)
            pytest_has_ended = not message
            if pytest_has_ended:
                for child in alive.values():
                    kill_session(child.pid)
                os._exit(0)
            request = fork_child(control, descriptors, alive)
            if request is not None:
                return request


def fork_child(
    control: socket.socket, descriptors: list[int], alive: dict[int, Child]
) -> dict[str, Any] | None:
    """Fork one child. Returns its request in the child, and None in the server.

    Args:
        control: The socket on which requests come.
        descriptors: What came with the request: the socket for reports, stdout, stderr.
        alive: The children by their pidfd. The server adds the new one.
    """
    server = os.getpid()
    # It is loaded before the fork, so that the child has nothing to load.
    libc = ctypes.CDLL(None)
    reports = socket.socket(fileno=descriptors[0])
    with reports.makefile("rb") as lines:
        request: dict[str, Any] = json.loads(lines.readline())
    pid = os.fork()
    if pid == 0:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        server_has_ended = os.getppid() != server
        if server_has_ended:
            os._exit(1)
        sockets = [control, reports, *(child.reports for child in alive.values())]
        leave(sockets, list(alive), *descriptors[1:])
        return request
    for descriptor in descriptors[1:]:
        os.close(descriptor)
    reports.sendall(f"{pid}\n".encode())
    alive[os.pidfd_open(pid)] = Child(pid, reports)
    return None


def leave(sockets: list[socket.socket], pidfds: list[int], stdout: int, stderr: int) -> None:
    """In a child: begin a session, close the server's files, take over the child's own output."""
    os.setsid()
    for theirs in sockets:
        theirs.close()
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    for number in (stdout, stderr, *pidfds):
        os.close(number)


def reap(pidfd: int, child: Child) -> None:
    """Report to pytest how a child has ended."""
    _, status = os.waitpid(child.pid, 0)
    code = os.waitstatus_to_exitcode(status)
    os.close(pidfd)
    # The pipe is broken where the test does not wait for the child.
    with child.reports, contextlib.suppress(BrokenPipeError):
        child.reports.sendall(f"{code}\n".encode())


def kill_session(pid: int) -> None:
    """SIGKILL to a child and what it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def become(words: list[str], cwd: str, env: dict[str, str]) -> None:
    """Go on as ``python -m module argument ...``, or as ``python -c code argument ...``.

    Args:
        words: The command.
        cwd: Its working folder.
        env: Its environment.
    """
    import torch
    from unbroken.machine import threads

    option, module = words[1:3]
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    searched = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    # The server's own entries are the clone, which the command may not have, and what every Python
    # on this machine searches.
    of_every_python = [path for path in sys.path[1:] if path != str(ROOT)]
    sys.path[:] = [cwd, *searched, *of_every_python]
    importlib.invalidate_caches()
    sys.argv = [option, *words[3:]]
    sys.orig_argv = words
    # torch has read OMP_NUM_THREADS already.
    torch.set_num_threads(threads.configure())
    if option == "-c":
        exec(module, {"__name__": "__main__"})
    else:
        # The module runs as __main__, and may have been imported by its own name before.
        sys.modules.pop(module, None)
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def code_of(request: dict[str, Any]) -> int:
    """Run a child's command; returns its exit code. Ctrl-C is left to the interpreter, which ends
    itself by that signal.
    """
    try:
        become(**request)
    except SystemExit as asked:
        if not isinstance(asked.code, int | None):
            print(asked.code, file=sys.stderr)
            return 1
        return asked.code or 0
    except KeyboardInterrupt:
        raise
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def end(code: int) -> NoReturn:
    """End a child as an interpreter ends: threads, exit handlers, output, exit code.

    An interpreter also lets go of each object. With those of torch and Lightning this takes a
    second.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()
    os._exit(code & 0xFF)


def has_threads() -> bool:
    """Whether imports have started threads, which a fork would lack. Some end by themselves."""
    end = time.monotonic() + 2
    while time.monotonic() < end:
        if len(os.listdir("/proc/self/task")) == 1:
            return False
        time.sleep(0.02)
    return True


def main() -> None:
    """Import, then serve. In a child, run its command."""
    from unbroken.cli import start
    from unbroken.machine import threads

    # It sets variables that torch reads as it is imported.
    threads.configure()
    # As in a fresh interpreter, the exit handlers of libraries come before this one.
    start.end_after_all_others()
    # The garbage collector would visit the many objects that an import makes again and again.
    gc.disable()
    # With fit come torch, Lightning and most of the project.
    import numerals.fit  # noqa: F401

    gc.freeze()
    gc.enable()
    ours = socket.socket(fileno=int(sys.argv[1]))
    if has_threads():
        ours.sendall(CANNOT_FORK)
        return
    ours.sendall(CAN_FORK)
    request = serve(ours)
    end(code_of(request))


if __name__ == "__main__":
    main()
