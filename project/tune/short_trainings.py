"""Short trainings that leave nothing behind: the learning-rate range test, and the search for a batch size."""

import contextlib
import gc
import itertools
import logging
import math
import re
import shlex
import statistics
import sys
import tempfile
import time
import warnings
from argparse import Namespace
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from project import hardware
from project.engine import signals
from project.engine.cli import Configuration
from project.engine.exact_loading import ExactLoading
from project.engine.lightning_internals import LiveMemory, leave_signals_alone
from project.engine.log_steps import synchronize
from project.engine.ranks import launched_world
from project.engine.summary import network_of, samples_of
from project.engine.trainer import build_trainer, trainer_flags
from project.errors import UserError, is_out_of_memory
from project.tables import Row, format_table

WIDTH = 1 / 25  # standard deviation of the loss curve's smoothing, as a fraction of all steps
# The suggested rate is that of the lowest loss, divided by this. Best validation accuracy after four epochs on the
# bundled digits, of rates 0.0006 to 0.03: ConvNet 0.006 (lowest loss at 0.015), MLP 0.006 to 0.012 (lowest at 0.007).
BELOW_LOWEST = 2.0
LEAST_FALL = 0.05  # of the first loss; a smaller fall is noise

COUNTED_STEPS = 2  # in which the CPU's memory is counted; a compiled network runs eagerly in them
WARM_UP_STEPS, WINDOWS, WINDOW_SECONDS = 3, 3, 0.4
FIRST = 16  # the first batch size that is tried
WORTH = 0.05  # a gain in speed below this fraction does not count
# Optimizer steps per epoch that a recommended size must leave. On the bundled digits, 4 per epoch gave an accuracy of
# 0.916 after five epochs, and 70 gave 0.983.
LEAST_STEPS = 50
CEILING = 65_536  # for data of unknown length
CPU_SHARE = 0.6  # of the free host memory: operations need temporary memory that is not counted, other programs theirs


def one_device_flags(config: Configuration) -> dict[str, Any]:
    """The Trainer's arguments for one process on one device; a UserError where that is not what was asked for."""
    asked, name = config.trainer, type(config.module).__name__
    devices, nodes, strategy = str(asked["devices"]), asked["num_nodes"], asked["strategy"]
    is_one = re.fullmatch(
        r"auto|-1|1|\d+,|\[\d+\]", devices
    )  # 2, and [2] name a device by its index
    if not is_one or nodes > 1 or strategy != "auto" or launched_world()[1] > 1:
        got = f"got --devices {devices} --num_nodes {nodes} --strategy {strategy}"
        leave = f"leave --devices, --num_nodes, --strategy, torchrun and srun away, {got}"
        raise UserError(
            f"tune measures one process on one device, and what it finds is per device: {leave}."
        )
    if not config.module.automatic_optimization:
        raise UserError(
            f"tune needs Lightning's automatic optimization, and {name} steps its optimizers itself."
        )
    asked["devices"] = 1 if devices in ("auto", "-1") else asked["devices"]
    return trainer_flags(config)


class ShortTraining(Callback):
    """Base of the callbacks that measure a training from within and end it by ``trainer.should_stop``."""

    steps_done = 0  # optimizer steps

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        leave_signals_alone(
            trainer
        )  # Lightning's handlers swallow SIGTERM: the try would seem to have fitted
        ExactLoading().install(trainer)  # the loaders that fit trains with

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.strategy.lr_scheduler_configs = []  # some wait for a validation, some end too early

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (
            asked := signals.state.requested
        ):  # an exception raised while a tensor is freed would be lost
            raise signals.Stopped(asked)
        if trainer.global_step != self.steps_done:  # else gradients are being accumulated
            self.steps_done = trainer.global_step
            self.after_step(trainer)

    def after_step(self, trainer: Trainer) -> None:
        """Called after every optimizer step."""


