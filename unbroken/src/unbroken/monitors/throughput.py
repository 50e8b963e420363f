"""How fast a run trains, how much of its time it waits for data, and how busy it keeps a GPU."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.profilers import PassThroughProfiler, Profiler
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from unbroken import contract
from unbroken.loading.batch_size import batch_size_of
from unbroken.loading.log_steps import is_log_step, is_optimizer_step, log_values, synchronize
from unbroken.monitors.flops import mfu_per_sample_per_sec
from unbroken.monitors.monitor import Monitor, never_ends_the_run
from unbroken.results.run_result import RunResult, Series

# The first steps of the optimizer compile, choose algorithms and fill caches.
WARM_UP_STEPS = 2
# A loader that takes a fifth of the time is worth a word.
LOADER_BOUND_PCT = 20.0
# How the names of three of Lightning's actions end. It gives the first to start() and stop() of the
# Trainer's profiler, the others to profile().
FETCHING = ".train_dataloader_next"
BEFORE_VALIDATION = ".on_validation_model_zero_grad"
SAVING = "save_checkpoint"
# How the names of what is logged here begin
GROUP = "throughput/"


class ThroughputMonitor(Monitor):
    """Measures training in windows of ``--log_every_n_steps`` optimizer steps, and the rest at each
    epoch's end.

    Lightning's own waits for the device at every step, logs nothing for 100 steps, and asks the
    user for the FLOPs. This one waits at the ends of a window, and around what it does not measure:
    the first two optimizer steps (but a run of only two reports its last), validation with its
    loader's start, saving, what happens between two epochs, and the wait for the first batch of
    each worker of a loader, which is the worker's start.

    Logged metrics, at every log step and epoch end, the same on any number of devices:

    - ``throughput/samples_per_sec``: training samples per second, all devices together
    - ``throughput/device_samples_per_sec``: the same per device
    - ``throughput/batches_per_sec``: batches per second, all devices together
    - ``throughput/step_ms``: milliseconds per optimizer step, as ``trainer.global_step`` counts
      (with accumulation, of several batches; with manual optimization a batch may have several)
    - ``throughput/data_wait_pct``: share of the time (0-100) in which training waited for its next
      batch
    - ``throughput/mfu_pct``: model FLOPs utilization (PaLM, arXiv 2204.02311, appendix B): the
      FLOPs that the network needs, as a share (0-100) of the GPU's dense peak. Known CUDA devices
      only
    - ``throughput/gpu_utilization_pct``: share of the time (0-100) in which a kernel ran, by NVML.
      CUDA only

    Args:
        clock: Seconds since any moment.
        wait_for_device: Called with the device at the edges of windows.
    """

    word = "throughput"

    # No hook of this puts other weights in for a validation.
    validates_trained_weights = True

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        wait_for_device: Callable[[torch.device], None] = synchronize,
    ) -> None:
        self.clock = clock
        self.wait_for_device = wait_for_device
        self.windows: list[dict[str, float]] = []  # what was logged, in order
        self.window = Window(started=0.0)
        # The pause for a validation. One without a batch has no on_validation_end: the next
        # training batch ends it.
        self.validation = ExitStack()
        self._device = torch.device("cpu")
        self._is_measuring = False
        self._listening: _Listening | None = None
        self._steps = 0  # in this training: batches at whose end the optimizer steps
        self._steps_to_log = 0  # the same, in the window
        self._global_step = 0  # optimizer steps at the end of the batch before
        self._warm_up: list[Window] = []  # a window for each step
        self._of_short_run: list[dict[str, float]] = []
        self._mfu_per_sample_per_sec: float | None = None
        self._utilization = GpuUtilization(None)
        # The clock's reading when training began to wait for a batch; None where a worker's start
        # is waited for.
        self._fetching_since: float | None = None
        # Batches of this epoch that are still to come from a worker that has just been started.
        self._from_new_workers = 0
        self._start_of_worker = ExitStack()

    # What comes out of it

    def summary(self) -> dict[str, float]:
        """Median over the windows of this training of every metric that was measured."""
        windows = self.windows or self._of_short_run
        values: dict[str, list[float]] = {}
        for window in windows:
            for name, value in window.items():
                values.setdefault(name, []).append(value)
        return {name: statistics.median(values[name]) for name in sorted(values)}

    def summary_of_run(self, series: Mapping[str, Series]) -> dict[str, float]:
        """Median over the windows of all starts of a run, which ``series`` holds by metric; of a
        metric that it lacks, over the windows of this training.
        """
        medians = self.summary()
        for name, points in series.items():
            if name.startswith(GROUP):
                medians[name] = statistics.median(value for _, value in points)
        return medians

    def advice(self, trainer: Trainer, metrics: Mapping[str, float]) -> str:
        """Where a run's time went and what to try, in one or two sentences; empty if nothing was
        measured.

        Args:
            trainer: The Trainer that has trained.
            metrics: The medians.
        """
        if "throughput/data_wait_pct" not in metrics:
            # A metric of this group may be the module's own.
            return ""
        waited = metrics["throughput/data_wait_pct"]
        busy = metrics.get("throughput/gpu_utilization_pct")
        batch_ms = 1000 * trainer.world_size / metrics["throughput/batches_per_sec"]
        measured = f"{batch_ms:.1f} ms a batch, {waited:.0f} % of it waiting for data"
        if busy is not None:
            measured += f", the GPU idle {100 - busy:.0f} % of the time"
        measured += "."
        if waited >= LOADER_BOUND_PCT:
            # There is no flag to try: more workers would make quick data slower.
            return f"loader-bound: {measured}"
        datamodule = trainer.datamodule  # type: ignore[attr-defined]
        if batch_size_of(datamodule) is not None:
            measured += " The command tune batch_size finds the fastest batch size."
        return measured

    def add_facts(self, trainer: Trainer, result: RunResult) -> None:
        """Add the medians and the advice to the summary."""
        medians = self.summary_of_run(result.series)
        result.summary.metrics |= medians
        result.summary.advice = self.advice(trainer, medians)

    # What it hears

    @never_ends_the_run
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # The Trainer's profiler is the public way to hear of waits for data, of saving, and of a
        # validation to come.
        profiler = trainer.profiler  # type: ignore[attr-defined]
        self._listening = _Listening(profiler, self)
        trainer.profiler = self._listening  # type: ignore[attr-defined]

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._listen_no_more(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._steps = 0
        self._steps_to_log = 0
        self._global_step = trainer.global_step
        self._begin(trainer)

    @never_ends_the_run
    def _begin(self, trainer: Trainer) -> None:
        self._device = trainer.strategy.root_device
        self._is_measuring = True
        self._warm_up = []
        read = None
        if self._device.type == "cuda":
            read = partial(torch.cuda.utilization, self._device)
        self._utilization = GpuUtilization(read)
        # A run that is resumed inside an epoch has no start of an epoch.
        self._begin_epoch(trainer)

    @never_ends_the_run
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin_epoch(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._count(trainer, batch)
        # From here on every rank does the same, also one whose monitor is off: they gather what
        # they have measured.
        if not is_optimizer_step(trainer, batch_idx):
            return
        self._steps += 1
        if self._steps <= WARM_UP_STEPS:
            self._end_warm_up_step(trainer, pl_module, batch)
            return
        self._steps_to_log += 1
        if is_log_step(trainer, batch_idx):
            self._log_window(trainer)

    @never_ends_the_run
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Among accumulated batches the profiler hears of a validation no sooner than here.
        self.begin_validation()

    @never_ends_the_run
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.validation.close()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._steps_to_log:
            self._log_window(trainer)
        elif 0 < self._steps <= WARM_UP_STEPS and is_last_epoch(trainer):
            # There is nothing but the warm-up. As the epoch ends, it is a part of the epoch's row.
            last_step = self._warm_up[-1] if self._warm_up else None
            logged = self._log(trainer, last_step)
            self._of_short_run = [logged] if logged else []

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._end()
        self._listen_no_more(trainer)

    def switch_off(self, error: Exception) -> None:
        self._is_measuring = False
        self._utilization.ended.set()
        super().switch_off(error)

    def pause_while_saving(self) -> AbstractContextManager[Any]:
        """A save is no training."""
        return self.pause()

    # Called by the profiler that listens

    @never_ends_the_run
    def begin_fetching(self) -> None:
        """Training waits for its next batch from now on."""
        self.validation.close()
        if self._from_new_workers:
            self._from_new_workers -= 1
            self._fetching_since = None
            self._start_of_worker.enter_context(self.pause())
        else:
            self._fetching_since = self.clock()

    @never_ends_the_run
    def end_fetching(self) -> None:
        """The batch is there."""
        self._start_of_worker.close()
        if self._fetching_since is not None:
            self.window.waited += self.clock() - self._fetching_since

    @never_ends_the_run
    def begin_validation(self) -> None:
        """Leave out what happens until the validation ends."""
        self.validation.enter_context(self.pause())

    # How it measures

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave what happens inside out of the window. Validation and ``trainer.save_checkpoint``
        already are.
        """
        # A pause may stand in another one.
        if not self._is_measuring or self._utilization.paused:
            yield
            return
        paused_at = self._begin_pause()
        try:
            yield
        finally:
            # Not after an error, which may be the device's.
            if self._is_measuring and paused_at is not None:
                self._end_pause(paused_at)

    @never_ends_the_run
    def _begin_pause(self) -> float:
        # Work that is queued already belongs to the window.
        self.wait_for_device(self._device)
        self._utilization.paused = True
        return self.clock()

    @never_ends_the_run
    def _end_pause(self, paused_at: float) -> None:
        self.wait_for_device(self._device)
        self.window.started += self.clock() - paused_at
        self._utilization.paused = False

    def _begin_epoch(self, trainer: Trainer) -> None:
        self._next_window(wait=False)
        self._from_new_workers = new_workers(trainer, is_first_epoch=self._steps == 0)

    @never_ends_the_run
    def _count(self, trainer: Trainer, batch: Any) -> None:
        before = self._global_step
        self._global_step = trainer.global_step
        self.window.steps += self._global_step - before
        self.window.batches += 1
        self.window.samples += samples_in(batch)

    @never_ends_the_run
    def _end_warm_up_step(self, trainer: Trainer, pl_module: LightningModule, batch: Any) -> None:
        self._warm_up.append(self._next_window())
        if len(self._warm_up) == 1:
            self._mfu_per_sample_per_sec = mfu_per_sample_per_sec(trainer, pl_module, batch)
        self._next_window(wait=False)

    def _next_window(self, wait: bool = True) -> Window:
        """Begin a window; returns the one before it, which ends once the device has caught up, or
        at once.
        """
        self.validation.close()
        if wait:
            self.wait_for_device(self._device)
        ended = self.window
        self.window = Window(started=self.clock())
        ended.seconds = self.window.started - ended.started
        ended.gpu_pct = self._utilization.mean()
        return ended

    @never_ends_the_run
    def _end_window(self) -> Window:
        return self._next_window()

    def _log_window(self, trainer: Trainer) -> None:
        self._steps_to_log = 0
        logged = self._log(trainer, self._end_window())
        if logged:
            self.windows.append(logged)

    def _log(self, trainer: Trainer, window: Window | None) -> dict[str, float] | None:
        """Log a window that has ended; returns the metrics. Every rank takes part, also one whose
        monitor is off.
        """
        ranks = self.gather_from_ranks(window)
        if ranks is None:
            return None
        return self._log_joined(trainer, ranks)

    @never_ends_the_run
    def _log_joined(self, trainer: Trainer, ranks: list[Window]) -> dict[str, float]:
        metrics = rates(ranks)
        samples_per_sec = metrics.get("throughput/device_samples_per_sec")
        if self._mfu_per_sample_per_sec and samples_per_sec:
            metrics["throughput/mfu_pct"] = self._mfu_per_sample_per_sec * samples_per_sec
        log_values(trainer, metrics)
        return metrics

    def _end(self) -> None:
        self._is_measuring = False
        self.validation.close()
        self._start_of_worker.close()
        self._utilization.ended.set()

    def _listen_no_more(self, trainer: Trainer) -> None:
        """Give the Trainer its own profiler back."""
        profiler = trainer.profiler  # type: ignore[attr-defined]
        if self._listening is not None and profiler is self._listening:
            trainer.profiler = self._listening.profiler  # type: ignore[attr-defined]
        self._listening = None


