"""``--precision auto``: float32, or half precision where this CPU is faster with it."""

import inspect
from typing import Any, Literal

import torch
from lightning.pytorch import Trainer

from project import hardware

# What Lightning's Trainer takes: 32-true, 16-mixed, bf16-mixed and others.
OF_LIGHTNING: Any = inspect.signature(Trainer).parameters["precision"].annotation

# Half precision must be faster than this share of float32's time, to be chosen. Where it is worth
# anything, it is near 0.5.
WORTH_THE_CHANGE = 0.9


class TrainerFlags(Trainer):
    """The Trainer whose arguments are the options of ``fit``. It takes one precision more: auto.

    It is never made: a run's Trainer is Lightning's own, and gets the precision that was chosen.
    """

    def __init__(
        self,
        *,
        precision: OF_LIGHTNING | Literal["auto"] = None,
        **flags: Any,
    ) -> None:
        super().__init__(precision=precision, **flags)  # type: ignore[arg-type]


def choose_precision(accelerator: Any) -> str:
    """What ``--precision auto`` stands for on this machine: ``bf16-mixed`` or ``32-true``.

    It is bf16-mixed on a CPU that has instructions for bfloat16, if a training step that is
    measured here is faster with them. On an accelerator it is 32-true: which one is faster there
    depends on the network's size, and ``python -m project.benchmark devices`` measures it.

    Args:
        accelerator: The Trainer's argument of that name.
    """
    half = "bf16-mixed"
    if not is_on_cpu(accelerator) or not hardware.cpu_computes(half):
        return "32-true"
    # A setting of the environment can keep PyTorch from using what the CPU has.
    cost = hardware.cost_on_cpu(half)
    return half if cost < WORTH_THE_CHANGE else "32-true"


def is_on_cpu(accelerator: Any) -> bool:
    """Whether a Trainer with this ``accelerator`` trains on the CPU."""
    if accelerator == "auto":
        return not torch.accelerator.is_available()
    return bool(accelerator == "cpu")
