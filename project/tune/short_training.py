"""Short trainings that leave nothing behind, and the first that uses them: the learning-rate range test."""

import contextlib
import logging
import math
import re
import sys
import tempfile
import warnings
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from project import hardware
from project.engine import signals
from project.engine.cli import Configuration
from project.engine.exact_loading import ExactLoading
from project.engine.lightning_internals import leave_signals_alone
from project.engine.ranks import launched_world
from project.engine.summary import network_of
from project.engine.trainer import build_trainer, trainer_flags
from project.errors import UserError
from project.tables import Row, format_table

WIDTH = 1 / 25  # standard deviation of the smoothing, as a fraction of all steps
# The suggested rate is that of the lowest loss, divided by this. Best validation accuracy after four epochs on the
# bundled digits, of rates 0.0006 to 0.03: ConvNet 0.006 (lowest loss at 0.015), MLP 0.006 to 0.012 (lowest at 0.007).
BELOW_LOWEST = 2.0
LEAST_FALL = 0.05  # of the first loss; a smaller fall is noise


def one_device_flags(config: Configuration) -> dict[str, Any]:
    """The Trainer's arguments for one process on one device; a UserError where that is not what was asked for."""
    asked, name = config.trainer, type(config.module).__name__
    devices, nodes, strategy = str(asked["devices"]), asked["num_nodes"], asked["strategy"]
    is_one = re.fullmatch(r"auto|-1|1|\d+,|\[\d+\]", devices)  # 2, and [2] name a device by its index
    if not is_one or nodes > 1 or strategy != "auto" or launched_world()[1] > 1:
        raise UserError(
            "tune measures one process on one device, and what it finds is per device: leave --devices, --num_nodes, "
            f"--strategy, torchrun and srun away, got --devices {devices} --num_nodes {nodes} --strategy {strategy}."
        )
    if not config.module.automatic_optimization:
        raise UserError(f"tune needs Lightning's automatic optimization, and {name} steps its optimizers itself.")
    asked["devices"] = 1 if devices in ("auto", "-1") else asked["devices"]
    return trainer_flags(config)


class ShortTraining(Callback):
    """Base of the callbacks that measure a training from within and end it by ``trainer.should_stop``."""

    steps_done = 0  # optimizer steps

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        leave_signals_alone(trainer)  # Lightning's handlers swallow SIGTERM: the try would seem to have fitted
        ExactLoading().install(trainer)  # the loaders that fit trains with

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # No learning-rate schedules: some wait for a validation that never comes, some end before the measurement.
        trainer.strategy.lr_scheduler_configs = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if asked := signals.state.requested:  # an exception raised while a tensor is freed would be lost
            raise signals.Stopped(asked)
        if trainer.global_step != self.steps_done:  # else gradients are being accumulated
            self.steps_done = trainer.global_step
            self.after_step(trainer)

    def after_step(self, trainer: Trainer) -> None:
        """Called after every optimizer step."""
        raise NotImplementedError


@contextlib.contextmanager
def scratch_trainer(flags: dict[str, Any], callback: ShortTraining) -> Iterator[Trainer]:
    """A Trainer with the device, precision and accumulation of ``flags`` that trains until ``callback`` ends it."""
    endless: dict[str, Any] = {"max_epochs": 1_000_000, "max_steps": -1, "max_time": None}
    endless |= {"min_epochs": None, "min_steps": None}
    endless |= {"limit_train_batches": None, "overfit_batches": 0.0, "fast_dev_run": False, "val_check_interval": 1.0}
    endless |= {"limit_val_batches": 0, "num_sanity_val_steps": 0, "check_val_every_n_epoch": 1_000_000}
    silent = {"logger": False, "profiler": None, "enable_progress_bar": False, "enable_model_summary": False}
    logging.disable(logging.WARNING)  # dozens of trainings would each print the same lines
    try:
        with tempfile.TemporaryDirectory(prefix="tune-") as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield build_trainer(flags | endless | silent | {"callbacks": [callback], "default_root_dir": folder})
    finally:
        logging.disable(logging.NOTSET)


@contextlib.contextmanager
def picture(path: Path, config: Configuration, flags: dict[str, Any], panels: int) -> Iterator[list[Axes]]:
    """Axes side by side, to draw on in the block, under a title that names the training; saved as PNG at the end."""
    figure = Figure(figsize=(4 + 2.6 * panels, 3.8), layout="constrained")
    row = list(figure.subplots(1, panels, squeeze=False)[0])
    yield row
    for axes in row:
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8, frameon=False)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    on_cpu = flags["accelerator"] == "cpu" or not (gpus := hardware.accelerators())
    device = "{name}, {cores} cores".format(**hardware.cpu()) if on_cpu else gpus[0]["name"]
    optimizer = config.module.hparams.get("optimizer")
    parts = [type(network_of(config.module)).__name__, *([optimizer] if isinstance(optimizer, str) else [])]
    figure.suptitle(f"{', '.join(parts)}, {flags['precision'] or '32-true'} on {device}", fontsize=9)
    figure.savefig(path, dpi=130)


