"""Learning rate, gradient norm and loss scale at log steps."""

from __future__ import annotations

import math
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer
from unbroken.loading.log_steps import SHARDING, counted, is_due, log_values
from unbroken.monitors.monitor import Monitor, never_ends_the_run

# The least points of the learning rate's curve
POINTS = 20


class OptimizerMonitor(Monitor):
    """Logs values of the optimizer step. Lightning's LearningRateMonitor names rates after the
    optimizer's class.

    Logged metrics, at log steps, of the first optimizer where a module has several:

    - ``optimizer/lr``: learning rate of the first parameter group; also at twenty steps of the run
      that are equally far apart, so that a short run shows its warm-up
    - ``optimizer/grad_norm``: 2-norm of the step's gradients, unscaled, before clipping; not where
      a strategy shards
    - ``optimizer/loss_scale``: the gradient scaler's factor, under 16-mixed only
    """

    word = "optimizer"

    def __init__(self) -> None:
        # Read before the optimizer steps, and logged at the step's end: to read a tensor waits for
        # the device.
        self._metrics: dict[str, float | Tensor] = {}
        # Steps from one point of the learning rate's curve to the next; 0: log steps alone
        self._apart = 0

    @never_ends_the_run
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        steps = trainer.estimated_stepping_batches
        # Only a time, or a stream's end, may end a run.
        self._apart = max(1, int(steps) // POINTS) if math.isfinite(steps) else 0

    @never_ends_the_run
    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        if not optimizer.param_groups:
            # Lightning's stand-in, where configure_optimizers returns None.
            return
        is_first = optimizer is trainer.optimizers[0]
        step = trainer.global_step + 1
        is_log_step = is_due(trainer, step)
        is_point = self._apart > 0 and counted(trainer, step) % self._apart == 0
        if not is_first or not (is_log_step or is_point):
            return
        self._metrics = {}
        # An optimizer of the user's own may have no rate.
        rate = optimizer.param_groups[0].get("lr")
        if rate is not None:
            self._metrics["optimizer/lr"] = float(rate)
        if not is_log_step:
            return
        # Only the plugin of 16-mixed has a scaler.
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            self._metrics["optimizer/loss_scale"] = scaler.get_scale()
        if isinstance(trainer.strategy, SHARDING):
            return
        norm = gradient_norm(optimizer)
        # A fused optimizer divides by the scale itself, later. For others Lightning has done so
        # already.
        if scaler is not None and optimizer.defaults.get("fused"):
            norm = norm / self._metrics["optimizer/loss_scale"]
        self._metrics["optimizer/grad_norm"] = norm

    @never_ends_the_run
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if self._metrics:
            log_values(trainer, self._metrics)
            self._metrics = {}


def gradient_norm(optimizer: Optimizer) -> Tensor:
    """The 2-norm of all gradients of an optimizer's parameters, a scalar on their device."""
    parameters: list[Tensor] = []
    for group in optimizer.param_groups:
        parameters.extend(group["params"])
    gradients = [stored_values(each.grad) for each in parameters if each.grad is not None]
    return torch.nn.utils.get_total_norm(gradients)


def stored_values(gradient: Tensor) -> Tensor:
    """A gradient's values: of a sparse one, such as of ``nn.Embedding(sparse=True)``, those that
    are not zero.
    """
    if gradient.layout is torch.strided:
        return gradient
    if gradient.layout is torch.sparse_coo:
        # A row that occurs twice in a batch is stored twice. Together they are one value.
        return gradient.coalesce().values()
    return gradient.values()
