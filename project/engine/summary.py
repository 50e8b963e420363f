"""What a run says of itself: its first line, a line per epoch, its last lines, and ``summary.json``."""

import contextlib
import importlib.metadata
import os
import platform
import shlex
import shutil
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import yaml
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ProgressBar, Timer
from tqdm import tqdm  # type: ignore[import-untyped]

from project.engine.ranks import say
from project.tables import is_number, read_rows, write_atomically

PACKAGES = ("torch", "torchvision", "lightning", "torchmetrics", "wandb", "numpy")
MONITORED = ("throughput/", "memory/", "optimizer/")  # not shown in a line of an epoch
MOST_SHOWN = 6
REFRESH_STEPS = 50
Series = list[tuple[int, float]]  # One metric over a run: (optimizer step, value), by step


@dataclass
class Summary:
    """The facts of a run, as ``summary.json`` holds them. None, or an absent metric: not measured."""

    run_name: str
    finished: bool
    device: str
    precision: str  # the effective one
    world_size: int
    parameters: int
    epochs: int  # completed
    steps: int  # optimizer steps
    fit_seconds: float
    command: str = field(default_factory=lambda: command_line())
    mode: str | None = None
    monitor: str | None = None  # the metric that best.ckpt follows
    best_score: float | None = None
    best_epoch: int | None = None  # from 0
    data_source: str | None = None
    train_samples: int | None = None
    start_seconds: float | None = None  # from process start to the first step
    # while other processes took cores, so that threads slept as they waited
    busy_seconds: float | None = None  # feature: waiting
    git_commit: str | None = None
    git_dirty: bool | None = None  # whether files differ from the commit, or are not under git
    date: str = field(default_factory=lambda: time.strftime("%Y-%m-%d %H:%M:%S"))  # of its end
    hardware: str | None = None  # CPU model and cores, such as "AMD EPYC 9B14, 2 cores"
    versions: dict[str, str] = field(default_factory=lambda: versions())
    metrics: dict[str, float] = field(
        default_factory=dict
    )  # val/* of the best epoch, test/*, throughput/*, memory/*
    advice: str | None = (
        None  # where the run's time went and what to try, in words: not in the file
    )

    def to_plain(self) -> dict[str, Any]:
        """One flat dictionary, metrics beside the facts; what is None is left out."""
        facts = {
            name: value
            for name, value in vars(self).items()
            if name not in ("metrics", "best_score", "advice")
        }
        if self.monitor is not None:
            facts[self.monitor] = self.best_score
        return {name: value for name, value in (facts | self.metrics).items() if value is not None}


@dataclass(frozen=True)  # feature: report, wandb, test_predictions
class Mistake:
    """A test image with a wrong prediction."""

    image: np.ndarray  # uint8 (height, width, channels), as it was before normalisation
    label: int
    prediction: int
    probability: float  # 0-1, of the prediction


@dataclass  # feature: report, wandb, test_predictions
class RunRecord:
    """Everything that the report and W&B show of a run that has ended or was stopped."""

    summary: Summary
    config: str  # resolved configuration as YAML
    series: dict[str, Series] = field(default_factory=dict)  # by metric name
    class_names: list[str] = field(default_factory=list)
    stopped_by: str | None = None  # name of the signal; None for a run that has finished
    max_epochs: int | None = None
    breakdown: dict[str, float] = field(default_factory=dict)  # GiB of memory by use
    leaks: list[str] = field(default_factory=list)  # what looks like one, in words
    confusion: np.ndarray | None = (
        None  # int64 (classes, classes), row: label; None without a classifier's test
    )
    mistakes: list[Mistake] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """One name per class of the confusion matrix; numbers where the data module names another number of classes."""
        classes = 0 if self.confusion is None else len(self.confusion)
        return self.class_names if len(self.class_names) == classes else [*map(str, range(classes))]

    @property
    def class_accuracy(self) -> list[tuple[str, float, int]]:
        """(class, share of its test samples that were labelled right (0-1), samples), worst first."""
        rows = zip(self.names, () if self.confusion is None else self.confusion, strict=True)
        counts = [(name, int(row[place]), int(row.sum())) for place, (name, row) in enumerate(rows)]
        return sorted(
            ((name, right / n, n) for name, right, n in counts if n), key=lambda row: row[1]
        )

    @property
    def confusions(self) -> list[tuple[str, str, int]]:
        """(label, prediction, samples) of the pairs that were mixed up, most frequent first."""
        names, cells = self.names, np.ndenumerate([] if self.confusion is None else self.confusion)
        pairs = [(names[i], names[j], int(count)) for (i, j), count in cells if count and i != j]
        return sorted(pairs, key=lambda pair: -pair[2])