class RateRamp(ShortTraining):
    """Raises the learning rate of all parameter groups exponentially and records the loss of every optimizer step.

    Ends after ``steps`` steps, or at a loss that is not finite. Lightning's finder needs a module with an attribute
    ``lr``, and its running mean lags 50 steps behind.
    """

    def __init__(self, min_lr: float, max_lr: float, steps: int) -> None:
        self.min_lr, self.growth, self.steps = min_lr, (max_lr / min_lr) ** (1 / (steps - 1)), steps
        self.present = math.nan  # the highest rate that the module itself chose
        self.rates: list[float] = []
        self.losses: list[float] = []  # of each step, the mean over its accumulated batches
        self._groups: list[dict[str, Any]] = []  # of all optimizers
        self._parts: list[float] = []  # losses of the step's batches

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        if not all("lr" in group for group in self._groups):
            raise UserError("tune lr: the optimizer has no learning rate.")
        self.present = max(float(group.get("initial_lr", group["lr"])) for group in self._groups)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        rate = self.min_lr * self.growth**self.steps_done
        for group in self._groups:
            group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], torch.Tensor) else rate

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if outputs:  # none where training_step skips a batch; Lightning divides the loss by the batches per step
            self._parts.append(float(outputs["loss"]) * trainer.accumulate_grad_batches)
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def after_step(self, trainer: Trainer) -> None:
        if self._parts:
            self.rates.append(self.min_lr * self.growth ** (self.steps_done - 1))
            self.losses.append(sum(self._parts) / len(self._parts))
        self._parts = []
        trainer.should_stop = self.steps_done >= self.steps or not all(map(math.isfinite, self.losses[-1:]))


def tune_lr(config: Configuration, flags: dict[str, Any], options: Namespace) -> tuple[list[Row], Row]:
    """Find a learning rate, print and draw it. Returns a row per step and all facts."""
    print(f"training {options.steps} steps at rates from {options.min_lr:g} to {options.max_lr:g}", file=sys.stderr)
    ramp = RateRamp(options.min_lr, options.max_lr, options.steps)
    with scratch_trainer(flags, ramp) as trainer:
        trainer.fit(config.module, datamodule=config.datamodule)
    smooth, lowest = read_curve(ramp.rates, ramp.losses)
    rates, losses, now = ramp.rates[: len(smooth)], ramp.losses[: len(smooth)], ramp.present
    columns = ("lr", "loss", "smooth_loss")
    rows: list[Row] = [dict(zip(columns, row, strict=True)) for row in zip(rates, losses, smooth, strict=True)]
    print(format_table(rows[:: max(1, len(rows) // 20)]))
    found, suggestion = rates[lowest], rates[lowest] / BELOW_LOWEST
    says = f"lowest loss at a learning rate of {found:.2g}; half of it is a safe peak"
    if lowest >= len(rows) - 3:
        says = f"the loss still fell at {found:.2g}: a larger --max_lr may find a better rate"
    flag = "--model.lr" if "lr" in (config.resolved["model"].get("init_args") or {}) else "learning rate"
    print(f"\n{says}\n\n  {flag} {suggestion:.2g}\n\nIt was {now:g}.")
    with picture(options.plot, config, flags, 1) as (axes,):
        axes.plot(rates, losses, ".", markersize=3, color="#bbccee", label="each step")
        axes.plot(rates, smooth, color="#4477aa", label="smoothed")
        height = np.interp(suggestion, rates, smooth)
        axes.plot(suggestion, height, "o", color="#ee6677", label=f"suggested: {suggestion:.2g}")
        axes.plot(found, smooth[lowest], "o", color="#228833", fillstyle="none", label=f"lowest loss: {found:.2g}")
        if rates[0] < now < rates[-1]:
            axes.axvline(now, color="#999999", linestyle="--", linewidth=1, label=f"now: {now:g}")
        fall = smooth[0] - smooth[lowest]
        limits = min(0.0, smooth[lowest] - 0.1 * fall), smooth[0] + 0.3 * fall  # a diverging end would flatten the rest
        axes.set(xscale="log", ylim=limits, xlabel="learning rate", ylabel="training loss")
    return rows, {"suggested_lr": suggestion, "lowest_loss_lr": found, "curve": rows}


def read_curve(rates: Sequence[float], losses: Sequence[float]) -> tuple[list[float], int]:
    """The losses up to the first that is not finite, smoothed by a Gaussian, and the step at which they are lowest.

    Lightning's ``suggestion()`` divides by differences of rates, which at the low end are 1e-7: noise beats every real
    slope. It suggests 0.00002 or 0.00006 for our ConvNet, depending on the seed.
    """
    count = next((step for step, loss in enumerate(losses) if not math.isfinite(loss)), len(losses))
    if count:
        # No loss counts more than the first ones do: a diverged loss of 1e12 would show a hundred steps earlier.
        capped = np.minimum(losses[:count], max(losses[: max(1, count // 10)]))
        distance = np.subtract.outer(np.arange(count), np.arange(count)) / (WIDTH * len(rates))
        weights = np.exp(-0.5 * distance**2)
        smooth = (weights @ capped / weights.sum(axis=1)).tolist()
        lowest = smooth.index(min(smooth))
        if smooth[0] - smooth[lowest] > LEAST_FALL * abs(smooth[0]):
            return smooth, lowest
    raise UserError("tune lr: the loss never fell. Widen --min_lr and --max_lr, or raise --steps.")
