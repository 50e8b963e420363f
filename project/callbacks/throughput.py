"""How fast a run trains, and what holds it up: loader, overhead or arithmetic."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from project import threads
from project.callbacks.gpu import GpuUtilization, mfu_per_sample_per_sec
from project.engine.log_steps import gather_over_ranks, is_log_step_old, log_metrics, skip_idle_hooks

# The first optimizer steps compile, choose algorithms and fill caches.
WARM_UP_STEPS = 2


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that was asked of it."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class ThroughputMonitor(Callback):
    """Measures training in windows of ``--log_every_n_steps`` optimizer steps, and the rest at each epoch's end.

    Lightning's own waits for the device at every step, says nothing for 100 steps, and needs the FLOPs from the user.
    Here the device is waited for at a window's edges only. Left out of every window: the first two optimizer steps (a
    run of no more than that reports its last one, at its end), validation with its loader's start, checkpoint saving,
    the sanity check, and what happens between two epochs. Logging and progress display are part of a run and count.

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
        self.clock = clock
        self.wait_for_device = wait_for_device
        self.windows: list[dict[str, float]] = []  # what was logged, in order
        self._device = torch.device("cpu")
        self._window = Window(started=0.0)
        self._measuring = False
        self._pauses = 0
        self._paused_at = 0.0
        self._warm_up = WARM_UP_STEPS
        self._last_of_warm_up: tuple[Window, float] | None = None
        self._mfu_per_sample_per_sec: float | None = None
        self._utilization: GpuUtilization | None = None
        self._methods = WrappedMethods()
        self._facts: dict[str, Any] = {}

    # What others ask

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave what happens inside out of the window. Validation and ``trainer.save_checkpoint`` already are."""
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
        """One sentence: what the run waits for, and the flag to try. Empty where nothing was measured."""
        return bottleneck(self.summary(), **self._facts) if self.windows else ""

    # Windows

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        skip_idle_hooks(self)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._release()
        self._device = trainer.strategy.root_device
        self._warm_up, self._last_of_warm_up, self._pauses = WARM_UP_STEPS, None, 0
        self._methods.wrap(trainer.fit_loop.epoch_loop.val_loop, "run", self._outside)
        self._methods.wrap(trainer, "save_checkpoint", self._outside)
        self._watch_fetches(trainer)
        self._utilization = GpuUtilization.of(self._device)
        self._facts = facts_for_advice(trainer)
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
        if trainer.accumulate_grad_batches > 1 and trainer.fit_loop._should_accumulate():
            return
        window.steps += 1
        if self._warm_up:
            self._end_warm_up_step(trainer, pl_module, batch)
        elif is_log_step_old(trainer):
            self._log(trainer, *self._close())

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._window.steps:
            self._log(trainer, *self._close(), epoch_end=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.windows and self._last_of_warm_up:
            self._log(trainer, *self._last_of_warm_up, epoch_end=True)
        self._release()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._release()

    # Inside

    def _restart(self) -> None:
        """The one place where a window begins."""
        self._window = Window(started=self.clock())

    def _restart_all(self) -> None:
        """Begin a window, and forget what the GPU did before it."""
        self._restart()
        if self._utilization:
            self._utilization.take_mean()

    def _close(self) -> tuple[Window, float]:
        """End the window once the device has caught up, and begin the next. Returns it with the time it ended."""
        self.wait_for_device(self._device)
        window = self._window
        self._restart()
        return window, self._window.started

    def _end_warm_up_step(self, trainer: Trainer, module: LightningModule, batch: Any) -> None:
        self._last_of_warm_up = self._close()
        if self._warm_up == WARM_UP_STEPS:
            self._mfu_per_sample_per_sec = mfu_per_sample_per_sec(trainer, module, batch)
        self._warm_up -= 1
        self._restart_all()

    def _log(self, trainer: Trainer, window: Window, ended: float, epoch_end: bool = False) -> None:
        utilization = self._utilization.take_mean() if self._utilization else None
        known = [utilization, 1.0] if utilization is not None else [0.0, 0.0]
        *totals, busy, devices = zip(*gather_over_ranks(trainer, [*window.totals(ended), *known]), strict=True)
        metrics = rates(list(zip(*totals, strict=True)), window.steps)
        if sum(devices):
            metrics["throughput/gpu_utilization_pct"] = sum(busy) / sum(devices)
        if self._mfu_per_sample_per_sec and "throughput/device_samples_per_sec" in metrics:
            metrics["throughput/mfu_pct"] = self._mfu_per_sample_per_sec * metrics["throughput/device_samples_per_sec"]
        if metrics:
            self.windows.append(metrics)
            log_metrics(trainer, metrics, epoch_end)

    def _watch_fetches(self, trainer: Trainer) -> None:
        """Time the loader where Lightning's profiler does: right around ``next()``."""
        clock, fetching = self.clock, 0.0

        def before(profile: Callable[[], None]) -> Callable[[], None]:
            def start() -> None:
                nonlocal fetching
                profile()
                fetching = clock()

            return start

        def after(profile: Callable[[], None]) -> Callable[[], None]:
            def stop() -> None:
                self._window.waited += clock() - fetching
                profile()

            return stop

        self._methods.wrap(trainer.fit_loop.epoch_loop, "_on_before_fetch", before)
        self._methods.wrap(trainer.fit_loop.epoch_loop, "_on_after_fetch", after)

    def _outside(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def paused(*args: Any, **kwargs: Any) -> Any:
            with self.pause():
                return function(*args, **kwargs)

        return paused

    def _release(self) -> None:
        self._measuring = False
        self._methods.release()
        if self._utilization:
            self._utilization.stop()
            self._utilization = None


# A stretch of training that is measured as one: what was counted in it, and the rates that follow.


@dataclass
class Window:
    """Counts of one rank since ``started``.

    Args:
        started: The clock's reading (s) at the window's beginning; moved on by what was excluded.
        batches: Batches trained on.
        steps: Optimizer steps done; fewer than batches with ``--accumulate_grad_batches``.
        samples: Samples in those batches; 0 where a batch does not tell.
        waited: Seconds in which training waited for the next batch.
    """

    started: float
    batches: int = 0
    steps: int = 0
    samples: int = 0
    waited: float = 0.0

    def totals(self, now: float) -> list[float]:
        """Seconds up to ``now``, batches, samples and seconds waited: what is summed over ranks."""
        return [now - self.started, self.batches, self.samples, self.waited]


def rates(totals: Sequence[Sequence[float]], steps: int) -> dict[str, float]:
    """The ``throughput/*`` metrics of one window.

    Args:
        totals: :meth:`Window.totals` of every rank.
        steps: Optimizer steps in the window, the same on every rank.
    """
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
    """Length of the first tensor found in a batch (tensors in tuples, lists or mappings), 0 where there is none."""
    while not isinstance(batch, Tensor):
        if isinstance(batch, (tuple, list)) and batch:
            batch = batch[0]
        elif isinstance(batch, Mapping) and batch:
            batch = next(iter(batch.values()))
        else:
            return 0
    return batch.size(0) if batch.ndim else 1


# Methods of Lightning's objects wrapped for a while, where Lightning has no hook around what is to be timed.


class WrappedMethods:
    """Wraps methods on single objects, never on their classes, and gives them back."""

    def __init__(self) -> None:
        self._wrapped: list[tuple[object, str]] = []

    def wrap(self, owner: object, name: str, wrapper: Callable[[Any], Any]) -> None:
        """Put ``wrapper(owner.name)`` in the place of ``owner.name``."""
        setattr(owner, name, wrapper(getattr(owner, name)))
        self._wrapped.append((owner, name))

    def release(self) -> None:
        """Give back every method, the last one wrapped first."""
        while self._wrapped:
            owner, name = self._wrapped.pop()
            vars(owner).pop(name, None)


# What a run waits for, in one sentence with the flag to try.


# A loader that takes a fifth of the time is worth a flag.
LOADER_BOUND_PCT = 20.0
# Below it the GPU is idle often enough that the CPU, which feeds it, sets the pace.
GPU_BUSY_PCT = 70.0
# Lightning's loop and Python take 0.4 to 0.7 ms a batch: a tenth or more of a batch that takes no longer than this.
TINY_BATCH_MS = 5.0


def bottleneck(
    metrics: Mapping[str, float],
    *,
    device: str,
    precision: str,
    world_size: int,
    batch_size: int | None,
    num_workers: int,
    compiled: bool,
) -> str:
    """Whether a run is bound by its loader, by overhead or by arithmetic.

    Args:
        metrics: ``throughput/*`` (medians).
        device: ``cpu``, ``cuda`` or ``mps``.
        precision: The Trainer's, such as ``32-true``.
        world_size: Number of devices.
        batch_size: Samples per batch and device, None where unknown.
        num_workers: The training loader's.
        compiled: Whether the network is compiled.
    """
    waited = metrics["throughput/data_wait_pct"]
    batch_ms = 1000 * world_size / metrics["throughput/batches_per_sec"]
    busy = metrics.get("throughput/gpu_utilization_pct")
    if waited >= LOADER_BOUND_PCT:
        return f"loader-bound: {waited:.0f} % of the time is spent waiting for data. Try {_loader_flag(num_workers)}."
    if (busy < GPU_BUSY_PCT) if busy is not None else (batch_ms < TINY_BATCH_MS):
        idle = f", the GPU busy {busy:.0f} % of the time" if busy is not None else ""
        size = f"--data.batch_size {4 * batch_size}" if batch_size else "a larger --data.batch_size"
        return f"overhead-bound: {batch_ms:.1f} ms a batch{idle}, much of it Python and launches. Try {size}."
    if device == "cuda" and precision.startswith("32"):
        flag = "--precision bf16-mixed (16-mixed before Ampere)"
    elif not compiled:
        flag = "--model.compile true"
    else:
        flag = "more devices (--devices)"
    return f"compute-bound: {batch_ms:.1f} ms a batch, {waited:.0f} % of it waiting for data. Try {flag}."


def _loader_flag(num_workers: int) -> str:
    cores = threads.available_cores()
    if num_workers < cores:
        return f"--data.num_workers {cores}"
    return "less work per sample in the dataset (augment on the device: --data.rotate_degrees and its kin)"


def facts_for_advice(trainer: Trainer) -> dict[str, Any]:
    """What :func:`bottleneck` needs to know besides the rates."""
    return {
        "device": trainer.strategy.root_device.type,
        "precision": str(trainer.precision),
        "world_size": trainer.world_size,
        "batch_size": getattr(trainer.datamodule, "batch_size", None),  # type: ignore[attr-defined]
        "num_workers": getattr(trainer.train_dataloader, "num_workers", 0),
        "compiled": any(part._compiled_call_impl is not None for part in trainer.lightning_module.modules()),
    }
