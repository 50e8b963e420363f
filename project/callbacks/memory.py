"""How much memory a run uses, for what, and whether it leaks."""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Callable
from contextlib import suppress
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
# Optimizer state comes into being at the first step that is not skipped; 16-mixed skips one or two.
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

    ``read`` is :func:`device_memory` or its like, ``host`` reads the host's memory.
    """

    def __init__(self, read: Callable[..., dict[str, int]] | None = None, host: HostMemory | None = None) -> None:
        self._read, self._host = read or device_memory, host or HostMemory()
        self._device = torch.device("cpu")
        self._window_peaks: dict[str, int] = {}  # bytes, since the last logged value
        self._step_peak: int | None = None  # bytes, of training steps alone
        self._parts: dict[str, float] = {}
        self._parts_due = 0
        self._logged_at, self._logged_peaks = -1, dict[str, float]()
        self._run: dict[str, float] = {}  # highest values
        self._growth: list[tuple[MemoryGrowth, Callable[[], int]]] = []
        self._leaks: dict[str, str] = {}  # place → its newest report
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
        """Share (0-100) that each flag would save at most, see :func:`possible_savings`."""
        return possible_savings(self.breakdown, self._precision)

    @property
    def leaks(self) -> list[str]:
        """Reports of growth, the newest of each place."""
        return list(self._leaks.values())

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._device = trainer.strategy.root_device
        self._growth = [(MemoryGrowth("host", least_mib=2), self._host.process_rss)]
        if self._read_peaks():
            self._growth.append((MemoryGrowth("device", least_mib=0.5), lambda: self._read(self._device)["allocated"]))
        self._window_peaks, self._step_peak, self._logged_at = {}, None, -1
        self._parts_due, self._precision = SETTLING_STEPS, str(trainer.precision)

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
            if report := growth.note(used()):
                if growth.place not in self._leaks:
                    rank_zero_warn(report)
                self._leaks[growth.place] = report

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if not is_out_of_memory(exception) or HEADLINE in str(exception):
            return
        now = self._read(self._device)
        peak_gib = max(self._run.get("memory/peak_allocated_gib", 0.0), now.get("peak_allocated", 0) / GIB)
        # in the message, so that it is the last thing on the screen whoever prints the error
        exception.args = (f"{exception}\n\n{explain(trainer, peak_gib, now.get('total'))}",)

    def _read_peaks(self, of_training: bool = False) -> dict[str, int]:
        """Read the allocator, keep its peaks for the window, and reset them: the one place that does."""
        now = self._read(self._device, reset_peaks=True)
        for name in now.keys() & {"peak_allocated", "peak_reserved"}:
            self._window_peaks[name] = max(self._window_peaks.get(name, 0), now[name])
        if of_training and "peak_allocated" in now:
            self._step_peak = max(self._step_peak or 0, now["peak_allocated"])
        return now

    def _log(self, trainer: Trainer, module: LightningModule, epoch_end: bool = False) -> None:
        sizes = self._read_peaks(of_training=True) | self._window_peaks
        self._window_peaks = {}
        metrics = {f"memory/{name}_gib": size / GIB for name, size in sizes.items() if name != "total"}
        if "peak_reserved" in sizes:
            metrics["memory/peak_reserved_pct"] = 100 * sizes["peak_reserved"] / sizes["total"]
        host = [self._host.rss() / GIB, self._host.peak_rss() / GIB]
        rss, peak_rss, *columns = zip(*gather_over_ranks(trainer, [*host, *metrics.values()]), strict=True)
        metrics = {name: max(ranks) for name, ranks in zip(metrics, columns, strict=True)}
        peaks = {name: value for name, value in metrics.items() if name.startswith("memory/peak")}
        for name, value in {**peaks, "memory/peak_rss_gib": max(sum(rss), sum(peak_rss))}.items():
            self._run[name] = max(self._run.get(name, 0.0), value)
        if self._logged_at == trainer.global_step:  # a log step ended the epoch: the same row is written again
            metrics |= {name: max(value, self._logged_peaks[name]) for name, value in peaks.items()}
        self._logged_at, self._logged_peaks = trainer.global_step, peaks
        log_values(module, {**metrics, "memory/rss_gib": sum(rss)}, epoch_end)


def device_memory(device: torch.device, reset_peaks: bool = False) -> dict[str, int]:
    """Bytes, as PyTorch's allocator of a device tells them; nothing on the CPU.

    ``allocated`` in tensors, ``reserved`` from the device, its ``total``, and on CUDA ``peak_allocated`` and
    ``peak_reserved``, the most since the last reset.
    """
    if device.type == "mps":
        now = {"allocated": torch.mps.current_allocated_memory(), "reserved": torch.mps.driver_allocated_memory()}
        return {**now, "total": torch.mps.recommended_max_memory()}
    if device.type != "cuda":
        return {}
    stats, kinds = torch.cuda.memory_stats(device), ("allocated", "reserved")
    now = {kind: stats.get(f"{kind}_bytes.all.current", 0) for kind in kinds}
    now |= {f"peak_{kind}": stats.get(f"{kind}_bytes.all.peak", 0) for kind in kinds}
    if reset_peaks:
        torch.cuda.reset_peak_memory_stats(device)
    return {**now, "total": torch.cuda.get_device_properties(device).total_memory}


def is_measurable() -> bool:
    """Whether the system tells what a process uses; without ``/proc`` Linux does not."""
    try:
        psutil.Process().memory_info()
    except psutil.Error:
        return False
    return True


class HostMemory:
    """Resident set sizes (bytes) of this rank. Pages that processes share count once in each of them."""

    def process_rss(self) -> int:
        """Of this process alone."""
        return int(psutil.Process().memory_info().rss)

    def rss(self) -> int:
        """Of this process and the workers that its loaders have started."""
        total = self.process_rss()
        # Python's own list of children: psutil's walks through all processes of the machine, some milliseconds
        for child in multiprocessing.active_children():
            with suppress(psutil.NoSuchProcess):  # a worker that has just ended
                total += int(psutil.Process(child.pid).memory_info().rss)
        return total

    def peak_rss(self) -> int:
        """The most this process has had since it was started, 0 if the system does not report it.

        Not ``getrusage``: its ``ru_maxrss`` begins with the size of the process that started this one.
        """
        with suppress(OSError):
            if found := re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text()):
                return int(found[1]) * 1024
        return 0


class MemoryGrowth:
    """Watches one kind of memory at epoch ends. Allocators and loggers grow, too: less than ``least_mib`` per epoch."""

    def __init__(self, place: str, least_mib: float) -> None:
        self.place, self.least_mib = place, least_mib
        self.mib: list[float] = []

    def note(self, used_bytes: int) -> str | None:
        """Add an epoch's end. Returns the report, with numbers, while the growth looks like a leak.

        That is: each of the last four epochs added ``least_mib``, and a third of what the one that added most did (a
        cache that fills up adds less and less).
        """
        self.mib.append(used_bytes / MIB)
        recent = self.mib[-EPOCHS - 1 :]
        added = [after - before for before, after in pairwise(recent)]
        if len(added) < EPOCHS or min(added) < max(self.least_mib, max(added) / 3):
            return None
        return (
            f"{self.place} memory looks like it leaks: {sum(added) / EPOCHS:.1f} MiB more after each of the last "
            f"{EPOCHS} epochs ({recent[0]:.0f} MiB → {recent[-1]:.0f} MiB). Something keeps tensors alive from step to "
            "step: keep loss.item() or loss.detach(), never the loss or outputs with their graph."
        )
