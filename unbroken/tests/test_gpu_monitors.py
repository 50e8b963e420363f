"""The monitors on a real CUDA device: against PyTorch's own counters, and in its limits."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn
from unbroken.monitors.memory import ACTIVATIONS, GIB, MemoryMonitor
from unbroken.monitors.memory_snapshot import MemorySnapshot
from unbroken.monitors.optimizer import OptimizerMonitor
from unbroken.monitors.profiler import StepProfiler
from unbroken.monitors.throughput import ThroughputMonitor

from tests.monitored import Linear, Points, make_trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


class Wide(Linear):
    """A network of 4096 × 4096 products: enough for a GPU to be busy."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(
            nn.Linear(8, 4096), *[nn.Linear(4096, 4096) for _ in range(6)], nn.Linear(4096, 2)
        )


def gpu_trainer(folder: Any, *callbacks: Any, **options: Any) -> Any:
    return make_trainer(
        folder, *callbacks, accelerator="gpu", **{"log_every_n_steps": 20, **options}
    )


def test_mfu_and_utilization_are_within_what_a_gpu_can_do(tmp_path):
    monitor = ThroughputMonitor()
    options = {"precision": "bf16-mixed", "log_every_n_steps": 200}
    trainer, rows = gpu_trainer(tmp_path, monitor, **options)
    trainer.fit(Wide(), Points(4096 * 600, 4096).loader())
    assert all(0 < row["mfu_pct"] < 100 for _, row in rows.of("throughput"))
    assert all(
        0 < row["gpu_utilization_pct"] <= 100
        for _, row in rows.of("throughput")
        if "gpu_utilization_pct" in row
    )
    assert any("gpu_utilization_pct" in row for _, row in rows.of("throughput"))
    assert monitor.advice(trainer)


def test_memory_agrees_with_pytorchs_own_counters(tmp_path):
    class Counters(Callback):
        def on_train_start(self, trainer, pl_module):
            torch.cuda.reset_peak_memory_stats()

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 19:
                seen.update(torch.cuda.memory_stats())

    seen: dict[str, int] = {}
    monitor = MemoryMonitor()
    trainer, rows = gpu_trainer(tmp_path, Counters(), monitor)
    trainer.fit(Wide(), Points(256 * 20, 256).loader())
    _, row = rows.of("memory")[0]
    assert row["allocated_gib"] == seen["allocated_bytes.all.current"] / GIB
    assert row["reserved_gib"] == seen["reserved_bytes.all.current"] / GIB
    assert row["peak_allocated_gib"] == seen["allocated_bytes.all.peak"] / GIB
    assert row["peak_reserved_gib"] == seen["reserved_bytes.all.peak"] / GIB
    total = torch.cuda.get_device_properties(0).total_memory
    assert row["peak_reserved_pct"] == pytest.approx(100 * seen["reserved_bytes.all.peak"] / total)
    parts = monitor.breakdown
    weights = sum(p.numel() * 4 for p in Wide().parameters()) / GIB
    assert parts["weights"] == parts["gradients"] == weights
    assert parts["optimizer state"] == pytest.approx(2 * weights, rel=1e-4)
    assert parts[ACTIVATIONS] > 0
    assert sum(parts.values()) == pytest.approx(monitor.peaks["memory/peak_allocated_gib"])


def test_a_real_out_of_memory_error_gives_the_advice(tmp_path):
    module = Wide()
    module.on_step = lambda: torch.empty(2**50, device="cuda")
    trainer, _ = gpu_trainer(tmp_path, MemoryMonitor())
    with pytest.raises(torch.OutOfMemoryError, match="Try, in this order") as caught:
        trainer.fit(module, Points(256, 256).loader())
    assert "--precision bf16-mixed" in str(caught.value)
    assert "weights" in str(caught.value)


def test_a_snapshot_loads_and_holds_this_runs_allocations(tmp_path):
    path = tmp_path / "memory.pickle"
    trainer, _ = gpu_trainer(tmp_path, MemorySnapshot(str(path)))
    trainer.fit(Wide(), Points(1024, 256).loader())
    snapshot = pickle.loads(path.read_bytes())
    assert snapshot["segments"]
    assert any(entry["action"] == "alloc" for trace in snapshot["device_traces"] for entry in trace)


def test_the_loss_scale_is_logged_under_16_mixed(tmp_path):
    class Slow(Wide):  # at Linear's learning rate the activations overflow 16 bits
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    trainer, rows = gpu_trainer(
        tmp_path, OptimizerMonitor(), precision="16-mixed", log_every_n_steps=10
    )
    trainer.fit(Slow(), Points(256 * 10, 256).loader())
    logged = [row for _, row in rows.of("optimizer") if "loss_scale" in row]
    assert logged
    assert all(row["loss_scale"] >= 1 for row in logged)
    assert all(0 < row["grad_norm"] < float("inf") for row in logged)


def test_a_profile_has_the_kernels_of_every_region(tmp_path):
    trainer, _ = gpu_trainer(tmp_path, profiler=StepProfiler(wait=2, warmup=1, active=3))
    trainer.fit(Wide(), Points(1024 * 10, 1024).loader())
    lines = (tmp_path / "profile" / "top_operations.txt").read_text().splitlines()
    device_ms = {line.split()[0]: float(line.split()[2]) for line in lines[2:7]}
    assert all(device_ms[name] > 0 for name in ("forward", "backward", "optimizer"))
    assert device_ms["backward"] > device_ms["forward"]  # two products for each of the forward pass
