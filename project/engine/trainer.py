"""The Lightning Trainer of a run: its flags, made to agree with the launcher and this machine, and its final test."""

import os
import re
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, WeightAveraging
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.strategies import FSDPStrategy  # feature: fsdp
from lightning.pytorch.utilities.model_helpers import is_overridden

from project import threads
from project.engine.checkpoint_files import AtomicCheckpointIO
from project.engine.cli import Configuration
from project.engine.lightning_internals import check
from project.engine.ranks import launched_world, say
from project.engine.summary import RunTimer
from project.errors import UserError, require
from project.waiting import waiting  # feature: waiting

ENGINE = __name__.rpartition(".")[0]
RESTORING = "lightning.pytorch.trainer.connectors.checkpoint_connector"
MACHINERY = ("lightning", "torch", "numpy", "random", "packaging", ENGINE)
MOST = 2**31 - 1  # for a count; a larger one is a typing error and would overflow
# Counts, and what else than a number of at least 1 each may be: no end, no logging
COUNTS: dict[str, int | None] = {"max_epochs": -1, "max_steps": -1, "log_every_n_steps": 0}
COUNTS |= dict.fromkeys(("accumulate_grad_batches", "check_val_every_n_epoch"), None)


def trainer_flags(config: Configuration) -> dict[str, Any]:
    """The Trainer's arguments as typed, made to agree with torchrun or SLURM and this machine, or refused."""
    check()
    flags = dict(config.trainer)
    _, world_size, local_size = launched_world()
    devices, nodes = flags["devices"], flags["num_nodes"]
    if world_size > 1 and devices == "auto":
        # Without this, `torchrun fit` would run as many independent trainings (Lightning's devices default to one CPU).
        flags["devices"], flags["num_nodes"] = local_size, world_size // local_size
    elif world_size > 1 and str(devices).isdigit() and int(devices) * nodes != world_size:
        fix = f"must be the {world_size} processes that the launcher started. Leave both away to take what it started."
        raise UserError(f"--devices {devices} × --num_nodes {nodes} {fix}")
    refuse_what_cannot_run(flags, world_size)
    if str(flags["strategy"]).startswith("fsdp"):  # feature: fsdp
        import project.engine.sharding  # noqa: F401 - registers itself; half a second, for FSDP alone
    flags["plugins"] = [*as_list(flags["plugins"]), AtomicCheckpointIO()]
    flags["callbacks"] = as_list(flags["callbacks"])
    flags["logger"] = [logger for logger in as_list(flags["logger"]) if isinstance(logger, Logger)]
    flags["enable_model_summary"] = bool(
        flags["enable_model_summary"]
    )  # the run's first line says the same
    if (precision := config.options.matmul_precision) is not None:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = (
            precision != "highest"
        )  # convolutions: not set by the call above
    return flags


def requeue_signal(config: Configuration) -> int | None:
    """The signal at which SLURM wants the job to be saved and queued again; None outside SLURM, or where refused."""
    if not SLURMEnvironment.detect():
        return None
    plugins = [*as_list(config.trainer["plugins"]), SLURMEnvironment()]
    environment = next(plugin for plugin in plugins if isinstance(plugin, SLURMEnvironment))
    return int(environment.requeue_signal or signal.SIGUSR1) if environment.auto_requeue else None


