"""The Lightning Trainer of a run: flags as typed, this project's callbacks, loggers and checkpoint files."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers import Logger

from project import threads
from project.engine.checkpoint_files import AtomicCheckpointIO
from project.engine.cli import Configuration
from project.engine.ranks import launched_world
from project.errors import UserError

MATMUL_PRECISIONS = ("highest", "high", "medium")


def trainer_flags(config: Configuration) -> dict[str, Any]:
    """The Trainer's arguments as typed, made to agree with torchrun or SLURM and with this machine."""
    flags: dict[str, Any] = dict(config.trainer)
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
    plugins = flags["plugins"] or []
    flags["plugins"] = [*(plugins if isinstance(plugins, list) else [plugins]), AtomicCheckpointIO()]
    flags["enable_model_summary"] = bool(flags["enable_model_summary"])  # the start line says what matters
    precision = config.options.matmul_precision
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
        callbacks = flags["callbacks"] or []
        flags["enable_checkpointing"] = any(isinstance(callback, Checkpoint) for callback in callbacks)
        trainer = Trainer(**flags)
    except (MisconfigurationException, ValueError, RuntimeError, TypeError, ImportError) as error:
        raise UserError(f"the Trainer refuses a flag: {' '.join(str(error).split())}") from None
    if launched_world()[1] == 1 and trainer.num_devices > 1:  # it is about to start the other ranks
        os.environ |= (part := threads.share(trainer.num_devices))
        if part:
            torch.set_num_threads(int(part["OMP_NUM_THREADS"]))
    return trainer


def own_callbacks(flags: dict[str, Any]) -> list[Callback]:
    """The callbacks that the user chose; taken out of the flags."""
    chosen: Any = flags.pop("callbacks", None) or []
    return [chosen] if isinstance(chosen, Callback) else list(chosen)  # --trainer.callbacks CLASS gives one


def own_loggers(flags: dict[str, Any], options: Any, folder: Path, ours: list[Logger | None]) -> list[Logger]:
    """metrics.csv always; W&B unless ``--logger`` names others; TensorBoard on its flag."""
    csv, wandb = ours
    loggers = [csv] if csv is not None else []
    chosen = flags.pop("logger", None)
    if isinstance(chosen, Logger):
        loggers.append(chosen)
    elif isinstance(chosen, (list, tuple)):
        loggers += chosen
    elif chosen is not False and wandb is not None:
        loggers.append(wandb)
    if options.tensorboard:
        from lightning.pytorch.loggers import TensorBoardLogger

        loggers.append(TensorBoardLogger(folder, name="tensorboard", version=""))
    return loggers
