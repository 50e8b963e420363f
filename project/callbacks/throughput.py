"""How fast a run trains, and how much of its time it waits for data."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.profilers import AdvancedProfiler, PassThroughProfiler, Profiler, PyTorchProfiler, SimpleProfiler
from torch import Tensor

from project import threads
from project.callbacks.gpu import GpuUtilization, mfu_per_sample_per_sec
from project.engine.lightning_internals import tell_profiled_module
from project.engine.log_steps import gather_over_ranks, is_log_step, is_optimizer_step, log_values, synchronize
from project.errors import UserError

WARM_UP_STEPS = 2  # of the optimizer, which compile, choose algorithms and fill caches
LOADER_BOUND_PCT = 20.0  # a loader that takes a fifth of the time is worth a flag
# Ends of the names that Lightning gives to what it does
FETCHING = ".train_dataloader_next"
READ = BEFORE_VALIDATION, SAVING = ".on_validation_model_zero_grad", "save_checkpoint"
PROFILERS = {"simple": SimpleProfiler, "advanced": AdvancedProfiler, "pytorch": PyTorchProfiler}


class ThroughputMonitor(Callback):
    """Measures training in windows of ``--log_every_n_steps`` optimizer steps, and the rest at each epoch's end.

    Lightning's own waits for the device at every step, logs nothing for 100 steps, and asks the user for the FLOPs.
    This one waits for the device at the ends of a window only. A window leaves out the first two optimizer steps (a run
    of only two reports the last one), validation with its loader's start, checkpoint saving, the sanity check, and what
    happens between two epochs. Logging and progress display count.

    The Trainer needs ``profiler=monitor.profiler(...)``: it reports waits for data, saving, and a validation to come.

    Logged metrics, at every log step and epoch end, the same on any number of devices:

    - ``throughput/samples_per_sec``: training samples per second, all devices together
    - ``throughput/device_samples_per_sec``: the same per device
    - ``throughput/batches_per_sec``: batches per second, all devices together
    - ``throughput/step_ms``: milliseconds per optimizer step (with accumulation, of several batches)
    - ``throughput/data_wait_pct``: share of the time (0-100) in which training waited for its next batch
    - ``throughput/mfu_pct``: model FLOPs utilization (PaLM, arXiv 2204.02311, appendix B): the FLOPs that the network
      needs, as a share (0-100) of the GPU's dense peak. Known CUDA devices only
    - ``throughput/gpu_utilization_pct``: share of the time (0-100) in which a kernel ran, by NVML. CUDA only

    ``clock`` returns seconds; ``wait_for_device`` is called at the edges of windows.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        wait_for_device: Callable[[torch.device], None] = synchronize,
    ) -> None:
        self.clock, self.wait_for_device = clock, wait_for_device
        self.windows: list[dict[str, float]] = []  # what was logged, in order
        self.window = Window(started=0.0)
        # The pause for a validation. One without a batch has no on_validation_end: the next training batch ends it.
        self.validation = ExitStack()
        self._device = torch.device("cpu")
        self._measuring, self._pauses, self._warm_up = False, 0, WARM_UP_STEPS
        self._last_of_warm_up: tuple[list[float], int] | None = None
        self._of_short_run: list[dict[str, float]] = []
        self._mfu_per_sample_per_sec: float | None = None
        self._utilization = GpuUtilization(None)
        self._trainer: Trainer | None = None

    def profiler(self, chosen: Profiler | str | None = None) -> LoaderTimer:
        """The Trainer's profiler; the user's own, or the one of Lightning's that is named, stands behind it."""
        if not isinstance(chosen, str):
            return LoaderTimer(self, chosen)
        if chosen.lower() not in PROFILERS:
            raise UserError(f"--profiler must be one of {', '.join(PROFILERS)} or a class, got {chosen}.")
        return LoaderTimer(self, PROFILERS[chosen.lower()]())

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave what happens inside out of the window. Validation and ``trainer.save_checkpoint`` already are."""
        outermost = self._measuring and not self._pauses
        self._pauses += 1
        if outermost:
            self.wait_for_device(self._device)  # work already queued belongs to the window
            paused_at, self._utilization.paused = self.clock(), True
        try:
            yield
        finally:
            self._pauses -= 1
            if outermost and self._measuring:  # not after an error, which may be the device's
                self.wait_for_device(self._device)
                self.window.started += self.clock() - paused_at
                self._utilization.paused = False

    def summary(self) -> dict[str, float]:
        """Median over the windows of every metric that was measured."""
        names = sorted({name for window in self.windows for name in window})
        return {name: statistics.median(w[name] for w in self.windows if name in w) for name in names}

    def advice(self) -> str:
        """What was measured and what to try, in one or two sentences; empty if nothing was measured."""
        return bottleneck(self.summary(), self._trainer) if self.windows and self._trainer else ""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._trainer, self._device = trainer, trainer.strategy.root_device
        self._warm_up, self._last_of_warm_up = WARM_UP_STEPS, None
        self._utilization = GpuUtilization.of(self._device)
        self._measuring = True
        self._restart()  # a run resumed in mid-epoch has no start of an epoch

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restart()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.window.batches += 1
        self.window.samples += samples_in(batch)
        if not is_optimizer_step(trainer, batch_idx):
            return
        self.window.steps += 1
        if self._warm_up:
            self._last_of_warm_up = self._close()
            if self._warm_up == WARM_UP_STEPS:
                self._mfu_per_sample_per_sec = mfu_per_sample_per_sec(trainer, pl_module, batch)
            self._warm_up -= 1
            self._restart()
        elif is_log_step(trainer, batch_idx):
            self.windows.append(self._log(trainer, pl_module, *self._close()))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # in the midst of accumulated batches, the profiler does not hear of it sooner
        self.validation.enter_context(self.pause())

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.validation.close()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.window.steps:
            self.windows.append(self._log(trainer, pl_module, *self._close(), epoch_end=True))
        elif not self.windows and self._last_of_warm_up:
            self._of_short_run = [self._log(trainer, pl_module, *self._last_of_warm_up, epoch_end=True)]

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.windows = self.windows or self._of_short_run
        self._release()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._release()

    def _restart(self) -> None:
        """Begin a window, and forget what the GPU did before it."""
        self.window = Window(started=self.clock())
        self._utilization.forget()

    def _close(self) -> tuple[list[float], int]:
        """End the window once the device has caught up, and begin the next. Returns what :func:`rates` takes."""
        self.validation.close()
        self.wait_for_device(self._device)
        ended, self.window, percent = self.window, Window(started=self.clock()), self._utilization.mean()
        gpu = [0.0, 0] if percent is None else [percent, 1]
        return [self.window.started - ended.started, ended.batches, ended.samples, ended.waited, *gpu], ended.steps

    def _log(
        self, trainer: Trainer, module: LightningModule, totals: list[float], steps: int, epoch_end: bool = False
    ) -> dict[str, float]:
        metrics = rates(gather_over_ranks(trainer, totals), steps)
        profiler = trainer.profiler  # type: ignore[attr-defined]
        if not (isinstance(profiler, LoaderTimer) and profiler.monitor is self):  # nobody has reported the waits
            metrics.pop("throughput/data_wait_pct", None)
        if self._mfu_per_sample_per_sec and (rate := metrics.get("throughput/device_samples_per_sec")):
            metrics["throughput/mfu_pct"] = self._mfu_per_sample_per_sec * rate
        log_values(module, metrics, epoch_end)
        return metrics

    def _release(self) -> None:
        self._measuring = False
        self.validation.close()
        self._utilization.stop()


class LoaderTimer(Profiler):
    """Reports to a :class:`ThroughputMonitor`, and passes everything on to the user's profiler, if there is one.

    A profiler is the public way to see the wait for a batch, saving, and the moment before a validation.
    """

    def __init__(self, monitor: ThroughputMonitor, inner: Profiler | None = None) -> None:
        super().__init__()
        self.monitor, self.inner = monitor, inner or PassThroughProfiler()
        self._alone, self._nothing = isinstance(self.inner, PassThroughProfiler), nullcontext("")
        self._fetching, self._saving = 0.0, ExitStack()

    def profile(self, action_name: str) -> AbstractContextManager[str]:  # type: ignore[override]
        # some sixty times a step: what nobody reads shares one empty section
        if self._alone and not action_name.endswith(READ):
            return self._nothing
        return super().profile(action_name)

    def start(self, action_name: str) -> None:
        self.inner.start(action_name)
        if action_name.endswith(FETCHING):
            self.monitor.validation.close()
            self._fetching = self.monitor.clock()
        elif action_name.endswith(BEFORE_VALIDATION):
            self.monitor.validation.enter_context(self.monitor.pause())
        elif action_name == SAVING:
            self._saving.enter_context(self.monitor.pause())

    def stop(self, action_name: str) -> None:
        if action_name.endswith(FETCHING):
            self.monitor.window.waited += self.monitor.clock() - self._fetching
        elif action_name == SAVING:
            self._saving.close()
        self.inner.stop(action_name)

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        tell_profiled_module(self, self.inner)
        self.inner.setup(stage, local_rank, log_dir)

    def summary(self) -> str:
        return self.inner.summary()

    def describe(self) -> None:
        self.inner.describe()  # which also tears it down, as every profiler does


@dataclass
class Window:
    """Counts of one rank over a stretch of training that is measured as one."""

    started: float  # the clock's reading (s) at its beginning; moved on by what was excluded
    batches: int = 0
    steps: int = 0  # of the optimizer; fewer than batches with --accumulate_grad_batches
    samples: int = 0  # 0 where a batch does not tell
    waited: float = 0.0  # seconds in which training waited for the next batch


def rates(totals: Sequence[Sequence[float]], steps: int) -> dict[str, float]:
    """The ``throughput/*`` metrics of a window of so many optimizer steps.

    ``totals`` of every rank: seconds, batches, samples, seconds waited, GPU utilization (%), GPUs that tell it (0, 1).
    """
    seconds, batches, samples, waited, gpu_pct, gpus = (sum(column) for column in zip(*totals, strict=True))
    if seconds <= 0 or not steps:
        return {}
    seconds_per_rank = seconds / len(totals)
    metrics = {
        "throughput/batches_per_sec": batches / seconds_per_rank,
        "throughput/step_ms": 1000 * seconds_per_rank / steps,
        "throughput/data_wait_pct": 100 * waited / seconds,
    }
    if samples:
        metrics["throughput/samples_per_sec"] = samples / seconds_per_rank
        metrics["throughput/device_samples_per_sec"] = samples / seconds
    if gpus:
        metrics["throughput/gpu_utilization_pct"] = gpu_pct / gpus
    return metrics


def samples_in(batch: Any) -> int:
    """Length of the first tensor in a batch (at any depth of tuples, lists and mappings), 0 where there is none."""
    if isinstance(batch, Tensor):
        return batch.size(0) if batch.ndim else 1
    parts = batch if isinstance(batch, (tuple, list)) else batch.values() if isinstance(batch, Mapping) else ()
    for part in parts:  # at every step: a generator would take twice as long
        if count := samples_in(part):
            return count
    return 0


def bottleneck(metrics: Mapping[str, float], trainer: Trainer) -> str:
    """Where a run's time went, by the medians of ``throughput/*``, and which flag or command to try."""
    waited, busy = metrics.get("throughput/data_wait_pct"), metrics.get("throughput/gpu_utilization_pct")
    measured = f"{1000 * trainer.world_size / metrics['throughput/batches_per_sec']:.1f} ms a batch"
    measured += "" if waited is None else f", {waited:.0f} % of it waiting for data"
    measured += "." if busy is None else f", the GPU idle {100 - busy:.0f} % of the time."
    datamodule = getattr(trainer, "datamodule", None)
    if waited is None or waited < LOADER_BOUND_PCT:
        if hasattr(datamodule, "batch_size"):  # feature: tune
            measured += " To find the fastest batch size: python -m project.tune batch_size."  # feature: tune
        return measured
    cores, loader = max(1, threads.available_cores() // trainer.num_devices), trainer.train_dataloader
    in_memory = hasattr(getattr(loader, "dataset", None), "gather")  # workers would only copy it
    if not in_memory and getattr(loader, "num_workers", cores) < cores:
        flag = "--data.num_workers " if hasattr(datamodule, "num_workers") else "the DataLoader's num_workers="
        measured += f" Try {flag}{cores}."
    return f"loader-bound: {measured}"
