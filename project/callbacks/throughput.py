"""How fast a run trains, and what holds it up: loader, overhead or arithmetic."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from project.callbacks.bottleneck import bottleneck, facts_for_advice
from project.callbacks.gpu_utilization import GpuUtilization
from project.callbacks.log_steps import gather_over_ranks, is_log_step, log_metrics, skip_idle_hooks
from project.callbacks.model_flops import mfu_per_sample_per_sec
from project.callbacks.window import Window, rates, samples_in
from project.callbacks.wrapped_methods import WrappedMethods

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
        elif is_log_step(trainer):
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
