"""The most memory that tensors take during one optimizer step, on a GPU and on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.profiler import ProfilerActivity, profile

from project.callbacks.memory_breakdown import GIB, memory_breakdown, size_gib

PARTS = {"weights": "weights", "gradients": "gradients", "optimizer state": "optimizer"}


class PeakMemory(Callback):
    """Measures a run's third optimizer step; the first ones make optimizer state and choose algorithms.

    On CUDA the allocator keeps the peak. The CPU's allocator keeps none: there every allocation and release of a tensor
    is taken from PyTorch's profiler and added up from what lives when the step begins. What libraries take for
    themselves (oneDNN's scratch memory) is not seen there.
    """

    def __init__(self) -> None:
        self.peak = 0.0  # bytes
        self.parts: dict[str, float] = {}  # bytes of weights, gradients, optimizer (state) after the step
        self._profiler: Any = None
        self._before = 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx != 2 * trainer.accumulate_grad_batches:
            return
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            return
        self._before = GIB * (sum(memory_breakdown(trainer).values()) + size_gib(batch))
        self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=False)
        self._profiler.__enter__()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx + 1 != 3 * trainer.accumulate_grad_batches:
            return
        if self._profiler is None:
            self.peak = float(torch.cuda.max_memory_allocated())
        else:
            self._profiler.__exit__(None, None, None)
            self.peak = self._before + largest_sum(self._profiler)
        self.parts = {PARTS[name]: GIB * size for name, size in memory_breakdown(trainer).items()}


def largest_sum(profiler: Any) -> int:
    """The most bytes above the start that a profiler's memory events add up to."""
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    total = largest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes()
        largest = max(largest, total)
    return largest
