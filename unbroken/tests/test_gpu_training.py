"""Training on a real CUDA device: exact resume, portable checkpoints, no wait inside a step."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from numerals.fit import job as fit
from torch.profiler import ProfilerActivity, profile
from unbroken.cli.read_checkpoint import load
from unbroken.commands import test as test_command
from unbroken.commands.benchmark.command import main as benchmark
from unbroken.run.final_test import float32_products

from tests.commands import CONVNET, SMALL, assert_same_run, summary
from tests.monitored import Linear, Points, make_trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # Of torch's detector of waits, of its profiler, and of Lightning about few batches.
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
ON_GPU = [*SMALL, *CONVNET, "--accelerator", "gpu", "--devices", "1"]
HOST = ["--data.on_device", "false", "--data.num_workers"]
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
    monkeypatch.setenv(
        "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
    )  # cuBLAS asks for it under --deterministic true
    arguments = [
        *ON_GPU,
        "--precision",
        precision,
        "--deterministic",
        "true",
        "--model.network.dropout",
        "0.2",
    ]
    words = [sys.executable, "-m", "numerals.fit", *arguments, "--run_name", "reference"]
    assert subprocess.run(words, timeout=180).returncode == 0
    start_and_stop(60, *arguments, "--run_name", "stopped")
    words = [sys.executable, "-m", "numerals.fit", "--run_name", "stopped", "--ckpt_path", "last"]
    assert subprocess.run(words, timeout=180).returncode == 0
    assert_same_run(Path("checkpoints/reference"), Path("checkpoints/stopped"))


@pytest.mark.parametrize(
    ("before", "after"), [("16-mixed", "bf16-mixed"), ("bf16-mixed", "16-mixed")]
)
def test_a_run_goes_on_in_another_precision(workplace: Path, before: str, after: str) -> None:
    """A fused optimizer keeps its step counts on the device, the one under a gradient scaler on the
    host.
    """
    start_and_stop(60, *ON_GPU, "--precision", before, "--run_name", "r")
    assert fit.main(["--run_name", "r", "--ckpt_path", "last", "--precision", after]) == 0
    assert summary(Path("checkpoints/r"))["precision"] == after


@pytest.mark.parametrize("precision", [*PRECISIONS, "bf16-true"])
def test_a_checkpoint_predicts_the_same_on_a_cpu(workplace: Path, precision: str) -> None:
    assert fit.main([*ON_GPU, "--precision", precision, "--run_name", "r"]) == 0
    best = "checkpoints/r/best.ckpt"
    figures: list[dict[str, Any]] = []
    for accelerator in ("gpu", "cpu"):
        assert (
            test_command.main(
                "numerals",
                ["--ckpt_path", best, "--accelerator", accelerator, "--output", "m.json"],
            )
            == 0
        )
        figures.append(json.loads(Path("m.json").read_text()))
    assert (
        figures[0]["test/accuracy"]
        == figures[1]["test/accuracy"]
        == summary(Path("checkpoints/r"))["test/accuracy"]
    )
    loaded = load(fit, Path(best))
    loaded.datamodule.setup("test")
    images, _ = loaded.datamodule.splits["test"].gather(torch.arange(200))
    with torch.no_grad(), float32_products():
        here, there = loaded.module(images), loaded.module.cuda()(images.cuda()).cpu()
    assert torch.allclose(here, there, atol=1e-3)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_gradients_are_clipped_after_they_are_unscaled(tmp_path: Path, precision: str) -> None:
    class Norms(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            norms.append(
                float(torch.nn.utils.get_total_norm([p.grad for p in pl_module.parameters()]))
            )

    norms: list[float] = []
    options = {"accelerator": "gpu", "precision": precision, "gradient_clip_val": 0.01}
    trainer, _ = make_trainer(tmp_path, Norms(), **options)
    trainer.fit(Linear(), Points(256 * 5, 256).loader())
    assert norms == pytest.approx([0.01] * 5, rel=1e-2)


def test_a_step_that_overflows_is_skipped_and_halves_the_scale(tmp_path: Path) -> None:
    class Overflows(Linear):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            before.append(self.layer.weight.detach().clone())
            scales.append(self.trainer.precision_plugin.scaler.get_scale())
            loss = super().training_step(batch, batch_idx)
            return loss * float("inf") if batch_idx == 2 else loss

    before: list[torch.Tensor] = []
    scales: list[float] = []
    trainer, _ = make_trainer(tmp_path, accelerator="gpu", precision="16-mixed")
    trainer.fit(Overflows(), Points(256 * 6, 256).loader())
    moved = [not torch.equal(one, other) for one, other in itertools.pairwise(before)]
    assert moved == [True, True, False, True, True]
    assert [scale / scales[0] for scale in scales] == [1, 1, 1, 0.5, 0.5, 0.5]


@pytest.mark.parametrize(("setting", "tf32"), [("highest", False), ("high", True)])
def test_matmul_precision_decides_on_tf32(workplace: Path, setting: str, tf32: bool) -> None:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("this GPU has no TF32")
    assert (
        fit.main([*ON_GPU, "--matmul_precision", setting, "--max_epochs", "1", "--run_name", "r"])
        == 0
    )
    a, b = torch.rand(2, 1024, 1024, dtype=torch.float64, device="cuda") - 0.5
    error = float((a.float() @ b.float() - a @ b).abs().max() / (a @ b).abs().max())
    assert (error > 1e-5) == tf32, error  # float32 keeps 24 bits of a factor, TF32 11


def test_a_compiled_run_learns_and_its_checkpoint_needs_no_compiler(workplace: Path) -> None:
    assert (
        fit.main(
            [*ON_GPU, "--model.compile", "true", "--precision", "bf16-mixed", "--run_name", "r"]
        )
        == 0
    )
    assert summary(Path("checkpoints/r"))["test/accuracy"] > 0.5
    words = ["--ckpt_path", "checkpoints/r/best.ckpt", "--accelerator", "cpu", "--output", "m.json"]
    assert test_command.main("numerals", words) == 0
    assert (
        json.loads(Path("m.json").read_text())["test/accuracy"]
        == summary(Path("checkpoints/r"))["test/accuracy"]
    )


def test_activation_checkpointing_lowers_the_peak(workplace: Path) -> None:
    # more samples than --quick takes: the third optimizer step is measured
    sizes = ["--batch_sizes", "512", "--precisions", "32-true", "--data.train_samples", "4096"]
    assert (
        benchmark(
            "numerals",
            ["memory", "--quick", "--n", "1", *sizes, "--accelerator", "gpu", "--output", "m.json"],
        )
        == 0
    )
    table = json.loads(Path("m.json").read_text())["tables"]["memory"]
    peaks = {
        row["activation_checkpointing"]: row["peak_mib"]
        for row in table
        if row["accumulation"] == 1
    }
    assert 0 < peaks[True] < peaks[False]


def test_batches_are_copied_from_pinned_memory(workplace: Path) -> None:
    words = [*ON_GPU, "--max_epochs", "1", "--limit_val_batches", "0", "--data.on_device", "false"]
    # By how much images are shifted is drawn on the CPU, and copied in each step.
    words += ["--data.shift_pixels", "0"]
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        assert fit.main([*words, "--run_name", "r"]) == 0
    copies = [event.name for event in profiler.events() if "Memcpy HtoD" in event.name]
    steps = 3200 // 64
    # images and labels of every step; pageable are a few small ones before the first step and in
    # the test
    assert sum("Pinned" in name for name in copies) >= 2 * steps
    assert sum("Pageable" in name for name in copies) < steps, copies


def test_fsdp_on_one_gpu_trains_resumes_and_tests_on_a_cpu(
    workplace: Path,
) -> None:
    """On one GPU and in mixed precision; the rest is tested on the CPU.

    Each run has a process of its own.
    """
    arguments = [*ON_GPU, "--strategy", "fsdp", "--precision", "bf16-mixed"]
    start_and_stop(60, *arguments, "--run_name", "r")
    words = [sys.executable, "-m", "numerals.fit", "--run_name", "r", "--ckpt_path", "last"]
    resumed = subprocess.run(words, capture_output=True, text=True, timeout=180)
    assert resumed.returncode == 0, resumed.stderr
    assert summary(Path("checkpoints/r"))["test/accuracy"] > 0.5
    assert (
        test_command.main(
            "numerals", ["--ckpt_path", "checkpoints/r/best.ckpt", "--accelerator", "cpu"]
        )
        == 0
    )


EMA = "{class_path: lightning.pytorch.callbacks.EMAWeightAveraging, init_args: {decay: 0.9}}"


@pytest.mark.parametrize(
    "data", [["--data.on_device", "true"], [*HOST, "0"], [*HOST, "1"]], ids=["device", "0", "1"]
)
@pytest.mark.parametrize(
    "precision", ["32-true", "bf16-mixed"]
)  # 16-mixed asks for overflows at every step
@pytest.mark.parametrize("averaged", [False, True], ids=["", "EMA"])
def test_a_step_waits_for_nothing(
    workplace: Path, data: list[str], precision: str, averaged: bool
) -> None:
    """By PyTorch's own detector of synchronisation, over steps between two log steps."""
    callbacks = ["{class_path: tests.test_gpu_training.NoWaits}", *([EMA] if averaged else [])]
    Path("c.yaml").write_text(f"trainer:\n  callbacks: [{', '.join(callbacks)}]\n")
    words = [
        *ON_GPU,
        "--log_every_n_steps",
        "1000",
        "--max_epochs",
        "1",
        "--precision",
        precision,
        *data,
    ]
    assert fit.main(["--config", "c.yaml", *words, "--run_name", "r"]) == 0
    assert json.loads(Path("steps.json").read_text()) > 20


@pytest.mark.parametrize("precision", PRECISIONS)
def test_data_on_the_device_give_the_weights_of_data_on_the_host(
    workplace: Path, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    arguments = [*ON_GPU, "--precision", precision, "--deterministic", "true", "--data.on_device"]
    for where in ("true", "false"):
        words = [sys.executable, "-m", "numerals.fit", *arguments, where, "--run_name", where]
        assert subprocess.run(words, timeout=180).returncode == 0
    assert_same_run(Path("checkpoints/true"), Path("checkpoints/false"))


class NoWaits(Callback):
    """Makes every wait for the device an error, from the 20th step to the epoch's last but one."""

    steps = 0

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        inside = 20 <= batch_idx < trainer.num_training_batches - 2
        torch.cuda.set_sync_debug_mode("error" if inside else "default")
        assert batch[0].device.type == "cuda"
        self.steps += inside

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")
        Path("steps.json").write_text(json.dumps(self.steps))
