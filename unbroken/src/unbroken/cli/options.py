"""The options of ``fit`` and ``test`` that are our own, and what Trainer flags are without being
typed.
"""

import inspect
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, get_args, get_origin

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger
from unbroken.cli.trackers import TrackerWords

# Trainer flags, which may be typed without "trainer."
FLAT = frozenset(inspect.signature(Trainer).parameters)
# Options of one launch. They are no settings of the run: config.yaml leaves them out.
OF_THE_LAUNCH = (
    "ckpt_path",
    "run_name",
    "mirror",
    "mirror_required",
    "init_weights",
    "memory_snapshot",
    "trust_checkpoint",
    "output",
    "config",
)
# What Lightning's Trainer takes: 32-true, 16-mixed, bf16-mixed and others.
PRECISIONS: Any = inspect.signature(Trainer).parameters["precision"].annotation


class TrainerFlags(Trainer):
    """The Trainer's arguments as they may be typed. Only its signature is used.

    Args:
        logger: wandb, tensorboard, mlflow, trackio, csv, several with commas, or false; or a class.
            metrics.csv is always written.
        precision: A precision of Lightning's; or auto, which is bf16-mixed on a CPU where that is
            faster, and 32-true elsewhere.
    """

    def __init__(
        self,
        *,
        logger: Logger | Iterable[Logger | TrackerWords] | TrackerWords | bool | None = None,
        precision: PRECISIONS | Literal["auto"] = None,
        **flags: Any,
    ) -> None:
        super().__init__(logger=logger, precision=precision, **flags)  # type: ignore[arg-type]


class Option(NamedTuple):
    """One of our own options."""

    name: str
    kind: Any  # its type
    default: Any
    help: str


OPTIONS: tuple[Option, ...] = (
    Option(
        "run_name",
        str | None,
        None,
        "The run's folder in checkpoints/ (default: a time stamp).",
    ),
    Option(
        "ckpt_path",
        str | None,
        None,
        "Go on from last, best, auto (last whole one, else afresh), a file or its address.",
    ),
    Option(
        "init_weights",
        str | None,
        None,
        "Start a new run from the weights of another run's checkpoint.",
    ),
    Option(
        "monitor",
        str | None,
        None,
        "The metric that best.ckpt follows (default: the module's own choice)."
        " Under torchrun: -m NAME.fit -- --monitor METRIC.",
    ),
    Option(
        "mode",
        str | None,
        None,
        "Whether its largest (max) or smallest (min) value is the best.",
    ),
    Option(
        "monitors",
        str,
        "all",
        "Which monitors take part, with commas: throughput, memory, optimizer; all or none.",
    ),
    Option("report", bool, True, "Write report.html at the end."),
    Option(
        "checkpoint_every",
        str,
        "60s",
        "Save last.ckpt every so many optimizer steps (500) or seconds (60s).",
    ),
    Option(
        "mirror",
        str | None,
        None,
        "Copy the run to URL (s3://, gs://, az://, sftp://, or a folder) while it trains; on an"
        " empty machine, --ckpt_path auto brings it back from there.",
    ),
    Option(
        "mirror_required",
        bool,
        False,
        "Exit with 1 where the mirror is not complete at the end.",
    ),
    Option(
        "matmul_precision",
        Literal["highest", "high", "medium"] | None,
        None,
        "float32: high is TF32, medium bfloat16.",
    ),
    Option(
        "memory_snapshot",
        str | None,
        None,
        "Record CUDA allocations to FILE, for PyTorch's viewer.",
    ),
    Option("tensorboard", bool, False, "Also write TensorBoard files into the run's folder."),
    Option(
        "trust_checkpoint",
        bool,
        False,
        "Take a checkpoint that you did not write as your own: it may name any class.",
    ),
)


def _is_switch(kind: Any) -> bool:
    """Whether a type is true or false, or besides a number or a word."""
    kinds = get_args(kind) or (kind,)
    others = {each for each in kinds if get_origin(each) is not Literal}
    return bool in others and others <= {bool, int, type(None)}


# The options that are true or false
SWITCHES = frozenset(
    [option.name for option in OPTIONS if _is_switch(option.kind)]
    + [
        name
        for name, flag in inspect.signature(Trainer).parameters.items()
        if _is_switch(flag.annotation)
    ]
)
