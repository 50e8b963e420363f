"""Callbacks: Lightning's own, and some of the user's that keep a state."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    SpikeDetection,
    StochasticWeightAveraging,
    Timer,
    WeightAveraging,
)
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from tests.situations.situation import Keeps, Task, add

add("ema", Task, callbacks=lambda: [EMAWeightAveraging(decay=0.9)])
add(
    "ema_on_validations_inside_epochs",
    Task,
    callbacks=lambda: [EMAWeightAveraging(decay=0.9)],
    val_check_interval=2,
)
add(
    "ema_every_3_steps",
    Task,
    callbacks=lambda: [EMAWeightAveraging(decay=0.9, update_every_n_steps=3)],
)


class AveragesEpochs(WeightAveraging):
    """Averages the weights of epochs' ends."""

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return epoch_idx is not None and epoch_idx > 0


add("averages_epochs", Task, callbacks=lambda: [AveragesEpochs()])
add(
    "averages_with_buffers",
    Task,
    callbacks=lambda: [WeightAveraging(use_buffers=True, multi_avg_fn=get_ema_multi_avg_fn(0.8))],
)
add(
    "swa",
    Task,
    callbacks=lambda: [StochasticWeightAveraging(0.01, swa_epoch_start=1)],
    says="resumes from its last epoch's end",
    # Lightning's callback makes them anew only as an epoch starts.
    ignores_when_over=("schedules", "scheduler_state", "n_averaged"),
    max_epochs=4,
)


class Backboned(Task):
    """A task with a backbone."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())

    def forward(self, x: Any) -> Any:
        return super().forward(self.backbone(x))

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.Adam(trained, 0.02)


add(
    "backbone_finetuning",
    Backboned,
    callbacks=lambda: [BackboneFinetuning(1, lambda epoch: 1.5, verbose=False)],
)


class Thaws(BaseFinetuning):
    """Thaws the backbone in the second epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, lr=0.005)


add("base_finetuning", Backboned, callbacks=lambda: [Thaws()])


class StopsItself(Task):
    """Logs a loss that does not get better for long."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.log("val_loss", float(self.global_step > 9) + 1.0)


add(
    "early_stopping",
    StopsItself,
    max_epochs=6,
    callbacks=lambda: [EarlyStopping("val_loss", patience=1)],
)
add(
    "early_stopping_inside_an_epoch",
    StopsItself,
    max_epochs=6,
    val_check_interval=2,
    callbacks=lambda: [EarlyStopping("val_loss", patience=5)],
)
add(
    "early_stopping_of_training",
    Task,
    max_epochs=5,
    callbacks=lambda: [
        EarlyStopping("train_loss_epoch", patience=1, check_on_train_epoch_end=True, min_delta=0.5)
    ],
)
add(
    "accumulation_by_epoch",
    Task,
    max_epochs=4,
    callbacks=lambda: [GradientAccumulationScheduler({1: 2, 2: 3})],
)
add("learning_rate_monitor", Task, callbacks=lambda: [LearningRateMonitor("step", True, True)])
add("learning_rate_monitor_of_epochs", Task, callbacks=lambda: [LearningRateMonitor("epoch")])
add("timer", Task, callbacks=lambda: [Timer("00:01:00:00")], ignores=("callbacks",))
add("lambda_callback", Task, callbacks=lambda: [LambdaCallback()])
theirs = ("_path", "dirpath", "best_k_models")
add(
    "model_checkpoint_beside",
    Task,
    ignores=theirs,
    callbacks=lambda: [
        ModelCheckpoint("theirs", monitor="val_loss", save_top_k=2, enable_version_counter=False)
    ],
)
add(
    "model_checkpoint_every_2_steps",
    Task,
    ignores=theirs,
    callbacks=lambda: [ModelCheckpoint("theirs", every_n_train_steps=2, save_top_k=-1)],
)
add(
    "spike_detection",
    Task,
    says="not exact with SpikeDetection",
    is_exact=False,
    callbacks=lambda: [SpikeDetection(rtol=1000.0, exclude_batches_path="spikes/batches.json")],
)
add(
    "pruning",
    Task,
    says="not exact with ModelPruning",
    is_exact=False,
    callbacks=lambda: [ModelPruning("l1_unstructured", amount=0.2)],
)

HOOKS = [
    "on_fit_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_train_epoch_end",
]


class Counts(Keeps, Callback):
    """Counts one hook, as a state, and lets the count weigh in the training."""

    count = 0


def counts_at(hook: str) -> type[Counts]:
    def count(self: Any, trainer: Any, module: Any, *_: Any) -> None:
        self.count += 1

    return type(f"CountsAt_{hook}", (Counts,), {hook: count})


for hook_name in HOOKS:
    kind = counts_at(hook_name)
    # What a start counts is counted at each start: only the checkpoint's count stays.
    add(f"callback_counts_{hook_name}", Task, callbacks=lambda k=kind: [k()], val_check_interval=3)


class CountsItself(Keeps, Callback):
    """Is stateful, has several instances, and raises the rate by its count."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.count = 0

    @property
    def state_key(self) -> str:
        return f"CountsItself{self.step}"

    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        self.count += self.step
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = 0.001 * (1 + self.count)


add("several_callbacks_of_one_class", Task, callbacks=lambda: [CountsItself(1), CountsItself(2)])


class KeepsTensors(Callback):
    """Keeps the best outputs, as tensors, by its hooks of a checkpoint."""

    def __init__(self) -> None:
        self.best = torch.zeros(0)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.best = torch.cat([self.best, outputs["loss"].detach().reshape(1)]).sort().values[:5]
        module.log("best", self.best[0])

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["best_outputs"] = self.best

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self.best = checkpoint["best_outputs"]


add("callback_adds_to_the_checkpoint", Task, callbacks=lambda: [KeepsTensors()])


class AddsInValidation(KeepsTensors):
    """The same, in validations."""

    on_train_batch_end = Callback.on_train_batch_end  # type: ignore[assignment]

    def on_validation_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        value = trainer.callback_metrics.get("train_loss_step", torch.zeros(())).reshape(1)
        self.best = torch.cat([self.best, value]).sort().values[-5:]


add(
    "callback_adds_to_the_checkpoint_in_validation",
    Task,
    val_check_interval=3,
    callbacks=lambda: [AddsInValidation()],
)


class StopsByChance(Callback):
    """Ends the training when a number that it draws is small."""

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if torch.rand(()) < 0.04:
            trainer.should_stop = True


add("stops_by_chance", Task, callbacks=lambda: [StopsByChance()], max_epochs=5)


class ScalesBatches(Callback):
    """Changes the batch in place before the step."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        batch[0].mul_(1 + 0.1 * torch.rand(()))


add("callback_changes_batches", Task, callbacks=lambda: [ScalesBatches()])


class SwapsWeights(Callback):
    """Validates other weights than are trained."""

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.trained = [p.detach().clone() for p in module.parameters()]
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(0.5)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        with torch.no_grad():
            for parameter, value in zip(module.parameters(), self.trained, strict=True):
                parameter.copy_(value)


add("validates_other_weights", Task, callbacks=lambda: [SwapsWeights()])
add(
    "validates_other_weights_inside_epochs",
    Task,
    callbacks=lambda: [SwapsWeights()],
    val_check_interval=2,
)