def read_series(
    path: Path, epochs: int
) -> dict[str, Series]:  # feature: report, wandb, test_predictions
    """The columns of a ``metrics.csv`` as charts show them, ``epoch`` too, without values that cannot be drawn. Of a
    training metric either the means at the ends of the completed ``epochs``, or what was logged within, if more.
    """
    series: dict[str, Series] = {}
    for row in read_rows(path):
        for name, value in row.items():
            if name != "step" and is_number(value):
                series.setdefault(name, []).append((int(row["step"]), value))
    ends = {epoch: step for step, epoch in series.get("epoch", []) if epoch < epochs}.values()
    for name in series:
        if name.startswith("train/"):
            parts = [
                [point for point in series[name] if (point[0] in ends) is at_end]
                for at_end in (False, True)
            ]
            series[name] = max(parts, key=len)
    return series


class RunTimer(Callback):
    """Prints a run's first line; seconds from process start to the first step, and of training over all its parts. With
    a subclass of Lightning's Timer among its callbacks the Trainer would ignore ``--max_time``.
    """

    start_seconds: float | None = None
    begun = False  # whether the first step has
    _started_at: float | None = None  # this part; None outside of training
    _before = 0.0  # seconds of the parts that have ended

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started_at, samples = time.perf_counter(), training_samples(trainer)
        source = getattr(trainer.datamodule, "data_source", None)  # type: ignore[attr-defined]
        parts = [
            device_name(trainer) + (f" × {trainer.world_size}" if trainer.world_size > 1 else ""),
            f"precision {trainer.precision}",
            f"data {source}" if source is not None else "",
            f"{parameter_count(trainer, pl_module):,} parameters",
            f"{samples:,} training samples" if samples is not None else "",
            f"going on from step {trainer.global_step:,}" if trainer.global_step else "",
        ]
        say(" | ".join(filter(None, parts)))

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if not self.begun:
            self.begun = True
            with contextlib.suppress(psutil.Error):  # no /proc
                self.start_seconds = time.time() - psutil.Process().create_time()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._before, self._started_at = self.fit_seconds, None

    @property
    def fit_seconds(self) -> float:
        return self._before + (
            0.0 if self._started_at is None else time.perf_counter() - self._started_at
        )

    def state_dict(self) -> dict[str, float]:
        return {"seconds": self.fit_seconds}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        self._before = float(state_dict["seconds"])


