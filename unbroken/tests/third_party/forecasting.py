"""pytorch-forecasting: its Temporal Fusion Transformer and N-BEATS on sines."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from lightning.pytorch import LightningDataModule
from pytorch_forecasting import NBeats, TemporalFusionTransformer, TimeSeriesDataSet

SERIES = 6
LENGTH = 26


def series() -> TimeSeriesDataSet:
    """Windows over a few sines."""
    rows = []
    for number in range(SERIES):
        for time in range(LENGTH):
            value = np.sin(time / 3 + number) + 2
            rows.append({"series": str(number), "time": time, "value": value})
    return TimeSeriesDataSet(
        pd.DataFrame(rows),
        time_idx="time",
        target="value",
        group_ids=["series"],
        max_encoder_length=8,
        max_prediction_length=2,
        time_varying_unknown_reals=["value"],
    )


def transformer() -> TemporalFusionTransformer:
    """As the package makes it from a data set."""
    return TemporalFusionTransformer.from_dataset(
        series(), hidden_size=8, attention_head_size=1, hidden_continuous_size=4, dropout=0.1
    )


def nbeats() -> NBeats:
    """As the package makes it from a data set."""
    return NBeats.from_dataset(series(), widths=[8, 8], num_blocks=[1, 1], dropout=0.1)


class Series(LightningDataModule):
    def __init__(self, workers: int = 0) -> None:
        super().__init__()
        self.workers = workers

    def train_dataloader(self) -> Any:
        return series().to_dataloader(train=True, batch_size=8, num_workers=self.workers)

    def val_dataloader(self) -> Any:
        return series().to_dataloader(train=False, batch_size=16)
