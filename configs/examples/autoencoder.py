"""A module and a data module as in Lightning's documentation.

They import and inherit nothing of this project.
"""

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class LitAutoEncoder(L.LightningModule):  # noqa: D101 - as it stands there
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(28 * 28, 64), nn.ReLU(), nn.Linear(64, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 28 * 28))

    def training_step(
        self, batch: list[Tensor], batch_idx: int, name: str = "train_loss"
    ) -> Tensor:
        x, _ = batch
        x = x.view(x.size(0), -1)
        z = self.encoder(x)
        x_hat = self.decoder(z)
        loss = nn.functional.mse_loss(x_hat, x)
        self.log(name, loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.training_step(batch, batch_idx, "val_loss")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Waves(L.LightningDataModule):  # noqa: D101
    def setup(self, stage: str) -> None:
        draw = torch.Generator().manual_seed(42)
        # Of each wave: its frequency, its phase and its height.
        places = torch.rand(2000, 3, 1, generator=draw)
        axis = torch.linspace(0, 1, 28 * 28)
        images = torch.sin(40 * places[:, 0] * axis + places[:, 1]) * places[:, 2]
        dataset = TensorDataset(images, places)
        self.train_set, self.val_set = random_split(dataset, [1800, 200], generator=draw)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train_set, batch_size=32, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val_set, batch_size=32)
