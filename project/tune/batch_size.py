"""The batch-size search: the largest that fits, every size timed at full speed, and which of them to use."""

import gc
import shlex
import statistics
import sys
import time
from argparse import Namespace
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from lightning.pytorch import Trainer

from project import hardware
from project.engine.cli import Configuration
from project.engine.lightning_internals import LiveMemory
from project.engine.log_steps import synchronize
from project.engine.summary import samples_of
from project.errors import UserError, is_out_of_memory
from project.tables import Row, format_table
from project.tune.short_training import ShortTraining, picture, scratch_trainer

COUNTED_STEPS = 2  # in which the CPU's memory is counted; a compiled network runs eagerly in them
WARM_UP_STEPS, WINDOWS, WINDOW_SECONDS = 3, 3, 0.4
FIRST = 16  # the first size that is tried
WORTH = 0.05  # a gain in speed below this fraction does not count
# Optimizer steps per epoch that a recommended size must leave. On the bundled digits, 4 per epoch gave an accuracy of
# 0.916 after five epochs, and 70 gave 0.983.
LEAST_STEPS = 50
CEILING = 65_536  # for data of unknown length
CPU_SHARE = 0.6  # of the free host memory: operations need temporary memory that is not counted, other programs theirs


class Clock(ShortTraining):
    """Times windows of several steps, waits for the device only at their edges, and ends the training after the last.

    The warm-up steps are windows of one step that do not count. Memory peaks in the second step, when gradients and
    optimizer state exist; then ``memory`` is closed, because counting slows steps down.
    """

    def __init__(self, memory: LiveMemory) -> None:
        self.memory = memory
        self.step_ms: list[float] = []  # of each window
        self._began, self._first, self._length = 0.0, 0, 1  # of the window: time, steps before it, steps in it

    def after_step(self, trainer: Trainer) -> None:
        if self.steps_done == COUNTED_STEPS:
            self.memory.close()
        if self.steps_done < self._first + self._length:
            return
        synchronize(trainer.strategy.root_device)
        now = time.perf_counter()
        step_seconds = (now - self._began) / self._length  # meaningless in the first window, where it is not used
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
        """Of one device."""
        return 1000 * self.batch_size / self.step_ms


