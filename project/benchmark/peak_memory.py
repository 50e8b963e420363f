"""The most memory that tensors take during one optimizer step, on a GPU and on the CPU."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.profiler import ProfilerActivity, profile, record_function

from project.callbacks.memory_use import GIB, memory_breakdown

MARK = "the step that is measured"
PARTS = {"weights": "weights", "gradients": "gradients", "optimizer state": "optimizer"}


class PeakMemory(Callback):
    """Measures a run's third optimizer step; the first ones make optimizer state and choose algorithms.

    On CUDA the allocator keeps the peak. The CPU's allocator keeps none: there every allocation and release of a tensor
    is taken from PyTorch's profiler and added up. That sees no release of what was allocated before it began, and so
    begins a step earlier: by the third one, all that comes and goes was allocated under its eyes, and weights and
    optimizer state, which stay, are added. What libraries take for themselves (oneDNN's scratch memory) is not seen.
    """

    def __init__(self) -> None:
        self.peak = 0.0  # bytes
        self.parts: dict[str, float] = {}  # bytes of weights, gradients, optimizer (state) after the step
        self._profiler: Any = None
        self._mark: Any = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        on_gpu = trainer.strategy.root_device.type == "cuda"
        step, part = divmod(batch_idx, trainer.accumulate_grad_batches)
        if part:
            return
        if step == 1 and not on_gpu:
            self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self._profiler.__enter__()
        elif step == 2 and on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        elif step == 2:
            self._mark = record_function(MARK)
            self._mark.__enter__()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx + 1 != 3 * trainer.accumulate_grad_batches:
            return
        self.parts = {PARTS[name]: GIB * size for name, size in memory_breakdown(trainer).items()}
        if self._profiler is None:
            self.peak = float(torch.cuda.max_memory_allocated())
        else:
            self._mark.__exit__(None, None, None)
            self._profiler.__exit__(None, None, None)
            events = self._profiler.profiler.kineto_results.events()
            self.peak = self.parts["weights"] + self.parts["optimizer"] + largest_sum(events)


def largest_sum(events: Iterable[Any]) -> int:
    """The most bytes that a profiler's memory events add up to, from the mark on."""
    in_order = sorted(events, key=lambda event: event.start_ns())
    total = largest = 0
    marked = False
    for event in in_order:
        marked = marked or event.name() == MARK
        if event.name() == "[memory]":
            total += event.nbytes()
        if marked:
            largest = max(largest, total)
    return largest
