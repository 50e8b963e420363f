"""Promise 13: thread counts follow what this process may use, and are shared with those started beside it."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from project import threads
from tests.commands import CPU2, SMALL, command, run, start, summary


class WriteThreads(Callback):
    """Every rank writes how many threads it computes with."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        Path(f"threads-{trainer.global_rank}.json").write_text(json.dumps(torch.get_num_threads()))


@pytest.fixture(autouse=True)
def _four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", threads.OURS)
    for name in (*names, "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "")  # so that what configure() sets is taken away again
        monkeypatch.delenv(name)
    monkeypatch.setattr(threads, "available_cores", lambda: 4)


def test_all_cores_and_patient_waiting_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    assert threads.configure() == 4
    on_linux = sys.platform.startswith("linux")
    name, value = ("GOMP_SPINCOUNT", threads.SPINS) if on_linux else ("OMP_WAIT_POLICY", "PASSIVE")
    assert os.environ[name] == value
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert threads.configure() == 2  # chosen anew: the 4 was not the user's
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads.configure() == 3


def test_torchruns_guess_of_one_thread_is_not_the_users_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert threads.configure() == 2


def test_a_containers_quota_counts(tmp_path: Path) -> None:
    assert threads.container_quota(tmp_path) == math.inf
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert threads.container_quota(tmp_path) == 1.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert threads.container_quota(tmp_path) == math.inf


def test_ranks_that_lightning_starts_share_the_cores(workplace: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    callback = ["--trainer.callbacks", "tests.test_threads.WriteThreads"]
    counted = run("fit", *SMALL, "--max_epochs", "1", *CPU2, *callback, fresh=True)
    assert counted.returncode == 0, counted.stderr
    told = [json.loads(Path(f"threads-{rank}.json").read_text()) for rank in (0, 1)]
    assert told == 2 * [max(1, cores // 2)]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="affinity is Linux's")
def test_affinity_counts() -> None:
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    code += "from project import threads; print(threads.configure())"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "1"


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.alone
def test_a_busy_neighbour_and_a_second_run_slow_a_run_but_do_not_stop_it(workplace: Path) -> None:
    """At most 2.5 and 3 times as long; with threads that spin it was thirty times."""
    long = [*SMALL, "--max_epochs", "10"]
    seconds = {}
    assert run("fit", *long, "--run_name", "alone", fresh=True).returncode == 0
    neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        assert run("fit", *long, "--run_name", "beside", fresh=True).returncode == 0
    finally:
        neighbour.kill()
        neighbour.wait()
    words = {name: command("fit", *long, "--run_name", name) for name in ("one", "two")}
    both = [start(words[name], workplace / f"{name}.log", fresh=True) for name in words]
    assert [process.wait(timeout=200) for process in both] == [0, 0]
    for name in ("alone", "beside", "one", "two"):
        seconds[name] = summary(Path("checkpoints") / name)["fit_seconds"]
    assert seconds["beside"] <= 2.5 * seconds["alone"], seconds
    assert max(seconds["one"], seconds["two"]) <= 3 * seconds["alone"], seconds
