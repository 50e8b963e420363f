"""Runs a function in a process of its own, whose output goes into a file."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch


class Ended(NamedTuple):
    """How a process has ended."""

    # Its exit code, negative for a signal; None: it did not end in time.
    code: int | None
    output: str
    seconds: float


def can_fork() -> bool:
    """Whether a process of this one's memory can be made and can train: not on Windows, and not
    once this one has used a GPU. Nor once autograd has started a thread, for it refuses to work in
    a fork from then on: it does so where there is a GPU in the first backward pass, also in one on
    the CPU, and without one in a backward pass of fake tensors, such as an export's.
    """
    is_possible = hasattr(os, "fork") and not torch.cuda.is_initialized()
    return is_possible and _a_fork_can_train()


def _a_fork_can_train() -> bool:
    """Try a backward pass in a fork."""
    pid = _fork()
    if pid == 0:
        code = 1
        try:
            torch.ones(1, requires_grad=True).backward()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    return status == 0


def run_apart(function: Callable[[], int], output: Path, patience: float) -> Ended:
    """Call a function in a new process, and wait for it.

    Args:
        function: Returns the exit code. Where this process cannot fork, it must be picklable.
        output: The file for what the process prints.
        patience: Seconds after which the process is killed.

    Raises:
        ValueError: The process cannot be a fork, and the function cannot be sent to it.
    """
    began = time.monotonic()
    code = _forked(function, output, patience) if can_fork() else _sent(function, output, patience)
    text = output.read_text(encoding="utf-8", errors="replace")
    return Ended(code, text, time.monotonic() - began)


def become(words: list[str], variables: dict[str, str]) -> int:
    """Go on as a command, in a fresh interpreter, with further variables of the environment.

    For :func:`run_apart`: a fork gets all cores back, which a command that is started in another
    way would not.
    """
    environment = {**os.environ, **variables}
    if sys.platform != "win32":
        os.execve(words[0], words, environment)
    return subprocess.call(words, env=environment)


def _forked(function: Callable[[], int], output: Path, patience: float) -> int | None:
    pid = _fork()
    if pid == 0:
        code = 1
        try:
            os.setsid()
            code = _call(function, output)
        finally:
            # No exit handler of the parent's runs in the child.
            os._exit(code)
    try:
        return _wait(pid, patience)
    finally:
        # What the process has started ends with it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


def _fork() -> int:
    """``os.fork``: 0 in the child, its number in the parent."""
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # Python 3.12 warns of threads, which a fork lacks. The child starts its own.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _wait(pid: int, patience: float) -> int | None:
    end = time.monotonic() + patience
    has_ended = False
    try:
        while time.monotonic() < end:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                has_ended = True
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        return None
    finally:
        if not has_ended:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _call(function: Callable[[], int], output: Path) -> int:
    with open(output, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    # Under pytest they are files of the parent's.
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - the process's own
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    try:
        return function()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _sent(function: Callable[[], int], output: Path, patience: float) -> int | None:
    try:
        pickle.dumps(function)
    except Exception as error:  # pickle, and what it asks, raise errors of many kinds
        raise ValueError(
            "here each run is a fresh process, since this one cannot fork (Windows, or it has"
            " trained where there is a GPU, or traced a backward pass): give functions that are"
            f" defined at the top of a file, not lambdas or local ones ({error})."
        ) from None
    process = multiprocessing.get_context("spawn").Process(
        target=_call_and_end, args=(function, output)
    )
    process.start()
    process.join(patience)
    if process.exitcode is None:
        process.kill()
        process.join()
        return None
    return process.exitcode


def _call_and_end(function: Callable[[], int], output: Path) -> None:
    if hasattr(os, "setsid"):
        os.setsid()
    os._exit(_call(function, output))