class _Listening(Profiler):
    """Stands before the Trainer's profiler during a run: tells the monitor what it hears, and
    passes everything on.
    """

    def __init__(self, profiler: Profiler, monitor: ThroughputMonitor) -> None:
        # Where the Trainer's profiler writes: the module may ask.
        super().__init__(getattr(profiler, "dirpath", None), getattr(profiler, "filename", None))
        self.profiler = profiler
        self.monitor = monitor
        # An idle profiler has nothing to do in any of its actions, some sixty times a step. A
        # subclass may have.
        self.is_idle = type(profiler) is PassThroughProfiler

    def start(self, action_name: str) -> None:
        self.profiler.start(action_name)
        if action_name.endswith(FETCHING):
            self.monitor.begin_fetching()

    def stop(self, action_name: str) -> None:
        if action_name.endswith(FETCHING):
            self.monitor.end_fetching()
        self.profiler.stop(action_name)

    def profile(self, action_name: str) -> AbstractContextManager[Any]:  # type: ignore[override]
        if action_name.endswith(BEFORE_VALIDATION):
            self.monitor.begin_validation()
        if action_name == SAVING:
            return self._profile_saving(action_name)
        return NOTHING if self.is_idle else self.profiler.profile(action_name)

    @contextmanager
    def _profile_saving(self, action_name: str) -> Iterator[Any]:
        with self.monitor.pause(), self.profiler.profile(action_name) as inside:
            yield inside

    def summary(self) -> str:
        return self.profiler.summary()

    def describe(self) -> None:
        self.profiler.describe()

    def __getattr__(self, name: str) -> Any:
        # What else a profiler of the user's own has. This is asked for only what a Profiler lacks.
        return getattr(self.profiler, name)


