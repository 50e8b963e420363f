"""chemprop: its message passing network on small molecules, in its own loader."""

from __future__ import annotations

from typing import Any

from chemprop import nn
from chemprop.data import MoleculeDatapoint, MoleculeDataset, build_dataloader
from chemprop.models import MPNN
from lightning.pytorch import LightningDataModule


def network() -> MPNN:
    """The module as it comes."""
    passing = nn.BondMessagePassing(d_h=16, depth=2, dropout=0.1)
    return MPNN(passing, nn.MeanAggregation(), nn.RegressionFFN(input_dim=16, hidden_dim=16))


def molecules(count: int) -> MoleculeDataset:
    """Chains of carbon and oxygen, and how long they are."""
    points = []
    for index in range(count):
        smiles = "C" * (1 + index % 7) + "O" + "C" * (1 + index % 5)
        points.append(MoleculeDatapoint.from_smi(smiles, [len(smiles) / 10]))
    return MoleculeDataset(points)


class Molecules(LightningDataModule):
    def __init__(self, workers: int = 0) -> None:
        super().__init__()
        self.workers = workers

    def train_dataloader(self) -> Any:
        return build_dataloader(molecules(96), batch_size=8, num_workers=self.workers)

    def val_dataloader(self) -> Any:
        return build_dataloader(molecules(30), batch_size=8, shuffle=False)

    def test_dataloader(self) -> Any:
        return build_dataloader(molecules(37), batch_size=8, shuffle=False)
