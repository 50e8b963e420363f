"""How fast a run trains, how much of its time it waits for data, and how busy it keeps a GPU."""

from __future__ import annotations

import csv
import re
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.throughput import measure_flops
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from project.engine.log_steps import (
    SHARDING,
    is_log_step,
    is_optimizer_step,
    log_values,
    synchronize,
)
from project.engine.ranks import of_all_ranks

WARM_UP_STEPS = 2  # of the optimizer, which compile, choose algorithms and fill caches
LOADER_BOUND_PCT = 20.0  # a loader that takes a fifth of the time is worth a flag
# Ends of Lightning's action names. It gives the first to start() and stop(), the others to profile().
FETCHING, BEFORE_VALIDATION, SAVING = (
    ".train_dataloader_next",
    ".on_validation_model_zero_grad",
    "save_checkpoint",
)
MATMUL_DTYPES = {
    "32": torch.float32,
    "16": torch.float16,
    "bf16": torch.bfloat16,
}  # by a precision's first word


class ThroughputMonitor(Callback):
    """Measures training in windows of ``--log_every_n_steps`` optimizer steps, and the rest at each epoch's end.

    Lightning's own waits for the device at every step, logs nothing for 100 steps, and asks the user for the FLOPs.
    This one waits only at the ends of a window. Not measured: the first two optimizer steps (but a run of only two
    reports its last), validation with its loader's start, saving, and what happens between two epochs.

    Logged metrics, at every log step and epoch end, the same on any number of devices:

    - ``throughput/samples_per_sec``: training samples per second, all devices together
    - ``throughput/device_samples_per_sec``: the same per device
    - ``throughput/batches_per_sec``: batches per second, all devices together
    - ``throughput/step_ms``: milliseconds per optimizer step (with accumulation, of several batches)
    - ``throughput/data_wait_pct``: share of the time (0-100) in which training waited for its next batch
    - ``throughput/mfu_pct``: model FLOPs utilization (PaLM, arXiv 2204.02311, appendix B): the FLOPs that the network
      needs, as a share (0-100) of the GPU's dense peak. Known CUDA devices only
    - ``throughput/gpu_utilization_pct``: share of the time (0-100) in which a kernel ran, by NVML. CUDA only
    """

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, wait_for_device: Any = synchronize
    ) -> None:
        self.clock, self.wait_for_device = (
            clock,
            wait_for_device,
        )  # seconds; called at the edges of windows
        self.windows: list[dict[str, float]] = []  # what was logged, in order
        self.window = Window(started=0.0)
        # The pause for a validation. One without a batch has no on_validation_end: the next training batch ends it.
        self.validation = ExitStack()
        self._device, self._measuring = torch.device("cpu"), False
        self._warm_up: list[Window] = []  # a window for each step
        self._of_short_run: list[dict[str, float]] = []
        self._mfu_per_sample_per_sec: float | None = None
        self._utilization = GpuUtilization(None)
        self._fetching = 0.0  # the clock's reading when training began to wait for a batch

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Listen to the Trainer's profiler, the public way to hear of waits for data, saving, and a validation to come.
        One that serves several runs tells the newest.
        """
        profiler: Any = trainer.profiler  # type: ignore[attr-defined]
        start, stop, profile = vars(profiler).setdefault(
            "unheard", (profiler.start, profiler.stop, profiler.profile)
        )
        # what an idle one does in all of its actions, some sixty times a step
        nothing = nullcontext("") if type(profiler) is PassThroughProfiler else None

        def heard_start(action_name: str) -> None:
            start(action_name)
            if action_name.endswith(FETCHING):
                self.validation.close()
                self._fetching = self.clock()

        def heard_stop(action_name: str) -> None:
            if action_name.endswith(FETCHING):
                self.window.waited += self.clock() - self._fetching
            stop(action_name)

        def heard_profile(action_name: str) -> AbstractContextManager[Any]:
            if action_name.endswith(BEFORE_VALIDATION):
                self.validation.enter_context(self.pause())
            inside = nothing or profile(action_name)
            if action_name != SAVING:
                return inside
            saving = ExitStack()
            saving.enter_context(self.pause())
            saving.enter_context(inside)
            return saving

        profiler.start, profiler.stop, profiler.profile = heard_start, heard_stop, heard_profile

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave what happens inside out of the window. Validation and ``trainer.save_checkpoint`` already are."""
        if not self._measuring or self._utilization.paused:
            yield
            return
        self.wait_for_device(self._device)  # work already queued belongs to the window
        paused_at, self._utilization.paused = self.clock(), True
        try:
            yield
        finally:
            if self._measuring:  # not after an error, which may be the device's
                self.wait_for_device(self._device)
                self.window.started += self.clock() - paused_at
                self._utilization.paused = False

    def summary(self) -> dict[str, float]:
        """Median over the windows of every metric that was measured."""
        windows = self.windows or self._of_short_run
        names = sorted({name for window in windows for name in window})
        return {name: statistics.median(w[name] for w in windows if name in w) for name in names}

    def advice(self, trainer: Trainer) -> str:
        """Where a run's time went and what to try, in one or two sentences; empty if nothing was measured."""
        if not (metrics := self.summary()):
            return ""
        waited, busy = (
            metrics["throughput/data_wait_pct"],
            metrics.get("throughput/gpu_utilization_pct"),
        )
        batch_ms = 1000 * trainer.world_size / metrics["throughput/batches_per_sec"]
        measured = f"{batch_ms:.1f} ms a batch, {waited:.0f} % of it waiting for data"
        measured += "." if busy is None else f", the GPU idle {100 - busy:.0f} % of the time."
        if waited >= LOADER_BOUND_PCT:
            return f"loader-bound: {measured}"  # no flag to try: more workers would make quick data slower
        if hasattr(getattr(trainer, "datamodule", None), "batch_size"):  # feature: tune
            measured += " To find the fastest batch size: python -m project.tune batch_size."
        return measured

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._device, self._measuring, self._warm_up = trainer.strategy.root_device, True, []
        on_gpu = self._device.type == "cuda"
        self._utilization = GpuUtilization(
            partial(torch.cuda.utilization, self._device) if on_gpu else None
        )
        self._next_window(wait=False)  # a run resumed in mid-epoch has no start of an epoch

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._next_window(wait=False)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.window.batches += 1
        self.window.samples += samples_in(batch)
        if not is_optimizer_step(trainer, batch_idx):
            return
        self.window.steps += 1
        if len(self._warm_up) < WARM_UP_STEPS:
            self._warm_up.append(self._next_window())
            if len(self._warm_up) == 1:
                self._mfu_per_sample_per_sec = mfu_per_sample_per_sec(trainer, pl_module, batch)
            self._next_window(wait=False)
        elif is_log_step(trainer, batch_idx):
            self.windows.append(self._log(trainer, self._next_window()))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.validation.enter_context(
            self.pause()
        )  # among accumulated batches the profiler hears of it no sooner

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.validation.close()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.window.steps:
            self.windows.append(self._log(trainer, self._next_window()))
        elif not self.windows and self._warm_up:
            self._of_short_run = [self._log(trainer, self._warm_up[-1])]

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._measuring = False
        self.validation.close()
        self._utilization.ended.set()

    on_exception = on_train_end

    def _next_window(self, wait: bool = True) -> Window:
        """Begin a window; returns the one before it, which ends once the device has caught up, or at once."""
        self.validation.close()
        if wait:
            self.wait_for_device(self._device)
        ended, self.window = self.window, Window(started=self.clock())
        ended.seconds, ended.gpu_pct = self.window.started - ended.started, self._utilization.mean()
        return ended

    def _log(self, trainer: Trainer, window: Window) -> dict[str, float]:
        metrics = rates(of_all_ranks(window))
        if self._mfu_per_sample_per_sec and (
            rate := metrics.get("throughput/device_samples_per_sec")
        ):
            metrics["throughput/mfu_pct"] = self._mfu_per_sample_per_sec * rate
        log_values(trainer, metrics)
        return metrics


