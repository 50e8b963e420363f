"""Two networks against each other: manual optimization with two optimizers, and no metric that could be followed."""

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset


class GAN(L.LightningModule):
    """Learns points on a circle. ``g_loss`` and ``d_loss`` are in nats."""

    def __init__(self, lr: float = 1e-3, width: int = 64) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.lr = lr
        self.generator = nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 2))
        self.discriminator = nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        (real,) = batch
        fake = self.generator(torch.randn_like(real))
        answers = (
            [(real, 1.0), (fake.detach(), 0.0)],
            [(fake, 1.0)],
        )  # what each is trained to have answered
        for name, optimizer, wanted in zip(
            ("d_loss", "g_loss"), self.optimizers(), answers, strict=True
        ):
            logits = [(self.discriminator(points), truth) for points, truth in wanted]
            loss = sum(
                binary_cross_entropy_with_logits(x, torch.full_like(x, truth))
                for x, truth in logits
            )
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.log(name, loss)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        parts = (self.discriminator, self.generator)
        return [torch.optim.Adam(part.parameters(), self.lr, betas=(0.5, 0.999)) for part in parts]

    def train_dataloader(self) -> DataLoader:
        angles = torch.rand(2000, generator=torch.Generator().manual_seed(0)) * 6.2832
        return DataLoader(
            TensorDataset(torch.stack([angles.cos(), angles.sin()], dim=1)),
            batch_size=50,
            shuffle=True,
        )
