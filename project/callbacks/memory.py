"""How much memory a run takes, what for, and whether it leaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from project.callbacks.allocator import Allocator, allocator_of
from project.callbacks.host_memory import HostMemory
from project.callbacks.log_steps import gather_over_ranks, is_log_step, log_metrics, row_step, skip_idle_hooks
from project.callbacks.memory_breakdown import GIB, add_activations, memory_breakdown, possible_savings
from project.callbacks.memory_growth import MemoryGrowth
from project.callbacks.out_of_memory import HEADLINE, explain, is_out_of_memory

PEAKS = ("peak_allocated", "peak_reserved")
# Optimizer state comes into being at the first step that is not skipped; 16-mixed skips one or two.
SETTLING_STEPS = 3


class MemoryMonitor(Callback):
    """Reads the device's allocator and the host's resident memory at log steps and epoch ends.

    Lightning's DeviceStatsMonitor logs every counter of the allocator, in bytes, twice a step.

    Logged metrics, GiB of 1024³ bytes:

    - ``memory/rss_gib``: resident host memory now, of all ranks and their loader workers together (pages that
      processes share count in each)
    - ``memory/allocated_gib``, ``memory/reserved_gib``: device memory now in tensors, and held by PyTorch. CUDA, MPS
    - ``memory/peak_allocated_gib``, ``memory/peak_reserved_gib``: the most since the last logged value, validation
      included. CUDA
    - ``memory/peak_reserved_pct``: the same as a share (0-100) of the device's memory. CUDA

    Device metrics are those of the rank that has most. Growth over epochs that looks like a leak is reported in a
    warning, with numbers. An out-of-memory error gets advice added to its message, and goes on its way.

    Args:
        allocator: Makes the device's allocator; None of it on the CPU.
        host: Reads the host's memory.
    """

    def __init__(
        self,
        allocator: Callable[[torch.device], Allocator | None] = allocator_of,
        host: HostMemory | None = None,
    ) -> None:
        self.leaks: list[str] = []
        """Reports of growth, the newest of each place."""
        self.epoch_peaks: list[dict[str, float]] = []
        """The ``memory/peak_*`` metrics over each whole epoch."""
        self._make_allocator = allocator
        self._host = host or HostMemory()
        self._allocator: Allocator | None = None
        self._window_peaks: dict[str, int] = {}
        self._step_peak: int | None = None
        self._parts: dict[str, float] = {}
        self._parts_due = 0
        self._row: tuple[int, dict[str, float]] = (-1, {})
        self._precision, self._dtype = "32-true", torch.float32
        self._epoch: dict[str, float] = {}
        self._run: dict[str, float] = {}
        self._growth: list[tuple[MemoryGrowth, Callable[[], int]]] = []

    def summary(self) -> dict[str, float]:
        """The run's highest values: ``memory/peak_rss_gib``, with CUDA ``memory/peak_allocated_gib`` and its kin."""
        return dict(self._run)

    @property
    def breakdown(self) -> dict[str, float]:
        """GiB by use on this rank, see :func:`memory_breakdown`; empty before the first step."""
        return add_activations(self._parts, self._step_peak)

    @property
    def savings(self) -> dict[str, float]:
        """Share (0-100) of the breakdown's whole that each flag would save at most."""
        return possible_savings(self.breakdown, self._precision, self._dtype)

    # Hooks

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        skip_idle_hooks(self)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._allocator = self._make_allocator(trainer.strategy.root_device)
        self._growth = [(MemoryGrowth("host", least_mib=2), self._host.process_rss)]
        if (allocator := self._allocator) is not None:
            self._growth.append((MemoryGrowth("device", least_mib=0.5), lambda: allocator.read()["allocated"]))
        self._read_peaks()
        self._window_peaks, self._step_peak, self._row = {}, None, (-1, {})
        self._parts_due = SETTLING_STEPS
        self._precision = str(trainer.precision)
        self._dtype = next((p.dtype for p in pl_module.parameters()), torch.float32)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._parts_due and not trainer.fit_loop._should_accumulate():
            self._parts_due -= 1
            self._parts = memory_breakdown(trainer)
        if is_log_step(trainer):
            self._log(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._read_peaks(of_training=True)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._read_peaks()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._log(trainer, epoch_end=True)
        self.epoch_peaks.append(self._epoch)
        self._epoch = {}
        reports = [(growth.place, growth.note(used())) for growth, used in self._growth]
        for place, report in reports:
            known = [leak for leak in self.leaks if leak.startswith(place)]
            if report:
                self.leaks = [leak for leak in self.leaks if leak not in known] + [report]
                if not known:
                    rank_zero_warn(report)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if not is_out_of_memory(exception) or HEADLINE in str(exception):
            return
        peaks = [gib * GIB for gib in (self._run.get("memory/peak_allocated_gib"),) if gib is not None]
        if self._allocator is not None:
            peaks.append(self._allocator.read().get("peak_allocated", 0))
        total = self._allocator.total if self._allocator else None
        advice = explain(exception, trainer, int(max(peaks)) if peaks else None, total)
        # In the message, so that it is the last thing on the screen whoever prints the error.
        exception.args = (f"{exception}\n\n{advice}",)

    # Inside

    def _read_peaks(self, of_training: bool = False) -> dict[str, int]:
        """Read the allocator, keep its peaks for the window, and reset them: the one place that does."""
        if self._allocator is None:
            return {}
        now = self._allocator.read()
        self._allocator.reset_peak()
        for name in PEAKS:
            if name in now:
                self._window_peaks[name] = max(self._window_peaks.get(name, 0), now[name])
        if of_training and "peak_allocated" in now:
            self._step_peak = max(self._step_peak or 0, now["peak_allocated"])
        return now

    def _log(self, trainer: Trainer, epoch_end: bool = False) -> None:
        now = self._read_peaks(of_training=True)
        device = {name: size / GIB for name, size in now.items() if name not in PEAKS}
        device |= {name: size / GIB for name, size in self._window_peaks.items()}
        metrics = {f"memory/{name}_gib": value for name, value in device.items()}
        if self._allocator is not None and self._allocator.total and "peak_reserved" in self._window_peaks:
            metrics["memory/peak_reserved_pct"] = 100 * self._window_peaks["peak_reserved"] / self._allocator.total
        self._window_peaks = {}
        rss, peak_rss = self._host.rss(), self._host.peak_rss()
        ranks = gather_over_ranks(trainer, [rss / GIB, peak_rss / GIB, *metrics.values()])
        rss_gib, peak_rss_gib = (sum(rank[i] for rank in ranks) for i in (0, 1))
        metrics = {name: max(rank[i] for rank in ranks) for i, name in enumerate(metrics, 2)}
        self._keep_highest(metrics, max(rss_gib, peak_rss_gib))
        peaks = {name: value for name, value in metrics.items() if name.startswith("memory/peak")}
        step = row_step(trainer, epoch_end)
        if self._row[0] == step:  # the epoch's last step was a log step, and its row is written again
            metrics |= {name: max(value, self._row[1][name]) for name, value in peaks.items()}
        self._row = step, peaks
        log_metrics(trainer, {**metrics, "memory/rss_gib": rss_gib}, epoch_end)

    def _keep_highest(self, metrics: dict[str, float], rss_gib: float) -> None:
        peaks = {name: value for name, value in metrics.items() if name.startswith("memory/peak")}
        for highest in (self._epoch, self._run):
            for name, value in {**peaks, "memory/peak_rss_gib": rss_gib}.items():
                highest[name] = max(highest.get(name, 0.0), value)
