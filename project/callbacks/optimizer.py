"""Learning rate, gradient norm and loss scale at log steps."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from project.engine.log_steps import SHARDING, is_due, log_values


class OptimizerMonitor(Callback):
    """Logs values of the optimizer step. Lightning's LearningRateMonitor names rates after the optimizer's class.

    Logged metrics, at log steps, of the first optimizer where a module has several:

    - ``optimizer/lr``: learning rate of the first parameter group
    - ``optimizer/grad_norm``: 2-norm of the step's gradients, unscaled, before clipping; not where a strategy shards
    - ``optimizer/loss_scale``: the gradient scaler's factor, under 16-mixed only
    """

    def __init__(self) -> None:
        self._metrics: dict[
            str, float | Tensor
        ] = {}  # logged at the step's end: to read them waits for the device

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        if optimizer is not trainer.optimizers[0] or not is_due(trainer, trainer.global_step + 1):
            return
        metrics = self._metrics = dict[str, float | Tensor]()
        if (
            rate := optimizer.param_groups[0].get("lr")
        ) is not None:  # an optimizer of the user's may have none
            metrics["optimizer/lr"] = float(rate)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            metrics["optimizer/loss_scale"] = scaler.get_scale()
        if not isinstance(trainer.strategy, SHARDING):
            parameters = (
                parameter for group in optimizer.param_groups for parameter in group["params"]
            )
            norm = torch.nn.utils.get_total_norm(p.grad for p in parameters if p.grad is not None)
            fused = scaler is not None and optimizer.defaults.get(
                "fused"
            )  # it divides by the scale itself, later
            metrics["optimizer/grad_norm"] = (
                norm / metrics["optimizer/loss_scale"] if fused else norm
            )

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if self._metrics:
            log_values(trainer, self._metrics)
            self._metrics = {}
