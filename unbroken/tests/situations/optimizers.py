"""Optimizers and manual optimization."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from tests.situations.situation import Manual, Task, add, table


def trains_with(make: Callable[[Any], Optimizer]) -> Callable[[], Task]:
    """A task whose optimizer is made of its parameters."""

    class Trained(Task):
        def configure_optimizers(self) -> Any:
            return make(self.parameters())

    return Trained


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05),
    "sgd_nesterov": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True),
    "adam_amsgrad": lambda p: torch.optim.Adam(p, 0.02, amsgrad=True),
    "adam_fused": lambda p: torch.optim.Adam(p, 0.02, fused=True),
    "adam_rate_is_a_tensor": lambda p: torch.optim.Adam(p, torch.tensor(0.02)),
    "adadelta": lambda p: torch.optim.Adadelta(p, 1.0),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.05),
    "adamax": lambda p: torch.optim.Adamax(p, 0.02),
    "asgd": lambda p: torch.optim.ASGD(p, 0.02, t0=3),
    "nadam": lambda p: torch.optim.NAdam(p, 0.02),
    "radam": lambda p: torch.optim.RAdam(p, 0.02),
    "rmsprop_centered": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p, 0.01),
    "lbfgs": lambda p: torch.optim.LBFGS(p, 0.1, max_iter=3, history_size=4),
}
for optimizer_name, make_optimizer in OPTIMIZERS.items():
    add(f"optimizer_{optimizer_name}", trains_with(make_optimizer))


class Groups(Task):
    """Two groups with their own rates, and a third that is added later."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": self.net[0].parameters(), "lr": 0.01},
            {"params": self.net[3].parameters(), "weight_decay": 0.1},
            {"params": [self.scale], "lr": 0.1},
        ]
        return torch.optim.SGD(groups, 0.05, momentum=0.9)


add("parameter_groups", Groups)


class Sparse(Task):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.places = nn.Embedding(5, 6, sparse=True)

    def loss(self, batch: Any) -> Tensor:
        places = (batch[0][:, 0] * 3).long().remainder(5)
        return nn.functional.mse_loss(self(batch[0]) + self.places(places).sum(1), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> None:
        dense, sparse = self.optimizers()
        loss = self.loss(batch)
        dense.zero_grad()
        sparse.zero_grad()
        self.manual_backward(loss)
        dense.step()
        sparse.step()
        self.log("train_loss", loss.detach())

    def configure_optimizers(self) -> Any:
        dense = torch.optim.Adam(self.net.parameters(), 0.02)
        return [dense, torch.optim.SparseAdam(self.places.parameters(), 0.05)]


add("sparse_adam", Sparse)


class SparseAutomatic(Sparse):
    """The same, all by one optimizer that takes sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return Task.training_step(self, batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05)


add("sparse_gradients", SparseAutomatic, accumulate_grad_batches=2)
add("manual", Manual)


class Accumulates(Manual):
    """Adds up gradients of three batches by hand, also over an epoch's end."""

    steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.manual_backward(loss / 3)
        if (self.current_epoch * 7 + batch_idx + 1) % 3 == 0:
            self.optimizers().step()
            self.optimizers().zero_grad()
        self.log("train_loss", loss.detach(), on_step=True, on_epoch=True)


add("manual_accumulation", Accumulates)


class StepsTwice(Manual):
    """Two steps of the optimizer for each batch."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.clip_gradients(optimizer, gradient_clip_val=0.5)
        optimizer.step()


add("manual_two_steps_a_batch", StepsTwice)
add("manual_max_steps", StepsTwice, max_steps=25)


class ManualSchedule(Manual):
    """A schedule that is stepped by hand, each batch and each epoch another."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        self.lr_schedulers()[0].step()

    def on_train_epoch_end(self) -> None:
        self.lr_schedulers()[1].step(self.trainer.callback_metrics["train_loss_epoch"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)
        by_step = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        by_loss = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return [optimizer], [by_step, by_loss]


add("manual_schedules", ManualSchedule)


class Adversarial(Task):
    """Two networks that play against each other."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.judge = nn.Sequential(nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        maker, judge = self.optimizers()
        self.toggle_optimizer(maker)
        noise = torch.randn_like(batch[0])
        loss = -self.judge(self(noise).unsqueeze(1)).mean()
        self.manual_backward(loss)
        maker.step()
        maker.zero_grad()
        self.untoggle_optimizer(maker)
        if batch_idx % 2 == 0:
            self.toggle_optimizer(judge)
            made = self(noise).detach().unsqueeze(1)
            judged = self.judge(made).mean() - self.judge(batch[1].unsqueeze(1)).mean()
            self.manual_backward(judged)
            judge.step()
            judge.zero_grad()
            self.untoggle_optimizer(judge)
            self.log("judged", judged.detach(), on_step=True, on_epoch=True)
        self.log("train_loss", loss.detach(), on_epoch=True)

    def configure_optimizers(self) -> Any:
        maker = torch.optim.Adam(self.net.parameters(), 0.02, betas=(0.5, 0.9))
        judge = torch.optim.RMSprop(self.judge.parameters(), 0.01)
        decay = torch.optim.lr_scheduler.ExponentialLR(judge, 0.9)
        return [maker, judge], [decay]


add("adversarial", Adversarial)


class Alternates(Task):
    """Freezes one part of itself in every second batch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net[0].requires_grad_(batch_idx % 2 == 0)


add("alternates_frozen_layers", Alternates)


class OwnStep(Task):
    """Warms its rate up in ``optimizer_step``, and draws a number there."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        optimizer.step(closure=closure)
        for group in optimizer.param_groups:
            group["lr"] = 0.02 * min(1.0, (self.trainer.global_step + 1) / 10)
        with torch.no_grad():
            self.net[0].weight.add_(0.001 * torch.randn(6, 4))


add("own_optimizer_step", OwnStep)


class TwoLoaders(Task):
    """Keeps gradients where its own zero_grad leaves them."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2:
            optimizer.zero_grad(set_to_none=False)


add("keeps_gradients_over_steps", TwoLoaders)


class Smoothed(Task):
    """Its gradients are changed by a hook with a memory, kept in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("smooth", torch.zeros(6, 4))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradient = self.net[0].weight.grad
        self.smooth = 0.8 * self.smooth + 0.2 * gradient
        gradient.copy_(self.smooth)


add("smooths_gradients", Smoothed)


class ByStage(Task):
    """Trains its parts one epoch after the other, by an optimizer that is made anew."""

    def train_dataloader(self) -> Any:
        return DataLoader(table(50), 8, shuffle=True, drop_last=True)

    def on_train_epoch_start(self) -> None:
        self.net[0].requires_grad_(self.current_epoch != 1)
        self.net[3].requires_grad_(self.current_epoch != 2)


add("trains_by_stages", ByStage)
