"""The promises that hold for any data set and network, as tests to inherit: see test_examples.py."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image, ImageDraw

from project import fit
from project.engine.checkpoint_files import read
from project.engine.restore import load
from tests.commands import complete

ROOT = Path(__file__).parents[1]
MEASURED = ("throughput/", "memory/")  # columns that time and memory fill, which no two runs share


class PromiseSuite:
    """What every run keeps, whatever it trains on. A subclass says how it is started, and inherits the tests."""

    interrupt_at = 12  # optimizer step, in the middle of an epoch
    signal = "SIGTERM"
    least_accuracy = 0.5  # on the test set, after the few steps of these runs

    @classmethod
    def arguments(cls, folder: Path) -> list[str]:
        """Make data in ``folder``; return the arguments of ``fit`` that train on them for two short epochs."""
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def flags(cls, tmp_path_factory: pytest.TempPathFactory) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("WANDB_MODE", "disabled")
            patch.syspath_prepend(str(ROOT))  # the examples are imported as a user's file in the clone is
            patch.chdir(ROOT)
            folder = tmp_path_factory.mktemp(cls.__name__)
            common = ["--accelerator", "cpu", "--max_epochs", "2", "--log_every_n_steps", "3"]
            yield [*cls.arguments(folder / "data"), *common, "--default_root_dir", str(folder / "runs")]

    @pytest.fixture(scope="class")
    @classmethod
    def undisturbed(cls, flags: list[str]) -> Path:
        """Folder of a run that nobody interrupts."""
        assert fit.main([*flags, "--run_name", "undisturbed"]) == 0
        return Path(flags[-1]) / "undisturbed"

    def test_trains_and_reports(self, undisturbed: Path) -> None:
        summary = json.loads((undisturbed / "summary.json").read_text())
        assert summary["test/accuracy"] >= self.least_accuracy, summary
        assert summary["throughput/samples_per_sec"] > 0
        assert summary["memory/peak_rss_gib"] > 0
        logged = {name for row in metric_rows(undisturbed) for name in row}
        assert {"train/loss", "train/accuracy", "val/loss", "val/accuracy", "optimizer/lr"} <= logged
        for name in ("best.ckpt", "last.ckpt", "config.yaml"):
            assert (undisturbed / name).is_file()

    def test_a_run_that_was_stopped_and_resumed_is_bit_identical(self, flags: list[str], undisturbed: Path) -> None:
        command = [sys.executable, "-m", "tests.interrupted", str(self.interrupt_at), self.signal]
        named = [*flags, "--run_name", "stopped", "--checkpoint_every", "5"]
        ended = run_process([*command, *named])
        assert ended.returncode == {"SIGTERM": 143, "SIGINT": 130, "SIGKILL": -9}[self.signal], ended.stderr
        folder = undisturbed.with_name("stopped")
        saved = read(folder / "last.ckpt")["global_step"]
        assert 0 < saved <= self.interrupt_at + 1, saved  # asked to stop within a step, a run ends after it
        assert not (folder / "summary.json").exists()

        assert fit.main([*named, "--ckpt_path", "auto"]) == 0
        for name in ("last.ckpt", "best.ckpt"):
            ours, theirs = (read(run / name)["state_dict"] for run in (folder, undisturbed))
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[key], theirs[key]) for key in ours), name
        assert metric_rows(folder) == metric_rows(undisturbed)

    def test_two_processes_measure_what_one_does(self, flags: list[str], undisturbed: Path, tmp_path: Path) -> None:
        command = [sys.executable, "-m", "project.test", "--ckpt_path", str(undisturbed / "best.ckpt")]
        devices = ["--accelerator", "cpu", "--devices", "2", "--strategy", "ddp"]
        ended = run_process([*command, *devices, "--output", str(tmp_path / "metrics.json")])
        assert ended.returncode == 0, ended.stderr
        summary = json.loads((undisturbed / "summary.json").read_text())
        found = json.loads((tmp_path / "metrics.json").read_text())
        assert found["world_size"] == 2
        assert found["test/accuracy"] == summary["test/accuracy"]
        assert found["test/loss"] == pytest.approx(summary["test/loss"], rel=1e-6)

    def test_predicts_pictures_from_the_checkpoint_alone(self, undisturbed: Path, tmp_path: Path) -> None:
        from project import predict

        data = load(undisturbed / "best.ckpt").datamodule
        picture = Image.new("RGB", (90, 120), "white")
        ImageDraw.Draw(picture).ellipse((30, 30, 60, 90), outline="black", width=8)
        picture.save(tmp_path / "picture.png")
        words = [str(tmp_path / "picture.png"), "--ckpt_path", str(undisturbed / "best.ckpt")]
        assert predict.main([*words, "--output", str(tmp_path / "labels.json")]) == 0
        (row,) = json.loads((tmp_path / "labels.json").read_text())
        assert row.get("label", row.get("digit")) in data.class_names
        assert 1 / len(data.class_names) <= row["probability"] <= 1, row

    @pytest.mark.skipif(importlib.util.find_spec("project.export") is None, reason="there is no export command")
    def test_exports_a_model_that_answers_like_the_checkpoint(self, undisturbed: Path) -> None:
        pytest.importorskip("onnxruntime")
        from project import export

        assert export.main(["--ckpt_path", str(undisturbed / "best.ckpt")]) in (0, None)  # compares the answers
        assert list(undisturbed.rglob("*.onnx"))


def metric_rows(folder: Path) -> list[dict[str, str]]:
    """The rows of metrics.csv without empty cells and without what is measured by a clock."""
    with open(folder / "metrics.csv", newline="") as file:
        return [
            {key: value for key, value in row.items() if value and not key.startswith(MEASURED)}
            for row in csv.DictReader(file)
        ]


def run_process(command: list[str], timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """Run a command in the clone with as many threads as this process has: sums are then of the same order."""
    left_out = ("LOCAL_RANK", "PROJECT_RANK_ZERO_DECISION", "PL_GLOBAL_SEED")
    environment = {key: value for key, value in os.environ.items() if key not in left_out}
    environment |= {"OMP_NUM_THREADS": str(torch.get_num_threads()), "WANDB_MODE": "disabled"}
    return complete(command, timeout, cwd=ROOT, env=environment)