class EpochLines(Callback):
    """Prints a line per epoch, and why training ended early; on a terminal with a bar of the run below. Printed when
    the next epoch begins or training ends: Lightning asks callbacks before the module has logged.
    """

    def __init__(self, bar: bool = False) -> None:
        self.wants_bar = bar
        self._bar = tqdm(disable=True)  # which shows nothing
        self._began: float | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.wants_bar and trainer.is_global_zero:
            steps = trainer.estimated_stepping_batches  # infinite where only a time ends the run
            self._bar = tqdm(
                total=steps,
                initial=trainer.global_step,
                unit="step",
                leave=False,
                dynamic_ncols=True,
            )

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._print_epoch(trainer)
        self._began = time.perf_counter()
        self._bar.set_description(f"epoch {trainer.current_epoch + 1}", refresh=False)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        # asking at every step would cost a third of a small model's run, and wait for the device
        if not self._bar.disable and trainer.global_step >= self._bar.n + REFRESH_STEPS:
            logged = trainer.logged_metrics
            name = next(
                (name for name in logged if "loss" in name and not name.startswith("val")), None
            )
            self._bar.set_postfix_str(
                f"{name} {float(logged[name]):.4f}" if name else "", refresh=False
            )
            self._bar.update(trainer.global_step - self._bar.n)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._bar.close()  # so that what is printed next begins a line
        self._print_epoch(trainer)
        for callback in trainer.callbacks if trainer.should_stop else ():  # type: ignore[attr-defined]
            if isinstance(callback, EarlyStopping) and callback.stopping_reason_message:
                reason = callback.stopping_reason_message.removesuffix("Signaling Trainer to stop.")
                say(f"stopped early: {' '.join(reason.split())}")
            if isinstance(callback, Timer) and (callback.time_remaining() or 0) < 0:
                lines = stopped_lines(
                    Path(trainer.default_root_dir), trainer.global_step, " --max_time DD:HH:MM:SS"
                )
                say("stopped early: --max_time is over.", *lines)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._bar.close()

    def _print_epoch(self, trainer: Trainer) -> None:
        if not (trainer.is_global_zero and trainer.current_epoch and trainer.callback_metrics):
            return
        of = f"/{trainer.max_epochs}" if (trainer.max_epochs or 0) > 0 else ""
        parts, metrics = [f"epoch {trainer.current_epoch}{of}"], trainer.callback_metrics
        shown = [
            name
            for name in metrics
            if not name.startswith(MONITORED) and not name.endswith(("_step", "_epoch"))
        ]
        # training before validation, losses before the rest
        shown.sort(key=lambda name: (name.startswith("val"), "loss" not in name, name))
        parts += [f"{name} {float(metrics[name]):.4f}" for name in shown[:MOST_SHOWN]]
        if self._began is not None:
            parts.append(f"{time.perf_counter() - self._began:.1f} s")
        if self.wants_bar:
            whole = "  ".join(
                part.replace(" ", "\u00a0") for part in parts
            )  # a name and its value stay together
            lines = textwrap.fill(
                whole, shutil.get_terminal_size().columns, subsequent_indent="    "
            )
            tqdm.write(lines.replace("\u00a0", " "))
        else:
            say("  ".join(parts))


def progress_callback(flags: dict[str, Any]) -> Callback | None:
    """Lines of epochs, with a bar on a terminal; None where switched off, or the user has a bar. Changes the flags."""
    asked, own = (
        flags["enable_progress_bar"],
        any(isinstance(each, ProgressBar) for each in flags["callbacks"]),
    )
    flags["enable_progress_bar"] = own
    return None if asked is False or own else EpochLines(bar=sys.stdout.isatty())


def device_name(trainer: Trainer) -> str:
    """``cpu``, ``mps``, or the CUDA device's name."""
    device = trainer.strategy.root_device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def samples_of(loader: Any) -> int | None:
    """Samples of a loader's dataset, None where it has no length (an ``IterableDataset``, several loaders)."""
    return sized_len(getattr(loader, "dataset", None))


def training_samples(trainer: Trainer) -> int | None:
    """Samples that an epoch draws from: of the dataset, with ``--overfit_batches`` of its first batches."""
    samples, batches = (
        samples_of(trainer.train_dataloader),
        getattr(trainer.train_dataloader, "sampler", None),
    )
    if trainer.overfit_batches and samples and getattr(batches, "batch_size", None):  # type: ignore[attr-defined]
        return min(samples, int(trainer.num_training_batches) * batches.global_batch_size)  # type: ignore[union-attr]
    return samples


