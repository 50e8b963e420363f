"""How a command ends: with its exit code, whatever is still at work in a library."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from project.command_line import start as entry
from project.engine import signals

ROOT = Path(__file__).parents[1]
# A command whose daemon threads are inside the C++ code of a library when it ends
BUSY_IN_A_LIBRARY = """
import sys, threading, time
from project.command_line.start import prepare_process, run
prepare_process("__main__")
import torch

def main(argv):
    sizes = torch.randn(300, 300)
    def work():
        while True:
            sizes @ sizes
            torch.randn(10).sort()
    for _ in range(4):
        threading.Thread(target=work, daemon=True).start()
    time.sleep(0.3)
    print("done", end="")
    return 3

run(main)
"""


def run_code(code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)


def test_a_thread_inside_a_library_does_not_make_the_end_a_crash() -> None:
    done = run_code(BUSY_IN_A_LIBRARY)
    assert (done.returncode, done.stdout, done.stderr) == (3, "done", "")


def test_exit_handlers_of_libraries_run_before_the_end() -> None:
    done = run_code("""
        from project.command_line.start import prepare_process, run
        prepare_process("__main__")
        import atexit
        atexit.register(lambda: print("handled"))
        run(lambda argv: print("worked"))
    """)
    assert (done.returncode, done.stdout) == (0, "worked\nhandled\n")


def test_workers_are_ended_with_the_command() -> None:
    done = run_code("""
        import multiprocessing, time
        from project.command_line.start import prepare_process, run
        prepare_process("__main__")

        def work(ready):
            ready.set()
            time.sleep(600)

        def main(argv):
            context = multiprocessing.get_context("fork")
            ready = context.Event()
            worker = context.Process(target=work, args=(ready,), daemon=True)
            worker.start()
            ready.wait()
            print(worker.pid)

        run(main)
    """)
    assert done.returncode == 0
    assert not Path(f"/proc/{done.stdout.strip()}").exists()


def test_a_signal_after_the_command_is_done_ends_the_process_with_its_code() -> None:
    code = """
        import atexit, time
        from project.command_line.start import prepare_process, run
        prepare_process("__main__")
        atexit.register(lambda: (print("waits", flush=True), time.sleep(60)))
        run(lambda argv: 0)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "waits\n"
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert process.wait(30) == 143
    assert time.monotonic() - began < 10
    assert process.communicate()[1] == ""


def test_a_signal_while_an_error_is_printed_is_no_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert entry.report(signals.Stopped(signal.SIGTERM)) == 143
    assert capsys.readouterr().err == ""
