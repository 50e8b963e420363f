"""Rows of numbers: the last column is predicted from the others.

There are no images, so the data module is a plain :class:`SplitDataModule`.

python -m project.fit --config configs/examples/tabular.yaml --data.file rows.csv
"""

from typing import Any

import numpy as np
import torch
from unbroken.data import Split, SplitDataModule, TensorRows


class Rows(SplitDataModule):
    """``file`` is CSV with a line of names first. A fifth of the rows is the test set."""

    def __init__(self, file: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.file = file

    def make_split(self, split: Split) -> Any:
        if self.file is None:
            rows = made_up()
        else:
            rows = np.loadtxt(self.file, delimiter=",", skiprows=1, dtype=np.float32)
        table = torch.from_numpy(rows)
        everything = TensorRows(table[:, :-1], table[:, -1])
        # A cut has two parts: "val" is the share that is held out, "train" is the rest. The first
        # cut holds the test set out, and the rest is cut once more.
        tested = self.hold_out(everything, "val", share=0.2)
        training = self.hold_out(everything, "train", share=0.2)
        if split == "test":
            return tested
        # The module standardizes each column by these.
        features, _ = training[:]
        self.mean = features.mean(0).tolist()
        self.std = features.std(0).tolist()
        return self.hold_out(training, split)


def made_up(count: int = 1000) -> np.ndarray:
    """Eight features of very different sizes, and a target that is made of three of them."""
    draw = np.random.default_rng(0).normal(size=(count, 8))
    target = draw[:, 0] * draw[:, 1] + draw[:, 2]
    features = draw * 10.0 ** np.arange(-3, 5)
    return np.column_stack([features, target]).astype(np.float32)
