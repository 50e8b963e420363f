"""torch_geometric: graph classification with its LightningDataset."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.data.lightning import LightningDataset
from torch_geometric.nn import GCNConv, global_mean_pool


def graph(seed: int) -> Data:
    """A ring of nodes with numbers."""
    draw = torch.Generator().manual_seed(seed)
    count = 4 + seed % 5
    first = torch.arange(count)
    edges = torch.stack([first, (first + 1) % count])
    x = torch.randn(count, 4, generator=draw)
    return Data(x=x, edge_index=edges, y=x.sum().sin().reshape(1))


def with_noise(data: Data) -> Data:
    """A random transform."""
    noisy = data.clone()
    noisy.x = data.x + 0.1 * torch.randn_like(data.x)
    return noisy


class Graphs(torch.utils.data.Dataset[Data]):
    def __init__(self, first: int, last: int, transform: Any = None) -> None:
        self.graphs = [graph(seed) for seed in range(first, last)]
        self.transform = transform

    def __len__(self) -> int:
        return len(self.graphs)

    def __getitem__(self, index: int) -> Data:
        found = self.graphs[index]
        return found if self.transform is None else self.transform(found)


def data(workers: int = 0) -> LightningDataset:
    """The package's own data module."""
    return LightningDataset(
        Graphs(0, 96, with_noise), Graphs(96, 130), batch_size=8, num_workers=workers
    )


class GraphNetwork(LightningModule):
    monitor = "val_loss"
    mode = "min"

    def __init__(self) -> None:
        super().__init__()
        self.conv = GCNConv(4, 8)
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(8, 1))

    def loss(self, batch: Any) -> Tensor:
        nodes = self.conv(batch.x, batch.edge_index).relu()
        answers = self.head(global_mean_pool(nodes, batch.batch)).squeeze(1)
        return nn.functional.mse_loss(answers, batch.y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, batch_size=len(batch.y))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), batch_size=len(batch.y))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.01)
