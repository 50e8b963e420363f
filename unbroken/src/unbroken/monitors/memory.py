"""How much memory a run uses, for what, and whether it leaks."""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from unbroken import contract
from unbroken.errors import is_out_of_memory
from unbroken.loading.log_steps import is_log_step, is_optimizer_step, log_values
from unbroken.machine.hardware import GIB
from unbroken.machine.live_memory import LiveMemory
from unbroken.monitors.monitor import Monitor, never_ends_the_run
from unbroken.monitors.out_of_memory import HEADLINE, explain
from unbroken.results.run_result import RunResult

MIB = 1024**2
# The optimizer's state comes into being at the first step that is not skipped; 16-mixed skips one
# or two.
SETTLING_STEPS = 3
# A leak: this many epochs in a row that all grew, each by at least so many MiB.
LEAK_EPOCHS = 4
LEAST_MIB = {"host": 2.0, "device": 0.5}
ACTIVATIONS = "activations and the rest"
Reader = Callable[..., dict[str, int]]  # sizes in bytes, by name


class MemoryMonitor(Monitor):
    """Reads the device's allocator and the host's resident memory at log steps and epoch ends.

    Lightning's DeviceStatsMonitor logs every counter of the allocator, in bytes, twice a step.

    Logged metrics, GiB of 1024³ bytes:

    - ``memory/rss_gib``: resident host memory now, of all ranks and their loader workers (shared
      pages count in each)
    - ``memory/allocated_gib``, ``memory/reserved_gib``: device memory now in tensors, and held by
      PyTorch. CUDA, MPS
    - ``memory/peak_allocated_gib``, ``memory/peak_reserved_gib``: the most since the last row, with
      validation. CUDA
    - ``memory/peak_reserved_pct``: the same as a share (0-100) of the device's memory. CUDA

    Peaks of the run are the largest of all its starts. Device metrics are the highest of a rank.
    The monitor warns of growth like a leak's, and adds advice to an out-of-memory error.

    Args:
        read: Sizes of a device's memory; default :func:`device_memory`.
        host: Sizes of the host's; default :func:`host_memory`.
    """

    word = "memory"

    # No hook of this puts other weights in for a validation.
    validates_trained_weights = True

    def __init__(self, read: Reader | None = None, host: Reader | None = None) -> None:
        self._read = read or device_memory
        self._read_host = host or host_memory
        # Of the run: ``memory/peak_rss_gib``, and with CUDA the other ``memory/peak_*``.
        self.peaks: dict[str, float] = {}
        self.leaks: dict[str, str] = {}  # place → the newest report of growth there
        self._begin()

    @property
    def is_measurable(self) -> bool:
        """Whether the system tells what a process uses; without ``/proc`` Linux does not."""
        with suppress(psutil.Error):
            return bool(psutil.Process().memory_info())
        return False

    def _begin(self) -> None:
        # Counts a step's tensors where no allocator does.
        self._live = LiveMemory()
        self._window_peaks: dict[str, int] = {}  # bytes, since the last logged value
        self._step_peak: int | None = None  # bytes, of training steps alone
        self._parts: dict[str, float] = {}  # GiB by use
        self._parts_due = SETTLING_STEPS  # steps after which to look once more
        self._at_epoch_ends: dict[str, list[float]] = {}  # place → MiB
        self._logged_at = -1  # global step of the last row

    @property
    def breakdown(self) -> dict[str, float]:
        """GiB by use on this rank, with what the training peak has more, where it is known; empty
        before a step.
        """
        if not self._parts:
            return {}
        peak = self._step_peak
        if self._live.peak_bytes:
            # Weights and state were there before the step whose tensors were counted.
            before = self._parts["weights"] + self._parts["optimizer state"]
            peak = self._live.peak_bytes + int(GIB * before)
        if peak is None:
            return self._parts
        rest = peak / GIB - sum(self._parts.values())
        return {**self._parts, ACTIVATIONS: max(0.0, rest)}

    def add_facts(self, trainer: Trainer, result: RunResult) -> None:
        """Add the peaks to the summary, and for the report memory by use and what looks like a
        leak.
        """
        result.summary.metrics |= self.peaks
        result.breakdown = self.breakdown
        result.leaks = list(self.leaks.values())

    def state_dict(self) -> dict[str, Any]:
        return {"peaks": dict(self.peaks)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep what an earlier start has reached, too."""
        self._keep_peaks(state_dict["peaks"])

    @never_ends_the_run
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin()
        # What came before is not the training's.
        self._read(trainer.strategy.root_device, reset_peaks=True)

    @never_ends_the_run
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # The first step makes the optimizer's state: the second is the first that is like all
        # others.
        is_second_step = trainer.global_step == 1
        # A compiled network would run eagerly while its tensors are counted.
        is_compiled = bool(pl_module.hparams.get("compile"))
        if is_second_step and not is_compiled and not self._read(trainer.strategy.root_device):
            self._live.start()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._look_at_parts(trainer, batch_idx)
        if is_log_step(trainer, batch_idx):
            self._log(trainer)

    @never_ends_the_run
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._read_peaks(trainer)

    @never_ends_the_run
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._read_peaks(trainer, of_training=False)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._log(trainer)
        self._look_for_leaks(trainer)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._live.close()
        if is_out_of_memory(exception) and HEADLINE not in str(exception):
            self._add_advice(trainer, exception)

    def switch_off(self, error: Exception) -> None:
        self._live.close()
        super().switch_off(error)

    @never_ends_the_run
    def _look_at_parts(self, trainer: Trainer, batch_idx: int) -> None:
        self._live.close()
        if self._parts_due and is_optimizer_step(trainer, batch_idx):
            self._parts = memory_breakdown(trainer)
            self._parts_due -= 1

    @never_ends_the_run
    def _add_advice(self, trainer: Trainer, exception: BaseException) -> None:
        total = self._read_peaks(trainer).get("total")
        self._parts = memory_breakdown(trainer)
        advice = explain(trainer, self.breakdown, self._step_peak, total)
        # In the message, so that it is the last thing on the screen, whoever prints the error.
        exception.args = (f"{exception}\n\n{advice}",)

    def _read_peaks(self, trainer: Trainer, of_training: bool = True) -> dict[str, int]:
        """Read the allocator, keep its peaks for the window, and reset them."""
        now = self._read(trainer.strategy.root_device, reset_peaks=True)
        for name in ("peak_allocated", "peak_reserved"):
            if name in now:
                self._window_peaks[name] = max(self._window_peaks.get(name, 0), now[name])
        if of_training and "peak_allocated" in now:
            self._step_peak = max(self._step_peak or 0, now["peak_allocated"])
        return now

    def _log(self, trainer: Trainer) -> None:
        """Log a row. Every rank takes part, also one whose monitor is off."""
        ranks = self.gather_from_ranks(self._measure(trainer))
        if ranks is not None:
            self._log_joined(trainer, ranks)

    @never_ends_the_run
    def _measure(self, trainer: Trainer) -> dict[str, float]:
        """This rank's device metrics by their names, and bytes of the host by theirs."""
        sizes = self._read_peaks(trainer) | self._window_peaks
        self._window_peaks = {}
        measured: dict[str, float] = {**self._read_host()}
        for name, size in sizes.items():
            if name != "total":
                measured[f"memory/{name}_gib"] = size / GIB
        if "peak_reserved" in sizes:
            measured["memory/peak_reserved_pct"] = 100 * sizes["peak_reserved"] / sizes["total"]
        return measured

    @never_ends_the_run
    def _log_joined(self, trainer: Trainer, ranks: list[dict[str, float]]) -> None:
        # A log step may end the epoch. Its row is written once more, and keeps its own peaks.
        is_same_row = self._logged_at == trainer.global_step
        self._logged_at = trainer.global_step
        metrics: dict[str, float] = {}
        for name in ranks[0]:
            if name.startswith("memory/"):
                metrics[name] = max(rank[name] for rank in ranks)
                if is_same_row and name.startswith("memory/peak"):
                    logged = float(trainer.callback_metrics.get(name, 0.0))
                    metrics[name] = max(metrics[name], logged)
        metrics["memory/rss_gib"] = sum(rank["rss"] for rank in ranks) / GIB
        peak_rss = sum(rank["peak_rss"] for rank in ranks) / GIB
        self._keep_peaks(
            {**metrics, "memory/peak_rss_gib": max(metrics["memory/rss_gib"], peak_rss)}
        )
        log_values(trainer, metrics)

    def _keep_peaks(self, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            if name.startswith("memory/peak"):
                self.peaks[name] = max(self.peaks.get(name, 0.0), value)

    @never_ends_the_run
    def _look_for_leaks(self, trainer: Trainer) -> None:
        sizes = {
            "host": self._read_host()["process"],
            "device": self._read(trainer.strategy.root_device).get("allocated", 0),
        }
        for place, size in sizes.items():
            self._at_epoch_ends.setdefault(place, []).append(size / MIB)
            report = leak_report(place, self._at_epoch_ends[place])
            if report is not None and place not in self.leaks:
                rank_zero_warn(report)
            if report is not None:
                self.leaks[place] = report


def device_memory(device: torch.device, reset_peaks: bool = False) -> dict[str, int]:
    """Bytes ``allocated``, ``reserved`` and in ``total``, on CUDA ``peak_*`` since the last reset;
    none on the CPU.
    """
    if device.type == "mps":
        return {
            "allocated": torch.mps.current_allocated_memory(),
            "reserved": torch.mps.driver_allocated_memory(),
            "total": torch.mps.recommended_max_memory(),
        }
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats(device)
    now = {"total": torch.cuda.get_device_properties(device).total_memory}
    for kind in ("allocated", "reserved"):
        now[kind] = stats.get(f"{kind}_bytes.all.current", 0)
        now[f"peak_{kind}"] = stats.get(f"{kind}_bytes.all.peak", 0)
    if reset_peaks:
        torch.cuda.reset_peak_memory_stats(device)
    return now


def host_memory() -> dict[str, int]:
    """Resident bytes of this ``process``, of it and the workers of its loaders (``rss``), its
    ``peak_rss`` (or 0).
    """
    process = int(psutil.Process().memory_info().rss)
    rss = process
    # Python's own list of children: psutil walks through all processes of the machine, which takes
    # milliseconds.
    for child in multiprocessing.active_children():
        # A worker may just have ended.
        with suppress(psutil.NoSuchProcess):
            rss += int(psutil.Process(child.pid).memory_info().rss)
    return {"process": process, "rss": rss, "peak_rss": _peak_rss()}


def _peak_rss() -> int:
    """Peak resident bytes of this process; 0 where there is no ``/proc``."""
    # Not ru_maxrss, which begins with the size of the process that started this one.
    with suppress(OSError):
        found = re.search(
            r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8")
        )
        if found is not None:
            return int(found[1]) * 1024
    return 0


def leak_report(place: str, mib: list[float]) -> str | None:
    """What to tell of sizes at epoch ends where each of the last epochs added memory; None where
    one did not.

    An epoch must add ``LEAST_MIB``, and a third of the largest addition: a cache adds less and
    less.
    """
    recent = mib[-LEAK_EPOCHS - 1 :]
    added = [after - before for before, after in pairwise(recent)]
    if len(added) < LEAK_EPOCHS:
        return None
    if min(added) < LEAST_MIB[place] or min(added) < max(added) / 3:
        return None
    growth = f"{sum(added) / LEAK_EPOCHS:.1f} MiB more after each of the last {LEAK_EPOCHS} epochs"
    sizes = f"{recent[0]:.0f} MiB → {recent[-1]:.0f} MiB"
    return (
        f"{place} memory looks like it leaks: {growth} ({sizes}). "
        "Something keeps tensors alive from step to step: keep loss.item() or loss.detach(), "
        "never the loss or outputs with their graph."
    )


def memory_breakdown(trainer: Trainer) -> dict[str, float]:
    """GiB of this rank's ``weights`` (with buffers), ``gradients``, ``optimizer state``, and on a
    GPU ``data``.
    """
    module = trainer.lightning_module
    parameters = list(module.parameters())
    state_values: list[Any] = []
    for optimizer in trainer.optimizers:
        for state in optimizer.state.values():
            state_values.extend(state.values())
    parts = {
        "weights": size_gib([*parameters, *module.buffers()]),
        "gradients": size_gib(parameter.grad for parameter in parameters),
        "optimizer state": size_gib(state_values),
    }
    datamodule = trainer.datamodule  # type: ignore[attr-defined]
    is_on_gpu = trainer.strategy.root_device.type != "cpu"
    if is_on_gpu and isinstance(datamodule, contract.HoldsDataOnDevice):
        data = sum(datamodule.bytes_on_device.values()) / GIB
        if data:
            parts["data"] = data
    return parts


def size_gib(values: Iterable[Any]) -> float:
    """GiB of the tensors among values, of a sharded tensor this rank's own part."""
    size = 0
    for value in values:
        if isinstance(value, Tensor):
            # Only a DTensor has the method. To import its class takes long where nothing is
            # sharded.
            own = value.to_local() if hasattr(value, "to_local") else value
            for part in dense_parts(own):
                size += part.numel() * part.element_size()
    return size / GIB


def dense_parts(tensor: Tensor) -> list[Tensor]:
    """The dense tensors that hold a tensor's values: of a sparse one its indices and values, else
    itself.

    A lazy parameter, whose shape is not known yet, has none.
    """
    if torch.nn.parameter.is_lazy(tensor):
        return []
    if tensor.layout is torch.sparse_coo:
        merged = tensor.detach().coalesce()
        return [merged.indices(), merged.values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor]
