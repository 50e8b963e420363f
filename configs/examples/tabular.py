"""Rows of numbers: the last column is predicted from the others. No images, so a plain :class:`SplitDataModule`.

python -m project.fit --config configs/examples/tabular.yaml --data.file rows.csv
"""

from typing import Any

import numpy as np
import torch

from project.data import Split, SplitDataModule, TensorRows


class Rows(SplitDataModule):
    """``file`` is CSV with a line of names first. A fifth of the rows is the test set."""

    def __init__(self, file: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.file = file

    def make_split(self, split: Split) -> Any:
        rows = (
            made_up()
            if self.file is None
            else np.loadtxt(self.file, delimiter=",", skiprows=1, dtype=np.float32)
        )
        table = torch.from_numpy(rows)
        features, targets = table[:, :-1], table[:, -1]
        everything = TensorRows(features, targets)
        if split == "test":
            return self.hold_out(everything, "val", share=0.2)
        training = self.hold_out(everything, "train", share=0.2)
        known, _ = training[:]
        self.mean, self.std = (
            known.mean(0).tolist(),
            known.std(0).tolist(),
        )  # the module standardizes each column
        return self.hold_out(training, split)


def made_up(count: int = 1000) -> np.ndarray:
    """Eight features of very different sizes, and a sum of two of their products."""
    draw = np.random.default_rng(0).normal(size=(count, 8))
    target = draw[:, 0] * draw[:, 1] + draw[:, 2]
    return np.column_stack([draw * 10.0 ** np.arange(-3, 5), target]).astype(np.float32)
