"""How a command ends: with its exit code, whatever is still at work in a library.

``END_SIGNALS=60 python -m pytest -m nightly tests/test_end_of_process.py`` sends 60 signals of each
kind after the last epoch; without the variable it is eight. ``END_SEED`` chooses other moments.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path

import pytest
from unbroken.cli import start as entry
from unbroken.stopping import signals

from tests.commands import (
    SMALL,
    Process,
    checkpoint,
    command,
    kill_group,
    run,
    start,
    summary,
    wait_for,
)

ROOT = Path(__file__).parents[2]
# A command whose daemon threads are inside the C++ code of a library when it ends
BUSY_IN_A_LIBRARY = """
import sys, threading, time
from unbroken.cli.start import prepare_process, run
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
        from unbroken.cli.start import prepare_process, run
        prepare_process("__main__")
        import atexit
        atexit.register(lambda: print("handled"))
        run(lambda argv: print("worked"))
    """)
    assert (done.returncode, done.stdout) == (0, "worked\nhandled\n")


def test_workers_are_ended_with_the_command() -> None:
    done = run_code("""
        import multiprocessing, time
        from unbroken.cli.start import prepare_process, run
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
        from unbroken.cli.start import prepare_process, run
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
    # By then it sleeps. Python would not hear a signal in the moment before it does.
    time.sleep(0.5)
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


# This line is printed after the last epoch's validation.
LAST_EPOCH = "val/loss"
RUN = Path("checkpoints/r")


def fit_until_last_epoch(flags: list[str], log: Path, fresh: bool) -> Process:
    """Start a run of one epoch; returns its process as the epoch's line is printed."""
    shutil.rmtree("checkpoints", ignore_errors=True)
    log.write_bytes(b"")
    process = start(command("fit", *flags), log, fresh=fresh)
    assert wait_for(LAST_EPOCH, log, process), log.read_text()
    return process


def what_is_lost(code: int) -> str:
    """What is missing or wrong in a run that ended so; empty where all is well."""
    if code:
        weights = checkpoint(RUN / "last.ckpt")["state_dict"]
        if not weights:
            return "no weights in last.ckpt"
        # It says that the run is finished, or goes on.
        again = run("fit", "--run_name", "r", "--ckpt_path", "auto")
        if again.returncode:
            return f"auto ended with {again.returncode}: {again.stderr[-500:]}"
    facts = summary(RUN)
    if not facts["finished"] or facts["steps"] != 10 or "test/loss" not in facts:
        return f"summary.json: {facts}"
    if list(Path().rglob("*.part")):
        return "half a file is left"
    return ""


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("wandb", ["offline", "disabled"])
@pytest.mark.parametrize("report", ["true", "false"])
def test_a_signal_after_the_last_epoch_ends_with_its_code_or_comes_too_late(
    report: str, wandb: str, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", wandb)
    seed = os.environ.get("END_SEED", "0")
    chance = random.Random(f"{report}{wandb}{seed}")
    log = workplace / "log.txt"
    flags = [*SMALL, "--run_name", "r", "--max_epochs", "1", "--data.train_samples", "640"]
    flags += ["--report", report]
    process = fit_until_last_epoch(flags, log, fresh=False)
    began = time.monotonic()
    assert process.wait(60) == 0
    longest = time.monotonic() - began

    signals_of_each = int(os.environ.get("END_SIGNALS", "8")) // 4
    numbers = [signal.SIGTERM, signal.SIGINT] * max(1, signals_of_each)
    codes: Counter[str] = Counter()
    wrong = []
    for attempt, number in enumerate(numbers):
        # A fork has no start of an interpreter, and is quicker. A few are as a user starts them.
        process = fit_until_last_epoch(flags, log, fresh=attempt % 8 == 7)
        moment = chance.uniform(0, longest)
        time.sleep(moment)
        process.send_signal(number)
        try:
            code = process.wait(20)
        except subprocess.TimeoutExpired:
            code = 0
            wrong.append(f"{attempt}: {number.name} after {moment:.2f} s: not ended after 20 s")
        finally:
            kill_group(process)
        codes[f"{number.name}: {code}"] += 1
        told = log.read_text()
        lost = what_is_lost(code)
        expected = (0, 128 + number)
        if code not in expected or lost or "Traceback" in told or "terminate called" in told:
            what = f"{attempt}: {number.name} after {moment:.2f} s of {longest:.2f} s"
            wrong.append(f"{what}: exit code {code}, {lost}: {told[-2000:]}")
    print(f"report {report}, W&B {wandb}, seed {seed}: {dict(codes)}")
    assert not wrong, f"{len(wrong)} of {len(numbers)}:\n" + "\n".join(wrong)