NOTHING = nullcontext("")


def new_workers(trainer: Trainer, is_first_epoch: bool) -> int:
    """Worker processes that a training's loaders start for an epoch; of several loaders, those of
    the one with most.
    """
    workers = 0
    for loader in CombinedLoader(trainer.train_dataloader).flattened:
        # An iterable of the user's own has no workers.
        if not isinstance(loader, contract.HasWorkers):
            continue
        if is_first_epoch or not loader.persistent_workers:
            workers = max(workers, loader.num_workers)
    return workers


def is_last_epoch(trainer: Trainer) -> bool:
    """Whether training ends with the epoch whose end is now."""
    max_epochs = trainer.max_epochs
    has_all_epochs = max_epochs is not None and 0 <= max_epochs <= trainer.current_epoch + 1
    has_all_steps = 0 <= trainer.max_steps <= trainer.global_step
    return bool(trainer.should_stop) or has_all_epochs or has_all_steps


@dataclass
class Window:
    """A stretch of training that is measured as one, on one rank."""

    started: float  # the clock's reading (s) at its beginning; moved on by what was excluded
    batches: int = 0
    # Of the optimizer: fewer than batches with --accumulate_grad_batches; none, or several a batch,
    # with manual optimization
    steps: int = 0
    samples: int = 0  # 0 where a batch does not tell
    waited: float = 0.0  # seconds in which training waited for the next batch
    seconds: float = 0.0  # known at its end, as is the GPU's utilization
    gpu_pct: float | None = None


