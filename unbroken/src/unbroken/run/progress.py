"""What a run prints while it trains: its first line, a line per epoch with a bar below, its last
lines.
"""

import os
import shlex
import shutil
import sys
import textwrap
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ProgressBar, Timer
from tqdm import tqdm  # type: ignore[import-untyped]
from unbroken import contract
from unbroken.machine.waiting import waiting
from unbroken.parts.metrics import logged_since
from unbroken.results.facts import Summary, device_name, parameter_count, training_samples
from unbroken.results.run_result import RunResult
from unbroken.stopping.ranks import launched_world, say
from unbroken.tables import format_metric
from unbroken.tensors.unsized import has_lazy_layers

MONITORED = ("throughput/", "memory/", "optimizer/")  # not shown in a line of an epoch
MOST_SHOWN = 6  # metrics in a line of an epoch
REFRESH_STEPS = 50  # the bar is drawn anew after so many
# Options of srun, and the variables that tell their values, first those of the step
OPTIONS_OF_SRUN = {
    "--nodes": ("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
    "--ntasks": ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    "--cpus-per-task": ("SLURM_CPUS_PER_TASK",),
}
# A space that ``textwrap`` does not break, so that a name and its value stay together
UNBREAKABLE = "\u00a0"


class RunTimer(Callback):
    """Prints a run's first line, and takes its time.

    With a subclass of Lightning's Timer among its callbacks the Trainer would ignore
    ``--max_time``.

    Attributes:
        start_seconds: From process start to the first step; None before it, or where the system
            does not tell when a process began.
        begun: Whether the first step has begun.
    """

    start_seconds: float | None = None
    begun = False
    _started_at: float | None = None  # of this part; None outside of training
    _before = 0.0  # seconds of the parts that have ended
    _busy_before = 0.0  # of these, seconds in which other processes took cores
    _is_test = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._is_test = stage != "fit"

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started_at = time.perf_counter()
        # What others took while this process imported its packages is none of the training's.
        waiting.count_anew()
        say(" | ".join(_first_line(trainer, pl_module)))

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if not self.begun:
            self.begun = True
            with suppress(psutil.Error):  # no /proc
                self.start_seconds = time.time() - psutil.Process().create_time()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._busy_before = self.busy_seconds
        self._before = self.fit_seconds
        self._started_at = None

    def add_facts(self, trainer: Trainer, result: RunResult) -> None:
        """Add the seconds."""
        result.summary.fit_seconds = self.fit_seconds
        result.summary.busy_seconds = round(self.busy_seconds, 1) or None
        result.summary.start_seconds = self.start_seconds

    @property
    def fit_seconds(self) -> float:
        """Seconds of training, over all parts of a resumed run."""
        if self._started_at is None:
            return self._before
        return self._before + time.perf_counter() - self._started_at

    @property
    def busy_seconds(self) -> float:
        """Seconds of it in which other processes took cores."""
        if self._started_at is None:
            return self._busy_before
        return self._busy_before + waiting.seconds_slept()

    def state_dict(self) -> dict[str, float]:
        return {"seconds": self.fit_seconds, "busy_seconds": self.busy_seconds}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        # The test at a run's end loads best.ckpt, whose epoch ended earlier than the run.
        if not self._is_test:
            self._before = float(state_dict["seconds"])
            self._busy_before = float(state_dict.get("busy_seconds", 0.0))


def _first_line(trainer: Trainer, module: LightningModule) -> list[str]:
    """The parts of the line that a run begins with."""
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    devices = f" × {trainer.world_size}" if trainer.world_size > 1 else ""
    parts = [device_name(trainer) + devices, f"precision {trainer.precision}"]
    if isinstance(data, contract.NamesSource) and data.data_source is not None:
        parts.append(f"data {data.data_source}")
    parameters = f"{parameter_count(trainer, module):,} parameters"
    if has_lazy_layers(module):
        parameters += " and those of lazy layers"
    parts.append(parameters)
    samples = training_samples(trainer)
    if samples is not None:
        parts.append(f"{samples:,} training samples")
    if trainer.global_step:
        parts.append(f"going on from step {trainer.global_step:,}")
    return parts


class EpochLines(Callback):
    """Prints a line per epoch, and why training ended early; on a terminal with a bar of the run
    below.

    A line is printed when the next epoch begins or training ends: Lightning asks callbacks before
    the module has logged.

    Args:
        fit: The command that trains, such as ``python -m project.fit``.
        bar: Whether to show the bar.
    """

    def __init__(self, fit: str, bar: bool = False) -> None:
        self.fit = fit
        self.wants_bar = bar
        self._bar = tqdm(disable=True)  # which shows nothing
        self._began: float | None = None
        # The values of which the line before has told.
        self._printed: dict[str, Any] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.wants_bar and trainer.is_global_zero:
            self._bar = tqdm(
                total=trainer.estimated_stepping_batches,  # infinite where only a time ends the run
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
        # Asking at every step would cost a third of a small model's run, and wait for the device.
        if self._bar.disable or trainer.global_step < self._bar.n + REFRESH_STEPS:
            return
        self._bar.set_postfix_str(_shown_loss(trainer), refresh=False)
        self._bar.update(trainer.global_step - self._bar.n)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._bar.close()  # so that what is printed next begins a line
        self._print_epoch(trainer)
        if trainer.should_stop:
            for callback in trainer.callbacks:  # type: ignore[attr-defined]
                say(*self._why_it_stopped(callback, trainer))

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._bar.close()

    def _print_epoch(self, trainer: Trainer) -> None:
        metrics = logged_since(self._printed, trainer)
        self._printed = dict(trainer.callback_metrics)
        if not (trainer.is_global_zero and trainer.current_epoch and metrics):
            return
        of = f"/{trainer.max_epochs}" if (trainer.max_epochs or 0) > 0 else ""
        shown = [
            f"{name} {format_metric(float(metrics[name]))}" for name in _shown_metrics(metrics)
        ]
        parts = [f"epoch {trainer.current_epoch}{of}", *shown]
        if self._began is not None:
            parts.append(f"{time.perf_counter() - self._began:.1f} s")
        say(_wrapped(parts) if self.wants_bar else "  ".join(parts))

    def _why_it_stopped(self, callback: Callback, trainer: Trainer) -> list[str]:
        """What is printed where this callback has ended a training early."""
        if isinstance(callback, EarlyStopping) and callback.stopping_reason_message:
            reason = callback.stopping_reason_message.removesuffix("Signaling Trainer to stop.")
            return [f"stopped early: {' '.join(reason.split())}"]
        if isinstance(callback, Timer) and (callback.time_remaining() or 0) < 0:
            folder = Path(trainer.default_root_dir)
            step = trainer.global_step
            go_on = stopped_lines(self.fit, folder, step, step, " --max_time DD:HH:MM:SS")
            return ["stopped early: --max_time is over.", *go_on]
        return []


def _shown_loss(trainer: Trainer) -> str:
    """The training's loss as the bar shows it; empty where none was logged."""
    for name, value in trainer.logged_metrics.items():
        if "loss" in name and not name.startswith("val"):
            return f"{name} {format_metric(float(value))}"
    return ""


def _shown_metrics(metrics: dict[str, Any]) -> list[str]:
    """Names of the metrics in a line of an epoch: training before validation, losses before the
    rest.
    """
    shown = []
    for name in metrics:
        is_part = name.endswith(("_step", "_epoch"))
        if not is_part and not name.startswith(MONITORED):
            shown.append(name)
    shown.sort(key=lambda name: (name.startswith("val"), "loss" not in name, name))
    return shown[:MOST_SHOWN]


def _wrapped(parts: Sequence[str]) -> str:
    """The parts of a line, broken between parts where a terminal is too narrow for them."""
    whole = "  ".join(part.replace(" ", UNBREAKABLE) for part in parts)
    columns = shutil.get_terminal_size().columns
    lines = textwrap.fill(whole, columns, subsequent_indent="    ")
    return lines.replace(UNBREAKABLE, " ")


def progress_callback(fit: str, flags: dict[str, Any]) -> Callback | None:
    """Lines of epochs, with a bar on a terminal; None where switched off, or the user has a bar.

    Args:
        fit: See :class:`EpochLines`.
        flags: The Trainer's arguments. ``enable_progress_bar`` is changed: Lightning's own bar is
            shown only if the user has named one.
    """
    asked = flags["enable_progress_bar"]
    has_own = any(isinstance(callback, ProgressBar) for callback in flags["callbacks"])
    flags["enable_progress_bar"] = has_own
    if asked is False or has_own:
        return None
    return EpochLines(fit, bar=sys.stdout.isatty())


def stopped_lines(
    fit: str, folder: Path, step: int, saved_step: int | None, longer: str = ""
) -> list[str]:
    """What is printed when a run was stopped: what is saved, and the command that goes on.

    Args:
        fit: The command that trains, such as ``python -m project.fit``.
        folder: The run's folder.
        step: The optimizer step that was reached.
        saved_step: The one that last.ckpt holds. It is an earlier one where data cannot be started
            inside an epoch. None: this start has neither read nor written one.
        longer: What to add to that command.
    """
    if not (folder / "last.ckpt").exists():
        return ["nothing was saved yet."]
    go_on = f"{with_launcher(fit)} --run_name {shlex.quote(folder.name)} --ckpt_path auto"
    root = os.path.relpath(folder.parent)
    if root != "checkpoints":
        go_on += f" --default_root_dir {shlex.quote(root)}"
    saved = f"saved in {os.path.relpath(folder)}/last.ckpt"
    if saved_step is not None and saved_step != step:
        saved = f"step {saved_step:,} is {saved}"
    how = f"To go on{_what_is_not_known()}:"
    return [f"stopped after step {step:,}; {saved}. {how}", f"  {go_on}{longer}"]


def with_launcher(fit: str) -> str:
    """The command that trains as it was typed: under torchrun or srun, if one has started it."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        module = fit.removeprefix("python -m ")
        return f"{shlex.join(typed_torchrun(module))} -m {module}"
    return f"{shlex.join(['srun', *options_of_srun()])} {fit}" if is_launched_by_srun() else fit


def is_launched_by_srun() -> bool:
    """Whether srun has started this process as one of several."""
    is_given = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    return launched_world()[1] > 1 and not is_given


def options_of_srun() -> list[str]:
    """The options of srun that a process of it can know: how many there are, on how many nodes."""
    words = []
    for option, names in OPTIONS_OF_SRUN.items():
        value = next((os.environ[name] for name in names if name in os.environ), None)
        if value is not None:
            words += [option, value]
    return words


def _what_is_not_known() -> str:
    """What has to be added to the command that goes on, because the launcher does not tell it."""
    if "TORCHELASTIC_RUN_ID" in os.environ or launched_world()[1] == 1:
        return ""
    if is_launched_by_srun():
        return ", with whatever else srun was given"
    return ", by the launcher that has set RANK and WORLD_SIZE"


def typed_torchrun(module: str) -> list[str]:
    """The words of torchrun before ``-m MODULE``, as its agent was started; what the environment
    says of it where nobody knows them.
    """
    words: list[str] = []
    with suppress(psutil.Error):
        words = psutil.Process(os.getppid()).cmdline()
    for place, (word, following) in enumerate(pairwise(words)):
        if (word, following) == ("-m", module):
            typed = words[1:place]
            if typed and Path(typed[0]).name == "torchrun":
                return ["torchrun", *typed[1:]]
            return ["python", *typed]
    local = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return ["torchrun", "--nproc_per_node", local]


def closing_lines(
    summary: Summary, folder: Path, *commands: str, further: Sequence[str] = ()
) -> str:
    """What is printed at the end of a run.

    Args:
        summary: What the run has reached.
        folder: The run's folder.
        commands: The commands that its best checkpoint can be used with.
        further: Lines with other commands.
    """
    shown = shlex.quote(os.path.relpath(folder))
    tests = []
    for name, value in summary.metrics.items():
        if name.startswith("test"):
            tests.append(f"{name} {format_metric(value)}")
    lines = ["", "   ".join(tests)] if tests else [""]
    if summary.best_score is not None and summary.best_epoch is not None:
        of = f" of {summary.epochs}" if summary.epochs else ""
        what = "best" if summary.best_is_sound else "no best: weights are not numbers"
        where = f"({what}, epoch {summary.best_epoch + 1}{of})"
        score = format_metric(summary.best_score)
        lines.append(f"{summary.monitor}  {score}   {where}")
    sentences = [_time_line(summary), summary.advice or "", *summary.notes]
    lines += [sentence for sentence in sentences if sentence]
    lines.append(f"everything in {shown}/")
    of_best: list[str] = []
    if (folder / "best.ckpt").exists():
        of_best = [f"  {command} --ckpt_path {shown}/best.ckpt" for command in commands]
    if of_best or further:
        lines += ["next:", *of_best, *further]
    return "\n".join(lines)


def _time_line(summary: Summary) -> str:
    speed = summary.metrics.get("throughput/samples_per_sec")
    line = f"trained {summary.fit_seconds:.1f} s"
    if speed:
        line += f" at {speed:,.0f} samples/s"
    if round(summary.busy_seconds or 0):
        line += f"; for {summary.busy_seconds:.0f} s other processes took cores"
    return line