@dataclass
class Window:
    """A stretch of training that is measured as one, on one rank."""

    started: float  # the clock's reading (s) at its beginning; moved on by what was excluded
    batches: int = 0
    steps: int = 0  # of the optimizer; fewer than batches with --accumulate_grad_batches
    samples: int = 0  # 0 where a batch does not tell
    waited: float = 0.0  # seconds in which training waited for the next batch
    seconds: float = 0.0  # known at its end, as is the GPU's utilization
    gpu_pct: float | None = None


def rates(ranks: Sequence[Window]) -> dict[str, float]:
    """The ``throughput/*`` metrics of a window that has ended, as every rank saw it."""
    seconds = statistics.fmean(window.seconds for window in ranks)
    samples, gpus = (
        sum(w.samples for w in ranks),
        [w.gpu_pct for w in ranks if w.gpu_pct is not None],
    )
    metrics = {
        "throughput/batches_per_sec": sum(w.batches for w in ranks) / seconds,
        "throughput/step_ms": 1000 * seconds / ranks[0].steps,
        "throughput/data_wait_pct": 100 * statistics.fmean(w.waited for w in ranks) / seconds,
        "throughput/samples_per_sec": samples / seconds if samples else None,
        "throughput/device_samples_per_sec": samples / seconds / len(ranks) if samples else None,
        "throughput/gpu_utilization_pct": statistics.fmean(gpus) if gpus else None,
    }
    return {name: value for name, value in metrics.items() if value is not None}


