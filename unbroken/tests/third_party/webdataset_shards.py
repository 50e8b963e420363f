"""webdataset: tar files of samples, shuffled in the package's ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import webdataset
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader

from tests.third_party.regression import TRAINING_SAMPLES, table, validation_loader

FOLDER = Path("shards")
SHARDS = 4


def make_files() -> None:
    """Write the training samples into tar files."""
    FOLDER.mkdir()
    x, y = table(TRAINING_SAMPLES, seed=0)
    for shard in range(SHARDS):
        with webdataset.TarWriter(str(FOLDER / f"{shard}.tar")) as file:
            for index in range(shard, TRAINING_SAMPLES, SHARDS):
                row = torch.cat([x[index], y[index : index + 1]])
                file.write({"__key__": f"{index:04d}", "row.pth": row})


def as_pair(row: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and target of one sample."""
    return row[:4], row[4]


class Unshuffled(LightningDataModule):
    def __init__(self, workers: int = 0) -> None:
        super().__init__()
        self.workers = workers

    @property
    def places(self) -> list[str]:
        """The shards."""
        return [str(FOLDER.absolute() / f"{shard}.tar") for shard in range(SHARDS)]

    def stream(self) -> Any:
        return webdataset.WebDataset(self.places, shardshuffle=False)

    def train_dataloader(self) -> Any:
        pairs = self.stream().decode().to_tuple("row.pth").map(lambda sample: as_pair(sample[0]))
        return DataLoader(pairs, batch_size=8, num_workers=self.workers)

    def val_dataloader(self) -> Any:
        return validation_loader()


class Shuffled(Unshuffled):
    """As in the package's own first example: from a generator that is seeded by the clock."""

    def stream(self) -> Any:
        return webdataset.WebDataset(self.places, shardshuffle=SHARDS).shuffle(30)


class ShuffledBySeed(Unshuffled):
    """Every epoch has the same order."""

    def stream(self) -> Any:
        return webdataset.WebDataset(self.places, shardshuffle=SHARDS, seed=3).shuffle(30, seed=3)


class ShuffledByEpoch(Unshuffled):
    """The stream counts its epochs itself, to draw another order in each."""

    def stream(self) -> Any:
        stream = webdataset.WebDataset(self.places, shardshuffle=SHARDS, detshuffle=True, seed=3)
        return stream.compose(webdataset.detshuffle(30, seed=3))


class OwnLoader(Shuffled):
    """Batches are made in the stream, shuffled again behind the workers, and counted."""

    def train_dataloader(self) -> Any:
        pairs = self.stream().decode().to_tuple("row.pth").map(lambda sample: as_pair(sample[0]))
        loader = webdataset.WebLoader(pairs.batched(4), batch_size=None, num_workers=self.workers)
        return loader.unbatched().shuffle(20).batched(8).with_epoch(15)
