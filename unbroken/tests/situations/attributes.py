"""State in plain attributes, which no state dict holds."""

from __future__ import annotations

import copy
import itertools
from collections import deque
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningDataModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset
from torchmetrics import MeanMetric
from unbroken.tasks.supervised import SupervisedModule

from tests.situations.situation import Task, add, table


class Collects(Task):
    """Collects the outputs of an epoch and of a validation in lists, as Lightning's guide says."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []
        self.validated: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.outputs.append(loss)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("median", torch.stack(self.outputs).median().detach())
        self.outputs.clear()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        super().validation_step(batch, batch_idx)
        self.validated.append(self.loss(batch))

    def on_validation_epoch_end(self) -> None:
        self.log("val_median", torch.stack(self.validated).median())
        self.validated.clear()


add("collects_outputs_in_lists", Collects)
add("collects_outputs_in_lists_and_validates_inside_epochs", Collects, val_check_interval=3)
add("collects_outputs_and_accumulates", Collects, accumulate_grad_batches=2)
add("longer_collects_outputs", Collects, shorter={"max_steps": 10})


class DrawsItself(Task):
    """Adds noise from generators of its own, one in an object that is no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.draw = torch.Generator().manual_seed(1)
        self.helper = {"noise": np.random.default_rng(2)}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        noise = 0.1 * torch.randn(x.shape, generator=self.draw)
        return super().training_step([x + noise + self.helper["noise"].normal(), y], batch_idx)


add("generators_of_a_module", DrawsItself)
add("generators_of_a_module_and_validation_inside_epochs", DrawsItself, val_check_interval=3)


class Counts(Task):
    """Counts steps and epochs, and weighs its loss by them."""

    seen = 0

    def __init__(self) -> None:
        super().__init__()
        self.epochs = 0
        self.best = float("inf")

    def on_train_epoch_start(self) -> None:
        self.epochs += 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += 1
        loss = super().training_step(batch, batch_idx)
        self.best = min(self.best, float(loss))
        self.log("best", self.best)
        return loss * (1 + 0.01 * self.seen + 0.1 * self.epochs)

    def on_validation_start(self) -> None:
        self.seen += 10


add("counts_in_attributes", Counts)
add("counts_in_attributes_and_validates_inside_epochs", Counts, val_check_interval=2)
add("two_ranks_count_in_attributes", Counts, ranks=2)


class Window(Task):
    """Keeps the last losses in a queue, a running mean in a tensor, and sums in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.window: deque[float] = deque(maxlen=5)
        self.mean = torch.zeros(())
        self.sums: dict[str, list[float]] = {"losses": []}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.window.append(float(loss))
        self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        self.sums["losses"].append(float(loss))
        self.log("window", sum(self.window) / len(self.window))
        self.log("sum", sum(self.sums["losses"]))
        return loss * (1 + self.mean)


add("windows_and_means_in_attributes", Window)


class Dropout(Task):
    """Raises the dropout of a layer with each batch."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.net[2].p = min(0.5, self.net[2].p + 0.02)


add("dropout_by_batch_and_not_saved", Dropout)


