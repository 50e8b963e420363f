"""Hooks of modules, callbacks and data modules that change rates, buffers, layers or data."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.situations.situation import Keeps, Manual, Task, add, table


def lowers_rates(module: LightningModule) -> None:
    for group in module.trainer.optimizers[0].param_groups:
        group["lr"] *= 0.8


def draws_momenta(module: LightningModule) -> None:
    for group in module.trainer.optimizers[0].param_groups:
        group["betas"] = (random.uniform(0.8, 0.9), 0.99)


def counts_in_a_buffer(module: LightningModule) -> None:
    module.count += 1


def turns_weights(module: LightningModule) -> None:
    with torch.no_grad():
        module.net[3].weight.mul_(0.9).add_(0.01 * float(np.random.normal()))


def freezes_a_layer(module: LightningModule) -> None:
    module.net[0].requires_grad_(not module.net[0].weight.requires_grad)


def empties_the_optimizer(module: LightningModule) -> None:
    module.trainer.optimizers[0].state.clear()


HOOKS = (
    "on_fit_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_zero_grad",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_train_epoch_end",
)
ACTS = (lowers_rates, draws_momenta, counts_in_a_buffer, turns_weights, freezes_a_layer)


class Acted(Task):
    """Trains with all that hooks may change."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * (1 + 0.01 * self.count)


class Acts(Callback):
    """Does one thing at one hook."""

    def __init__(self, act: Any) -> None:
        self.act = act


def act_at(hook: str, act: Any) -> tuple[type[Acted], type[Acts]]:
    """A module that acts at a hook of its own, and a callback that does."""

    def of_module(self: Any, *_: Any) -> None:
        act(self)

    def of_callback(self: Any, trainer: Any, module: Any, *_: Any) -> None:
        act(module)

    return type("Acting", (Acted,), {hook: of_module}), type("ActsAt", (Acts,), {hook: of_callback})


for number, hook_name in enumerate(HOOKS):
    for offset, act in enumerate(ACTS):
        if hook_name == "on_before_zero_grad" and act is turns_weights:
            # A forward pass waits for its backward pass there.
            continue
        module_kind, callback_kind = act_at(hook_name, act)
        title = f"{act.__name__}_at_{hook_name}"
        if (number + offset) % 2:
            add(f"module_{title}", module_kind)
        else:
            add(f"callback_{title}", Acted, callbacks=lambda k=callback_kind, a=act: [k(a)])

for hook_name in ("on_train_start", "on_train_epoch_start", "on_validation_end"):
    module_kind, _ = act_at(hook_name, empties_the_optimizer)
    add(f"module_empties_the_optimizer_at_{hook_name}", module_kind)


class Rate(Task):
    """Halves its rate at each epoch's start."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch > 0:
            for group in self.optimizers().param_groups:
                group["lr"] *= 0.5


add("rate_at_epoch_start", Rate)


class SteppedAtStart(Manual):
    """Steps its schedule at each epoch's start."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch > 0:
            self.lr_schedulers().step()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


add("manual_schedule_at_epoch_start", SteppedAtStart)


class CountsInData(Keeps, LightningDataModule):
    """Counts in each of its hooks, and gives its samples by the count."""

    count = 0

    def train_dataloader(self) -> Any:
        return DataLoader(table(50), 8, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(table(20, 1), 8)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.trainer.training:
            self.count += 1
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + 0.001 * self.count, batch[1]]


add("data_module_counts", Task, data=CountsInData)


class ChangesData(Task):
    """Changes its data module at each epoch's start."""

    def on_train_epoch_start(self) -> None:
        self.trainer.datamodule.count += 10


add("data_module_changed_at_epoch_start", ChangesData, data=CountsInData)


class CountsInTransfer(Task):
    """Adds noise to a batch when it is moved, from a generator of torch."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + 0.1 * torch.randn_like(batch[0]), batch[1]]


add("noise_at_transfer", CountsInTransfer)


class OwnState(Task):
    """Counts in plain attributes that it saves and loads itself."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0
        self.epochs = 0

    def on_train_epoch_start(self) -> None:
        self.epochs += 1

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen += 1

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * (1 + 0.01 * self.seen + 0.1 * self.epochs)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = {"seen": self.seen, "epochs": self.epochs}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = checkpoint["mine"]["seen"]
        self.epochs = checkpoint["mine"]["epochs"]


add("module_saves_what_it_counts", OwnState)


class OwnStateOfValidation(OwnState):
    """The same, and it counts inside a validation, too."""

    def on_validation_batch_end(self, *_: Any) -> None:
        self.seen += 100

    def on_validation_start(self) -> None:
        self.epochs += 1


add("module_saves_what_it_counts_in_validation", OwnStateOfValidation)
add("module_counts_in_validation_inside_epochs", OwnStateOfValidation, val_check_interval=3)


