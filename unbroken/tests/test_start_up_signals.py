"""Promise 4 from the first moment on: a signal at any moment of the start-up ends every process,
with its exit code.

``START_UP_SIGNALS=60 python -m pytest -m nightly tests/test_start_up_signals.py`` sends sixty to
one process and sixty to two ranks; without the variable it is ten and six. ``START_UP_SEED``
chooses others.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed import TCPStore
from unbroken.cli.start import exit_code
from unbroken.stopping import signals

from tests import commands
from tests.commands import CPU2, SMALL, command, kill_group

CODES = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGHUP: 143}
PATIENCE_S = 20.0  # ten seconds, and a busy machine


def in_session(session: int) -> list[int]:
    """Process ids of a session that have not ended."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, _, theirs = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:4]
            except OSError:
                continue
            if int(theirs) == session and state != "Z":
                found.append(int(entry.name))
    return found


def handles_signals(pid: int) -> bool:
    """Whether a process has a handler for SIGTERM; before, it is Python's own start that a signal
    meets.
    """
    try:
        caught = next(
            line
            for line in Path(f"/proc/{pid}/status").read_text().splitlines()
            if "SigCgt" in line
        )
    except (OSError, StopIteration):
        return False
    return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


def start(words: list[str], log: Path) -> subprocess.Popen[bytes]:
    with open(log, "wb") as file:
        process = subprocess.Popen(
            words, stdout=file, stderr=file, stdin=subprocess.DEVNULL, start_new_session=True
        )
    while not handles_signals(process.pid):
        assert process.poll() is None, log.read_text()
        time.sleep(0.001)
    return process


def seconds_to_first_step(words: list[str], log: Path) -> float:
    process = start(words, log)
    began = time.monotonic()
    while b"training samples" not in log.read_bytes():
        assert process.poll() is None, log.read_text()
        time.sleep(0.01)
    took = time.monotonic() - began
    kill_group(process)
    return took


# Rank zero, which starts rank one as Lightning does, and tells its process id.
RANK_ZERO = """
import os, subprocess, sys, time
code = "from unbroken.stopping import signals; signals.install(); print(1, flush=True);" \\
    "import time; time.sleep(60)"
rank = subprocess.Popen(
    [sys.executable, "-c", code], env={**os.environ, "LOCAL_RANK": "1"}, stdout=subprocess.PIPE
)
rank.stdout.readline()
print(rank.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux tells a process of its parent's end"
)
def test_a_rank_that_starts_ends_with_the_process_that_has_started_it() -> None:
    words = [sys.executable, "-c", RANK_ZERO]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        rank = int(parent.stdout.readline())
        parent.kill()
    end = time.monotonic() + 5
    try:
        while psutil.pid_exists(rank) and psutil.Process(rank).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < end, "it waits for rank zero"
            time.sleep(0.01)
    except psutil.NoSuchProcess:
        return
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank, signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a rank may have another parent")
@pytest.mark.parametrize(("is_alive", "code"), [(True, 0), (False, 143)])
def test_a_rank_whose_rank_zero_has_ended_before_it_began_ends(is_alive: bool, code: int) -> None:
    rank_zero = os.getpid() if is_alive else 1
    variables = {"LOCAL_RANK": "1", "UNBROKEN_RANK_ZERO_PID": str(rank_zero)}
    words = [sys.executable, "-c", "from unbroken.stopping import signals; signals.install()"]
    assert subprocess.run(words, env={**os.environ, **variables}, timeout=20).returncode == code


@pytest.mark.nightly
def test_a_rank_that_waits_for_a_late_one_inside_a_library_ends_with_a_signal(
    workplace: Path,
) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    log = workplace / "log.txt"
    rank = commands.start(
        command("fit", *SMALL, *CPU2), log, env={**os.environ, **place, **address}
    )
    try:
        begun = time.monotonic()
        while not store.num_keys():
            assert rank.poll() is None, log.read_text()
            assert time.monotonic() - begun < 60
            time.sleep(0.01)
        # It has told its address, and asks for that of rank zero.
        time.sleep(0.5)
        assert rank.poll() is None, log.read_text()
        os.kill(rank.pid, signal.SIGTERM)
        assert rank.wait(timeout=PATIENCE_S) == 143, log.read_text()
    finally:
        kill_group(rank)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("devices", [1, 2])
def test_a_signal_at_any_moment_of_the_start_up(
    devices: int, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    count = int(os.environ.get("START_UP_SIGNALS", "10" if devices == 1 else "6"))
    words = command("fit", *SMALL, "--max_epochs", "1000", *(CPU2 if devices == 2 else []))
    log = workplace / "log.txt"
    longest = seconds_to_first_step(words, log)
    chance = random.Random(os.environ.get("START_UP_SEED", f"{devices}"))
    wrong = []
    for attempt in range(count):
        number = chance.choice(list(CODES))
        shutil.rmtree("checkpoints", ignore_errors=True)
        process = start(words, log)
        moment = chance.uniform(0, longest)
        time.sleep(moment)
        ranks = [
            process.pid,
            *(
                pid
                for pid in in_session(process.pid)
                if pid != process.pid and handles_signals(pid)
            ),
        ]
        whom = chance.choice(["group", "first", "any"])
        if whom == "group":
            os.killpg(process.pid, number)
        else:
            os.kill(process.pid if whom == "first" else chance.choice(ranks), number)
        began = time.monotonic()
        what = f"{attempt}: {number.name} to {whom} after {moment:.2f} s of {longest:.2f} s"
        try:
            code = process.wait(PATIENCE_S)
            took = time.monotonic() - began
            while in_session(process.pid) and time.monotonic() - began < PATIENCE_S:
                time.sleep(0.02)
            told = log.read_text()
            if code != CODES[number] or "Traceback" in told or "rror" in told:
                wrong.append(f"{what}: exit code {code} after {took:.1f} s: {told[-1500:]}")
            if left := in_session(process.pid):
                wrong.append(f"{what}: {len(left)} processes are left")
            if (
                runs := [str(path) for path in Path("checkpoints").glob("*/*")]
            ) and "training samples" not in told:
                wrong.append(f"{what}: left {runs}: {told[-500:]}")
            if list(Path().rglob("*.part")):
                wrong.append(f"{what}: left half a file")
        except subprocess.TimeoutExpired:
            wrong.append(f"{what}: not ended after {PATIENCE_S} s: {log.read_text()[-1500:]}")
        finally:
            kill_group(process)
    assert not wrong, f"{len(wrong)} of {count}:\n" + "\n".join(wrong)


# A start that hangs in a library, which lets no handler run.
HANGS_AS_IT_STARTS = """
import ctypes, runpy, sys
from unbroken.run import main_job

