"""litdata: a StreamingDataset of local chunks, read by litdata's own loader and by a plain one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import litdata
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from tests.third_party.regression import TRAINING_SAMPLES, table, validation_loader

FOLDER = Path("litdata_chunks")


def sample(index: int) -> tuple[Any, Any]:
    """One sample, as the chunks hold it."""
    x, y = table(TRAINING_SAMPLES, seed=0)
    return x[index], y[index]


def make_files() -> None:
    """Write the chunks."""
    litdata.optimize(
        sample,
        list(range(TRAINING_SAMPLES)),
        str(FOLDER),
        chunk_size=20,
        num_workers=1,
        verbose=False,
    )


class OwnLoader(LightningDataModule):
    def __init__(self, workers: int = 0) -> None:
        super().__init__()
        self.workers = workers

    def train_dataloader(self) -> Any:
        stream = litdata.StreamingDataset(str(FOLDER.absolute()), shuffle=True)
        return litdata.StreamingDataLoader(stream, batch_size=8, num_workers=self.workers)

    def val_dataloader(self) -> Any:
        return validation_loader()


class PlainLoader(OwnLoader):
    def train_dataloader(self) -> Any:
        stream = litdata.StreamingDataset(str(FOLDER.absolute()), shuffle=True)
        return DataLoader(stream, batch_size=8, num_workers=self.workers)
