"""How much memory a run uses, for what, and whether it leaks."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from project.callbacks.memory_use import (
    HEADLINE,
    add_activations,
    explain,
    memory_breakdown,
    possible_savings,
)
from project.engine.log_steps import gather_over_ranks, is_log_step, is_optimizer_step, log_values
from project.hardware import GIB
from project.live_memory import is_out_of_memory

MIB = 1024**2
STATUS = Path("/proc/self/status")
PEAKS = ("peak_allocated", "peak_reserved")
# Optimizer state is made at the first step that is not skipped; 16-mixed skips one or two.
SETTLING_STEPS = 3
# Epochs in a row that must grow to count as a leak. The baseline is the end of the first one, with caches filled.
EPOCHS = 4


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

    Device metrics are those of the rank with the highest value. Growth over epochs that looks like a leak is reported
    in a warning, with numbers. An out-of-memory error is raised again with advice in its message.

    Args:
        allocator: Makes the device's allocator; None of it on the CPU.
        host: Reads the host's memory.
    """

    def __init__(
        self, allocator: Callable[[torch.device], Allocator | None] | None = None, host: HostMemory | None = None
    ) -> None:
        self.leaks: list[str] = []
        """Reports of growth, the newest one for each kind of memory."""
        self._make_allocator, self._host = allocator or allocator_of, host or HostMemory()
        self._allocator: Allocator | None = None
        self._window_peaks: dict[str, int] = {}  # bytes, since the last logged value
        self._step_peak: int | None = None  # bytes, of training steps alone
        self._parts: dict[str, float] = {}
        self._parts_due = 0
        self._logged_at, self._logged_peaks = -1, dict[str, float]()
        self._run: dict[str, float] = {}  # highest values
        self._growth: list[tuple[MemoryGrowth, Callable[[], int]]] = []
        self._precision = "32-true"

    def summary(self) -> dict[str, float]:
        """The run's highest values: ``memory/peak_rss_gib``, and with CUDA the other ``memory/peak_*``."""
        return dict(self._run)

    @property
    def breakdown(self) -> dict[str, float]:
        """GiB by use on this rank, see :func:`memory_breakdown`; empty before the first step."""
        return add_activations(self._parts, self._step_peak)

    @property
    def savings(self) -> dict[str, float]:
        """GiB that each flag would save at most, see :func:`possible_savings`."""
        return possible_savings(self.breakdown, self._precision)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._allocator = self._make_allocator(trainer.strategy.root_device)
        self._growth = [(MemoryGrowth("host", least_mib=2), self._host.process_rss)]
        if (allocator := self._allocator) is not None:
            self._growth.append((MemoryGrowth("device", least_mib=0.5), lambda: allocator.read()["allocated"]))
        self._read_peaks()
        self._window_peaks, self._step_peak, self._logged_at = {}, None, -1
        self._parts_due = SETTLING_STEPS
        self._precision = str(trainer.precision)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._parts_due and is_optimizer_step(trainer, batch_idx):
            self._parts_due -= 1
            self._parts = memory_breakdown(trainer)
        if is_log_step(trainer, batch_idx):
            self._log(trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._read_peaks(of_training=True)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._read_peaks()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._log(trainer, pl_module, epoch_end=True)
        for growth, used in self._growth:
            known = [leak for leak in self.leaks if leak.startswith(growth.place)]
            if report := growth.note(used()):
                self.leaks = [leak for leak in self.leaks if leak not in known] + [report]
                if not known:
                    rank_zero_warn(report)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if not is_out_of_memory(exception) or HEADLINE in str(exception):
            return
        peaks = [self._run.get("memory/peak_allocated_gib", 0.0)]
        if self._allocator is not None:
            peaks.append(self._allocator.read().get("peak_allocated", 0) / GIB)
        total = self._allocator.total if self._allocator else None
        # in the message, so that it is the last thing on the screen whoever prints the error
        exception.args = (f"{exception}\n\n{explain(trainer, max(peaks), total)}",)

    def _read_peaks(self, of_training: bool = False) -> dict[str, int]:
        """Read the allocator, keep its peaks for the window, and reset them. Nothing else resets them."""
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

    def _log(self, trainer: Trainer, module: LightningModule, epoch_end: bool = False) -> None:
        sizes = self._read_peaks(of_training=True) | self._window_peaks
        metrics = {f"memory/{name}_gib": size / GIB for name, size in sizes.items()}
        if self._allocator is not None and self._allocator.total and "peak_reserved" in sizes:
            metrics["memory/peak_reserved_pct"] = 100 * sizes["peak_reserved"] / self._allocator.total
        self._window_peaks = {}
        rss, peak_rss = self._host.rss(), self._host.peak_rss()
        ranks = gather_over_ranks(trainer, [rss / GIB, peak_rss / GIB, *metrics.values()])
        rss_gib, peak_rss_gib = (sum(rank[i] for rank in ranks) for i in (0, 1))
        metrics = {name: max(rank[i] for rank in ranks) for i, name in enumerate(metrics, 2)}
        peaks = {name: value for name, value in metrics.items() if name.startswith("memory/peak")}
        for name, value in {**peaks, "memory/peak_rss_gib": max(rss_gib, peak_rss_gib)}.items():
            self._run[name] = max(self._run.get(name, 0.0), value)
        if self._logged_at == trainer.global_step:  # a log step ended the epoch: the same row is written again
            metrics |= {name: max(value, self._logged_peaks[name]) for name, value in peaks.items()}
        self._logged_at, self._logged_peaks = trainer.global_step, peaks
        log_values(module, {**metrics, "memory/rss_gib": rss_gib}, epoch_end)


class Allocator:
    """What PyTorch's allocator of one CUDA or MPS device says, in bytes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        on_cuda = device.type == "cuda"
        self.total = (
            torch.cuda.get_device_properties(device).total_memory if on_cuda else torch.mps.recommended_max_memory()
        )

    def read(self) -> dict[str, int]:
        """``allocated`` (in tensors), ``reserved`` (held from the device), and on CUDA ``peak_allocated`` and
        ``peak_reserved``, the most since the last :meth:`reset_peak`. MPS keeps no peaks.
        """
        if self.device.type == "mps":
            return {"allocated": torch.mps.current_allocated_memory(), "reserved": torch.mps.driver_allocated_memory()}
        stats = torch.cuda.memory_stats(self.device)
        return {
            "allocated": stats.get("allocated_bytes.all.current", 0),
            "reserved": stats.get("reserved_bytes.all.current", 0),
            "peak_allocated": stats.get("allocated_bytes.all.peak", 0),
            "peak_reserved": stats.get("reserved_bytes.all.peak", 0),
        }

    def reset_peak(self) -> None:
        """Reset the peaks to the present values."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)


def allocator_of(device: torch.device) -> Allocator | None:
    """The allocator of a device, None for the CPU, which keeps no counters."""
    return Allocator(device) if device.type in ("cuda", "mps") else None


class HostMemory:
    """Resident set sizes (bytes) of this rank. Pages that processes share count once in each of them."""

    def __init__(self) -> None:
        self._processes: dict[int, psutil.Process] = {}

    def process_rss(self) -> int:
        """Of this process alone."""
        return self._rss(os.getpid())

    def rss(self) -> int:
        """Of this process and the workers that its loaders have started."""
        # Python's own list of children: psutil would search all processes of the machine, some milliseconds
        workers = [child.pid for child in multiprocessing.active_children() if child.pid is not None]
        return self.process_rss() + sum(map(self._rss, workers))

    def peak_rss(self) -> int:
        """The most this process has had since it was started, 0 if the system does not report it.

        Not ``getrusage``: its ``ru_maxrss`` begins with the size of the process that started this one.
        """
        try:
            for line in STATUS.read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        except OSError:
            pass
        return 0

    def _rss(self, pid: int) -> int:
        try:
            if pid not in self._processes:
                self._processes[pid] = psutil.Process(pid)
            return int(self._processes[pid].memory_info().rss)
        except psutil.NoSuchProcess:  # the worker has just ended
            self._processes.pop(pid, None)
            return 0


class MemoryGrowth:
    """Watches one kind of memory at epoch ends: a leak adds much the same amount every epoch.

    Args:
        place: Named in the report, such as ``host``.
        least_mib: Growth per epoch below which nothing is reported; allocators and loggers always grow a little.
    """

    def __init__(self, place: str, least_mib: float) -> None:
        self.place, self.least_mib = place, least_mib
        self.mib: list[float] = []

    def note(self, used_bytes: int) -> str | None:
        """Add an epoch's end. Returns the report, with numbers, while the growth looks like a leak.

        Each of the last four epochs must have added at least ``least_mib``, and at least a third of the largest
        addition (a cache that fills up adds less and less).
        """
        self.mib.append(used_bytes / MIB)
        recent = self.mib[-EPOCHS - 1 :]
        if len(recent) <= EPOCHS:
            return None
        added = [after - before for before, after in pairwise(recent)]
        if min(added) < self.least_mib or min(added) < max(added) / 3:
            return None
        return (
            f"{self.place} memory looks like it leaks: {sum(added) / EPOCHS:.1f} MiB more after each of the last "
            f"{EPOCHS} epochs ({recent[0]:.0f} MiB → {recent[-1]:.0f} MiB). Something keeps tensors alive from step to "
            "step: keep loss.item() or loss.detach(), never the loss or outputs with their graph."
        )
