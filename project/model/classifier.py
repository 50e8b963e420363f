"""The Lightning module: what a step does, what is logged, how it learns."""

from functools import partial
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from unbroken import tasks

from project.model.networks import ConvNet

# Images (batch, 1, 28, 28), uint8 or float in 0-1, and their labels (batch,), int64
Batch = tuple[Tensor, Tensor]


class MNISTClassifier(LightningModule):
    """Labels MNIST's digits: a network, cross-entropy, accuracy.

    Logged, each exact over its samples and over all devices:

    - ``train/loss`` at log steps (the mean since the last one), and at an epoch's end;
    - ``train/accuracy`` at an epoch's end;
    - ``val/loss``, ``val/accuracy``, ``test/loss``, ``test/accuracy`` after the evaluation.

    A loss is in nats and without label smoothing. An accuracy is a fraction in 0-1.

    Args:
        network: Maps standardized images (batch, 1, 28, 28) to logits (batch, 10). Default:
            :class:`ConvNet`.
        lr: Peak learning rate.
        weight_decay: For weights of two or more dimensions, not for biases and norms.
        label_smoothing: Share of the target that is spread over all classes, in training.
        optimizer: Name of a class in ``torch.optim``, or the import path of another optimizer.
        optimizer_args: Further arguments of the optimizer, such as ``{momentum: 0.9}``.
        schedule: The learning rate over the run: ``constant``; ``cosine`` or ``linear`` to 0;
            ``onecycle`` (cosine up from 1/25, cosine down to 0).
        warmup_fraction: Share of the run in which the rate climbs to ``lr``.
        compile: Compile the network in place. Its checkpoints are those of the eager network.
        channels_last: Keep images and weights in channels-last order, which tensor cores and a
            CPU's convolutions like.
        activation_checkpointing: Recompute activations in the backward pass instead of storing
            them.
    """

    mean: Tensor  # (1,), of pixels in 0-1
    std: Tensor

    def __init__(
        self,
        network: nn.Module | None = None,
        lr: float = 2e-2,
        weight_decay: float = 0.01,
        label_smoothing: float = 0.1,
        optimizer: str = "AdamW",
        optimizer_args: dict[str, Any] = {},  # noqa: B006 - it is only read
        schedule: Literal["constant", "cosine", "linear", "onecycle"] = "linear",
        warmup_fraction: float = 0.2,
        compile: bool = False,
        channels_last: bool = True,
        activation_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        tasks.check_rates(lr, weight_decay, warmup_fraction, label_smoothing)
        self.save_hyperparameters(ignore=["network"])
        self.lr = lr
        self.weight_decay = weight_decay
        self.label_smoothing = label_smoothing
        self.optimizer = optimizer
        self.optimizer_args = optimizer_args
        self.schedule = schedule
        self.warmup_fraction = warmup_fraction
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format

        self.network = ConvNet() if network is None else network
        self.network.to(memory_format=self.memory_format)
        if activation_checkpointing:
            tasks.recompute_activations(self.network)
        if compile:
            self.network.compile()
        # MNIST's. In setup those of the data module take their place, where it has any.
        tasks.register_mean_and_std(self, [0.1307], [0.3081])

        # Every checkpoint holds their sums (KeepsSums in unbroken.contract): a resume adds to them.
        loss = partial(cross_entropy, reduction="none")
        self.train_means = tasks.RunningMeans(self, loss=loss, accuracy=tasks.is_right)
        self.eval_means = tasks.RunningMeans(self, loss=loss, accuracy=tasks.is_right)

    def setup(self, stage: str) -> None:
        self.train_means.reset()
        self.eval_means.reset()
        if stage == "fit":
            tasks.take_mean_and_check_logits(self, self.network)
            # All weights but biases and norms. Here, because FSDP makes every weight flat later.
            self.decays = tasks.which_decay(self.parameters())

    def forward(self, images: Tensor) -> Tensor:
        """Logits (batch, 10) of images (batch, 1, 28, 28), uint8 or float in 0-1."""
        inputs = tasks.standardized(images, self.mean, self.std)
        logits = self.network(inputs.contiguous(memory_format=self.memory_format))
        return tasks.at_least_float32(logits)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels = batch
        logits = self(images)
        self.train_means.add(logits, labels)
        return cross_entropy(logits, labels, label_smoothing=self.label_smoothing)

    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels = batch
        logits = self(images)
        self.eval_means.add(logits, labels)
        return logits  # for callbacks that look at predictions

    test_step = validation_step

    def predict_step(self, images: Tensor, batch_idx: int) -> Tensor:
        """Probabilities (batch, 10)."""
        return self(images).softmax(dim=1)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = tasks.make_optimizer(
            self, self.optimizer, self.lr, self.weight_decay, self.decays, self.optimizer_args
        )
        shape = self.schedule
        schedule = tasks.shaped_schedule(optimizer, shape, self.warmup_fraction, self.trainer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        # Not in training_step, and at log steps alone, because to read a mean waits for the device.
        if tasks.is_log_step(self.trainer, batch_idx):
            self.log_dict(self.train_means.since_log_step("train/", "loss"))

    def on_train_epoch_end(self) -> None:
        self.log_dict(self.train_means.of_epoch("train/"))

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.eval_means.of_epoch("val/"), prog_bar=True)

    def on_test_epoch_end(self) -> None:
        self.log_dict(self.eval_means.of_epoch("test/"))
