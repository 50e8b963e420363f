"""The Trainer's arguments, made to agree with the launcher and this machine, and refused where they
cannot work.
"""

import inspect
import math
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint, ProgressBar, WeightAveraging
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import FSDPStrategy
from unbroken.chosen import Chosen
from unbroken.cli.cli import Configuration
from unbroken.cli.precision import is_on_cpu
from unbroken.errors import UserError, require
from unbroken.lightning_internals import NAMES_OF_THE_PARSER, check
from unbroken.machine import threads
from unbroken.machine.waiting import waiting
from unbroken.stopping.ranks import launched_world, say
from unbroken.storage.checkpoint_files import AtomicCheckpointIO

MOST = 2**31 - 1  # for a count; a larger one is a typing error and would overflow
# Flags that count, and what else than a number of at least 1 each may be: no end, no logging
COUNTS: dict[str, int | None] = {
    "max_epochs": -1,
    "max_steps": -1,
    "log_every_n_steps": 0,
    "accumulate_grad_batches": None,
    "check_val_every_n_epoch": None,
}
# What a word for an accelerator may mean; others are Lightning's to judge.
KINDS_OF_DEVICES = {"gpu": ("cuda", "mps"), "cuda": ("cuda",), "mps": ("mps",)}
# What the Trainer raises for flags that it does not take
REFUSALS = (MisconfigurationException, ValueError, RuntimeError, TypeError, ImportError)
PROCESSES_PER_CORE = 4  # more ranks than that on CPU cores only swap
THREADS_PER_CORE = 4  # more threads than that would wait for each other in every operation


@contextmanager
def reading_only(
    trainer: Trainer,
    fingerprint: str | None,
    with_states: bool = True,
    contents: dict[str, Any] | None = None,
) -> Iterator[None]:
    """Inside, the first checkpoint that a Trainer reads must have the contents of this fingerprint:
    what was judged is what is used. None: any may be read.

    Args:
        trainer: Of :func:`trainer_flags`.
        fingerprint: See :func:`unbroken.storage.seals.fingerprint`.
        with_states: Whether more than the weights is used, because the file is the user's.
        contents: What the Trainer gets in the place of the file's, which is not read again.
    """
    io = trainer.strategy.checkpoint_io
    # trainer_flags has put it there.
    assert isinstance(io, AtomicCheckpointIO)
    io.reads_next = fingerprint
    io.reads_no_states = not with_states
    io.gives = contents
    try:
        yield
    finally:
        # Where other processes have trained, this one has read nothing.
        io.reads_next = None
        io.reads_no_states = False
        io.gives = None


def trainer_flags(config: Configuration) -> dict[str, Any]:
    """The Trainer's arguments as typed, made to agree with torchrun or SLURM and this machine, or
    refused.
    """
    check(NAMES_OF_THE_PARSER)
    flags = dict(config.trainer)
    _, world_size, local_size = launched_world()
    _agree_with_launcher(flags, world_size, local_size)
    keep_devices(flags, config.chosen)
    refuse_what_cannot_run(flags, world_size)
    if str(flags["strategy"]).startswith("fsdp"):
        # It registers itself. The import takes half a second, for FSDP alone.
        import unbroken.checkpoint.sharding  # noqa: F401
    flags["plugins"] = [*as_list(flags["plugins"]), AtomicCheckpointIO()]
    flags["callbacks"] = as_list(flags["callbacks"])
    flags["logger"] = [logger for logger in as_list(flags["logger"]) if isinstance(logger, Logger)]
    # None would show a summary of layers; the run's first line says the same.
    flags["enable_model_summary"] = bool(flags["enable_model_summary"])
    _set_matmul_precision(config.options.matmul_precision)
    return flags


def _agree_with_launcher(flags: dict[str, Any], world_size: int, local_size: int) -> None:
    """Take the processes that torchrun or SLURM has started; a UserError where other numbers are
    typed.
    """
    if world_size == 1:
        return
    devices = flags["devices"]
    nodes = flags["num_nodes"]
    if devices == "auto":
        # Lightning's own default is one CPU: `torchrun fit` would run as many independent
        # trainings.
        flags["devices"] = local_size
        flags["num_nodes"] = world_size // local_size
    elif str(devices).isdigit() and int(devices) * nodes != world_size:
        must = f"must be the {world_size} processes that the launcher started"
        fix = "Leave both away to take what it started."
        raise UserError(f"--devices {devices} × --num_nodes {nodes} {must}. {fix}")