def refuse_what_cannot_run(flags: dict[str, Any], world_size: int) -> None:
    """Raise a UserError for flags that Lightning accepts but that lead to a crash, a hang or swapping."""
    devices, strategy = str(flags["devices"]), flags["strategy"]
    most = 4 * threads.available_cores()
    on_cpu = flags["accelerator"] == "cpu" or (
        flags["accelerator"] == "auto" and not torch.accelerator.is_available()
    )
    must = f"be at most {most} on this machine's {threads.available_cores()} CPU cores"
    require(not (on_cpu and devices.isdigit() and int(devices) > most), "--devices", must, devices)
    if world_size == 1 and flags["num_nodes"] > 1:  # rank 0 would wait half an hour for the others
        raise UserError(
            f"--num_nodes {flags['num_nodes']} needs a launcher, torchrun or SLURM: see the README."
        )
    if isinstance(strategy, str) and re.search("spawn|fork|notebook", strategy):
        raise UserError(
            f"--strategy {strategy} starts ranks in functions, and what they reach is lost. Use ddp."
        )
    if isinstance(strategy, FSDPStrategy) or str(strategy).startswith("fsdp"):  # feature: fsdp
        if (
            flags["gradient_clip_val"] and flags["gradient_clip_algorithm"] != "value"
        ):  # no norm over shards
            raise UserError(
                "--gradient_clip_val clips by norm, fsdp cannot. Add --gradient_clip_algorithm value."
            )
        if any(isinstance(callback, WeightAveraging) for callback in as_list(flags["callbacks"])):
            raise UserError(
                "--strategy fsdp cannot average weights. Use --strategy ddp, or --trainer.callbacks null."
            )
    for name, further in COUNTS.items():
        value = flags[name]
        must = f"be at least 1 and at most {MOST}" + ("" if further is None else f", or {further}")
        require(
            not isinstance(value, int) or 0 < value <= MOST or value == further,
            f"--{name}",
            must,
            value,
        )
    require(str(flags["gradient_clip_val"]) != "nan", "--gradient_clip_val", "be a number", "nan")
    if flags["val_check_interval"] in (0, "0"):
        raise UserError(
            "--val_check_interval must be above 0, got 0. --limit_val_batches 0 turns validation off."
        )


def build_trainer(flags: dict[str, Any]) -> Trainer:
    """``Trainer(**flags)``, its refusals as a :class:`UserError`; its ranks on this machine share the cores."""
    flags = flags | {
        "enable_checkpointing": any(
            isinstance(each, Checkpoint) for each in as_list(flags["callbacks"])
        )
    }
    try:
        trainer = Trainer(**flags)
    except (MisconfigurationException, ValueError, RuntimeError, TypeError, ImportError) as error:
        raise UserError(f"the Trainer refuses a flag: {' '.join(str(error).split())}") from None
    if not torch.cuda.is_available():
        # Lightning sets 1, and torch's optimizers then open the driver's library at every step: 0.2 ms without a GPU
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "0"
    if launched_world()[1] == 1 and trainer.num_devices > 1:  # it is about to start the other ranks
        os.environ |= (part := threads.share(trainer.num_devices))
        if part:
            torch.set_num_threads(int(part["OMP_NUM_THREADS"]))
        waiting.spin()  # on all cores, which the ranks will have, too  # feature: waiting
    return trainer


def as_list(value: Any) -> list[Any]:
    """The value of a flag that takes none, one or several objects, as a list."""
    return list(value) if isinstance(value, (list, tuple)) else [] if value is None else [value]


