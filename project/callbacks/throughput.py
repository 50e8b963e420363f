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
from lightning.pytorch.profilers import AdvancedProfiler, Profiler, PyTorchProfiler, SimpleProfiler
from torch import Tensor

from project import threads
from project.callbacks.gpu import GpuUtilization, mfu_per_sample_per_sec
from project.engine.lightning_internals import tell_profiled_module
from project.engine.log_steps import gather_over_ranks, is_log_step, is_optimizer_step, log_values, synchronize
from project.errors import UserError

# The first optimizer steps compile, choose algorithms and fill caches.
WARM_UP_STEPS = 2
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

    Args:
        clock: Returns seconds, increasing.
        wait_for_device: Called at the edges of windows.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        wait_for_device: Callable[[torch.device], None] = synchronize,
    ) -> None:
        self.clock, self.wait_for_device = clock, wait_for_device
        self.windows: list[dict[str, float]] = []  # what was logged, in order
        self._device = torch.device("cpu")
        self._window = Window(started=0.0)
        self._measuring = False
        self._pauses, self._paused_at = 0, 0.0
        self._validation = ExitStack()
        self._warm_up = WARM_UP_STEPS
        self._last_of_warm_up: tuple[Window, float] | None = None
        self._of_short_run: list[dict[str, float]] = []
        self._mfu_per_sample_per_sec: float | None = None
        self._utilization: GpuUtilization | None = None
        self._waits_known = False
        self._trainer: Trainer | None = None

    def profiler(self, chosen: Profiler | str | None = None) -> LoaderTimer:
        """The Trainer's profiler. It passes everything on to the profiler that the user chose."""
        if isinstance(chosen, str) and chosen.lower() not in PROFILERS:
            raise UserError(f"--profiler must be one of {', '.join(PROFILERS)} or a class, got {chosen}.")
        return LoaderTimer(self, PROFILERS[chosen.lower()]() if isinstance(chosen, str) else chosen)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave the block out of the window. Validation and ``trainer.save_checkpoint`` are left out already."""
        outermost = self._pauses == 0
        self._pauses += 1
        if outermost and self._measuring:
            self.wait_for_device(self._device)  # work already queued belongs to the window
            self._paused_at = self.clock()
            if self._utilization:
                self._utilization.paused = True
        try:
            yield
        finally:
            self._pauses -= 1
            if outermost and self._measuring:
                self.wait_for_device(self._device)
                self._window.started += self.clock() - self._paused_at
                if self._utilization:
                    self._utilization.paused = False

    def summary(self) -> dict[str, float]:
        """Median over the windows of every metric that was measured."""
        names = sorted({name for window in self.windows for name in window})
        return {name: statistics.median(w[name] for w in self.windows if name in w) for name in names}

    def advice(self) -> str:
        """What was measured, and what to try, in one or two sentences. Empty if nothing was measured."""
        return bottleneck(self.summary(), self._trainer) if self.windows and self._trainer else ""

    def count_wait(self, seconds: float) -> None:
        """Add seconds in which training waited for its next batch."""
        self._window.waited += seconds

    def pause_for_validation(self) -> None:
        """Pause until :meth:`resume`."""
        self._validation.enter_context(self.pause())

    def resume(self) -> None:
        """End the pause. A validation without a batch has no ``on_validation_end``: the next training batch ends it."""
        self._validation.close()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._release()
        self._trainer = trainer
        self._device = trainer.strategy.root_device
        self._warm_up, self._last_of_warm_up, self._pauses = WARM_UP_STEPS, None, 0
        self._utilization = GpuUtilization.of(self._device)
        profiler = trainer.profiler  # type: ignore[attr-defined]
        self._waits_known = isinstance(profiler, LoaderTimer) and profiler.monitor is self
        self._measuring = True
        self._restart()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restart_all()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        window = self._window
        window.batches += 1
        window.samples += samples_in(batch)
        if not is_optimizer_step(trainer, batch_idx):
            return
        window.steps += 1
        if self._warm_up:
            self._last_of_warm_up = self._close()
            if self._warm_up == WARM_UP_STEPS:
                self._mfu_per_sample_per_sec = mfu_per_sample_per_sec(trainer, pl_module, batch)
            self._warm_up -= 1
            self._restart_all()
        elif is_log_step(trainer, batch_idx):
            self.windows.append(self._log(trainer, pl_module, *self._close()))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.pause_for_validation()  # while gradients accumulate, the profiler does not report it earlier

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.resume()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._window.steps:
            self.windows.append(self._log(trainer, pl_module, *self._close(), epoch_end=True))
        elif not self.windows and self._last_of_warm_up:
            self._of_short_run = [self._log(trainer, pl_module, *self._last_of_warm_up, epoch_end=True)]

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.windows = self.windows or self._of_short_run
        self._release()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._release()

    def _restart(self) -> None:
        self._window = Window(started=self.clock())

    def _restart_all(self) -> None:
        """Begin a window, and forget what the GPU did before it."""
        self._restart()
        if self._utilization:
            self._utilization.forget()

    def _close(self) -> tuple[Window, float]:
        """Wait for the device, end the window and begin the next. Returns it with the time it ended."""
        self.resume()
        self.wait_for_device(self._device)
        window = self._window
        self._restart()
        return window, self._window.started

    def _log(
        self, trainer: Trainer, module: LightningModule, window: Window, ended: float, epoch_end: bool = False
    ) -> dict[str, float]:
        utilization = self._utilization.mean() if self._utilization else None
        known = [utilization, 1.0] if utilization is not None else [0.0, 0.0]  # percent, and whether there is one
        *totals, busy, devices = zip(*gather_over_ranks(trainer, [*window.totals(ended), *known]), strict=True)
        metrics = rates(list(zip(*totals, strict=True)), window.steps)
        if not self._waits_known:
            metrics.pop("throughput/data_wait_pct", None)
        if sum(devices):
            metrics["throughput/gpu_utilization_pct"] = sum(busy) / sum(devices)
        if self._mfu_per_sample_per_sec and (rate := metrics.get("throughput/device_samples_per_sec")):
            metrics["throughput/mfu_pct"] = self._mfu_per_sample_per_sec * rate
        log_values(module, metrics, epoch_end)
        return metrics

    def _release(self) -> None:
        self._measuring = False
        self.resume()
        if self._utilization:
            self._utilization.stop()
            self._utilization = None


class LoaderTimer(Profiler):
    """Reports to a :class:`ThroughputMonitor`, and passes everything on to the user's profiler, if there is one.

    A profiler is the public way to see the wait for a batch, saving, and the moment before a validation.
    """

    _nothing = nullcontext("")

    def __init__(self, monitor: ThroughputMonitor, inner: Profiler | None = None) -> None:
        super().__init__()
        self.monitor, self.inner = monitor, inner
        self._fetching = 0.0

    def start(self, action_name: str) -> None:
        if self.inner is not None:
            self.inner.start(action_name)
        if action_name.endswith(".train_dataloader_next"):
            self.monitor.resume()
            self._fetching = self.monitor.clock()

    def stop(self, action_name: str) -> None:
        if action_name.endswith(".train_dataloader_next"):
            self.monitor.count_wait(self.monitor.clock() - self._fetching)
        if self.inner is not None:
            self.inner.stop(action_name)

    def profile(self, action_name: str) -> AbstractContextManager[str]:  # type: ignore[override]
        if action_name.endswith(".on_validation_model_zero_grad"):
            self.monitor.pause_for_validation()
        section = self._nothing if self.inner is None else self.inner.profile(action_name)
        return self._outside(section) if action_name == "save_checkpoint" else section

    @contextmanager
    def _outside(self, section: AbstractContextManager[str]) -> Iterator[str]:
        with self.monitor.pause(), section as name:
            yield name

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        super().setup(stage, local_rank, log_dir)
        if self.inner is not None:
            tell_profiled_module(self, self.inner)
            self.inner.setup(stage, local_rank, log_dir)

    def summary(self) -> str:
        return self.inner.summary() if self.inner is not None else ""

    def describe(self) -> None:
        if self.inner is not None:
            self.inner.describe()  # which also tears it down, as every profiler does


@dataclass
class Window:
    """Counts of one rank over a stretch of training that is measured as one."""

    started: float  # the clock's reading (s) at its beginning; moved on by what was excluded
    batches: int = 0
    steps: int = 0  # of the optimizer; fewer than batches with --accumulate_grad_batches
    samples: int = 0  # 0 where a batch does not tell
    waited: float = 0.0  # seconds in which training waited for the next batch

    def totals(self, now: float) -> list[float]:
        """Seconds up to ``now``, batches, samples and seconds waited: what is summed over ranks."""
        return [now - self.started, self.batches, self.samples, self.waited]


def rates(totals: Sequence[Sequence[float]], steps: int) -> dict[str, float]:
    """The ``throughput/*`` metrics of one window, from :meth:`Window.totals` of every rank and its optimizer steps."""
    world_size = len(totals)
    seconds, batches, samples, waited = (sum(column) for column in zip(*totals, strict=True))
    if seconds <= 0 or not steps:
        return {}
    seconds_per_rank = seconds / world_size
    metrics = {
        "throughput/batches_per_sec": batches / seconds_per_rank,
        "throughput/step_ms": 1000 * seconds_per_rank / steps,
        "throughput/data_wait_pct": 100 * waited / seconds,
    }
    if samples:
        metrics["throughput/samples_per_sec"] = samples / seconds_per_rank
        metrics["throughput/device_samples_per_sec"] = samples / seconds
    return metrics


def samples_in(batch: Any) -> int:
    """Length of the first tensor in a batch (at any depth of tuples, lists and mappings), 0 where there is none."""
    if isinstance(batch, Tensor):
        return batch.size(0) if batch.ndim else 1
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (tuple, list)) else ()
    return next((count for count in map(samples_in, parts) if count), 0)


# Above this share of the time, more workers are worth a try.
LOADER_BOUND_PCT = 20.0


def bottleneck(metrics: Mapping[str, float], trainer: Trainer) -> str:
    """Where a run's time went, by the medians of ``throughput/*``, and which flag or command to try."""
    waited, busy = metrics.get("throughput/data_wait_pct"), metrics.get("throughput/gpu_utilization_pct")
    facts = [f"{1000 * trainer.world_size / metrics['throughput/batches_per_sec']:.1f} ms a batch"]
    if waited is not None:
        facts.append(f"{waited:.0f} % of it waiting for data")
    if busy is not None:
        facts.append(f"the GPU idle {100 - busy:.0f} % of the time")
    measured = f"{', '.join(facts)}."
    datamodule = getattr(trainer, "datamodule", None)
    if waited is not None and waited >= LOADER_BOUND_PCT:
        cores, loader = max(1, threads.available_cores() // trainer.num_devices), trainer.train_dataloader
        in_memory = hasattr(getattr(loader, "dataset", None), "gather")  # workers would not help
        if not in_memory and getattr(loader, "num_workers", cores) < cores:
            flag = "--data.num_workers " if hasattr(datamodule, "num_workers") else "the DataLoader's num_workers="
            measured += f" Try {flag}{cores}."
        return f"loader-bound: {measured}"
    if hasattr(datamodule, "batch_size"):  # feature: tune
        measured += " To find the fastest batch size: python -m project.tune batch_size."  # feature: tune
    return measured
