"""How much memory a run uses, for what, whether it leaks, and what to try where it is used up."""

import multiprocessing
import re
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from project.engine.lightning_internals import LiveMemory, memory_history
from project.engine.log_steps import is_due, is_log_step, is_optimizer_step, log_values
from project.engine.ranks import of_all_ranks, say
from project.errors import UserError, is_out_of_memory
from project.hardware import GIB
from project.tables import check_output

MIB = 1024**2
SETTLING_STEPS = 3  # Optimizer state comes into being at the first step that is not skipped; 16-mixed skips one or two.
EPOCHS, LEAST_MIB = (
    4,
    {"host": 2.0, "device": 0.5},
)  # epochs that must grow, and by how much (MiB), for a leak
ACTIVATIONS = "activations and the rest"
HEADLINE = "Out of memory"
Reader = Callable[..., dict[str, int]]  # sizes in bytes, by name


class MemoryMonitor(Callback):
    """Reads the device's allocator and the host's resident memory at log steps and epoch ends.

    Lightning's DeviceStatsMonitor logs every counter of the allocator, in bytes, twice a step.

    Logged metrics, GiB of 1024³ bytes:

    - ``memory/rss_gib``: resident host memory now, of all ranks and their loader workers (shared pages count in each)
    - ``memory/allocated_gib``, ``memory/reserved_gib``: device memory now in tensors, and held by PyTorch. CUDA, MPS
    - ``memory/peak_allocated_gib``, ``memory/peak_reserved_gib``: the most since the last row, with validation. CUDA
    - ``memory/peak_reserved_pct``: the same as a share (0-100) of the device's memory. CUDA

    Device metrics are the highest of a rank. Growth like a leak's is warned of; an out-of-memory error gets advice.
    """

    def __init__(self, read: Reader | None = None, host: Reader | None = None) -> None:
        self._read, self._read_host = read or device_memory, host or host_memory
        self._live = LiveMemory()  # counts a step's tensors, if no allocator does it
        self._window_peaks: dict[str, int] = {}  # bytes, since the last logged value
        self._step_peak: int | None = None  # bytes, of training steps alone
        self._parts, self._parts_due = (
            dict[str, float](),
            SETTLING_STEPS,
        )  # GiB by use; steps after which to look
        self.peaks: dict[
            str, float
        ] = {}  # of the run: ``memory/peak_rss_gib``, and with CUDA the other ones
        self._at_epoch_ends: dict[str, list[float]] = {}  # place → MiB
        self.leaks: dict[str, str] = {}  # place → the newest report of growth there

    @property
    def breakdown(self) -> dict[str, float]:
        """GiB by use on this rank, with what the training peak has more, where it is known; empty before a step."""
        parts, peak = self._parts, self._step_peak
        if self._live.peak_bytes and parts:  # weights and state were there before
            peak = self._live.peak_bytes + int(GIB * (parts["weights"] + parts["optimizer state"]))
        if peak is None or not parts:
            return parts
        return {**parts, ACTIVATIONS: max(0.0, peak / GIB - sum(parts.values()))}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._live, self._parts, self._parts_due = LiveMemory(), {}, SETTLING_STEPS
        self._window_peaks, self._step_peak, self._at_epoch_ends = {}, None, {}
        self._read(
            trainer.strategy.root_device, reset_peaks=True
        )  # what came before is not the training's

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # the first step makes the optimizer's state; a compiled network would run eagerly while its tensors are counted
        may_count = trainer.global_step == 1 and not pl_module.hparams.get("compile")
        if may_count and not self._read(trainer.strategy.root_device):
            self._live.__enter__()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._live.close()
        if self._parts_due and is_optimizer_step(trainer, batch_idx):
            self._parts, self._parts_due = memory_breakdown(trainer), self._parts_due - 1
        if is_log_step(trainer, batch_idx):
            self._log(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._read_peaks(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._read_peaks(trainer, of_training=False)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._log(trainer, again=is_due(trainer, trainer.global_step))
        on_device = self._read(trainer.strategy.root_device).get("allocated", 0)
        for place, size in {"host": self._read_host()["process"], "device": on_device}.items():
            self._at_epoch_ends.setdefault(place, []).append(size / MIB)
            if report := leak_report(place, self._at_epoch_ends[place]):
                if place not in self.leaks:
                    rank_zero_warn(report)
                self.leaks[place] = report

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._live.close()
        if is_out_of_memory(exception) and HEADLINE not in str(exception):
            total, self._parts = self._read_peaks(trainer).get("total"), memory_breakdown(trainer)
            # in the message, so that it is the last thing on the screen whoever prints the error
            exception.args = (
                f"{exception}\n\n{explain(trainer, self.breakdown, self._step_peak, total)}",
            )

    def _read_peaks(self, trainer: Trainer, of_training: bool = True) -> dict[str, int]:
        """Read the allocator, keep its peaks for the window, and reset them."""
        now = self._read(trainer.strategy.root_device, reset_peaks=True)
        for name in now.keys() & {"peak_allocated", "peak_reserved"}:
            self._window_peaks[name] = max(self._window_peaks.get(name, 0), now[name])
        if of_training and "peak_allocated" in now:
            self._step_peak = max(self._step_peak or 0, now["peak_allocated"])
        return now

    def _log(self, trainer: Trainer, again: bool = False) -> None:
        """Log a row; ``again``: a log step ended the epoch, and its row is written once more."""
        sizes = self._read_peaks(trainer) | self._window_peaks
        self._window_peaks = {}
        metrics = {
            f"memory/{name}_gib": size / GIB for name, size in sizes.items() if name != "total"
        }
        if "peak_reserved" in sizes:
            metrics["memory/peak_reserved_pct"] = 100 * sizes["peak_reserved"] / sizes["total"]
        ranks = of_all_ranks(metrics | self._read_host())
        rss, peak_rss = (sum(rank[name] for rank in ranks) / GIB for name in ("rss", "peak_rss"))
        for name in metrics:
            metrics[name] = max(rank[name] for rank in ranks)
            if again and name.startswith("memory/peak"):
                metrics[name] = max(metrics[name], float(trainer.callback_metrics.get(name, 0.0)))
        for name, value in {**metrics, "memory/peak_rss_gib": max(rss, peak_rss)}.items():
            if name.startswith("memory/peak"):
                self.peaks[name] = max(self.peaks.get(name, 0.0), value)
        log_values(trainer, {**metrics, "memory/rss_gib": rss})


def device_memory(device: torch.device, reset_peaks: bool = False) -> dict[str, int]:
    """Bytes ``allocated``, ``reserved`` and in ``total``, on CUDA ``peak_*`` since the last reset; none on the CPU."""
    if device.type == "mps":
        now = {
            "allocated": torch.mps.current_allocated_memory(),
            "reserved": torch.mps.driver_allocated_memory(),
        }
        return {**now, "total": torch.mps.recommended_max_memory()}
    if device.type != "cuda":
        return {}
    stats, now = (
        torch.cuda.memory_stats(device),
        {"total": torch.cuda.get_device_properties(device).total_memory},
    )
    for kind in ("allocated", "reserved"):
        now[kind] = stats.get(f"{kind}_bytes.all.current", 0)
        now[f"peak_{kind}"] = stats.get(f"{kind}_bytes.all.peak", 0)
    if reset_peaks:
        torch.cuda.reset_peak_memory_stats(device)
    return now


def is_measurable() -> bool:
    """Whether the system tells what a process uses; without ``/proc`` Linux does not."""
    with suppress(psutil.Error):
        return bool(psutil.Process().memory_info())
    return False


def host_memory() -> dict[str, int]:
    """Resident bytes of this ``process``, of it and the workers of its loaders (``rss``), its ``peak_rss`` (or 0)."""
    sizes = {"process": int(psutil.Process().memory_info().rss), "peak_rss": 0}
    sizes["rss"] = sizes["process"]
    # Python's own list of children: psutil's walks through all processes of the machine, some milliseconds
    for child in multiprocessing.active_children():
        with suppress(psutil.NoSuchProcess):  # a worker that has just ended
            sizes["rss"] += int(psutil.Process(child.pid).memory_info().rss)
    with suppress(OSError):  # not ru_maxrss, which begins with the parent's size
        if found := re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text()):
            sizes["peak_rss"] = int(found[1]) * 1024
    return sizes


def leak_report(place: str, mib: list[float]) -> str | None:
    """What to tell where each of the last epochs added ``LEAST_MIB`` or more, and a third of the largest addition."""
    recent = mib[-EPOCHS - 1 :]
    added = [after - before for before, after in pairwise(recent)]
    if len(added) < EPOCHS or min(added) < max(
        LEAST_MIB[place], max(added) / 3
    ):  # a cache adds less and less
        return None
    growth = f"{sum(added) / EPOCHS:.1f} MiB more after each of the last {EPOCHS} epochs"
    found = (
        f"{place} memory looks like it leaks: {growth} ({recent[0]:.0f} MiB → {recent[-1]:.0f} MiB)"
    )
    fix = "keep loss.item() or loss.detach(), never the loss or outputs with their graph"
    return f"{found}. Something keeps tensors alive from step to step: {fix}."


def memory_breakdown(trainer: Trainer) -> dict[str, float]:
    """GiB of this rank's ``weights`` (with buffers), ``gradients``, ``optimizer state``, and on a GPU ``data``."""

    def size_gib(tensors: Iterable[object]) -> float:
        own = [
            tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors
        ]  # a rank's own shard
        return (
            sum(
                tensor.numel() * tensor.element_size()
                for tensor in own
                if isinstance(tensor, Tensor)
            )
            / GIB
        )

    module = trainer.lightning_module
    states = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
    parts = {
        "weights": size_gib([*module.parameters(), *module.buffers()]),
        "gradients": size_gib(parameter.grad for parameter in module.parameters()),
        "optimizer state": size_gib(value for state in states for value in state.values()),
    }
    data = sum(getattr(getattr(trainer, "datamodule", None), "bytes_on_device", {}).values()) / GIB
    return parts | {"data": data} if data and trainer.strategy.root_device.type != "cpu" else parts


def explain(
    trainer: Trainer, parts: dict[str, float], peak_bytes: int | None, total_bytes: int | None
) -> str:
    """The advice after an out-of-memory error: batch size, peak, memory by use (GiB), three things to try."""
    evaluating = trainer.validating or trainer.testing or trainer.sanity_checking
    flag = "eval_batch_size" if evaluating else "batch_size"
    size = getattr(getattr(trainer, "datamodule", None), flag, None)
    facts = f"{HEADLINE} in {'evaluation' if evaluating else 'training'}"
    facts += f"; --data.{flag} is {size}" if size else ""
    facts += f"; the peak was {peak_bytes / GIB:.2f} GiB" if peak_bytes else ""
    facts += f" of {total_bytes / GIB:.2f} GiB" if peak_bytes and total_bytes else ""
    largest_first = sorted(parts.items(), key=lambda part: -part[1])
    used = [
        f"{use} {gib:.2f} GiB" if gib >= 1 else f"{use} {1024 * gib:.1f} MiB"
        for use, gib in largest_first
    ]
    tries = [
        f"  {number}. {line}" for number, line in enumerate(flags_to_try(trainer, flag, size), 1)
    ]
    last = "The last checkpoint is whole: go on from it with --ckpt_path last and one of these."
    return "\n".join(
        [f"{facts}.", f"Memory by use: {', '.join(used)}.", "Try, in this order:", *tries, last]
    )


def flags_to_try(trainer: Trainer, flag: str, size: int | None) -> list[str]:
    """Three things to try, the one that costs least first; only flags that the run's module and data module have."""
    precision, evaluating = str(trainer.precision), flag == "eval_batch_size"
    smaller = (
        f"--data.{flag} {max(1, size // 2)}" if size else "half the batch size in your DataLoader"
    )
    accumulate = f"--accumulate_grad_batches {2 * trainer.accumulate_grad_batches}"
    tries = [f"{smaller} {accumulate}   (the same optimizer steps in smaller portions)"]
    if evaluating:
        tries = [f"{smaller}   (metrics do not change)"]
    if precision.startswith("32") and trainer.strategy.root_device.type != "cpu":
        tries.insert(
            evaluating, "--precision bf16-mixed   (16-bit activations; 16-mixed before Ampere)"
        )
    elif precision.endswith("mixed"):
        tries.append("--precision bf16-true   (16-bit weights, gradients and optimizer state)")
    if "activation_checkpointing" in trainer.lightning_module.hparams and not evaluating:
        tries.append(
            "--model.activation_checkpointing true   (activations computed again instead of kept)"
        )
    return [*tries, "a smaller network", "SGD as the optimizer   (no or less optimizer state)"][:3]


class MemorySnapshot(Callback):
    """Records the last 100,000 allocations and frees with their stacks, and writes them to ``path`` when training ends
    or fails, as after an out-of-memory error. A further rank adds its number to the name.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self._recording = ExitStack()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        path, rank, device = self.path, trainer.global_rank, trainer.strategy.root_device.type
        if device != "cuda":
            raise UserError(f"--memory_snapshot needs a CUDA device, got {device}. Leave it away.")
        check_output(path, (path.suffix.lower(),), "--memory_snapshot")
        where = (
            f"{path} (open it at https://pytorch.org/memory_viz; the file stays in your browser)"
        )
        self._recording.callback(say, f"memory snapshot: {where}")
        path = path.with_stem(f"{path.stem}.rank{rank}") if rank else path
        self._recording.enter_context(memory_history(path, 100_000))

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._recording.close()

    on_exception = on_train_end