def parameter_count(trainer: Trainer, module: LightningModule) -> int:
    """Parameters of a module, of the whole one where a strategy has cut it."""
    return getattr(trainer.strategy, "whole_parameters", 0) or sum(
        p.numel() for p in module.parameters()
    )


def network_of(module: LightningModule) -> torch.nn.Module:  # feature: tune, benchmark, export
    """The network inside a module, or the module itself where it has none of that name."""
    network = getattr(module, "network", None)
    return network if isinstance(network, torch.nn.Module) else module


def write_config(folder: Path, config: dict[str, Any]) -> None:
    """The resolved configuration, whose ``--config`` repeats the run, and how the code differs from its commit."""
    text = yaml.safe_dump(config, sort_keys=False)
    write_atomically(f"# {command_line()}\n{text}", folder / "config.yaml")
    if changes := git(
        "status", "--porcelain"
    ):  # names what git does not know; patch skips these lines
        difference = git("diff", "--no-ext-diff", "--no-color", "HEAD") or ""
        write_atomically(f"{changes}\n{difference}", folder / "uncommitted.diff")


def git(*words: str) -> str | None:
    """What a git command prints of the clone that this code lies in; None where it fails."""
    command = ["git", "-C", str(Path(__file__).parents[1]), *words]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=True, timeout=5
        ).stdout
    return None


def git_state() -> tuple[str | None, bool | None]:
    """The commit of this code (outside git: ``GIT_COMMIT``), and whether files differ from it or are unknown to git."""
    commit, changes = git("rev-parse", "HEAD"), git("status", "--porcelain")
    if commit is None or changes is None:
        return os.environ.get("GIT_COMMIT"), None
    return commit.strip(), bool(changes)


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that make a result."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def command_line() -> str:
    """The command line, ready to be typed again."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    program = f"python -m {module.name}" if module else f"python {sys.argv[0]}"
    return " ".join([program, *map(shlex.quote, sys.argv[1:])])


def stopped_lines(folder: Path, step: int, longer: str = "") -> list[str]:
    """What is printed when a run was stopped: what is saved, and the command that goes on, ``longer`` at its end."""
    if not (folder / "last.ckpt").exists():
        return ["nothing was saved yet."]
    go_on = f"python -m project.fit --run_name {shlex.quote(folder.name)} --ckpt_path auto"
    root = os.path.relpath(folder.parent)
    go_on += ("" if root == "checkpoints" else f" --default_root_dir {shlex.quote(root)}") + longer
    return [
        f"stopped after step {step:,}; saved in {os.path.relpath(folder)}/last.ckpt. To go on:",
        f"  {go_on}",
    ]


def closing_lines(summary: Summary, folder: Path, *commands: str) -> str:
    """What is printed at the end of a run; ``commands`` are those that its best checkpoint can be used with."""
    shown = shlex.quote(os.path.relpath(folder))
    tests = [
        f"{name} {value:.4f}" for name, value in summary.metrics.items() if name.startswith("test")
    ]
    lines = ["", "   ".join(tests)] if tests else [""]
    if summary.best_score is not None and summary.best_epoch is not None:
        of = f" of {summary.epochs}" if summary.epochs else ""
        lines.append(
            f"{summary.monitor}  {summary.best_score:.4f}   (best, epoch {summary.best_epoch + 1}{of})"
        )
    speed = summary.metrics.get("throughput/samples_per_sec")
    lines.append(
        f"trained {summary.fit_seconds:.1f} s" + (f" at {speed:,.0f} samples/s" if speed else "")
    )
    if round(summary.busy_seconds or 0):  # feature: waiting
        lines[-1] += f"; for {summary.busy_seconds:.0f} s other processes took cores"
    if summary.advice:
        lines.append(summary.advice)
    lines.append(f"everything in {shown}/")
    if commands and (folder / "best.ckpt").exists():
        lines += [
            "next:",
            *(f"  python -m project.{each} --ckpt_path {shown}/best.ckpt" for each in commands),
        ]
    return "\n".join(lines)
