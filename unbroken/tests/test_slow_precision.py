"""Half precision that is slow on this CPU is said in a run's first lines and in its summary, and
``--precision auto`` does not choose it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from numerals.fit import job as fit
from torch.utils.data import DataLoader, TensorDataset
from unbroken.cli.cli import configure
from unbroken.machine import hardware
from unbroken.monitors.slow_precision import SlowPrecision, slow_line

# An example that needs nothing
EXAMPLE = ["--config", "configs/examples/autoencoder.yaml"]
# How auto is chosen
WAYS = [[*EXAMPLE, "--precision", "auto"]]
WAYS += [["--config", "configs/fast.yaml"]]

# These play a CPU with AVX2 alone on a newer one.
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": "1"}


class Linear(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.layer(batch[0]).float().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(folder: Path, precision: Any) -> SlowPrecision:
    """A step on the CPU, with the callback in a plain Trainer."""
    callback = SlowPrecision()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        precision=precision,
        max_steps=1,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(Linear(), DataLoader(TensorDataset(torch.rand(4, 4)), 4))
    return callback


@pytest.mark.parametrize(
    ("precision", "cost", "used"),
    [
        ("bf16-mixed", 6.1, "bf16-mixed"),
        ("16-mixed", 6.1, "bf16-mixed"),  # Lightning replaces it on a CPU
        ("bf16-mixed", 0.5, None),
        ("bf16-mixed", 1.2, None),
        ("32-true", 6.1, None),
    ],
)
def test_a_run_in_half_precision_says_what_it_costs_here_and_what_to_type(
    precision: str,
    cost: float,
    used: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(hardware, "cost_on_cpu", lambda _: cost)
    monkeypatch.setattr(hardware, "cpu_computes", lambda _: False)
    callback = train(tmp_path, precision)
    told = capsys.readouterr().out
    result: Any = SimpleNamespace(summary=SimpleNamespace(notes=[]))
    callback.add_facts(Trainer(logger=False, enable_checkpointing=False), result)
    if used is None:
        assert "times as long" not in told
        assert result.summary.notes == []
        return
    line = (
        f"a step in {used} takes 6.1 times as long as in 32-true on this CPU, "
        "which has no instructions for it. To train faster: --precision 32-true"
    )
    assert line in told.splitlines()
    assert result.summary.notes == [line]


def test_a_cpu_with_the_instructions_is_not_said_to_lack_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hardware, "cpu_computes", lambda _: True)
    assert "no instructions" not in slow_line("bf16-mixed", 2.0)


@pytest.mark.parametrize(
    ("features", "precision", "computes"),
    [
        ("fpu avx2 avx512_bf16", "bf16-mixed", True),
        ("fpu avx2", "bf16-mixed", False),
        ("fpu avx2", "bf16-true", False),
        ("fpu avx2", "32-true", True),
        ("fpu avx2 avx512_bf16", "16-true", False),
    ],
)
def test_whether_this_cpu_has_instructions_for_a_precision(
    monkeypatch: pytest.MonkeyPatch, features: str, precision: str, computes: bool
) -> None:
    monkeypatch.setattr(hardware, "cpu_features", lambda: set(features.split()))
    assert hardware.cpu_computes(precision) is computes


def test_measuring_draws_no_random_number_and_keeps_the_threads() -> None:
    threads = torch.get_num_threads()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    assert hardware.cost_on_cpu("bf16-mixed") > 0
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads


@pytest.mark.nightly
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="x86 with AVX2"
)
def test_on_a_cpu_with_avx2_alone_half_precision_is_measured_to_be_slow() -> None:
    code = "from unbroken.machine import hardware; print(hardware.cost_on_cpu('bf16-mixed'))"
    environment = {**os.environ, **AVX2}
    words = [sys.executable, "-c", code]
    told = subprocess.run(words, capture_output=True, text=True, check=True, env=environment)
    assert float(told.stdout) > 1.5


@pytest.mark.daily(3)
@pytest.mark.parametrize(
    ("accelerator", "has_instructions", "cost", "chosen"),
    [
        ("cpu", True, 0.5, "bf16-mixed"),
        # The environment keeps PyTorch from using the instructions.
        ("cpu", True, 6.0, "32-true"),
        ("cpu", False, 0.5, "32-true"),
        ("gpu", True, 0.5, "32-true"),
    ],
)
@pytest.mark.parametrize("words", WAYS)
def test_auto_is_half_precision_where_it_is_faster_and_what_it_is_gets_recorded(
    words: list[str],
    accelerator: str,
    has_instructions: bool,
    cost: float,
    chosen: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hardware, "cpu_computes", lambda _: has_instructions)
    monkeypatch.setattr(hardware, "cost_on_cpu", lambda _: cost)
    config = configure(fit, "fit", [*words, "--accelerator", accelerator])
    assert config.trainer["precision"] == chosen
    assert config.resolved["trainer"]["precision"] == chosen
    assert config.notes == [f"--precision auto is {chosen} on this machine."]


def test_a_typed_precision_wins_over_auto(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("trainer: {precision: auto}")
    words = [*EXAMPLE, "--config", str(file), "--precision", "64-true"]
    config = configure(fit, "fit", words)
    assert config.trainer["precision"] == "64-true"
    assert config.notes == []
