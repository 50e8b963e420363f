"""Fine-tuning: a network that knows the ten digits learns whether a digit is odd.

Its body is frozen for one epoch. Then it learns as well, at a tenth of the head's rate.
"""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BaseFinetuning
from unbroken.data import Split, TensorImages

from project.data import MNISTDataModule
from project.model import MNISTClassifier


class OddDigits(MNISTDataModule):
    """MNIST's images with two labels."""

    class_names = ["even", "odd"]

    def read(self, split: Split) -> TensorImages:
        samples = super().read(split)
        return TensorImages(samples.images, samples.labels % 2)


class TwoRates(MNISTClassifier):
    """Trains the head of a :class:`project.model.ConvNet` at ``lr``, its body at a tenth of it."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        body = {"params": self.network.blocks.parameters(), "lr": self.lr / 10}
        head = {"params": self.network.head.parameters(), "lr": self.lr}
        return torch.optim.AdamW([body, head])


class ThawBody(BaseFinetuning):
    """Freezes the body, and thaws it at the start of the epoch ``at_epoch``, counted from 0."""

    def __init__(self, at_epoch: int = 1) -> None:
        super().__init__()
        self.at_epoch = at_epoch

    def freeze_before_training(self, pl_module: LightningModule) -> None:
        self.freeze(pl_module.network.blocks, train_bn=False)

    def finetune_function(self, pl_module: LightningModule, epoch: int, optimizer: Any) -> None:
        if epoch == self.at_epoch:
            self.make_trainable(pl_module.network.blocks)
