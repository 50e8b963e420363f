"""Learning-rate schedules: four shapes over the whole run, or any class of PyTorch's."""

import math
from functools import partial
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau
from unbroken.tasks.by_name import make, named_class

SHAPES = ("constant", "cosine", "linear", "onecycle")

# Where a run with the shape "onecycle" begins, as a factor on the peak rate.
ONECYCLE_START = 0.04


def shaped_schedule(
    optimizer: Optimizer, shape: str, warmup_fraction: float, trainer: Trainer
) -> LRScheduler:
    """A schedule of one of the :data:`SHAPES`, which climbs to the optimizer's rate and falls over
    the run. Let it take a step with every step of the optimizer.

    Where nothing says how many steps the run takes (``--max_time`` alone, or data without a
    length), the rate stays the optimizer's, and a warning says so.
    """
    total_steps = trainer.estimated_stepping_batches
    if is_endless(total_steps):
        warn_that_the_shape_is_lost(shape, warmup_fraction, optimizer.param_groups[0]["lr"])
    return LambdaLR(optimizer, partial(rate_factor, shape, warmup_fraction, total_steps))


def warn_that_the_shape_is_lost(shape: str, warmup_fraction: float, lr: float) -> None:
    """Say which option has no effect on a run of which nothing says how many steps it takes."""
    if shape != "constant":
        lost = f"--model.schedule {shape} has no effect"
    elif warmup_fraction > 0:
        lost = f"--model.warmup_fraction {warmup_fraction} has no effect"
    else:
        return
    rank_zero_warn(
        f"{lost}: nothing says how many steps this run takes, so the learning rate stays "
        f"{lr}. Add --max_steps N (--max_time may still end the run before)."
    )


def named_schedule(
    optimizer: Optimizer, name: str, arguments: dict[str, Any], mode: str
) -> LRScheduler:
    """A schedule by its class: one of ``torch.optim.lr_scheduler``, or an import path.

    ``mode`` ("min" or "max") says in which direction the metric is good that ReduceLROnPlateau
    follows.
    """
    cls = named_class("--model.schedule", name, lr_scheduler, LRScheduler, also=SHAPES)
    if issubclass(cls, ReduceLROnPlateau):
        arguments = {"mode": mode, **arguments}
    return make("--model.schedule", cls, arguments, optimizer)


def rate_factor(shape: str, warmup_fraction: float, total_steps: float, step: int) -> float:
    """The factor on the peak rate at ``step``, 0 being the first.

    It is 1 throughout in a run of which nothing says how many steps it takes.

    The factor is a function of the step alone. PyTorch's own schedules keep the run's length and
    peak in their state, but a user who resumes a run may change both.
    """
    if not 1 <= total_steps < math.inf:
        return 1.0
    done = min(1.0, step / total_steps)
    if done < warmup_fraction:
        return climb(shape, done / warmup_fraction, steps=warmup_fraction * total_steps)
    return fall(shape, (1 - done) / (1 - warmup_fraction))


def is_endless(total_steps: float) -> bool:
    """Whether nothing says how many steps a run takes. Lightning estimates -1 or infinity."""
    return total_steps < 0 or total_steps == math.inf


def climb(shape: str, height: float, steps: float) -> float:
    """The factor in a warm-up of so many steps.

    ``height`` is the share of the warm-up that is done, 0 to 1.
    """
    if shape == "onecycle":
        return ONECYCLE_START + (1 - ONECYCLE_START) * half_cosine(height)
    # The first step must not have a rate of 0: it would change nothing.
    return max(height, 1 / max(1, steps))


def fall(shape: str, height: float) -> float:
    """The factor after the warm-up. ``height`` falls from 1 to 0."""
    if shape == "constant":
        return 1.0
    if shape == "linear":
        return height
    return half_cosine(height)


def half_cosine(height: float) -> float:
    """A smooth way from 0 to 1, level at both ends, for a ``height`` from 0 to 1."""
    return (1 - math.cos(math.pi * height)) / 2
