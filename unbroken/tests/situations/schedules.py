"""Learning-rate schedules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    MultiplicativeLR,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.optim.swa_utils import SWALR

from tests.situations.situation import Task, add


def follows(make: Callable[[Optimizer], Any], **config: Any) -> Callable[[], Task]:
    """A task with a schedule, and how Lightning is to step it."""

    class Scheduled(Task):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)
            return [optimizer], [{"scheduler": make(optimizer), **config}]

    return Scheduled


BY_EPOCH: dict[str, Callable[[Optimizer], Any]] = {
    "constant": lambda o: ConstantLR(o, 0.5, 2),
    "linear": lambda o: LinearLR(o, 0.1, total_iters=2),
    "step": lambda o: StepLR(o, 1, 0.5),
    "multi_step": lambda o: MultiStepLR(o, [1, 2], 0.3),
    "exponential": lambda o: ExponentialLR(o, 0.7),
    "lambda": lambda o: LambdaLR(o, lambda epoch: 0.6**epoch),
    "multiplicative": lambda o: MultiplicativeLR(o, lambda epoch: 0.6),
    "polynomial": lambda o: PolynomialLR(o, 3, 2.0),
    "swa": lambda o: SWALR(o, 0.01, anneal_epochs=2),
}
BY_STEP: dict[str, Callable[[Optimizer], Any]] = {
    "cosine": lambda o: CosineAnnealingLR(o, 10),
    "warm_restarts": lambda o: CosineAnnealingWarmRestarts(o, 3, 2),
    "one_cycle": lambda o: OneCycleLR(o, 0.2, total_steps=25),
    "cyclic": lambda o: CyclicLR(o, 0.01, 0.1, step_size_up=4, mode="exp_range", gamma=0.9),
    "cyclic_momentum": lambda o: CyclicLR(o, 0.01, 0.1, step_size_up=3, cycle_momentum=True),
    "sequential": lambda o: SequentialLR(
        o, [LinearLR(o, 0.1, total_iters=4), CosineAnnealingLR(o, 15)], [4]
    ),
    "chained": lambda o: ChainedScheduler([LinearLR(o, 0.1, total_iters=4), ExponentialLR(o, 0.9)]),
    "step_of_lambda": lambda o: LambdaLR(o, lambda step: 1 / (1 + step)),
}
for schedule_name, make_schedule in BY_EPOCH.items():
    add(f"schedule_{schedule_name}", follows(make_schedule))
for schedule_name, make_schedule in BY_STEP.items():
    add(f"schedule_{schedule_name}_by_step", follows(make_schedule, interval="step"))

plateau = {"monitor": "val_loss", "reduce_on_plateau": True}
add("plateau_of_validation", follows(lambda o: ReduceLROnPlateau(o, patience=0), **plateau))
add(
    "plateau_of_training",
    follows(lambda o: ReduceLROnPlateau(o, patience=0), monitor="train_loss_epoch"),
)
add(
    "plateau_of_steps",
    follows(
        lambda o: ReduceLROnPlateau(o, patience=1, cooldown=1),
        monitor="train_loss_step",
        interval="step",
        frequency=2,
    ),
)
add(
    "plateau_of_validations_inside_epochs",
    follows(
        lambda o: ReduceLROnPlateau(o, patience=0),
        monitor="val_loss",
        interval="step",
        frequency=3,
    ),
    val_check_interval=3,
)
add(
    "schedule_every_second_epoch",
    follows(lambda o: StepLR(o, 1, 0.5), frequency=2),
    max_epochs=4,
)
add(
    "schedule_by_accumulated_steps",
    follows(lambda o: CosineAnnealingLR(o, 10), interval="step"),
    accumulate_grad_batches=3,
)


class KnowsItsLength(Task):
    """A schedule over all steps that the Trainer expects."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 0.02)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = OneCycleLR(optimizer, 0.1, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


add("schedule_over_estimated_steps", KnowsItsLength)


class OwnSchedulerStep(Task):
    """Steps its schedule by the number of updates, as timm's are."""

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step(self.global_step)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.05)
        return [optimizer], [{"scheduler": LambdaLR(optimizer, lambda n: 0.97**n)}]


add("own_scheduler_step", OwnSchedulerStep)


class Handmade:
    """A schedule that inherits nothing of torch's."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.05 / (1 + self.steps)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


class WithHandmade(Task):
    """Is stepped as it says itself."""

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.05)
        return [optimizer], [{"scheduler": Handmade(optimizer), "interval": "step"}]


add("handmade_schedule", WithHandmade)
