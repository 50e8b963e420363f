"""The Lightning Trainer of a run: flags as typed, this project's callbacks, loggers and checkpoint files."""

from __future__ import annotations

import os
import re
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.loggers import Logger

from project import summary, threads
from project.callbacks.checkpoint import RunCheckpoint
from project.callbacks.memory import MemoryMonitor
from project.callbacks.memory_snapshot import MemorySnapshot
from project.callbacks.optimizer_monitor import OptimizerMonitor
from project.callbacks.quick_steps import QuickSteps
from project.callbacks.test_predictions import TestPredictions
from project.callbacks.throughput import ThroughputMonitor
from project.callbacks.wandb_start import WandbStart
from project.checkpoints import AtomicCheckpointIO
from project.cli import ProjectCLI
from project.errors import UserError
from project.loggers import MetricsCSV
from project.progress import progress_callback
from project.ranks import is_rank_zero, launched_world
from project.runs import Run
from project.typed import parse_interval
from project.wandb_logging import make_wandb_logger

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
    own_bar = any(isinstance(callback, ProgressBar) for callback in chosen)
    plugins = flags.pop("plugins", None) or []
    flags |= {
        "callbacks": [callback for callback in (*ours, None if own_bar else bar, *chosen) if callback is not None],
        "enable_progress_bar": own_bar or isinstance(bar, ProgressBar),
        "enable_model_summary": bool(flags["enable_model_summary"]),  # the start line says what matters
        "enable_checkpointing": any(isinstance(callback, Checkpoint) for callback in chosen),
        "plugins": [*(plugins if isinstance(plugins, list) else [plugins]), AtomicCheckpointIO()],
        "logger": make_loggers(cli, run, flags.pop("logger", None)),
        "default_root_dir": run.folder,
    }
    return build_trainer(flags)


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
    refuse_what_cannot_run(flags, world_size)
    precision = cli.config.matmul_precision
    if precision is not None:
        if precision not in MATMUL_PRECISIONS:
            raise UserError(f"--matmul_precision must be one of {', '.join(MATMUL_PRECISIONS)}, got {precision}.")
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = precision != "highest"  # convolutions, which the setting above leaves alone
    return flags


def refuse_what_cannot_run(flags: dict[str, Any], world_size: int) -> None:
    """Raise a UserError for flags that Lightning takes and that end in a crash, a wait or a swapping machine."""
    devices = str(flags["devices"])
    most = 4 * threads.available_cores()
    on_cpu = flags["accelerator"] == "cpu" or (flags["accelerator"] == "auto" and not torch.accelerator.is_available())
    if on_cpu and devices.isdigit() and int(devices) > most:
        raise UserError(
            f"--devices must be at most {most} on this machine's {threads.available_cores()} CPU cores, got {devices}."
        )
    if world_size == 1 and flags["num_nodes"] > 1:  # rank 0 would wait half an hour for the others
        raise UserError(
            f"--num_nodes {flags['num_nodes']} needs a launcher that starts the other machines: torchrun or SLURM, see "
            "the README."
        )
    if isinstance(flags["strategy"], str) and re.search("spawn|fork|notebook", flags["strategy"]):
        raise UserError(
            f"--strategy {flags['strategy']} starts its ranks inside functions, where what a run has reached is lost. "
            "Use ddp."
        )
    for name in ("accumulate_grad_batches", "check_val_every_n_epoch"):
        if flags[name] is not None and flags[name] < 1:
            raise UserError(f"--{name} must be at least 1, got {flags[name]}.")
    for name in ("max_epochs", "max_steps"):
        if flags[name] == 0:
            raise UserError(f"--{name} must be at least 1, or -1 for no end, got 0.")
    if flags["val_check_interval"] in (0, "0"):
        raise UserError("--val_check_interval must be above 0, got 0. --limit_val_batches 0 turns validation off.")


def build_trainer(flags: dict[str, Any]) -> Trainer:
    """``Trainer(**flags)``, its refusals as a :class:`UserError`; its ranks on this machine share the cores."""
    try:
        trainer = Trainer(**flags)
    except (MisconfigurationException, ValueError, RuntimeError, TypeError, ImportError) as error:
        raise UserError(f"the Trainer refuses a flag: {' '.join(str(error).split())}") from None
    if launched_world()[1] == 1 and trainer.num_devices > 1:  # it is about to start the other ranks
        os.environ |= (part := threads.share(trainer.num_devices))
        if part:
            torch.set_num_threads(int(part["OMP_NUM_THREADS"]))
    return trainer


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


def find(trainer: Trainer, kind: type[Any]) -> Any:
    """The trainer's callback of a class."""
    return next(callback for callback in trainer.callbacks if isinstance(callback, kind))  # type: ignore[attr-defined]
