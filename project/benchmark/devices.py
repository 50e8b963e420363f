"""Every device and precision this machine has: speed, speed-up over the CPU in float32, accuracy, peak memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from project.benchmark.flags import Settings
from project.benchmark.steps import Steps
from project.benchmark.timing import alternate, median_and_spread
from project.benchmark.with_lightning import run_epochs
from project.callbacks.memory import MemoryMonitor
from project.engine.cli import ProjectCLI
from project.engine.trainer import find

RESNET = ["--model.network", "project.benchmark.resnet.ResNet18", "--model.lr", "1e-3"]
SWEEP = {"cpu": [64, 256, 1024], "cuda": [64, 256, 1024, 4096, 16384], "mps": [64, 256, 1024]}
RESNET_ON_CPU = {"batch": 32, "steps": 2, "image_size": 32}  # a whole epoch would take minutes
PATIENCE_S = 15.0  # a run that takes longer is not repeated: its row says n = 1


@dataclass(frozen=True)
class Case:
    """One row.

    Args:
        device: "cpu", "cuda" or "mps".
        network: "chosen" or "ResNet18".
        precision: One of the Trainer's, or "tf32".
        batch_size: Samples per step.
    """

    device: str
    network: str
    precision: str
    batch_size: int

    def flags(self) -> list[str]:
        """Flags of ``fit`` that make this case of any configuration."""
        trainer = "32-true" if self.precision == "tf32" else self.precision
        matmul = "high" if self.precision == "tf32" else "highest"
        flags = ["--accelerator", {"cuda": "gpu"}.get(self.device, self.device), "--devices", "1"]
        flags += ["--precision", trainer, "--matmul_precision", matmul, "--data.batch_size", str(self.batch_size)]
        if self.network == "ResNet18":
            flags += RESNET
            if self.device == "cpu":
                flags += ["--limit_train_batches", str(RESNET_ON_CPU["steps"]), "--limit_val_batches", "0"]
                flags += ["--model.network.image_size", str(RESNET_ON_CPU["image_size"])]
        return flags


def measure(cli: ProjectCLI, settings: Settings) -> list[dict[str, Any]]:
    """One row per case. A measurement is the second epoch of a real run; its first one is the warm-up."""
    cases = list(all_cases(cli, settings))
    clis = {case: ProjectCLI([*settings.fit_flags, *case.flags()], "project.benchmark") for case in cases}
    steps = Steps("devices", len(cases) * settings.n)
    too_slow: set[Case] = set()
    variants = {_name(case): partial(one_run, case, clis[case], too_slow) for case in cases}
    results = alternate(variants, settings.n, steps)
    steps.finish()
    rows = [row_of(case, clis[case], [run for run in results[_name(case)] if run]) for case in cases]
    add_comparisons(rows)
    return rows


def all_cases(cli: ProjectCLI, settings: Settings) -> Iterator[Case]:
    """Networks × devices × precisions at the configured batch size, then batch sizes of the chosen network."""
    wanted = cli.config_init.trainer.accelerator
    devices = [name for name in available_devices() if wanted in ("auto", name, {"cuda": "gpu"}.get(name))]
    for network in settings.networks:
        for device in devices:
            size = cli.datamodule.batch_size
            if network == "ResNet18":
                size = RESNET_ON_CPU["batch"] if device == "cpu" else 256
            for precision in usable(device, settings.precisions):
                yield Case(device, network, precision, size)
    for device in devices:
        if "chosen" in settings.networks and not settings.quick:
            for size in settings.batch_sizes or SWEEP[device]:
                if size != cli.datamodule.batch_size:
                    yield Case(device, "chosen", usable(device, settings.precisions)[0], size)


def available_devices() -> list[str]:
    """The CPU, and the kind of accelerator that can be used."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return ["cpu", *([found.type] if found is not None and found.type in SWEEP else [])]


def usable(device: str, precisions: list[str]) -> list[str]:
    """The precisions a device really has: on the CPU 16-mixed becomes bf16-mixed, and TF32 is CUDA's."""
    known = {"cpu": ("32-true", "bf16-mixed"), "mps": ("32-true", "16-mixed", "bf16-mixed")}
    has_tf32 = device == "cuda" and torch.cuda.get_device_capability() >= (8, 0)
    allowed = known.get(device, ("32-true", *(("tf32",) if has_tf32 else ()), "16-mixed", "bf16-mixed"))
    return [precision for precision in precisions if precision in allowed] or ["32-true"]


def one_run(case: Case, cli: ProjectCLI, too_slow: set[Case]) -> dict[str, float | None] | None:
    """Rate, accuracy and peak memory of one run of two epochs; None for a case that has been found too slow."""
    if case in too_slow:
        return None
    began = time.perf_counter()
    if case.device == "cuda":
        torch.cuda.empty_cache()
    epochs, trainer = run_epochs(cli, 2)
    if time.perf_counter() - began > PATIENCE_S:
        too_slow.add(case)
    # the sampler's batch, which is no larger than the set
    samples = int(trainer.num_training_batches) * trainer.train_dataloader.sampler.global_batch_size  # type: ignore[union-attr]
    peak = find(trainer, MemoryMonitor).summary().get("memory/peak_allocated_gib")
    return {"rate": samples / epochs[-1].train_s, "accuracy": epochs[-1].val_accuracy, "peak": peak}


def row_of(case: Case, cli: ProjectCLI, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The table's row. ``epoch_s``: seconds for the training set at the measured rate, without validation."""
    row: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if case.device == "cuda" else case.device,
        "network": case.network if case.network != "chosen" else type(cli.model.network).__name__,
        "precision": case.precision,
        "batch_size": case.batch_size,
        **median_and_spread("samples_per_sec", [run["rate"] for run in runs]),
    }
    row["epoch_s"] = cli.datamodule.num_samples("train") / row["samples_per_sec"]
    accuracies = [run["accuracy"] for run in runs if run["accuracy"] is not None]
    if accuracies:
        row["val/accuracy"] = statistics.mean(accuracies)  # after two epochs
    if runs[0]["peak"] is not None:
        row["peak_allocated_gib"] = max(run["peak"] for run in runs)
    return row


def add_comparisons(rows: list[dict[str, Any]]) -> None:
    """Speed-up and accuracy difference against the CPU in float32, where it was measured alike."""
    for row in rows:
        like = [r for r in rows if all(r[key] == row[key] for key in ("network", "batch_size"))]
        base = next((r for r in like if (r["device"], r["precision"]) == ("cpu", "32-true")), None)
        if base is not None:
            row["speed_up"] = row["samples_per_sec"] / base["samples_per_sec"]
            if "val/accuracy" in row and "val/accuracy" in base:
                row["accuracy_difference"] = row["val/accuracy"] - base["val/accuracy"]


def _name(case: Case) -> str:
    return f"{case.network} {case.device} {case.precision} batch {case.batch_size}"
