"""Both monitors in whole runs of ``fit`` on the bundled digits: what they record, and what they say
at the end.
"""

from __future__ import annotations

import csv
import os
from pathlib import Path

import pytest
from unbroken.storage.checkpoint_files import damage

from tests import reported
from tests.commands import SMALL, assert_same_run, finished_run, run, summary, two_rank_run
from tests.stopped_runs import train, train_until


def test_a_default_run_records_every_metric_that_a_cpu_has():
    folder = finished_run()
    (history,) = reported.wandb_folders(folder)
    items = [row["item"] for row in reported.of_type(reported.wandb_records(history), "history")]
    with open(folder / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    monitored, groups = reported.MONITORED, ("throughput/", "memory/", "optimizer/")
    assert {
        name for row in rows for name, value in row.items() if value and name.startswith(groups)
    } == monitored
    assert {name for item in items for name in item} >= monitored
    assert summary(folder)["world_size"] == 1
    assert summary(folder)["throughput/samples_per_sec"] > 0
    assert 0 <= summary(folder)["throughput/data_wait_pct"] <= 100
    assert 0.1 < summary(folder)["memory/peak_rss_gib"] < 10


def test_two_processes_of_fit_log_under_the_same_names():
    with open(two_rank_run() / "metrics.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["throughput/samples_per_sec"]]
    assert len(rows) >= 4
    for row in rows:
        device, together = (
            float(row[f"throughput/{name}samples_per_sec"]) for name in ("device_", "")
        )
        assert together == pytest.approx(2 * device)
    # five steps of two batches of 32
    batches, samples = (
        float(rows[1][f"throughput/{name}_per_sec"]) for name in ("batches", "samples")
    )
    assert samples == pytest.approx(32 * batches)
    assert float(rows[1]["throughput/step_ms"]) == pytest.approx(2000 / batches)


OOM_MODEL = """
import torch
from numerals.model import MNISTClassifier

class RunsOut(MNISTClassifier):
    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().training_step(batch, batch_idx)
"""


def test_fit_ends_an_out_of_memory_run_with_the_advice_and_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs_out.py").write_text(OOM_MODEL)
    flags = [
        "--data.source",
        "sample",
        "--data.batch_size",
        "64",
        "--accelerator",
        "cpu",
        "--max_epochs",
        "1",
    ]
    flags += ["--model", "runs_out.RunsOut", "--checkpoint_every", "2", "--run_name", "oom"]
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    ended = run("fit", *flags, cwd=tmp_path)
    assert ended.returncode == 1
    tail = ended.stderr.strip().splitlines()[-7:]
    assert tail[0].startswith("Out of memory in training; --data.batch_size is 64")
    assert "--data.batch_size 32 --accumulate_grad_batches 2" in ended.stderr
    assert tail[-1].startswith("The last checkpoint is whole")
    assert damage(tmp_path / "checkpoints" / "oom" / "last.ckpt") is None


@pytest.mark.nightly
def test_a_run_that_is_resumed_a_step_before_its_end_has_the_rows_of_an_undisturbed_one(
    workplace: Path,
) -> None:
    flags = [*SMALL, "--data.train_samples", "320", "--max_epochs", "1", "--report", "false"]
    one = train("one", *flags)
    killed = train_until(4, "killed", *flags)
    train("killed", "--ckpt_path", "auto", *flags)
    assert_same_run(one, killed)