def rates(ranks: Sequence[Window]) -> dict[str, float]:
    """The ``throughput/*`` metrics of a window that has ended, as every rank saw it.

    Empty where a coarse clock saw no time go by: nothing can be divided by it.
    """
    seconds = statistics.fmean(window.seconds for window in ranks)
    if seconds <= 0:
        return {}
    waited = statistics.fmean(window.waited for window in ranks)
    metrics = {
        "throughput/batches_per_sec": sum(window.batches for window in ranks) / seconds,
        "throughput/data_wait_pct": 100 * waited / seconds,
    }
    steps = ranks[0].steps
    if steps:
        metrics["throughput/step_ms"] = 1000 * seconds / steps
    samples = sum(window.samples for window in ranks)
    if samples:
        metrics["throughput/samples_per_sec"] = samples / seconds
        metrics["throughput/device_samples_per_sec"] = samples / seconds / len(ranks)
    gpus = [window.gpu_pct for window in ranks if window.gpu_pct is not None]
    if gpus:
        metrics["throughput/gpu_utilization_pct"] = statistics.fmean(gpus)
    return metrics


def samples_in(batch: Any) -> int:
    """Length of the first tensor in a batch (at any depth of tuples, lists and mappings), 0 where
    there is none.
    """
    if isinstance(batch, Tensor):
        return batch.size(0) if batch.ndim else 1
    parts: Any = ()
    if isinstance(batch, (tuple, list)):
        parts = batch
    elif isinstance(batch, Mapping):
        parts = batch.values()
    # A loop, for this runs at every step: a generator would take twice as long.
    for part in parts:
        count = samples_in(part)
        if count:
            return count
    return 0


class GpuUtilization:
    """Samples in a thread how busy the GPU is.

    Args:
        read: Returns percent (0-100), or raises (MIG, no access). None: there is no GPU.
        interval_seconds: Between samples. NVML's own value is a mean over up to a second.
    """

    def __init__(self, read: Callable[[], float] | None, interval_seconds: float = 0.5) -> None:
        self.paused = False  # whether samples are dropped
        self.ended = threading.Event()  # set: the thread ends
        self._samples: list[float] = []
        if read is not None:
            arguments = (read, interval_seconds)
            threading.Thread(target=self._run, args=arguments, daemon=True).start()

    def mean(self) -> float | None:
        """Mean (percent) of the samples since the last call; None where there are none."""
        samples = self._samples
        self._samples = []
        return statistics.mean(samples) if samples else None

    def _run(self, read: Callable[[], float], interval_seconds: float) -> None:
        # Whatever the driver's library raises: the metric is left out.
        with suppress(Exception):
            while not self.ended.wait(interval_seconds):
                sample = float(read())
                if not self.paused:
                    self._samples.append(sample)