def keep_devices(flags: dict[str, Any], chosen: Chosen) -> None:
    """Let ``auto`` mean the devices with which the run began, where they are here."""
    began = chosen.values.get("accelerator")
    if flags["accelerator"] == "auto" and began is not None:
        if is_here(began):
            flags["accelerator"] = began
        else:
            say(f"this run began on {began}, which is not here: the resume is not exact.")
        if began == "cpu" and torch.accelerator.is_available():
            say("this run began on the CPU, and stays there. To change that: --accelerator gpu")
    count = chosen.values.get("devices", math.inf)
    has_gpus = not is_on_cpu(flags["accelerator"]) and count <= torch.cuda.device_count()
    if flags["devices"] == "auto" and has_gpus:
        flags["devices"] = count


def is_here(accelerator: str) -> bool:
    """Whether this machine has an ``accelerator`` that a run keeps: cpu, cuda or mps."""
    if accelerator == "cuda":
        return torch.cuda.is_available()
    if accelerator == "mps":
        return torch.backends.mps.is_available()
    return accelerator == "cpu"


def _set_matmul_precision(precision: str | None) -> None:
    if precision is not None:
        torch.set_float32_matmul_precision(precision)
        # The call above does not set it for convolutions.
        torch.backends.cudnn.allow_tf32 = precision != "highest"


def refuse_what_cannot_run(flags: dict[str, Any], world_size: int) -> None:
    """Raise a UserError for flags that Lightning accepts but that lead to a crash, a hang or
    swapping.
    """
    _refuse_devices(flags, world_size)
    _refuse_strategy(flags)
    strategy = flags["strategy"]
    if isinstance(strategy, FSDPStrategy) or str(strategy).startswith("fsdp"):
        _refuse_what_fsdp_cannot(flags)
    for name, further in COUNTS.items():
        _require_count(name, flags[name], further)
    _require_sanity_steps(flags["num_sanity_val_steps"])
    _require_clip_value(flags["gradient_clip_val"])
    if flags["barebones"]:
        why = "leaves out the checkpoints and metrics that a run here consists of"
        raise UserError(f"--barebones true {why}. Remove it.")
    if flags["val_check_interval"] in (0, "0"):
        fix = "--limit_val_batches 0 turns validation off."
        raise UserError(f"--val_check_interval must be above 0, got 0. {fix}")


def _refuse_devices(flags: dict[str, Any], world_size: int) -> None:
    asked = flags["accelerator"]
    kinds = KINDS_OF_DEVICES.get(asked, ()) if isinstance(asked, str) else ()
    if kinds and not any(is_here(kind) for kind in kinds):
        fix = "Leave the flag away to train on what is here, or see the command devices."
        raise UserError(f"--accelerator {asked}: PyTorch finds no such device here. {fix}")
    devices = str(flags["devices"])
    count = int(devices) if re.fullmatch(r"-?\d+", devices) else 1
    require(count != 0, "--devices", "be at least 1, or auto", devices)
    if is_on_cpu(flags["accelerator"]):
        cores = threads.available_cores()
        most = PROCESSES_PER_CORE * cores
        must = f"be at least 1 and at most {most} on this machine's {cores} CPU cores"
        require(1 <= count <= most, "--devices", must, devices)
        if flags["sync_batchnorm"] and max(count, world_size) > 1:
            why = "--sync_batchnorm needs GPUs: PyTorch has none for CPUs."
            raise UserError(f"{why} Leave it away; before a validation the ranks share statistics.")
    if world_size == 1 and flags["num_nodes"] > 1:  # rank 0 would wait half an hour for the others
        how = "needs a launcher, torchrun or SLURM: see docs/scale_out.md."
        raise UserError(f"--num_nodes {flags['num_nodes']} {how}")


def _refuse_strategy(flags: dict[str, Any]) -> None:
    strategy = flags["strategy"]
    if isinstance(strategy, str) and re.search("spawn|fork|notebook", strategy):
        why = "starts ranks in functions, and what they reach is lost"
        raise UserError(f"--strategy {strategy} {why}. Use ddp.")


def _refuse_what_fsdp_cannot(flags: dict[str, Any]) -> None:
    clips_norm = flags["gradient_clip_val"] and flags["gradient_clip_algorithm"] != "value"
    if clips_norm:  # no rank knows the norm over all shards
        fix = "Add --gradient_clip_algorithm value."
        raise UserError(f"--gradient_clip_val clips by norm, fsdp cannot. {fix}")
    for callback in as_list(flags["callbacks"]):
        if isinstance(callback, WeightAveraging):
            fix = "Use --strategy ddp, or --trainer.callbacks null."
            raise UserError(f"--strategy fsdp cannot average weights. {fix}")


def _require_count(name: str, value: Any, further: int | None) -> None:
    """A UserError for a count outside 1 to ``MOST``, unless it is the ``further`` value."""
    must = f"be at least 1 and at most {MOST}"
    if further is not None:
        must += f", or {further}"
    fits = not isinstance(value, int) or 0 < value <= MOST or value == further
    require(fits, f"--{name}", must, value)


