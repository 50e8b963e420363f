"""What precision, activation checkpointing, accumulation and batch size do to the memory of a training step."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from project.benchmark import Row, Settings
from project.benchmark.devices import best_device, device_flags, network_name, usable
from project.benchmark.timing import progress, run_epochs
from project.callbacks.memory_use import memory_breakdown
from project.engine.cli import Configuration, configure
from project.hardware import GIB
from project.live_memory import LiveMemory

MIB = 1024**2
ACCUMULATIONS, BATCH_SIZES = (1, 4), (256, 1024)
STEPS = 3  # optimizer steps; the last is measured, the others make the optimizer's state and choose algorithms
COLUMNS = {"weights": "weights_mib", "gradients": "gradients_mib", "optimizer state": "optimizer_mib"}


def measure(config: Configuration, settings: Settings) -> list[Row]:
    """One row per combination on the best device here, each measured once: the peak does not vary.

    ``batch_size`` is what one optimizer step sees; with accumulation it comes in that many parts. The peak is that of
    the whole optimizer step; ``activations_mib`` is what it holds besides weights, gradients and optimizer state.
    """
    device = best_device(config).type
    model = config.resolved["model"]
    recomputes = (False, True) if "activation_checkpointing" in (model.get("init_args") or model) else (False,)
    sizes = settings.batch_sizes or ([64] if settings.quick else BATCH_SIZES)
    cases = list(product(usable(device, settings.precisions), recomputes, ACCUMULATIONS, sizes))
    rows: list[Row] = []
    with progress("memory", len(cases)) as bar:
        for precision, recompute, parts, size in cases:
            row: Row = {"precision": precision, "activation_checkpointing": recompute}
            row |= {"accumulation": parts, "batch_size": size}
            bar.set_postfix(row)
            flags = [*settings.fit_flags, *device_flags(device, precision, max(1, size // parts))]
            flags += ["--accumulate_grad_batches", str(parts), "--limit_train_batches", str(STEPS * parts)]
            flags += ["--limit_val_batches", "0"]
            flags += ["--model.activation_checkpointing", "true"] if recompute else []
            probe = PeakMemory()
            run = run_epochs(configure(flags, "project.benchmark"), 1, extra=[probe])
            bar.update()
            row = {"device": run.device, "network": network_name(config), **row}
            row |= {"peak_mib": probe.peak_bytes / MIB, "n": 1}
            row |= {COLUMNS[name]: size / MIB for name, size in probe.parts.items()}
            row["activations_mib"] = max(0.0, probe.peak_bytes - sum(probe.parts.values())) / MIB
            rows.append(row)
    return rows


class PeakMemory(Callback):
    """The most memory that tensors take during a run's last optimizer step, by what they are for.

    On CUDA the allocator keeps the peak. The CPU's allocator keeps none: there :class:`LiveMemory` counts tensors. It
    does not see what a library takes for itself during an operation (oneDNN's scratch memory).
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self.parts: dict[str, float] = {}  # bytes by use after the step, as memory_breakdown names them
        self._meter: LiveMemory | None = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx != (STEPS - 1) * trainer.accumulate_grad_batches:
            return
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            return
        self._meter = LiveMemory()
        self._meter.__enter__()
        states = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
        self._meter.count([*pl_module.parameters(), *pl_module.buffers(), *(p.grad for p in pl_module.parameters())])
        self._meter.count([value for state in states for value in state.values()])
        self._meter.count(batch if isinstance(batch, (tuple, list)) else [batch])

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx + 1 != STEPS * trainer.accumulate_grad_batches:
            return
        if self._meter is not None:
            self._meter.__exit__(None, None, None)
        self.peak_bytes = self._meter.peak_bytes if self._meter is not None else torch.cuda.max_memory_allocated()
        self.parts = {name: GIB * size for name, size in memory_breakdown(trainer).items()}
