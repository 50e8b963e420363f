"""Hugging Face's datasets: a table with keys, and streams of it with and without a buffer that
shuffles.
"""

from __future__ import annotations

from typing import Any

import datasets
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from tests.third_party.regression import TRAINING_SAMPLES, table, validation_loader


def training_table() -> datasets.Dataset:
    """The training samples, in memory."""
    x, y = table(TRAINING_SAMPLES, seed=0)
    rows = datasets.Dataset.from_dict({"x": x.tolist(), "y": y.tolist()})
    return rows.with_format("torch")


def as_pair(samples: list[dict[str, Any]]) -> list[Any]:
    """A batch of rows as inputs and targets."""
    columns = datasets.Dataset.from_list(samples).with_format("torch")
    return [columns[:]["x"], columns[:]["y"]]


class MapStyle(LightningDataModule):
    def __init__(self, workers: int = 0) -> None:
        super().__init__()
        self.workers = workers

    def training_data(self) -> Any:
        return training_table()

    def train_dataloader(self) -> Any:
        is_map_style = isinstance(self.training_data(), datasets.Dataset)
        return DataLoader(
            self.training_data(),
            batch_size=8,
            shuffle=is_map_style,
            num_workers=self.workers,
            collate_fn=as_pair,
        )

    def val_dataloader(self) -> Any:
        return validation_loader()


class Stream(MapStyle):
    def training_data(self) -> Any:
        return training_table().to_iterable_dataset(num_shards=4)


class ShuffledStream(MapStyle):
    def training_data(self) -> Any:
        return training_table().to_iterable_dataset(num_shards=4).shuffle(seed=3, buffer_size=30)