def samples_in(batch: Any) -> int:
    """Length of the first tensor in a batch (at any depth of tuples, lists and mappings), 0 where there is none."""
    if isinstance(batch, Tensor):
        return batch.size(0) if batch.ndim else 1
    parts = (
        batch
        if isinstance(batch, (tuple, list))
        else batch.values()
        if isinstance(batch, Mapping)
        else ()
    )
    for part in parts:  # at every step: a generator would take twice as long
        if count := samples_in(part):
            return count
    return 0


class GpuUtilization:
    """Samples in a thread how busy the GPU is: ``read`` returns percent, or raises (MIG, no access); None: no GPU."""

    def __init__(
        self, read: Callable[[], float] | None, interval_seconds: float = 0.5
    ) -> None:  # NVML: mean over 1 s
        self.paused = False  # whether samples are dropped
        self._samples: list[float] = []
        self.ended = threading.Event()  # set: the thread ends
        if read is not None:
            threading.Thread(target=self._run, args=(read, interval_seconds), daemon=True).start()

    def mean(self) -> float | None:
        """Mean (percent) of the samples since the last call; None where there are none."""
        samples, self._samples = self._samples, []
        return statistics.mean(samples) if samples else None

    def _run(self, read: Callable[[], float], interval_seconds: float) -> None:
        with suppress(Exception):  # whatever the driver's library raises: the metric is left out
            while not self.ended.wait(interval_seconds):
                sample = float(read())
                if not self.paused:
                    self._samples.append(sample)


def mfu_per_sample_per_sec(trainer: Trainer, module: LightningModule, batch: Any) -> float | None:
    """Model FLOPs utilization (0-100) of a CUDA device per sample per second; None, with a warning, where unknown."""
    device = trainer.strategy.root_device
    if device.type != "cuda":
        return None
    if isinstance(trainer.strategy, SHARDING):
        why = "FLOPs cannot be counted where a strategy shards the weights"
    else:
        name, dtype = (
            torch.cuda.get_device_name(device),
            MATMUL_DTYPES.get(str(trainer.precision).split("-")[0]),
        )
        why = f"no known peak of {name} at precision {trainer.precision}"
        if dtype and (peak := peak_flops(name, dtype, tf32=may_use_tf32(module))):
            try:
                return 100 * training_flops_per_sample(module, batch) / peak
            except Exception as error:
                why = f"the network's FLOPs cannot be counted ({error})"
    rank_zero_warn(f"throughput/mfu_pct is left out: {why}.")
    return None


def training_flops_per_sample(module: LightningModule, batch: Any) -> float:
    """FLOPs of one forward and backward pass per sample (a multiply-add counts 2), on the meta device, where nothing is
    computed, and in evaluation mode, without activation checkpointing's second forward pass.
    """
    inputs = batch[0] if isinstance(batch, (tuple, list)) else batch
    if not isinstance(inputs, Tensor):
        raise TypeError(
            f"the batch must begin with a tensor to count FLOPs, not {type(inputs).__name__}"
        )
    state = {
        name: torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad)
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
    }
    forward = partial(
        torch.func.functional_call, module, state, (torch.empty_like(inputs, device="meta"),)
    )
    training = [part for part in module.modules() if part.training]
    try:
        module.eval()
        with torch.compiler.set_stance("force_eager"), torch.enable_grad():
            return measure_flops(module, forward, lambda outputs: outputs.float().sum()) / len(
                inputs
            )
    finally:
        for part in training:
            part.training = True


def may_use_tf32(module: nn.Module) -> bool:
    """Whether float32 products of a network may run in TF32 (``--matmul_precision``; convolutions do by default)."""
    products = torch.backends.cuda.matmul.fp32_precision == "tf32"  # the older getters raise here
    convolves = any(
        isinstance(part, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) for part in module.modules()
    )
    return products or (convolves and torch.backends.cudnn.conv.fp32_precision == "tf32")  # type: ignore[attr-defined]


def peak_flops(device_name: str, dtype: torch.dtype, tf32: bool = False) -> float | None:
    """FLOP/s of a GPU, by CUDA's name, in dense matrix products, with ``tf32`` those of float32 in TF32; None: unknown.
    Lightning's get_available_flops lacks the H200, and is wrong for L40S, A40 and RTX.
    """
    # a laptop's or a slice's (MIG) chip is another one
    chip = re.sub(r"\b(nvidia|tesla|geforce|\d+gb|hbm3e?)\b|-", " ", device_name.lower())
    lines = Path(__file__).with_name("gpu_peaks.csv").read_text().splitlines()
    chips = {
        row["chip"]: row
        for row in csv.DictReader(line for line in lines if not line.startswith("#"))
    }
    rates, mode = chips.get(" ".join(chip.split()), {}), str(dtype).removeprefix("torch.")
    tflops = (tf32 and mode == "float32" and rates.get("tf32")) or rates.get(mode)
    return 1e12 * float(tflops) if tflops else None