class ExtraState(Task):
    """Counts in what a state dict holds beside tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += 1
        return super().training_step(batch, batch_idx) * (1 + 0.01 * self.seen)

    def on_validation_start(self) -> None:
        self.seen += 5

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


add("module_has_extra_state", ExtraState)
add("module_has_extra_state_and_validates_inside_epochs", ExtraState, val_check_interval=3)


class Queue(Task):
    """A queue of samples that its state dict leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(8), persistent=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.queue = torch.cat([self.queue[len(batch[1]) :], batch[1]])
        return loss * (1 + self.queue.mean()) ** 2


add("queue_that_is_not_persistent", Queue)


class GrowingQueue(Task):
    """A queue that grows from nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(0), persistent=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.queue = torch.cat([self.queue, batch[1]])[-20:]
        return loss * (1 + self.queue.mean()) ** 2


add("queue_that_grows", GrowingQueue)


class Graph(Task):
    """A sparse matrix that grows, and that its state dict leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("graph", torch.eye(3).to_sparse(), persistent=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.graph = (self.graph + 0.1 * torch.eye(3).to_sparse()).coalesce()
        return super().training_step(batch, batch_idx) * self.graph.to_dense().mean()


class CompressedGraph(Graph):
    """The same, compressed by rows."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.graph = (self.graph.to_dense() + 0.1 * torch.eye(3)).to_sparse_csr()
        return Task.training_step(self, batch, batch_idx) * self.graph.to_dense().mean()


class LateBuffers(Task):
    """Fills a buffer that is None, and makes further ones, by its first batch."""

    is_persistent = False

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", None, persistent=self.is_persistent)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.first is None:
            self.first = batch[1][:2].clone()
            self.register_buffer("seen", torch.zeros(()), persistent=self.is_persistent)
        self.seen += 1
        return super().training_step(batch, batch_idx) * (1 + self.first.mean() + 0.1 * self.seen)


class SavedLateBuffers(LateBuffers):
    """The same, in the state dict."""

    is_persistent = True


class Expanded(Task):
    """A buffer whose places share their memory, in the state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1).expand(6))


add("sparse_buffer_that_is_not_persistent", Graph)
add("compressed_buffer_that_is_not_persistent", CompressedGraph)
add("buffers_that_training_makes", LateBuffers)
add("buffers_that_training_makes_and_saves", SavedLateBuffers)
add("expanded_buffer", Expanded)


class ForwardMean(Task):
    """A running mean of all inputs, also of the validation, that its state dict leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = (0.9 * self.mean + 0.1 * x.mean(0)).detach()
        return super().forward(x - self.mean)


add("running_mean_also_in_validation", ForwardMean)
add("running_mean_also_in_validation_inside_epochs", ForwardMean, val_check_interval=2)


class BatchNormInValidation(Task):
    """Updates its statistics and its weights in the validation."""

    def on_validation_epoch_start(self) -> None:
        self.net.train()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        super().validation_step(batch, batch_idx)
        with torch.no_grad():
            self.net[3].bias.add_(0.01)


add("validation_changes_weights", BatchNormInValidation)
add("validation_changes_weights_inside_epochs", BatchNormInValidation, val_check_interval=2)


class FrozenStatistics(Task):
    """Trains with its batch norm in eval mode from the second epoch on."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch > 0:
            self.net[1].eval()


add("eval_mode_from_the_second_epoch", FrozenStatistics)


class EvalModeByBatch(Task):
    """Switches dropout off and on between batches."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.net[2].train(batch_idx % 3 != 0)


add("eval_mode_by_batch", EvalModeByBatch)


class DropoutRate(Task):
    """Changes a plain number of a layer by the epoch."""

    def on_train_epoch_start(self) -> None:
        self.net[2].p = 0.1 * (1 + self.current_epoch)


add("dropout_by_epoch", DropoutRate)


class DropoutRateSteps(Task):
    """Raises a plain number of a layer with each batch, and saves it by itself."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.net[2].p = min(0.5, self.net[2].p + 0.02)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["p"] = self.net[2].p

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.net[2].p = checkpoint["p"]


add("dropout_by_batch", DropoutRateSteps)


class Grows(Task):
    """Makes a second head when training starts."""

    def configure_model(self) -> None:
        if not hasattr(self, "head"):
            self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.head(self.net[0](x)).squeeze(1)


add("makes_layers_in_configure_model", Grows)


class DrawsAtEpochs(Task):
    """Draws from all generators at the start and the end of epochs and validations."""

    def draw(self) -> None:
        number = random.random() + float(np.random.rand()) + float(torch.rand(()))
        self.log("drawn", number)

    def on_train_epoch_start(self) -> None:
        self.draw()

    def on_train_epoch_end(self) -> None:
        self.draw()

    def on_validation_epoch_end(self) -> None:
        self.log("val_drawn", random.random() + float(np.random.rand()) + float(torch.rand(())))


add("draws_at_epochs", DrawsAtEpochs)
