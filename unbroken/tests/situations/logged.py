"""What is logged, from where and how, and metrics of torchmetrics."""

from __future__ import annotations

from typing import Any

import torch
import torchmetrics
from torch import Tensor
from torch.utils.data import DataLoader

from tests.situations.situation import Task, add, table


class LogsEveryWay(Task):
    """Logs in all ways from its step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        value = loss.detach()
        self.log("sum", value, on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("max", value, on_step=True, on_epoch=True, reduce_fx=torch.max)
        self.log("min", value, on_step=False, on_epoch=True, reduce_fx=min)
        self.log("mean", value, on_step=False, on_epoch=True, batch_size=3)
        self.log("step_only", value, on_step=True, on_epoch=False)
        self.log("a_number", batch_idx * 0.5, on_epoch=True)
        self.log("synced", value, on_epoch=True, sync_dist=True)
        self.log_dict({"a": value, "b": 2 * value}, on_epoch=True)
        if batch_idx % 3 == 1:
            self.log("now_and_then", value, on_step=True, on_epoch=True)
        return loss


add("logs_every_way", LogsEveryWay)
add("logs_every_way_and_accumulates", LogsEveryWay, accumulate_grad_batches=2)
add("logs_every_way_and_validates_inside_epochs", LogsEveryWay, val_check_interval=2)


class LogsFromHooks(Task):
    """Logs from many hooks."""

    def on_train_epoch_start(self) -> None:
        self.log("at_epoch_start", torch.rand(()))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("at_batch_start", batch[1].sum(), on_step=True, on_epoch=True)

    def on_before_backward(self, loss: Tensor) -> None:
        self.log("at_backward", loss.detach(), on_step=False, on_epoch=True)

    def on_after_backward(self) -> None:
        self.log("after_backward", self.net[0].weight.grad.norm(), on_epoch=True)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("at_step", self.net[0].weight.norm().detach(), on_step=True, on_epoch=True)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.log("at_zero_grad", self.net[3].weight.norm().detach(), on_epoch=True)

    def on_train_batch_end(self, *_: Any) -> None:
        self.log("at_batch_end", torch.rand(()), on_step=True, on_epoch=True)

    def on_train_epoch_end(self) -> None:
        self.log("at_epoch_end", torch.rand(()))

    def on_validation_start(self) -> None:
        self.log("at_validation", float(self.global_step))

    def on_validation_epoch_end(self) -> None:
        self.log("val_at_end", torch.rand(()))


add("logs_from_hooks", LogsFromHooks)
add("logs_from_hooks_and_validates_inside_epochs", LogsFromHooks, val_check_interval=3)


class SeveralValidations(Task):
    """Two validation sets, with values of each step."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        loss = self.loss(batch)
        self.log("val_loss", loss, on_step=True, on_epoch=True)
        self.log(f"val_own_{dataloader_idx}", loss, add_dataloader_idx=False)

    def val_dataloader(self) -> Any:
        return [DataLoader(table(20, 1), 8), DataLoader(table(9, 2), 4)]


add("several_validations", SeveralValidations, monitor="val_loss_epoch/dataloader_idx_0")
add(
    "several_validations_inside_epochs",
    SeveralValidations,
    val_check_interval=2,
    monitor="val_own_1",
)


class Collected(Task):
    """A collection whose metrics share their sums, logged as an object."""

    def __init__(self) -> None:
        super().__init__()
        both = {
            "mse": torchmetrics.MeanSquaredError(),
            "rmse": torchmetrics.MeanSquaredError(squared=False),
            "mae": torchmetrics.MeanAbsoluteError(),
        }
        self.errors = torchmetrics.MetricCollection(both)
        self.val_errors = self.errors.clone(prefix="val_")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.errors.update(self(batch[0]).detach(), batch[1])
        self.log_dict(self.errors, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        super().validation_step(batch, batch_idx)
        self.val_errors.update(self(batch[0]), batch[1])

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.val_errors.compute())
        self.val_errors.reset()


