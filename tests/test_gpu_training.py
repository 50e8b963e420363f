"""Training on a real CUDA device: exact resume, portable checkpoints, no wait inside a step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from project import fit
from project import test as test_command
from project.checkpoints import load
from tests.commands import CONVNET, SMALL, assert_same_run, checkpoint, summary

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
ON_GPU = [*SMALL, *CONVNET, "--accelerator", "gpu", "--devices", "1"]
PRECISIONS = ["32-true", "16-mixed", "bf16-mixed"]


def start_and_stop(step: int, *arguments: str) -> None:
    """A run that gets SIGTERM after a step, in a process of its own."""
    words = [sys.executable, "-m", "tests.interrupted", str(step), "SIGTERM", *arguments]
    stopped = subprocess.run(words, capture_output=True, text=True, timeout=180)
    assert stopped.returncode == 143, stopped.stderr


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_stopped_run_goes_on_to_bit_identical_weights(
    workplace: Path, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it under --deterministic true
    arguments = [*ON_GPU, "--precision", precision, "--deterministic", "true", "--model.network.dropout", "0.2"]
    words = [sys.executable, "-m", "project.fit", *arguments, "--run_name", "reference"]
    assert subprocess.run(words, timeout=180).returncode == 0
    start_and_stop(60, *arguments, "--run_name", "stopped")
    words = [sys.executable, "-m", "project.fit", "--run_name", "stopped", "--ckpt_path", "last"]
    assert subprocess.run(words, timeout=180).returncode == 0
    assert_same_run(Path("checkpoints/reference"), Path("checkpoints/stopped"))


@pytest.mark.parametrize(("before", "after"), [("16-mixed", "bf16-mixed"), ("bf16-mixed", "16-mixed")])
def test_a_run_goes_on_in_another_precision(workplace: Path, before: str, after: str) -> None:
    """A fused optimizer keeps its step counts on the device, the one under a gradient scaler on the host."""
    start_and_stop(60, *ON_GPU, "--precision", before, "--run_name", "r")
    assert fit.main(["--run_name", "r", "--ckpt_path", "last", "--precision", after]) == 0
    assert summary(Path("checkpoints/r"))["precision"] == after


@pytest.mark.parametrize("precision", [*PRECISIONS, "bf16-true"])
def test_a_checkpoint_predicts_the_same_on_a_cpu(workplace: Path, precision: str) -> None:
    assert fit.main([*ON_GPU, "--precision", precision, "--run_name", "r"]) == 0
    best = "checkpoints/r/best.ckpt"
    figures: list[dict[str, Any]] = []
    for accelerator in ("gpu", "cpu"):
        assert test_command.main(["--ckpt_path", best, "--accelerator", accelerator, "--output", "m.json"]) == 0
        figures.append(json.loads(Path("m.json").read_text()))
    assert figures[0]["test/accuracy"] == figures[1]["test/accuracy"] == summary(Path("checkpoints/r"))["test/accuracy"]
    loaded = load(Path(best))
    loaded.datamodule.setup("test")
    images = loaded.datamodule.normalize(loaded.datamodule.splits["test"][list(range(200))][0])
    torch.backends.cudnn.allow_tf32 = False
    with torch.no_grad():
        here, there = loaded.module(images), loaded.module.cuda()(images.cuda()).cpu()
    assert torch.allclose(here, there, atol=1e-3)


def test_clipping_and_scaling_do_what_they_should(workplace: Path) -> None:
    arguments = [*ON_GPU, "--gradient_clip_val", "0.01", "--precision", "16-mixed", "--log_every_n_steps", "1"]
    assert fit.main([*arguments, "--run_name", "r", "--max_epochs", "1"]) == 0
    assert checkpoint(Path("checkpoints/r/last.ckpt"))["global_step"] > 0
    assert summary(Path("checkpoints/r"))["precision"] == "16-mixed"


def test_a_step_waits_for_nothing(workplace: Path) -> None:
    """By PyTorch's own detector of synchronisation, over steps between two log steps."""
    words = [*ON_GPU, "--log_every_n_steps", "1000", "--max_epochs", "1", "--data.num_workers", "1"]
    assert fit.main([*words, "--trainer.callbacks", "tests.test_gpu_training.NoWaits", "--run_name", "r"]) == 0
    assert json.loads(Path("steps.json").read_text()) > 20


class NoWaits(Callback):
    """Makes every wait for the device an error, from the 20th step to the epoch's last but one."""

    steps = 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        inside = 20 <= batch_idx < trainer.num_training_batches - 2
        torch.cuda.set_sync_debug_mode("error" if inside else "default")
        assert batch[0].device.type == "cuda"
        self.steps += inside

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")
        Path("steps.json").write_text(json.dumps(self.steps))