class TrainingSteps:
    """Trains a new module for some steps at any batch size, which it sets on the data module.

    Lightning's batch-size finder keeps memory of failed tries and restores the state of one trainer (Lightning issues
    19789, 20231). ``memory_limit_gib`` simulates a device with less memory.
    """

    def __init__(self, config: Configuration, flags: dict[str, Any], memory_limit_gib: float | None = None) -> None:
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
        measured = self._train(batch_size)  # in a frame of its own, whose tensors are free when it has returned
        self.datamodule.trainer = None  # holds what the training has left
        free_memory()
        told = "out of memory"
        if measured is not None:
            told = f"{measured.step_ms:,.1f} ms per step, {measured.samples_per_sec:,.0f} samples/s"
        print(f"batch size {batch_size:,}: {told}", file=sys.stderr)
        return measured

    def _train(self, batch_size: int) -> Measured | None:
        memory = LiveMemory(self.memory_limit_bytes)
        clock, peak_gib, steps = Clock(memory), None, None
        try:
            with scratch_trainer(self.flags, clock) as trainer:
                module, device = self.config.fresh_module(), trainer.strategy.root_device
                if device.type == "cpu":
                    with memory:
                        memory.count([*module.parameters(), *module.buffers()])
                        trainer.fit(module, datamodule=self.datamodule)
                    peak_gib = memory.peak_bytes / hardware.GIB
                else:
                    self._limit_memory(device)
                    trainer.fit(module, datamodule=self.datamodule)
                    peak_gib = torch.cuda.max_memory_allocated(device) / hardware.GIB if device.type == "cuda" else None
        except Exception as error:
            if is_out_of_memory(error):
                return None
            raise
        if self.training_samples is not None:
            steps = max(1, self.training_samples // (batch_size * self.flags["accumulate_grad_batches"]))
        median = statistics.median(clock.step_ms)
        spread = 100 * (max(clock.step_ms) - min(clock.step_ms)) / median
        return Measured(batch_size, median, spread, peak_gib, steps)

    def _limit_memory(self, device: torch.device) -> None:
        """Limit a GPU's allocator until the process ends, and reset its peak."""
        backend = torch.get_device_module(device)  # torch.cuda or torch.mps
        where = (device,) if device.type == "cuda" else ()
        total = torch.cuda.get_device_properties(device).total_memory if where else backend.recommended_max_memory()
        if self.memory_limit_bytes is not None:
            backend.set_per_process_memory_fraction(min(1.0, self.memory_limit_bytes / total), *where)
        if where:
            torch.cuda.reset_peak_memory_stats(device)


def free_memory() -> None:
    """Free the memory of a finished or failed training."""
    gc.collect()  # Trainer, module and loops hold each other
    if torch.accelerator.is_available():  # its own empty_cache fails on MPS (PyTorch issue 186430)
        torch.get_device_module(torch.accelerator.current_accelerator()).empty_cache()


@dataclass
class Search:
    """What the search for the largest batch found."""

    largest: int = 0  # 0: not even one sample fits
    limited_by: str = "memory"  # or another reason
    fitting: dict[int, Measured] = field(default_factory=dict)  # by batch size
    smallest_failed: int | None = None


@dataclass(frozen=True)
class Advice:
    """Which sizes to use."""

    best: Measured  # of best throughput
    enough: Measured  # the smallest within WORTH of the best: a larger batch stops paying
    use: Measured | None  # the same among those that leave LEAST_STEPS; the present size where that gains nothing


def tune_batch_size(config: Configuration, flags: dict[str, Any], options: Namespace) -> tuple[list[Row], Row]:
    """Find batch sizes, print and draw them. Returns a row per size (what is not known is left out), and all facts."""
    present = getattr(config.datamodule, "batch_size", None)
    if not isinstance(present, int):
        raise UserError("tune batch_size needs a data module whose loader follows an attribute batch_size.")
    steps = TrainingSteps(config, flags, options.memory_limit_gib)
    ceiling, reason = steps.training_samples or CEILING, "the training set has no more samples"
    if options.max_batch_size is not None and options.max_batch_size < ceiling:
        ceiling, reason = options.max_batch_size, "--max_batch_size allows no larger one"
    search = find_largest(steps.measure, ceiling, reason, options.max_step_seconds)
    if not search.largest:
        raise UserError("not even one sample fits into the device's memory. Choose a smaller network or --precision.")
    if present < search.largest and present not in search.fitting and (now := steps.measure(present)):
        search.fitting[present] = now
    measured = [search.fitting[size] for size in sorted(search.fitting)]
    advice = advise(measured, present)
    notes = {"best throughput": advice.best, "larger stops paying": advice.enough, "use": advice.use}
    rows: list[Row] = []
    for size in measured:
        note = ", ".join(note for note, noted in notes.items() if noted is size)
        row = {"batch_size": size.batch_size, "samples_per_sec": size.samples_per_sec, **vars(size), "note": note}
        rows.append({name: value for name, value in row.items() if value is not None})
    print(format_table(rows))
    tune_lr = shlex.join(["python", "-m", "project.tune", "lr", *options.fit_flags, "--data.batch_size"])
    print("\n" + "\n".join(advice_lines(search, advice, present, tune_lr)))
    with picture(options.plot, config, flags, 2) as panels:
        draw(panels, measured, search, advice)
    return rows, {
        "largest_batch_size": search.largest,
        "limited_by": search.limited_by,
        "best_throughput_batch_size": advice.best.batch_size,
        "enough_batch_size": advice.enough.batch_size,
        "recommended_batch_size": advice.use.batch_size if advice.use else None,
        "sizes": rows,
    }


def find_largest(measure: Callable[[int], Measured | None], ceiling: int, reason: str, max_step_s: float) -> Search:
    """Double the size while it fits, then bisect to the exact largest; ``reason`` says why ``ceiling`` is a limit."""
    search = Search()

    def fits(size: int) -> bool:
        if (measured := measure(size)) is None:
            search.smallest_failed = size
            return False
        search.largest, search.fitting[size] = size, measured
        return True

    size = min(FIRST, ceiling)
    while fits(size):
        if size == ceiling:
            search.limited_by = reason
            return search
        if 2 * search.fitting[size].step_ms > 1000 * max_step_s:  # the doubled size's step would take longer
            search.limited_by = "larger steps take longer than --max_step_seconds"
            return search
        size = min(2 * size, ceiling)
    bisect_left(range(search.largest + 1, size), True, key=lambda between: not fits(between))
    return search


def advise(measured: Sequence[Measured], present: int) -> Advice:
    """The sizes to use, of ``measured`` in rising order; ``present`` is the size of the configuration."""

    def smallest_near_best(rows: Sequence[Measured]) -> Measured:
        best = max(row.samples_per_sec for row in rows)
        return next(row for row in rows if row.samples_per_sec >= (1 - WORTH) * best)

    allowed = [row for row in measured if row.steps_per_epoch is None or row.steps_per_epoch >= LEAST_STEPS]
    use = now = next((row for row in measured if row.batch_size == present), None)
    if allowed:
        found = smallest_near_best(allowed)
        use = found if now is None or found.samples_per_sec > (1 + WORTH) * now.samples_per_sec else now
    return Advice(max(measured, key=lambda row: row.samples_per_sec), smallest_near_best(measured), use)


def advice_lines(search: Search, advice: Advice, present: int, tune_lr: str) -> list[str]:
    """What the figures mean, what a larger batch costs, and the flags to paste; ``tune_lr`` lacks only the size."""
    lines = [f"largest batch tried: {search.largest:,}, and it fits ({search.limited_by})"]
    if search.limited_by == "memory":
        lines = [f"largest batch that fits: {search.largest:,} ({search.smallest_failed:,} does not)"]
    best, enough, use = advice.best, advice.enough, advice.use
    lines.append(f"best throughput: {best.batch_size:,} at {best.samples_per_sec:,.0f} samples/s")
    if enough is not best:
        gain = 100 * (best.samples_per_sec / enough.samples_per_sec - 1)
        lines.append(f"past {enough.batch_size:,} it stops paying: {best.batch_size:,} is only {gain:.1f} % faster")
    sizes = {row.batch_size: row.steps_per_epoch for row in (use or best, best) if row.steps_per_epoch is not None}
    cost = " and ".join(f"{steps:,} an epoch at {size:,}" for size, steps in sizes.items())
    lines.append(f"A larger batch is faster per sample but takes fewer optimizer steps{f': {cost}' if cost else ''}.")
    limit = f" that leaves {LEAST_STEPS} of them" if cost else ""
    if use is None:
        return [*lines, f"No size{limit} fits."]
    if (size := use.batch_size) == present:
        return [*lines, f"Keep --data.batch_size {size}: no size{limit} is {100 * WORTH:.0f} % faster."]
    return [*lines, "", f"  --data.batch_size {size}", "", "It wants another learning rate:", f"  {tune_lr} {size}"]


def draw(panels: Sequence[Any], measured: Sequence[Measured], search: Search, advice: Advice) -> None:
    """Throughput and peak memory over batch size, the advised sizes marked."""
    speed, peak = panels
    sizes, rates = [row.batch_size for row in measured], [row.samples_per_sec for row in measured]
    memory = {row.batch_size: row.peak_allocated_gib for row in measured if row.peak_allocated_gib is not None}
    line: dict[str, Any] = {"marker": "o", "markersize": 4, "color": "#4477aa"}
    errors = [row.samples_per_sec * row.spread_pct / 200 for row in measured]
    speed.errorbar(sizes, rates, yerr=errors, capsize=2, **line)
    speed.axhspan((1 - WORTH) * max(rates), max(rates), color="#228833", alpha=0.12, linewidth=0)
    marked = ((advice.best, "best throughput", "#228833", 13), (advice.use, "use", "#ee6677", 9))
    for row, meaning, colour, diameter in marked:
        if row is not None:
            at, label = (row.batch_size, row.samples_per_sec), f"{row.batch_size:,}: {meaning}"
            speed.plot(*at, "o", fillstyle="none", markersize=diameter, color=colour, label=label)
    speed.set(ylabel="samples per second", ylim=(0, 1.15 * max(rates)))
    speed.yaxis.set_major_formatter("{x:,.0f}")
    peak.semilogy(list(memory), list(memory.values()), **line)
    peak.set_ylabel("peak GiB of tensors" if memory else "peak memory (not told by this device)")
    if search.smallest_failed:
        peak.axvline(search.smallest_failed, color="#ee6677", linestyle="--", linewidth=1, label="out of memory")
    for axes in panels:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel("batch size")