class PlainSums(torchmetrics.Metric):
    """A metric of the user's own, which keeps its sums in plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0
        self.values: list[float] = []

    def update(self, value: Tensor) -> None:
        self.total += float(value)
        self.values.append(float(value))

    def compute(self) -> Tensor:
        return torch.tensor(self.total / len(self.values) + max(self.values))

    def reset(self) -> None:
        super().reset()
        self.total = 0.0
        self.values = []


class LogsPlainSums(Task):
    """Logs such a metric at each epoch's end."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = PlainSums()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.sums.update(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("sums", self.sums.compute())
        self.sums.reset()


add("metric_with_plain_sums", LogsPlainSums)
add("metric_collection", Collected)
add("metric_collection_and_validates_inside_epochs", Collected, val_check_interval=3)


class Wrapped(Task):
    """Metrics around metrics, and metrics that keep lists."""

    def __init__(self) -> None:
        super().__init__()
        self.running = torchmetrics.wrappers.Running(torchmetrics.MeanMetric(), 4)
        self.range = torchmetrics.MinMaxMetric(torchmetrics.MeanMetric())
        self.tracker = torchmetrics.MetricTracker(torchmetrics.MeanSquaredError(), maximize=False)
        self.booted = torchmetrics.BootStrapper(torchmetrics.MeanSquaredError(), 3)
        self.ranks = torchmetrics.SpearmanCorrCoef()
        self.all = torchmetrics.CatMetric()
        self.by_output = torchmetrics.MultioutputWrapper(torchmetrics.MeanSquaredError(), 2)

    def on_train_epoch_start(self) -> None:
        self.tracker.increment()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        guess = self(batch[0]).detach()
        self.running.update(loss.detach())
        self.range.update(loss.detach())
        self.tracker.update(guess, batch[1])
        self.booted.update(guess, batch[1])
        self.ranks.update(guess, batch[1])
        self.all.update(guess)
        self.by_output.update(guess.reshape(-1, 2), batch[1].reshape(-1, 2))
        self.log("running", self.running.compute())
        self.log("lowest", self.range.compute()["min"])
        self.log("ranks", self.ranks, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("spread", self.all.compute().std())
        self.log("booted", self.booted.compute()["mean"])
        self.log("by_output", self.by_output.compute().sum())
        self.log("best_epoch", float(self.tracker.best_metric(return_step=True)[1]))
        self.all.reset()
        self.booted.reset()
        self.by_output.reset()


add("metrics_around_metrics", Wrapped)
add("metrics_around_metrics_and_validates_inside_epochs", Wrapped, val_check_interval=2)


class NeverReset(Task):
    """A metric over the whole training, and one over all validations."""

    def __init__(self) -> None:
        super().__init__()
        self.overall = torchmetrics.MeanMetric()
        self.validations = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("overall", self.overall(loss.detach()), on_step=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.validations.update(self.loss(batch))
        super().validation_step(batch, batch_idx)

    def on_validation_end(self) -> None:
        self.logger.log_metrics({"validations": float(self.validations.compute())}, 0)


add("metrics_that_are_never_reset", NeverReset)
add("metrics_that_are_never_reset_inside_epochs", NeverReset, val_check_interval=3)


class OutputsOfAnEpoch(Task):
    """Keeps the outputs of an epoch in a list, as was Lightning's habit, in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("outputs", torch.zeros(0))

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        self.outputs = state[prefix + "outputs"].clone()
        super()._load_from_state_dict(state, prefix, *args)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.outputs = torch.cat([self.outputs, loss.detach().reshape(1)])
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("median", self.outputs.median())
        self.outputs = torch.zeros(0)


add("outputs_of_an_epoch", OutputsOfAnEpoch)


class LogsWithTheLogger(Task):
    """Logs past Lightning."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.logger.log_metrics({"past": float(loss)}, self.global_step)
        return loss

    def on_validation_end(self) -> None:
        self.logger.log_metrics({"past_validation": torch.rand(()).item()}, self.global_step)


add("logs_past_lightning", LogsWithTheLogger)
add("logs_past_lightning_inside_epochs", LogsWithTheLogger, val_check_interval=2)