class CountingData(LightningDataModule):
    """Counts its batches, and changes them by the count."""

    count = 0

    def train_dataloader(self) -> Any:
        return DataLoader(table(50), 8, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(table(20, 1), 8)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.trainer.training:
            self.count += 1
        return [batch[0] + 0.01 * self.count, batch[1]]


add("data_module_counts_in_an_attribute", Task, data=CountingData)


class CountingSubclass(SupervisedModule):
    """Counts steps beside the sums that the template's own module keeps, and weighs its loss."""

    def __init__(self) -> None:
        network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        super().__init__(network, loss="MSELoss", monitor="val/loss", lr=0.05)
        self.seen = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += 1
        return super().training_step(batch, batch_idx) * (1 + 0.01 * self.seen)

    def log_means(self, split: str, means: dict[str, Tensor]) -> None:
        super().log_means(split, means)
        if split == "val":
            # The name that all situations follow.
            self.log("val_loss", means["loss"])


add("subclass_and_its_data_module_count_in_attributes", CountingSubclass, data=CountingData)


class Teacher(Task):
    """A teacher that follows the weights, kept out of the module's parts in a list of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher: list[Tensor] = [p.detach().clone() for p in self.parameters()]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        for mine, weight in zip(self.teacher, self.parameters(), strict=True):
            mine.mul_(0.9).add_(weight.detach(), alpha=0.1)
        return loss + 0.1 * self.teacher[0].norm() * self.net[0].weight.norm()


add("teacher_in_a_list", Teacher)


class Meter:
    """A running sum, and averaged weights, in an object that is no layer."""

    def __init__(self, module: nn.Module) -> None:
        self.sum = 0.0
        self.shadow = {name: p.detach().clone() for name, p in module.named_parameters()}

    def add(self, module: nn.Module, loss: Tensor) -> None:
        self.sum += float(loss)
        for name, weight in module.named_parameters():
            self.shadow[name].mul_(0.9).add_(weight.detach(), alpha=0.1)


class Metered(Task):
    """Keeps its sums and averages in such an object."""

    def __init__(self) -> None:
        super().__init__()
        self.meters = {"train": Meter(self.net)}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        meter = self.meters["train"]
        meter.add(self.net, loss.detach())
        return loss * (1 + 0.01 * meter.sum + meter.shadow["0.weight"].norm())


add("meters_and_averages_in_objects", Metered)
add("meters_and_averages_in_objects_and_validation_inside_epochs", Metered, val_check_interval=3)


class Pool(LightningDataModule):
    """Trains on those samples that are in the pool."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = list(range(20))

    def train_dataloader(self) -> Any:
        return DataLoader(Subset(table(60), self.pool), 8, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(table(20, 1), 8)


class Asks(Task):
    """Asks for further samples at each epoch's end, as active learning does."""

    def on_train_epoch_end(self) -> None:
        pool = self.trainer.datamodule.pool
        pool.extend(range(len(pool), len(pool) + 10))


add("active_learning", Asks, data=Pool, reload_dataloaders_every_n_epochs=1)


class HiddenTeacher(Task):
    """A teacher that follows the weights, hidden from the state dict in a list, and a metric in a
    dictionary.
    """

    def __init__(self) -> None:
        super().__init__()
        self.teacher = [copy.deepcopy(self.net)]
        self.metrics = {"loss": MeanMetric()}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.metrics["loss"].update(loss.detach())
        with torch.no_grad():
            wanted = self.teacher[0](batch[0]).squeeze(1)
            pairs = zip(self.teacher[0].parameters(), self.net.parameters(), strict=True)
            for mine, weight in pairs:
                mine.lerp_(weight, 0.1)
        return (
            loss + nn.functional.mse_loss(self(batch[0]), wanted) * self.metrics["loss"].compute()
        )


add("teacher_hidden_in_a_list", HiddenTeacher)


class CopiesWeights(Callback):
    """Averages the weights in a copy of the network, and mixes them in at each epoch's end."""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.average = copy.deepcopy(module.net)

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        with torch.no_grad():
            pairs = zip(self.average.parameters(), module.net.parameters(), strict=True)
            for mine, weight in pairs:
                mine.lerp_(weight, 0.1)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        with torch.no_grad():
            pairs = zip(self.average.parameters(), module.net.parameters(), strict=True)
            for mine, weight in pairs:
                weight.lerp_(mine, 0.1)


add("callback_averages_in_a_copy", Task, callbacks=lambda: [CopiesWeights()])


class Cycles(Task):
    """Weighs its losses by turns, from an iterator."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = itertools.cycle([1.0, 2.0, 0.5])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * next(self.turns)


add(
    "iterator_in_an_attribute",
    Cycles,
    says="a resume may not be exact: module.turns changes in training",
    is_exact=False,
)
