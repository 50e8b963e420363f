"""A LightningModule and a Trainer with their default settings, as Lightning's documentation shows
them.

python docs/peers/plain_lightning.py --root data --network MLP --epochs 2
"""

import torch
from lightning import pytorch as pl
from measured import Measured, arguments, load_digits, make_network
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy


class LitDigits(pl.LightningModule):
    """A classifier of digits with a loss and an accuracy."""

    def __init__(self, network: nn.Module, lr: float) -> None:
        super().__init__()
        self.network = network
        self.lr = lr
        self.val_accuracy = MulticlassAccuracy(num_classes=10, average="micro")
        self.test_accuracy = MulticlassAccuracy(num_classes=10, average="micro")

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.network(images), labels)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.val_accuracy(self.network(images), labels)
        self.log("val_accuracy", self.val_accuracy, prog_bar=True)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.test_accuracy(self.network(images), labels)
        self.log("test_accuracy", self.test_accuracy)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def main() -> None:
    """Train, validate after each epoch, test once."""
    options = arguments()
    pl.seed_everything(options.seed)
    train_set, val_set, test_set = load_digits(options.root, options.samples)
    train_loader = DataLoader(train_set, options.batch_size, shuffle=True)
    val_loader = DataLoader(val_set, 1000)
    test_loader = DataLoader(test_set, 1000)
    module = LitDigits(make_network(options.network), options.lr)
    trainer = pl.Trainer(max_epochs=options.epochs, default_root_dir=options.folder)

    measured = Measured(options, len(train_set))
    trainer.fit(module, train_loader, val_loader)
    measured.training_ends()
    (result,) = trainer.test(module, test_loader)
    measured.report(result["test_accuracy"])


if __name__ == "__main__":
    main()