def train_shortly(
    flags: dict[str, Any], callback: ShortTraining, module: LightningModule, datamodule: Any
) -> Trainer:
    """Train with the device, precision and accumulation of ``flags`` until ``callback`` ends it."""
    endless: dict[str, Any] = {
        "max_epochs": 1_000_000,
        "max_steps": -1,
        "max_time": None,
        "min_epochs": None,
    }
    endless |= {
        "min_steps": None,
        "limit_train_batches": None,
        "overfit_batches": 0.0,
        "fast_dev_run": False,
    }
    unvalidated = {"limit_val_batches": 0, "val_check_interval": 1.0, "check_val_every_n_epoch": 1}
    silent = {
        "logger": False,
        "profiler": None,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    folder, ends = tempfile.TemporaryDirectory(prefix="tune-"), contextlib.ExitStack()
    with folder as root, warnings.catch_warnings(), ends:
        warnings.simplefilter("ignore")  # dozens of trainings would each print the same lines
        logging.disable(logging.WARNING)
        ends.callback(logging.disable, logging.NOTSET)
        own = {"callbacks": [callback], "default_root_dir": root}
        trainer = build_trainer(flags | endless | unvalidated | silent | own)
        trainer.fit(module, datamodule=datamodule)
        return trainer


@contextlib.contextmanager
def picture(
    path: Path, config: Configuration, flags: dict[str, Any], panels: int
) -> Iterator[list[Axes]]:
    """Axes side by side, to draw on in the block, under a title that names the training; saved as PNG at the end."""
    figure = Figure(figsize=(4 + 2.6 * panels, 3.8), layout="constrained")
    yield list(figure.subplots(1, panels, squeeze=False)[0])
    for axes in figure.axes:
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8, frameon=False)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    on_cpu = flags["accelerator"] == "cpu" or not (gpus := hardware.accelerators())
    device = "{name}, {cores} cores".format(**hardware.cpu()) if on_cpu else gpus[0]["name"]
    optimizer = config.module.hparams.get("optimizer")
    parts = [
        type(network_of(config.module)).__name__,
        *([optimizer] if isinstance(optimizer, str) else []),
    ]
    figure.suptitle(
        f"{', '.join(parts)}, {flags['precision'] or '32-true'} on {device}", fontsize=9
    )
    figure.savefig(path, dpi=130)


class RateRamp(ShortTraining):
    """Raises the learning rate of all parameter groups exponentially and records the loss of every optimizer step.
    Lightning's finder needs a module with an attribute ``lr``, and its running mean lags 50 steps behind.
    """

    def __init__(self, min_lr: float, max_lr: float, steps: int) -> None:
        self.min_lr, self.growth, self.steps = min_lr, (max_lr / min_lr) ** (1 / (steps - 1)), steps
        self.rates: list[float] = []
        self.losses: list[float] = []  # of each step, the mean over its accumulated batches
        self._parts: list[float] = []  # losses of the step's batches

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._groups = [
            group for optimizer in trainer.optimizers for group in optimizer.param_groups
        ]
        if not all("lr" in group for group in self._groups):
            raise UserError("tune lr: the optimizer has no learning rate.")
        # the highest rate that the module itself chose
        self.present = max(
            float(group.get("max_lr", group.get("initial_lr", group["lr"])))
            for group in self._groups
        )

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        rate = self.min_lr * self.growth**self.steps_done
        for group in self._groups:
            group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], torch.Tensor) else rate

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if outputs:  # none where training_step skips a batch; Lightning divides the loss by the batches per step
            self._parts.append(float(outputs["loss"]) * trainer.accumulate_grad_batches)
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def after_step(self, trainer: Trainer) -> None:
        if self._parts:
            self.rates.append(self.min_lr * self.growth ** (self.steps_done - 1))
            self.losses.append(statistics.fmean(self._parts))
        self._parts = []
        trainer.should_stop = self.steps_done >= self.steps or not all(
            map(math.isfinite, self.losses[-1:])
        )