def _require_sanity_steps(value: Any) -> None:
    """A UserError for a number below -1, which Lightning takes for none."""
    if isinstance(value, int):
        must = "be at least 0, or -1 for the whole validation set"
        require(value >= -1, "--num_sanity_val_steps", must, value)


def _require_clip_value(value: Any) -> None:
    """A UserError for a NaN. A negative one would train without clipping, and without a word."""
    if isinstance(value, int | float):
        require(not math.isnan(value), "--gradient_clip_val", "be a number", "nan")
        require(value >= 0, "--gradient_clip_val", "be at least 0", value, " 0 clips nothing.")


def build_trainer(flags: dict[str, Any], chosen: Chosen | None = None) -> Trainer:
    """``Trainer(**flags)``, its refusals as a :class:`UserError`; its ranks on this machine share
    the cores.

    Args:
        flags: The Trainer's arguments.
        chosen: What the run chose by itself: devices and threads are kept, or added. None: it is
            not a run.
    """
    saves = any(isinstance(callback, Checkpoint) for callback in as_list(flags["callbacks"]))
    try:
        trainer = Trainer(**flags | {"enable_checkpointing": saves})
    except REFUSALS as error:
        named = " with ".join(refused_flags(flags)) or "a flag"
        raise UserError(f"the Trainer refuses {named}: {' '.join(str(error).split())}") from None
    if not torch.cuda.is_available():
        # Lightning sets 1, and torch's optimizers then open the driver's library at every step: 0.2
        # ms without a GPU.
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "0"
    starts_ranks = launched_world()[1] == 1 and trainer.num_devices > 1
    if starts_ranks:
        share = threads.share(trainer.num_devices)
        os.environ |= share
        if share:
            torch.set_num_threads(int(share["OMP_NUM_THREADS"]))
        # On all cores, for the ranks will have them, too.
        waiting.spin()
    if chosen is not None:
        device = trainer.strategy.root_device.type
        if flags["accelerator"] == "auto" and is_here(device):
            chosen.values.setdefault("accelerator", device)
        if flags["devices"] == "auto" and device == "cuda":
            chosen.values.setdefault("devices", trainer.num_devices)
        keep_threads(chosen, trainer.num_devices * trainer.num_nodes)
    return trainer


def bar_for_a_terminal(flags: dict[str, Any]) -> bool:
    """Whether a command shows Lightning's bar: on a terminal, unless it is switched off. A bar that
    the user has named among the callbacks is shown anywhere, for Lightning refuses it otherwise.
    """
    if any(isinstance(callback, ProgressBar) for callback in as_list(flags["callbacks"])):
        return True
    return flags["enable_progress_bar"] is not False and sys.stdout.isatty()


def refused_flags(flags: dict[str, Any]) -> list[str]:
    """The flags, as they are typed, without any one of which the Trainer can be made. Lightning's
    text often names neither the flag nor its value.
    """
    found: list[str] = []
    # A Trainer adds callbacks of its own to the list that it gets.
    flags = flags | {"callbacks": None, "enable_checkpointing": False}
    for name, parameter in inspect.signature(Trainer).parameters.items():
        value = flags.get(name, parameter.default)
        is_typed = isinstance(value, str | int | float) and value != parameter.default
        if is_typed and name != "enable_checkpointing":
            with suppress(*REFUSALS):
                Trainer(**flags | {name: parameter.default})
                found.append(f"--{name} {value}")
    return found


def keep_threads(chosen: Chosen, ranks: int) -> None:
    """Let as many CPU threads compute on each of the ``ranks`` as when the run began. What the user
    has set in ``OMP_NUM_THREADS`` wins.

    Another number of threads adds up sums in another order, and they round differently. With
    another number of ranks sums differ anyway, and the cores are shared anew.
    """
    if chosen.values.get("ranks") != ranks:
        chosen.values.pop("threads", None)
        chosen.values["ranks"] = ranks
    here = torch.get_num_threads()
    began = chosen.once("threads", lambda: here)
    if threads.user_chose():
        chosen.values["threads"] = here
        return
    if began == here:
        return
    cores = threads.available_cores()
    # Fewer cores than threads is slow, and beyond that the run would hardly move.
    if 1 <= began <= THREADS_PER_CORE * cores:
        torch.set_num_threads(began)
        say(
            f"{began} CPU threads compute, as when this run began: another number rounds sums"
            f" differently. This machine would take {here}: OMP_NUM_THREADS={here}"
        )


def as_list(value: Any) -> list[Any]:
    """The value of a flag that takes none, one or several objects, as a list."""
    if isinstance(value, list | tuple):
        return list(value)
    return [] if value is None else [value]