def hangs(*_):
    print("starts", flush=True)
    ctypes.CDLL(None).system(b"sleep 12")

main_job.start_from = hangs
sys.argv[0] = "fit"
runpy.run_module("numerals.fit", run_name="__main__", alter_sys=True)
"""


@pytest.mark.nightly
def test_a_start_that_hangs_before_its_trainer_is_made_leaves_no_folder(workplace: Path) -> None:
    log = workplace / "log.txt"
    words = [sys.executable, "-c", HANGS_AS_IT_STARTS, *SMALL, "--max_epochs", "1"]
    process = start(words, log)
    try:
        while b"starts" not in log.read_bytes():
            assert process.poll() is None, log.read_text()
            time.sleep(0.01)
        assert list(Path("checkpoints").glob("*/*")), "the folder is made by now"
        process.terminate()
        assert process.wait(PATIENCE_S) == 143, log.read_text()
        assert list(Path("checkpoints").glob("*/*")) == []
    finally:
        kill_group(process)


def test_ranks_end_also_where_a_scripts_own_handler_raises_before_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def leave(number: int, frame: Any) -> None:
        raise KeyError(number)

    ended: list[str] = []
    state = signals.State()
    state.phase = signals.Phase.STARTS
    state.scripts_handlers = {signal.SIGTERM: leave}
    monkeypatch.setattr(signals, "state", state)
    monkeypatch.setattr(signals, "_end_ranks", lambda: ended.append("ranks"))
    with pytest.raises(KeyError):
        signals._handle(signal.SIGTERM, None)
    assert ended == ["ranks"]


def test_a_signal_behind_slurms_ends_no_process_that_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It stops at its first step, to be queued again."""
    ended: list[str] = []
    state = signals.State()
    monkeypatch.setattr(signals, "state", state)
    monkeypatch.setattr(signals, "START_UP_PATIENCE_S", 0.0)
    monkeypatch.setattr(signals, "_end_ranks", lambda: ended.append("ranks"))
    monkeypatch.setattr(os, "_exit", lambda code: pytest.fail(f"ended with {code}"))
    received = iter([bytes([signal.SIGTERM])])

    def read(*_: Any) -> bytes:
        with contextlib.suppress(StopIteration):
            return next(received)
        # Training begins.
        state.phase = signals.Phase.RUNS
        return bytes([signal.SIGTERM])

    monkeypatch.setattr(os, "read", read)
    state.requested = signal.SIGUSR1
    signals._watch(0)
    assert ended == []


@pytest.mark.parametrize(
    ("received", "code"),
    [(0, 3), (signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 143)],
)
def test_an_exit_inside_a_library_behind_a_signal_has_the_code_of_the_stop(
    received: int, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = signals.State()
    state.requested = received
    monkeypatch.setattr(signals, "state", state)
    assert exit_code(lambda _: sys.exit(3), []) == code
