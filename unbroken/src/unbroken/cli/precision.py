"""``--precision auto``: float32, or half precision where this CPU is faster with it."""

from typing import Any

import torch
from unbroken.machine import hardware

# Half precision must be faster than this share of float32's time, to be chosen. Where it is worth
# anything, it is near 0.5.
WORTH_THE_CHANGE = 0.9


def choose_precision(accelerator: Any) -> str:
    """What ``--precision auto`` stands for on this machine: ``bf16-mixed`` or ``32-true``.

    It is bf16-mixed on a CPU that has instructions for bfloat16, if a training step that is
    measured here is faster with them. On an accelerator it is 32-true: which one is faster there
    depends on the network's size, and the benchmark measures it.

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
