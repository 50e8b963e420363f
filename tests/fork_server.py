"""Commands as real processes without their start: a process that has imported torch forks one child per command.

A fresh ``python -m project.fit`` imports for four to six seconds; a fork begins at once. It is a process like any
other: with its own pid, session, folder, environment and output, killed by any signal, with a real exit code.
:func:`tests.commands.popen` chooses. Where starting is what is tested, it starts a fresh interpreter.

The server is started by the first test that needs it, one for each pytest process. It has no threads: a forked child
would have none of them, and torch's would hang. It ends, and its children with it, when its end of a socket closes.
"""

from __future__ import annotations

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
from pathlib import Path
from typing import Any

import project

ROOT = Path(__file__).parents[1]
PR_SET_PDEATHSIG = 1  # prctl(2): a signal for this process when its parent ends
# What Python and the libraries read as they start. A command that needs another value needs a fresh interpreter.
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


# On the tests' side


class Forked:
    """A child of the server. The part of :class:`subprocess.Popen` that tests use.

    Args:
        words: ``[python, "-m", module, argument, ...]`` or ``[python, "-c", code, argument, ...]``.
        stdout: Open file descriptor for its output.
        stderr: The same for its errors.
        cwd: Its working folder; this process' own when None.
        env: Its environment; this process' own when None.
    """

    def __init__(
        self,
        words: list[str],
        stdout: int,
        stderr: int,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
    ) -> None:
        self.args = words
        self.returncode: int | None = None
        self._reports, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(_server()[0], [b"+"], [theirs.fileno(), stdout, stderr])
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


@functools.cache
def _server() -> tuple[socket.socket, dict[str, str], Any]:
    """The server's socket, the environment that it was started with, and its process."""
    ours, theirs = socket.socketpair()
    started_with = dict(os.environ)
    # numpy's threads would start as it is imported
    environment = {**started_with, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
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
    return ours, started_with, process


def can_fork(words: list[str], env: dict[str, str] | None = None) -> bool:
    """Whether a fork of the server is what a fresh interpreter would be: ``-m`` one of our modules, or ``-c CODE``."""
    if not hasattr(os, "pidfd_open"):  # Linux only
        return False
    ours = words[1] == "-c" or (
        words[1] == "-m" and words[2].partition(".")[0] in (project.__name__, "tests")
    )
    if words[0] != sys.executable or not ours:
        return False
    return env is None or _read_at_start(env) == _read_at_start(_server()[1])


def _read_at_start(env: dict[str, str]) -> dict[str, str]:
    # the search path is set in the child; pytest changes its own variable with every test
    return {k: v for k, v in env.items() if k.startswith(READ_AT_START) and k != "PYTHONPATH"}


# On the server's side


def serve(control: socket.socket) -> dict[str, Any]:
    """Fork a child for each request; returns in the child, with what it should run."""
    server, libc = os.getpid(), ctypes.CDLL(None)
    alive: dict[
        int, tuple[int, socket.socket]
    ] = {}  # a child's pidfd → its pid, and where its end is told
    while True:
        for ready in select.select([control.fileno(), *alive], [], [])[0]:
            if ready != control.fileno():
                reap(ready, *alive.pop(ready))
                continue
            message, descriptors, _, _ = socket.recv_fds(control, 1, 3)
            if not message:  # pytest has ended
                for pid, _ in alive.values():
                    kill_session(pid)
                os._exit(0)
            reports = socket.socket(fileno=descriptors[0])
            with reports.makefile("rb") as lines:
                request: dict[str, Any] = json.loads(lines.readline())
            pid = os.fork()
            if not pid:
                libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() != server:
                    os._exit(1)
                leave(
                    [control, reports, *(theirs for _, theirs in alive.values())],
                    list(alive),
                    *descriptors[1:],
                )
                return request
            for descriptor in descriptors[1:]:
                os.close(descriptor)
            reports.sendall(f"{pid}\n".encode())
            alive[os.pidfd_open(pid)] = pid, reports


def leave(sockets: list[socket.socket], pidfds: list[int], stdout: int, stderr: int) -> None:
    """In a child: close the server's files, take over its own output, in a session of its own."""
    os.setsid()
    for theirs in sockets:
        theirs.close()
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    for number in (stdout, stderr, *pidfds):
        os.close(number)


def reap(pidfd: int, pid: int, reports: socket.socket) -> None:
    """Tell how a child has ended."""
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(pidfd)
    with reports, contextlib.suppress(BrokenPipeError):  # the test does not wait for it
        reports.sendall(f"{code}\n".encode())


def kill_session(pid: int) -> None:
    """SIGKILL to a child and what it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def become(words: list[str], cwd: str, env: dict[str, str]) -> None:
    """Go on as ``python -m module argument ...``, or ``-c code argument ...``, in a folder, with an environment."""
    import torch

    from project import threads

    option, module = words[1:3]
    ours = [str(ROOT), *sys.path[1:]]
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    searched = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [cwd, *searched, *(path for path in dict.fromkeys(ours) if path != str(ROOT))]
    importlib.invalidate_caches()
    sys.argv, sys.orig_argv = [option, *words[3:]], words
    torch.set_num_threads(threads.configure())  # torch has read OMP_NUM_THREADS already
    if option == "-c":
        exec(module, {"__name__": "__main__"})
    else:
        sys.modules.pop(module, None)  # it runs as __main__
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def main() -> None:
    """Import, then serve; in a child, run its command."""
    from project import threads

    threads.configure()  # before torch is imported
    gc.disable()
    import project.fit  # noqa: F401 - and with it torch and Lightning

    gc.freeze()
    gc.enable()
    running = os.listdir("/proc/self/task")
    assert len(running) == 1, (
        f"imports have started {len(running) - 1} threads, which a fork would lack"
    )
    request = serve(socket.socket(fileno=int(sys.argv[1])))
    become(**request)  # ends as the interpreter does: exit handlers, traceback, exit code


if __name__ == "__main__":
    main()
