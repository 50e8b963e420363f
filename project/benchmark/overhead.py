"""What each feature of a run costs: everything on, without each, Lightning alone, and loops written by hand."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from project.benchmark.by_hand import Epoch, FloorLoop, course_epoch
from project.benchmark.flags import Settings
from project.benchmark.per_sample import per_sample_loader
from project.benchmark.steps import Steps
from project.benchmark.timing import alternate, median_and_spread
from project.benchmark.with_lightning import Features, run_epochs
from project.callbacks.memory import MemoryMonitor
from project.callbacks.optimizer import OptimizerMonitor
from project.callbacks.throughput import ThroughputMonitor
from project.engine.checkpointing import RunCheckpoint
from project.engine.cli import ProjectCLI
from project.loggers.metrics_csv import MetricsCSV

FLOOR, COURSE, ALL = "hand-written floor", "course loop", "all features"
LOWER_FLOOR = "floor with index_select"


def measure(cli: ProjectCLI, settings: Settings) -> list[dict[str, Any]]:
    """One row per variant: seconds per epoch and its ratio to the floor's.

    An epoch is its training steps, the validation behind them and what is saved of it (the floor validates and saves
    nothing, the course loop only trains). The floor gathers a batch by plain indexing; with ``index_select``, which is
    what our dataset uses, it is lower. Every Lightning run trains one epoch to warm up and one that counts.
    """
    variants = make_variants(cli, settings)
    by_hand = (FLOOR, LOWER_FLOOR, COURSE)
    # a warm-up of the loops by hand, every variant n times, and n runs whose hooks are timed
    steps = Steps("overhead", len(by_hand) + (len(variants) + 1) * settings.n)
    for name in by_hand:  # Lightning runs have their own warm-up epoch
        steps.begin(f"{name} (warm-up)")
        variants[name]()
    results = alternate(variants, settings.n, steps)
    inside = inside_hooks(cli, settings.n, steps)
    steps.finish()
    rows = [
        {
            "loop": name,
            "network": type(cli.model.network).__name__,
            "batch_size": cli.datamodule.batch_size,
            **median_and_spread("epoch_s", [epoch.epoch_s for epoch in epochs]),
            "train_s": statistics.median(epoch.train_s for epoch in epochs),
            "train_cpu_s": statistics.median(epoch.train_cpu_s for epoch in epochs),
        }
        for name, epochs in results.items()
    ]
    floor = next(row for row in rows if row["loop"] == FLOOR)
    for row in rows:
        row["train_vs_floor"] = row["train_s"] / floor["train_s"]
        row["train_cpu_vs_floor"] = row["train_cpu_s"] / floor["train_cpu_s"]
        if row["loop"] != COURSE:
            row["epoch_vs_floor"] = row["epoch_s"] / floor["epoch_s"]
    return rows + inside


def inside_hooks(cli: ProjectCLI, n: int, steps: Steps) -> list[dict[str, Any]]:
    """A row per monitor and for the checkpoints: how much of a run of two epochs passes inside their own hooks.

    What a run with and without them differs by is less than what two runs differ by.
    """
    shares: dict[str, list[float]] = {}
    for number in range(n):
        steps.begin(f"inside the hooks ({number + 1} of {n})")
        features = Features(watched=(ThroughputMonitor, MemoryMonitor, OptimizerMonitor, RunCheckpoint))
        epochs, _ = run_epochs(cli, 2, features)
        seconds = sum(epoch.epoch_s for epoch in epochs)
        for name, clock in features.inside.items():
            shares.setdefault(name, []).append(100 * clock.seconds / seconds)
    return [
        {"loop": f"inside {name}", "batch_size": cli.datamodule.batch_size, **median_and_spread("pct_of_run", values)}
        for name, values in shares.items()
    ]


def make_variants(cli: ProjectCLI, settings: Settings) -> dict[str, Callable[[], Epoch]]:
    """Name → function that trains one measured epoch."""
    from lightning.pytorch.callbacks import ProgressBar
    from lightning.pytorch.loggers import WandbLogger

    each = {
        "without throughput monitor": Features(without=(ThroughputMonitor,)),
        "without memory monitor": Features(without=(MemoryMonitor,)),
        "without optimizer monitor": Features(without=(OptimizerMonitor,)),
        "without checkpoints": Features(without=(RunCheckpoint,)),
        "without W&B": Features(without=(WandbLogger,)),
        "without metrics.csv": Features(without=(MetricsCSV,)),
        "without progress bar": Features(without=(ProgressBar,)),
    }
    features = {
        ALL: Features(),
        **(each if settings.each_feature else {}),
        "Lightning, nothing on": Features(bare=True),
    }
    cli.datamodule.setup("fit")
    device = torch.device("cpu") if cli.config_init.trainer.accelerator == "cpu" else best_device()
    dtype = autocast_dtype(str(cli.config_init.trainer.precision))
    floors = {
        name: FloorLoop(copy.deepcopy(cli.model.network), cli.datamodule, device, dtype, index_select=select).epoch
        for name, select in ((FLOOR, False), (LOWER_FLOOR, True))
    }
    course_network = copy.deepcopy(cli.model.network).to(device)
    optimizer = torch.optim.Adam(course_network.parameters(), lr=1e-3)
    loader = per_sample_loader(cli.datamodule, "train")

    lightning = {name: partial(last_epoch, cli, feature) for name, feature in features.items()}
    return {**floors, COURSE: partial(course_epoch, course_network, optimizer, loader, device), **lightning}


def last_epoch(cli: ProjectCLI, features: Features) -> Epoch:
    """The second epoch of a run; the first one has warmed it up."""
    epochs, _ = run_epochs(cli, 2, features)
    return epochs[-1]


def best_device() -> torch.device:
    """The device that ``--accelerator auto`` trains on."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def autocast_dtype(precision: str) -> torch.dtype | None:
    """The data type of a mixed precision, None for the others."""
    return {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}.get(precision)
