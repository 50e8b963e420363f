"""A stream that is read shard by shard, in a random order, by ``litdata``; it resumes exactly.

The shards are written at the first start. It imports and inherits nothing of this project.
"""

from pathlib import Path

import lightning as L
import torch
from torch import Tensor, nn

try:
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming.writer import BinaryWriter
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"{error}. Try: pip install litdata") from error


class Regression(L.LightningModule):
    """Predicts the product of two of four features. ``val_loss`` is a mean squared error."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.1), nn.ReLU(), nn.Linear(64, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        features, target = batch
        return nn.functional.mse_loss(self.network(features), target)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Shards(L.LightningDataModule):
    """``root/train`` and ``root/val`` hold the shards."""

    def __init__(self, root: str = "data/shards", num_workers: int = 0) -> None:
        super().__init__()
        self.save_hyperparameters()

    def prepare_data(self) -> None:
        for name, rows in (("train", 2000), ("val", 500)):
            if not Path(self.hparams.root, name, "index.json").exists():
                write_shards(f"{self.hparams.root}/{name}", rows)

    def train_dataloader(self) -> StreamingDataLoader:
        stream = StreamingDataset(f"{self.hparams.root}/train", shuffle=True)
        return StreamingDataLoader(stream, batch_size=20, num_workers=self.hparams.num_workers)

    def val_dataloader(self) -> StreamingDataLoader:
        return StreamingDataLoader(StreamingDataset(f"{self.hparams.root}/val"), batch_size=100)


def write_shards(folder: str, rows: int) -> None:
    """Made-up rows, a hundred a shard. ``litdata.optimize`` does it for large data, in parallel."""
    writer = BinaryWriter(folder, chunk_size=100)
    draw = torch.Generator().manual_seed(rows)
    for index, row in enumerate(torch.randn(rows, 4, generator=draw)):
        writer[index] = (row, row[:1] * row[1:2])
    writer.done()
    writer.merge()
