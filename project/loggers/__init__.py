"""Where metrics go, metrics.csv and W&B, and which of them share a chart in ``report.html`` and the W&B dashboard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

STEP = "trainer/global_step"  # W&B's key of the optimizer step, the horizontal axis of every chart


@dataclass(frozen=True)
class Panel:
    """A chart of metrics over optimizer steps. It is left out where none of them was logged."""

    section: str
    title: str
    unit: str
    lines: dict[str, str]  # metric → label
    axis: Literal["from zero", "fitting", "log"] = "from zero"  # vertical; log only where values span a factor of ten
    in_report: bool = True  # False: one run shows it elsewhere, but runs are compared by it


def _parts(metric: str) -> dict[str, str]:
    return {f"train/{metric}": "train", f"val/{metric}": "validation", f"test/{metric}": "test"}


_GPU = {"throughput/gpu_utilization_pct": "a kernel runs", "throughput/mfu_pct": "model FLOPs utilization"}
_DEVICE = {f"memory/{name}_gib": name.replace("_", " ") for name in ("peak_reserved", "peak_allocated", "allocated")}
PANELS = (
    Panel("Training", "Loss", "", _parts("loss"), "log"),
    Panel("Training", "Accuracy", "fraction", _parts("accuracy"), "fitting"),
    Panel("Training", "Learning rate", "", {"optimizer/lr": "learning rate"}),
    Panel("Training", "Gradient norm", "L2, before clipping", {"optimizer/grad_norm": "gradient norm"}),
    Panel("Training", "Loss scale", "16-mixed", {"optimizer/loss_scale": "loss scale"}),
    Panel("Throughput", "Training samples per second", "", {"throughput/samples_per_sec": "samples/s"}),
    Panel("Throughput", "Waiting for data", "% of the time", {"throughput/data_wait_pct": "waiting for data"}),
    Panel("Throughput", "Optimizer step", "ms", {"throughput/step_ms": "step"}, in_report=False),
    Panel("Throughput", "GPU", "%", _GPU),
    Panel("Memory", "Device memory", "GiB", _DEVICE),
    Panel("Memory", "Host memory", "GiB, all processes", {"memory/rss_gib": "resident"}),
    Panel("Memory", "Device memory, peak reserved", "%", {"memory/peak_reserved_pct": "reserved"}, in_report=False),
)
