"""The main job as functions: a trainer for a run, and a run from start to summary. ``fit`` is its thin command."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.loggers import Logger

from project import signals, summary, threads
from project.callbacks.checkpoint import RunCheckpoint
from project.callbacks.memory import MemoryMonitor
from project.callbacks.memory_snapshot import MemorySnapshot
from project.callbacks.optimizer_monitor import OptimizerMonitor
from project.callbacks.quick_steps import QuickSteps
from project.callbacks.stop import release_child_processes
from project.callbacks.test_predictions import TestPredictions
from project.callbacks.throughput import ThroughputMonitor
from project.callbacks.wandb_start import WandbStart
from project.checkpoints import AtomicCheckpointIO
from project.cli import ProjectCLI
from project.errors import UserError
from project.final_test import test_best
from project.loggers import MetricsCSV
from project.progress import progress_callback
from project.ranks import is_rank_zero, launched_world
from project.results import publish
from project.runs import Run
from project.typed import parse_interval
from project.wandb_logging import STOP_PATIENCE, WandbRunLogger, make_wandb_logger

MATMUL_PRECISIONS = ("highest", "high", "medium")


def make_trainer(cli: ProjectCLI, run: Run) -> Trainer:
    """A Trainer from the command line's flags with this project's callbacks, loggers and checkpoint files.

    Raises:
        UserError: Lightning refuses a flag, or flags contradict the launcher or the machine.
    """
    flags = trainer_flags(cli)
    timer, throughput, memory = summary.RunTimer(), ThroughputMonitor(), MemoryMonitor()
    seconds, steps = parse_interval(cli.config.checkpoint_every)
    keeper = RunCheckpoint(run.folder, run_record(cli, run), seconds, steps, exclude=throughput.pause)
    chosen: list[Callback] = flags.pop("callbacks", None) or []
    chosen = [chosen] if isinstance(chosen, Callback) else chosen  # --trainer.callbacks CLASS gives one
    ours: list[Callback | None] = [
        timer,
        keeper,
        OptimizerMonitor(),
        throughput,
        memory,
        WandbStart(),
        TestPredictions(),
        QuickSteps(),
        MemorySnapshot(cli.config.memory_snapshot) if cli.config.memory_snapshot else None,
    ]
    bar = progress_callback(flags.pop("enable_progress_bar", None))
    plugins = flags.pop("plugins", None) or []
    flags |= {
        "callbacks": [callback for callback in (*ours, bar, *chosen) if callback is not None],
        "enable_progress_bar": isinstance(bar, ProgressBar),
        "enable_model_summary": bool(flags["enable_model_summary"]),  # the start line says what matters
        "enable_checkpointing": any(isinstance(callback, Checkpoint) for callback in chosen),
        "plugins": [*(plugins if isinstance(plugins, list) else [plugins]), AtomicCheckpointIO()],
        "logger": make_loggers(cli, run, flags.pop("logger", None)),
        "default_root_dir": run.folder,
    }
    trainer = build_trainer(flags)
    if launched_world()[1] == 1 and trainer.num_devices > 1:  # it is about to start the other ranks
        os.environ |= (part := threads.share(trainer.num_devices))
        if part:
            torch.set_num_threads(int(part["OMP_NUM_THREADS"]))
    return trainer


def trainer_flags(cli: ProjectCLI) -> dict[str, Any]:
    """The Trainer's arguments as typed, made to agree with torchrun or SLURM and with this machine."""
    flags: dict[str, Any] = dict(cli.config_init.trainer)
    _, world_size, local_size = launched_world()
    if world_size > 1:
        # Without this, `torchrun fit` would run as many independent trainings (Lightning's devices default to one CPU).
        if flags["devices"] == "auto":
            flags["devices"], flags["num_nodes"] = local_size, world_size // local_size
        elif str(flags["devices"]).isdigit() and int(flags["devices"]) * flags["num_nodes"] != world_size:
            raise UserError(
                f"--devices {flags['devices']} × --num_nodes {flags['num_nodes']} must be the {world_size} processes "
                "that the launcher started. Leave both away to take what it started."
            )
    devices = str(flags["devices"])
    most = 4 * threads.available_cores()
    on_cpu = flags["accelerator"] == "cpu" or (flags["accelerator"] == "auto" and not torch.accelerator.is_available())
    if on_cpu and devices.isdigit() and int(devices) > most:
        raise UserError(
            f"--devices must be at most {most} on this machine's {threads.available_cores()} CPU cores, got {devices}."
        )
    if flags["accumulate_grad_batches"] < 1:
        raise UserError(f"--accumulate_grad_batches must be at least 1, got {flags['accumulate_grad_batches']}.")
    precision = cli.config.matmul_precision
    if precision is not None:
        if precision not in MATMUL_PRECISIONS:
            raise UserError(f"--matmul_precision must be one of {', '.join(MATMUL_PRECISIONS)}, got {precision}.")
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = precision != "highest"  # convolutions, which the setting above leaves alone
    return flags


def build_trainer(flags: dict[str, Any]) -> Trainer:
    """``Trainer(**flags)``, its refusals as a :class:`UserError`."""
    try:
        return Trainer(**flags)
    except (MisconfigurationException, ValueError, RuntimeError, TypeError) as error:
        raise UserError(f"the Trainer refuses a flag: {' '.join(str(error).split())}") from None


