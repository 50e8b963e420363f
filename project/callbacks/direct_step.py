"""A training step straight through the strategy, without the wrappers that Lightning puts around its parts."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.call import _call_strategy_hook
from torch import Tensor
from torch.optim import Optimizer

from project.callbacks.log_steps import is_default

BYPASSED = ("optimizer_step", "optimizer_zero_grad")  # a module's hooks that DirectStep does not call


def can_step_directly(trainer: Trainer, module: LightningModule) -> bool:
    """Whether nobody would miss what :class:`DirectStep` leaves out.

    That is: the module overrides none of ``BYPASSED``, and neither it nor a callback has ``on_before_zero_grad``, once
    :class:`project.callbacks.quick_steps.QuickSteps` has taken off the hooks that nobody wrote.
    """
    overridden = not all(is_default(module, name) for name in BYPASSED)
    listeners = [module, *trainer.callbacks]  # type: ignore[attr-defined]
    listened_to = any(callable(listener.on_before_zero_grad) for listener in listeners)
    return not (overridden or listened_to or trainer.strategy.handles_gradient_accumulation)


class DirectStep:
    """Stands in for ``run`` of Lightning's automatic optimization, and computes the same.

    Forward and backward pass, clipping, gradient scaling and the optimizer go through the strategy and the precision
    plugin, as ever, with their hooks. Left out are the closure in three parts, its result with a divided and a copied
    loss, the wrapped optimizer, and the module's hooks that only lead there: 0.06 ms a step on a CPU core, of the
    1.9 ms that the course's classifier takes for 64 images.

    The first step of a fit, accumulated steps, and whoever switches the backward pass off take Lightning's own way,
    with its checks and warnings.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.loop = trainer.fit_loop.epoch_loop.automatic_optimization
        self.progress = self.loop.optim_progress.optimizer
        self._steps = 0

    def __call__(self, optimizer: Optimizer, batch_idx: int, kwargs: OrderedDict[str, Any]) -> dict[str, Any]:
        """One step: ``{"loss": tensor ()}`` and what else ``training_step`` returned."""
        self._steps += 1
        accumulated = self.trainer.accumulate_grad_batches != 1  # a callback may change it between epochs
        if self._steps == 1 or accumulated or self.loop._skip_backward:
            return type(self.loop).run(self.loop, optimizer, batch_idx, kwargs)
        result: dict[str, Any] = {}
        self.progress.step.increment_ready()
        closure = partial(self._forward_and_backward, optimizer, kwargs, result)
        self.trainer.strategy.optimizer_step(optimizer, closure)
        self.progress.step.increment_completed()
        return result

    @torch.enable_grad()  # an optimizer's step, which calls it, may have turned it off
    def _forward_and_backward(
        self, optimizer: Optimizer, kwargs: OrderedDict[str, Any], result: dict[str, Any]
    ) -> Tensor | None:
        output = _call_strategy_hook(self.trainer, "training_step", *kwargs.values())
        loss: Tensor | None
        if isinstance(output, Tensor):
            loss, result["loss"] = output, output.detach()
        else:
            parsed = self.loop.output_result_cls.from_training_step_output(output)
            loss = parsed.closure_loss
            result.update(parsed.asdict() if loss is not None else {})
        self.progress.zero_grad.increment_ready()
        self.progress.zero_grad.increment_started()
        optimizer.zero_grad()
        self.progress.zero_grad.increment_completed()
        if loss is not None:
            _call_strategy_hook(self.trainer, "backward", loss, optimizer)
        return result.get("loss")
