"""What a run shows while it trains: a bar on a terminal, a line per epoch anywhere else."""

from __future__ import annotations

import logging
import sys
import time
import warnings
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar, TQDMProgressBar

from project.engine.ranks import is_rank_zero

MONITORED = ("throughput/", "memory/", "optimizer/")  # not shown in a line of an epoch
MOST_SHOWN = 6


class EpochLines(Callback):
    """Prints one plain line per epoch on rank 0, for log files.

    Printed when the next epoch begins or training ends: Lightning asks callbacks before the module has logged its
    metrics of the epoch.
    """

    def __init__(self) -> None:
        self._began: float | None = None

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._print_epoch(trainer)
        self._began = time.perf_counter()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._print_epoch(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began = None

    def _print_epoch(self, trainer: Trainer) -> None:
        if not (trainer.is_global_zero and trainer.current_epoch and trainer.callback_metrics):
            return
        of = f"/{trainer.max_epochs}" if trainer.max_epochs and trainer.max_epochs > 0 else ""
        parts = [f"epoch {trainer.current_epoch}{of}"]
        metrics = trainer.callback_metrics
        shown = [name for name in metrics if not name.startswith(MONITORED) and not name.endswith(("_step", "_epoch"))]
        # training before validation, losses before the rest
        shown.sort(key=lambda name: (name.startswith("val"), "loss" not in name, name))
        parts += [f"{name} {float(metrics[name]):.4f}" for name in shown[:MOST_SHOWN]]
        if self._began is not None:
            parts.append(f"{time.perf_counter() - self._began:.1f} s")
        print("  ".join(parts), flush=True)


class QuietBar(TQDMProgressBar):
    """Lightning's bar without per-step values (each would wait for the device) and without the logger's version."""

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        return metrics


def progress_callback(flags: dict[str, Any]) -> Callback | None:
    """The bar on a terminal, else lines. None with ``--enable_progress_bar false`` or a bar of the user's own.

    Sets ``enable_progress_bar`` in the flags.
    """
    chosen = flags.get("callbacks") or []
    own = any(isinstance(callback, ProgressBar) for callback in (chosen if isinstance(chosen, list) else [chosen]))
    enabled = flags["enable_progress_bar"] is not False and not own
    bar = enabled and sys.stdout.isatty()
    flags["enable_progress_bar"] = own or bar
    # a refresh every 50 steps costs nothing that can be measured; every step costs a third of a small model's run
    return QuietBar(refresh_rate=50) if bar else EpochLines() if enabled else None


def say(*lines: str) -> None:
    """Print lines, on rank 0."""
    for line in lines if is_rank_zero() else ():
        print(line, flush=True)


# Advice of Lightning and wandb that is wrong here, with the reason
UNFOUNDED = (
    "You're resuming from a checkpoint that ended before the epoch",  # our sampler starts where the run was stopped
    "It is recommended to use `self.log",  # torchmetrics has summed over the ranks before we log
    "The '.*_dataloader' does not have many workers",  # none is fastest for images in memory
    "You requested to overfit",
    "The number of training batches .* is smaller than the logging interval",  # the rest of an epoch is logged
    "The `srun` command is available",
    "`isinstance.treespec, LeafSpec.` is deprecated",
)


def silence_unfounded_advice() -> None:
    """Hide Lightning's notes and the warnings above from the user; show every other warning."""
    for name in ("lightning.pytorch", "lightning.fabric"):  # its import sets INFO; our own lines say what matters
        logging.getLogger(name).setLevel(logging.WARNING)
    for name in ("callbacks.model_summary", "profilers.profiler"):  # what was asked for by a flag is shown
        logging.getLogger(f"lightning.pytorch.{name}").setLevel(logging.INFO)
    for message in UNFOUNDED:
        warnings.filterwarnings("ignore", message)