def make_loggers(cli: ProjectCLI, run: Run, chosen: Any) -> list[Logger]:
    """metrics.csv always; W&B unless ``--logger`` names others or ``WANDB_MODE=disabled``; TensorBoard on its flag."""
    loggers: list[Logger] = [MetricsCSV(run.folder / "metrics.csv")]
    if isinstance(chosen, Logger):
        loggers.append(chosen)
    elif isinstance(chosen, (list, tuple)):
        loggers += chosen
    elif chosen is not False and is_rank_zero():
        wandb_logger = make_wandb_logger(run.folder, run.name, run.run_id, cli.resolved())
        loggers += [wandb_logger] if wandb_logger else []
    if cli.config.tensorboard:
        from lightning.pytorch.loggers import TensorBoardLogger

        loggers.append(TensorBoardLogger(run.folder, name="tensorboard", version=""))
    return loggers


def run_record(cli: ProjectCLI, run: Run) -> dict[str, Any]:
    """What every checkpoint of a run says of it, besides its state."""
    return {"run_name": run.name, "run_id": run.run_id, "config": cli.resolved(), "versions": summary.versions()}


def train(cli: ProjectCLI, run: Run, trainer: Trainer) -> dict[str, Any]:
    """Train, test the best checkpoint once, and write the summary. Returns the summary's facts.

    Raises:
        signals.Stopped: The run was asked to stop; last.ckpt holds the step it reached.
    """
    status, finished = 1, False
    try:
        with refusals_as_errors(trainer):
            trainer.fit(
                cli.model,
                datamodule=cli.datamodule,
                ckpt_path=str(run.checkpoint) if run.checkpoint else None,
                weights_only=True,
            )
        facts = gather_facts(cli, run, trainer)  # before the test's precision is set
        facts |= test_best(trainer, cli, find(trainer, RunCheckpoint))
        if trainer.is_global_zero:
            summary.write_summary(run.folder / "summary.json", facts)
        finished = True
        signals.resume_immediate()  # nothing is left that could be lost
        publish(trainer, run.folder, facts, cli.resolved())
        status = 0
        return facts
    except signals.Stopped as stop:
        status = stop.exit_code
        if not finished:
            publish_stopped(cli, run, trainer, stop)
        raise
    finally:
        finish_wandb(trainer, status)
        release_child_processes()


@contextmanager
def refusals_as_errors(trainer: Trainer) -> Iterator[None]:
    """What Lightning itself refuses before the first step is a mistake in the flags: a :class:`UserError`."""
    try:
        yield
    except (MisconfigurationException, ValueError) as error:
        raised_in = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)][-1]
        started = find(trainer, summary.RunTimer).start_seconds is not None
        if started or not raised_in.startswith("lightning."):
            raise
        raise UserError(f"the Trainer refuses a flag: {' '.join(str(error).split())}") from None


def gather_facts(cli: ProjectCLI, run: Run, trainer: Trainer) -> dict[str, Any]:
    """The summary's facts that are known when training has ended."""
    keeper, timer = find(trainer, RunCheckpoint), find(trainer, summary.RunTimer)
    datamodule = cli.datamodule
    return {
        "run_name": run.name,
        "finished": True,
        "device": summary.device_name(trainer),
        "precision": trainer.precision,
        "world_size": trainer.world_size,
        "data_source": datamodule.data_source,
        "train_samples": datamodule.num_samples("train"),
        "parameters": sum(p.numel() for p in cli.model.parameters()),
        "epochs": trainer.current_epoch,
        "steps": trainer.global_step,
        "fit_seconds": timer.seconds_so_far(),
        "start_seconds": timer.start_seconds,
        "best_epoch": keeper.best_epoch,
        "val/accuracy": keeper.best_score,
        **find(trainer, ThroughputMonitor).summary(),
        **find(trainer, MemoryMonitor).summary(),
        **summary.git_state(),
        "versions": summary.versions(),
        "command": summary.command_line(),
    }


def write_config(cli: ProjectCLI, folder: Path) -> None:
    """The resolved configuration: ``--config`` of it repeats the run."""
    text = yaml.safe_dump(cli.resolved(), sort_keys=False)
    (folder / "config.yaml").write_text(f"# {summary.command_line()}\n{text}")


def publish_stopped(cli: ProjectCLI, run: Run, trainer: Trainer, stop: signals.Stopped) -> None:
    """The report of what a stopped run has reached, within the time it has; a second signal skips it."""
    release_child_processes()  # ranks that have nothing to report end now, as they should
    if trainer.is_global_zero and find(trainer, summary.RunTimer).start_seconds is not None:
        if trainer.world_size == 1:  # torchrun signals the ranks that are left as soon as one has ended
            signals.resume_immediate()
        facts = {**gather_facts(cli, run, trainer), "finished": False}
        publish(trainer, run.folder, facts, cli.resolved(), stopped_by=signal.Signals(stop.signum).name)


def finish_wandb(trainer: Trainer, exit_code: int) -> None:
    """Close the W&B run with the process's exit code, so that a stopped run is not shown as finished."""
    for logger in trainer.loggers:
        if isinstance(logger, WandbRunLogger):
            logger.finish(exit_code, patience=STOP_PATIENCE if exit_code else None)


def wandb_folder(run: Run) -> Path | None:
    """The newest offline W&B folder of a run, None where there is none."""
    found = sorted((run.folder / "wandb").glob("offline-run-*"), key=os.path.getmtime)
    return found[-1] if found else None


def find(trainer: Trainer, kind: type[Any]) -> Any:
    """The trainer's callback of a class."""
    return next(callback for callback in trainer.callbacks if isinstance(callback, kind))  # type: ignore[attr-defined]