def tune_lr(
    config: Configuration, flags: dict[str, Any], options: Namespace
) -> tuple[list[Row], Row]:
    """Find a learning rate, print and draw it. Returns a row per step and all facts."""
    print(
        f"training {options.steps} steps at rates from {options.min_lr:g} to {options.max_lr:g}",
        file=sys.stderr,
    )
    ramp = RateRamp(options.min_lr, options.max_lr, options.steps)
    train_shortly(flags, ramp, config.module, config.datamodule)
    smooth, lowest = read_curve(ramp.losses)
    rates, losses, now = ramp.rates[: len(smooth)], ramp.losses[: len(smooth)], ramp.present
    curve = zip(rates, losses, smooth, strict=True)
    rows: list[Row] = [
        {"lr": rate, "loss": loss, "smooth_loss": smoothed} for rate, loss, smoothed in curve
    ]
    print(format_table(rows[:: max(1, len(rows) // 20)]))
    found, suggestion = rates[lowest], rates[lowest] / BELOW_LOWEST
    says = f"lowest loss at a learning rate of {found:.2g}; half of it is a safe peak"
    if lowest >= len(rows) - 3:
        says = f"the loss still fell at {found:.2g}: a larger --max_lr may find a better rate"
    flag = (
        "--model.lr"
        if "lr" in (config.resolved["model"].get("init_args") or {})
        else "learning rate"
    )
    print(f"\n{says}\n\n  {flag} {suggestion:.2g}\n\nIt was {now:g}.")
    with picture(options.plot, config, flags, 1) as (axes,):
        axes.plot(rates, losses, ".", markersize=3, color="#bbccee", label="each step")
        axes.plot(rates, smooth, color="#4477aa", label="smoothed")
        height = np.interp(suggestion, rates, smooth)
        axes.plot(suggestion, height, "o", color="#ee6677", label=f"suggested: {suggestion:.2g}")
        axes.plot(
            found,
            smooth[lowest],
            "o",
            color="#228833",
            fillstyle="none",
            label=f"lowest loss: {found:.2g}",
        )
        if rates[0] < now < rates[-1]:
            axes.axvline(now, color="#999999", linestyle="--", linewidth=1, label=f"now: {now:g}")
        fall = smooth[0] - smooth[lowest]
        limits = (
            min(0.0, smooth[lowest] - 0.1 * fall),
            smooth[0] + 0.3 * fall,
        )  # a diverging end would flatten the rest
        axes.set(xscale="log", ylim=limits, xlabel="learning rate", ylabel="training loss")
    return rows, {"suggested_lr": suggestion, "lowest_loss_lr": found, "curve": rows}


def read_curve(losses: Sequence[float]) -> tuple[list[float], int]:
    """The losses up to the first that is not finite, smoothed by a Gaussian, and the step at which they are lowest.
    Lightning's ``suggestion()`` divides by differences of rates, of 1e-7 at the low end: noise beats every real slope.
    """
    finite = list(itertools.takewhile(math.isfinite, losses))
    if finite:
        # No loss counts more than the first ones do: a diverged loss of 1e12 would show a hundred steps earlier.
        capped, steps = (
            np.minimum(finite, max(finite[: max(1, len(finite) // 10)])),
            np.arange(len(finite)),
        )
        distance = np.subtract.outer(steps, steps) / (WIDTH * len(losses))
        weights = np.exp(-0.5 * distance**2)
        smooth = (weights @ capped / weights.sum(axis=1)).tolist()
        lowest = smooth.index(min(smooth))
        if smooth[0] - smooth[lowest] > LEAST_FALL * abs(smooth[0]):
            return smooth, lowest
    raise UserError("tune lr: the loss never fell. Widen --min_lr and --max_lr, or raise --steps.")


class Clock(ShortTraining):
    """Measures the peak of memory, times windows of several steps, and ends the training after the last window.
    The warm-up steps are windows of one step that do not count. Memory peaks in the second step, when gradients and
    optimizer state exist; then the CPU's is no longer counted, because that slows steps down.
    """

    def __init__(self, limit_bytes: int | None) -> None:
        self.memory = LiveMemory(limit_bytes)
        self.step_ms: list[float] = []  # of each window
        self._began, self._first, self._length = (
            0.0,
            0,
            1,
        )  # of the window: time, steps before it, steps in it

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        device, limit = trainer.strategy.root_device, self.memory.limit_bytes
        if device.type == "cpu":
            self.memory.__enter__()
            self.memory.count([*pl_module.parameters(), *pl_module.buffers()])
        elif limit is not None:  # a GPU's allocator keeps to it until the process ends
            total = hardware.GIB * hardware.accelerators()[device.index or 0]["memory_total_gib"]
            torch.get_device_module(device).set_per_process_memory_fraction(min(1.0, limit / total))
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def after_step(self, trainer: Trainer) -> None:
        if self.steps_done == COUNTED_STEPS:
            self.memory.close()
        if self.steps_done < self._first + self._length:
            return
        synchronize(trainer.strategy.root_device)
        now = time.perf_counter()
        step_seconds = (
            now - self._began
        ) / self._length  # meaningless in the first window, where it is not used
        if self.steps_done > WARM_UP_STEPS:
            self.step_ms.append(1000 * step_seconds)
            trainer.should_stop = len(self.step_ms) == WINDOWS
        if self.steps_done >= WARM_UP_STEPS:
            self._length = max(1, int(WINDOW_SECONDS / step_seconds))
        self._began, self._first = now, self.steps_done


@dataclass
class Measured:
    """What training at one batch size took."""

    batch_size: int
    step_ms: float
    spread_pct: float = 0.0  # of the windows: (largest − smallest) / median
    peak_allocated_gib: float | None = None  # None where the device does not tell
    steps_per_epoch: int | None = None  # optimizer steps; None for data of unknown length

    @property
    def samples_per_sec(self) -> float:
        return 1000 * self.batch_size / self.step_ms  # of one device


class TrainingSteps:
    """Trains a new module for some steps at any batch size, which it sets on the data module. Lightning's batch-size
    finder keeps memory of failed tries and restores the state of one trainer (Lightning issues 19789, 20231).
    """

    def __init__(
        self, config: Configuration, flags: dict[str, Any], memory_limit_gib: float | None = None
    ) -> None:
        self.config, self.flags, self.datamodule = config, flags, cast(Any, config.datamodule)
        limits = [] if memory_limit_gib is None else [memory_limit_gib]
        if flags["accelerator"] == "cpu" or not torch.accelerator.is_available():
            limits.append(CPU_SHARE * hardware.memory()["available_gib"])
        self.memory_limit_bytes = int(min(limits) * hardware.GIB) if limits else None
        self.datamodule.prepare_data()
        self.datamodule.setup("fit")
        self.training_samples = samples_of(self.datamodule.train_dataloader())  # None if unknown

    def measure(self, batch_size: int) -> Measured | None:
        """Train for a second or two and print the result on stderr; None: this size does not fit."""
        self.datamodule.batch_size = batch_size
        found = self._train(
            batch_size
        )  # in a frame of its own, whose tensors are free when it has returned
        self.datamodule.trainer = None  # holds what the training has left
        gc.collect()  # Trainer, module and loops hold each other
        if (
            torch.accelerator.is_available()
        ):  # its own empty_cache fails on MPS (PyTorch issue 186430)
            torch.get_device_module(torch.accelerator.current_accelerator()).empty_cache()
        told = (
            f"{found.step_ms:,.1f} ms per step, {found.samples_per_sec:,.0f} samples/s"
            if found
            else "out of memory"
        )
        print(f"batch size {batch_size:,}: {told}", file=sys.stderr)
        return found

    def _train(self, batch_size: int) -> Measured | None:
        clock = Clock(self.memory_limit_bytes)
        try:
            with contextlib.closing(clock.memory):
                trainer = train_shortly(
                    self.flags, clock, self.config.fresh_module(), self.datamodule
                )
        except Exception as error:
            if is_out_of_memory(error):
                return None
            raise
        samples, samples_per_step = (
            self.training_samples,
            batch_size * self.flags["accumulate_grad_batches"],
        )
        steps = None if samples is None else max(1, samples // samples_per_step)
        peaks = {
            "cpu": clock.memory.peak_bytes,
            "cuda": torch.cuda.max_memory_allocated(),
        }  # others do not tell
        peak_gib = {name: peak / hardware.GIB for name, peak in peaks.items()}.get(
            trainer.strategy.root_device.type
        )
        median = statistics.median(clock.step_ms)
        spread = 100 * (max(clock.step_ms) - min(clock.step_ms)) / median
        return Measured(batch_size, median, spread, peak_gib, steps)


def tune_batch_size(
    config: Configuration, flags: dict[str, Any], options: Namespace
) -> tuple[list[Row], Row]:
    """Find batch sizes, print and draw them. Returns a row per size (what is not known is left out), and all facts."""
    present = getattr(config.datamodule, "batch_size", None)
    if not isinstance(present, int):
        raise UserError(
            "tune batch_size needs a data module whose loader follows an attribute batch_size."
        )
    steps = TrainingSteps(config, flags, options.memory_limit_gib)
    ceiling, reason = steps.training_samples or CEILING, "the training set has no more samples"
    if options.max_batch_size is not None and options.max_batch_size < ceiling:
        ceiling, reason = options.max_batch_size, "--max_batch_size allows no larger one"
    fitting, limited_by = find_largest(steps.measure, ceiling, reason, options.max_step_seconds)
    if not fitting:
        raise UserError(
            "not even one sample fits into the device's memory. Choose a smaller network or --precision."
        )
    if present < max(fitting) and present not in fitting and (now := steps.measure(present)):
        fitting[present] = now
    measured = [fitting[size] for size in sorted(fitting)]
    best, enough, use = advise(measured, present)
    notes = {"best throughput": best, "larger stops paying": enough, "use": use}
    rows: list[Row] = []
    for size in measured:
        note = ", ".join(note for note, noted in notes.items() if noted is size)
        row = {
            "batch_size": size.batch_size,
            "samples_per_sec": size.samples_per_sec,
            **vars(size),
            "note": note,
        }
        rows.append({name: value for name, value in row.items() if value is not None})
    print(format_table(rows))
    tune_lr = shlex.join(
        ["python", "-m", "project.tune", "lr", *options.fit_flags, "--data.batch_size"]
    )
    print("\n" + "\n".join(advice_lines(measured, limited_by, present, tune_lr)))
    with picture(options.plot, config, flags, 2) as panels:
        draw(panels, measured, limited_by, present)
    facts: dict[str, Any] = {"largest_batch_size": max(fitting), "limited_by": limited_by}
    facts |= {"best_throughput_batch_size": best.batch_size, "enough_batch_size": enough.batch_size}
    return rows, facts | {"recommended_batch_size": use.batch_size if use else None, "sizes": rows}


def find_largest(
    measure: Callable[[int], Measured | None], ceiling: int, reason: str, max_step_s: float
) -> tuple[dict[int, Measured], str]:
    """Double the size while it fits, then bisect. Returns all that fit, and what limits them: memory, time, reason."""
    fitting: dict[int, Measured] = {}

    def fits(size: int) -> bool:
        if (measured := measure(size)) is not None:
            fitting[size] = measured
        return measured is not None

    size = min(FIRST, ceiling)
    while fits(size):
        if size == ceiling:
            return fitting, reason
        if (
            2 * fitting[size].step_ms > 1000 * max_step_s
        ):  # the doubled size's step would take longer
            return fitting, "larger steps take longer than --max_step_seconds"
        size = min(2 * size, ceiling)
    bisect_left(
        range(max(fitting, default=0) + 1, size), True, key=lambda between: not fits(between)
    )
    return fitting, "memory"


def advise(
    measured: Sequence[Measured], present: int
) -> tuple[Measured, Measured, Measured | None]:
    """Of sizes in rising order: the fastest; the smallest within WORTH of it, past which larger ones stop paying; and
    the one to use, the same among those that leave LEAST_STEPS, or the configuration's ``present`` one where that gains
    nothing. None: no size that may be recommended fits.
    """

    def smallest_near_best(rows: Sequence[Measured]) -> Measured:
        best = max(row.samples_per_sec for row in rows)
        return next(row for row in rows if row.samples_per_sec >= (1 - WORTH) * best)

    allowed = [
        row for row in measured if row.steps_per_epoch is None or row.steps_per_epoch >= LEAST_STEPS
    ]
    use = now = next((row for row in measured if row.batch_size == present), None)
    if allowed:
        found = smallest_near_best(allowed)
        use = (
            found
            if now is None or found.samples_per_sec > (1 + WORTH) * now.samples_per_sec
            else now
        )
    return max(measured, key=lambda row: row.samples_per_sec), smallest_near_best(measured), use


def advice_lines(
    measured: Sequence[Measured], limited_by: str, present: int, tune_lr: str
) -> list[str]:
    """What the figures mean, what a larger batch costs, and the flags to paste; ``tune_lr`` lacks only the size."""
    (best, enough, use), largest = advise(measured, present), measured[-1].batch_size
    lines = [f"largest batch tried: {largest:,}, and it fits ({limited_by})"]
    if limited_by == "memory":
        lines = [f"largest batch that fits: {largest:,} ({largest + 1:,} does not)"]
    lines.append(f"best throughput: {best.batch_size:,} at {best.samples_per_sec:,.0f} samples/s")
    if enough is not best:
        gain = 100 * (best.samples_per_sec / enough.samples_per_sec - 1)
        lines.append(
            f"past {enough.batch_size:,} it stops paying: {best.batch_size:,} is only {gain:.1f} % faster"
        )
    sizes = {
        row.batch_size: row.steps_per_epoch
        for row in (use or best, best)
        if row.steps_per_epoch is not None
    }
    cost = " and ".join(f"{steps:,} an epoch at {size:,}" for size, steps in sizes.items())
    lines.append(
        f"A larger batch is faster per sample but takes fewer optimizer steps{f': {cost}' if cost else ''}."
    )
    limit = f" that leaves {LEAST_STEPS} of them" if cost else ""
    if use is None:
        return [*lines, f"No size{limit} fits."]
    if (size := use.batch_size) == present:
        return [
            *lines,
            f"Keep --data.batch_size {size}: no size{limit} is {100 * WORTH:.0f} % faster.",
        ]
    return [
        *lines,
        "",
        f"  --data.batch_size {size}",
        "",
        "It wants another learning rate:",
        f"  {tune_lr} {size}",
    ]


def draw(
    panels: Sequence[Axes], measured: Sequence[Measured], limited_by: str, present: int
) -> None:
    """Throughput and peak memory over batch size, the advised sizes marked."""
    (speed, peak), (best, _, use) = panels, advise(measured, present)
    sizes, rates = [row.batch_size for row in measured], [row.samples_per_sec for row in measured]
    line: dict[str, Any] = {"marker": "o", "markersize": 4, "color": "#4477aa"}
    errors = [row.samples_per_sec * row.spread_pct / 200 for row in measured]
    speed.errorbar(sizes, rates, yerr=errors, capsize=2, **line)
    speed.axhspan((1 - WORTH) * max(rates), max(rates), color="#228833", alpha=0.12, linewidth=0)
    for row, meaning, colour, diameter in (
        (best, "best throughput", "#228833", 13),
        (use, "use", "#ee6677", 9),
    ):
        if row is not None:
            at, label = (row.batch_size, row.samples_per_sec), f"{row.batch_size:,}: {meaning}"
            speed.plot(*at, "o", fillstyle="none", markersize=diameter, color=colour, label=label)
    speed.set(ylabel="samples per second", ylim=(0, 1.15 * max(rates)))
    speed.yaxis.set_major_formatter("{x:,.0f}")
    peaks = {
        row.batch_size: row.peak_allocated_gib
        for row in measured
        if row.peak_allocated_gib is not None
    }
    peak.semilogy(list(peaks), list(peaks.values()), **line)
    peak.set_ylabel("peak GiB of tensors" if peaks else "peak memory (not told by this device)")
    if limited_by == "memory":
        peak.axvline(
            sizes[-1] + 1, color="#ee6677", linestyle="--", linewidth=1, label="out of memory"
        )
    for axes in panels:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel("batch size")