@contextmanager
def refusals_as_errors(checkpoint: Path | None, timer: RunTimer | None = None) -> Iterator[None]:
    """Turn what Lightning refuses into a :class:`UserError`: before the first step a flag, later an unknown metric. So
    is what cannot be restored of a checkpoint, unless the user's own code raised it. ``timer``: of a training.
    """
    try:
        yield
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        lacks, owner = (
            str(getattr(error, "name", "")),
            str(type(getattr(error, "obj", None))),
        )  # feature: wandb
        if lacks.startswith("add_") and "'wandb." in owner:  # feature: wandb
            raise UserError(
                f"self.logger.experiment is W&B's, without {lacks}. Add --tensorboard true."
            ) from None
        begun = timer is not None and timer.begun
        modules = [
            frame.f_globals.get("__name__", "")
            for frame, _ in traceback.walk_tb(error.__traceback__)
        ]
        raised_in, text = modules[-1], " ".join(str(error).split())
        if RESTORING in modules and "loading state_dict" in text:
            raise UserError(f"--ckpt_path: {text[:300]}") from None
        # what EarlyStopping, ReduceLROnPlateau and ModelCheckpoint say
        unknown = "which is not available" in text or "could not find the monitored key" in text
        refused = not begun and isinstance(
            error, (MisconfigurationException, ValueError, OverflowError)
        )
        if raised_in.startswith("lightning.") and (unknown or refused):
            text += (
                " Raise --max_epochs." if "restored a checkpoint with current_epoch" in text else ""
            )
            raise UserError(text if unknown else f"the Trainer refuses a flag: {text}") from None
        starting = timer is not None and not begun and raised_in.startswith(("lightning", ENGINE))
        restoring = RESTORING in modules and raised_in.startswith(MACHINERY)
        if checkpoint and (starting or restoring or raised_in.startswith("torch.optim")):
            why = f"it holds something else than such a run saves ({type(error).__name__}: {text})"
            used = "tested" if timer is None else "resumed"
            raise UserError(
                f"--ckpt_path {checkpoint} cannot be {used}: {why}. Give another checkpoint."
            ) from None
        raise


def final_test(trainer: Trainer, config: Configuration, best_path: Path | None) -> dict[str, float]:
    """Metrics of best.ckpt on the test set, or where there is none of the weights as they are, at a run's end."""
    if best_path is not None and not best_path.exists():
        raise UserError(
            "--ckpt_path: that checkpoint has trained as long as it should. Raise --max_epochs."
        )
    module, data = config.module, config.datamodule
    if lacks_for_test(module, data):
        return {}
    # in float32, so that the result is the same on any device
    if isinstance(trainer.strategy, FSDPStrategy):  # feature: fsdp
        from project.engine.sharding import for_float32_test

        module = for_float32_test(trainer.strategy, config.fresh_module())
    if isinstance(
        trainer.precision_plugin, (MixedPrecision, HalfPrecision)
    ):  # not of float64, which data may need
        trainer.strategy.precision_plugin = Precision()
        module.float()
    try:  # eagerly: for one pass a compiled network would be compiled once more
        with float32_products(), torch.compiler.set_stance("force_eager"):
            found = trainer.test(
                module, datamodule=data, ckpt_path=best_path, weights_only=True, verbose=False
            )
    except MisconfigurationException as error:
        if "limit_test_batches" not in str(error):
            raise
        say(
            f"not tested: {error}"
        )  # a share of less than a batch, known only here; the run itself is done
        return {}
    return {name: float(value) for metrics in found for name, value in metrics.items()}


def lacks_for_test(module: LightningModule, data: LightningDataModule | None) -> str | None:
    """What a test lacks: a ``test_step``, or data for it. None if nothing is missing."""
    if not is_overridden("test_step", module):
        return f"{type(module).__name__} has no test_step"
    if is_overridden("test_dataloader", module) or is_overridden("test_dataloader", data):
        return None
    return f"neither {type(module).__name__} nor its data module has a test_dataloader"


@contextmanager
def float32_products() -> Iterator[None]:
    """Switch TF32 off. GPUs use it for convolutions, and for matrix products with ``--matmul_precision high``. PyTorch
    has older and newer switches for it. Reading an older one is an error where a newer one was changed.
    """
    backends: Any = torch.backends
    newer = [backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn, backends.mkldnn.matmul]
    before, products, convolutions = [switch.fp32_precision for switch in newer], "highest", True
    with suppress(RuntimeError):
        products = torch.get_float32_matmul_precision()
    with suppress(RuntimeError):
        convolutions = backends.cudnn.allow_tf32

    def turn(products: str, convolutions: bool, values: list[str]) -> None:
        torch.set_float32_matmul_precision(products)
        backends.cudnn.allow_tf32 = convolutions
        for switch, value in zip(newer, values, strict=True):
            switch.fp32_precision = value

    turn("highest", False, ["ieee"] * len(newer))
    try:
        yield
    finally:
        turn(products, convolutions, before)
