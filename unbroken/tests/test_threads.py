"""Promise 13: thread counts follow what this process may use, and are shared with those started
beside it.
"""

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
from unbroken.machine import threads

from tests.commands import CPU2, SMALL, run


class WriteThreads(Callback):
    """Every rank writes how many threads it computes with."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        Path(f"threads-{trainer.global_rank}.json").write_text(json.dumps(torch.get_num_threads()))


available_cores = threads.available_cores


@pytest.fixture(autouse=True)
def _four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", threads.OURS)
    for name in (*names, "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "")  # so that what configure() sets is taken away again
        monkeypatch.delenv(name)
    monkeypatch.setattr(threads, "available_cores", lambda: 4)


def test_all_cores_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    assert threads.configure() == 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert threads.configure() == 2  # chosen anew: the 4 was not the user's
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads.configure() == 3


def test_torchruns_guess_of_one_thread_is_not_the_users_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert threads.configure() == 2


def test_a_containers_quota_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert threads.container_quota(tmp_path) == math.inf
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert threads.container_quota(tmp_path) == 1.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert threads.container_quota(tmp_path) == math.inf
    monkeypatch.setattr(threads, "container_quota", lambda: 1.5)
    assert available_cores() == 1


def test_a_system_that_tells_no_affinity_has_all_its_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert threads.cores_at_start() == set()
    monkeypatch.setattr(threads, "CORES", set())
    monkeypatch.setattr(threads, "container_quota", lambda: math.inf)
    assert available_cores() == os.cpu_count()


@pytest.mark.nightly
def test_ranks_that_lightning_starts_share_the_cores(workplace: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    callback = ["--trainer.callbacks", "tests.test_threads.WriteThreads"]
    counted = run(
        "fit",
        *SMALL,
        "--max_epochs",
        "1",
        "--limit_train_batches",
        "5",
        *CPU2,
        *callback,
    )
    assert counted.returncode == 0, counted.stderr
    told = [json.loads(Path(f"threads-{rank}.json").read_text()) for rank in (0, 1)]
    assert told == 2 * [max(1, cores // 2)]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="affinity is Linux's")
def test_affinity_counts() -> None:
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    code += "from unbroken.machine import threads; print(threads.configure())"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "1"
