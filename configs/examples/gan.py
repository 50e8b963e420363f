"""Two networks against each other: manual optimization with two optimizers.

There is no metric that could be followed.
"""

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
        (real,) = batch  # (batch, 2)
        fake = self.generator(torch.randn_like(real))
        d_optimizer, g_optimizer = self.optimizers()

        # The discriminator learns to tell real points from made ones.
        d_loss = self.error(real, is_real=1.0) + self.error(fake.detach(), is_real=0.0)
        d_optimizer.zero_grad()
        self.manual_backward(d_loss)
        d_optimizer.step()
        self.log("d_loss", d_loss)

        # The generator learns to make points that are taken for real.
        g_loss = self.error(fake, is_real=1.0)
        g_optimizer.zero_grad()
        self.manual_backward(g_loss)
        g_optimizer.step()
        self.log("g_loss", g_loss)

    def error(self, points: Tensor, is_real: float) -> Tensor:
        """How far the discriminator's answers are from the wanted one, which is 1 for real points
        and 0 for others.
        """
        logits = self.discriminator(points)
        return binary_cross_entropy_with_logits(logits, torch.full_like(logits, is_real))

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.adam(self.discriminator), self.adam(self.generator)]

    def adam(self, network: nn.Module) -> torch.optim.Optimizer:
        """An optimizer for one of the two networks."""
        return torch.optim.Adam(network.parameters(), self.lr, betas=(0.5, 0.999))

    def train_dataloader(self) -> DataLoader:
        draw = torch.Generator().manual_seed(0)
        angles = torch.rand(2000, generator=draw) * 2 * torch.pi
        points = torch.stack([angles.cos(), angles.sin()], dim=1)
        return DataLoader(TensorDataset(points), batch_size=50, shuffle=True)
