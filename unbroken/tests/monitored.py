"""A small training run whose every second is known, for the monitors' exact-value tests."""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tests.commands import complete


@pytest.fixture(autouse=True)
def one_thread():
    """Several threads on a busy machine wait for each other, and these runs are too small to gain
    from them.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def in_a_fork(of_two_ranks: Callable[[Path], None], folder: Path) -> None:
    """Call a test file's function in a process that may fork once more: one that has trained before
    may not.
    """
    module, name = of_two_ranks.__module__.rpartition(".")[2], of_two_ranks.__name__
    code = [
        "import sys",
        "from pathlib import Path",
        f"from tests.{module} import {name}",
        f"{name}(Path(sys.argv[1]))",
    ]
    done = complete([sys.executable, "-c", "\n".join(code), str(folder)])
    assert done.returncode == 0, done.stderr


class FakeClock:
    """A clock that stands still unless told otherwise."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class Rows(Logger):
    """A logger that keeps what it is given: ``(step, metrics)`` in order."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "rows"

    @property
    def version(self) -> str:
        return ""

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((int(step or 0), metrics))

    def of(self, group: str) -> list[tuple[int, dict[str, float]]]:
        """The rows that hold metrics of a group, with those alone and without the group's name."""
        kept = [
            (step, {k.partition("/")[2]: v for k, v in row.items() if k.startswith(f"{group}/")})
            for step, row in self.rows
        ]
        return [(step, row) for step, row in kept if row]


def read(path: Path) -> list[dict[str, float]]:
    """The rows of a metrics.csv, without what is empty."""
    with open(path, newline="", encoding="utf-8") as file:
        return [{k: float(v) for k, v in row.items() if v != ""} for row in csv.DictReader(file)]


class Points(Dataset[tuple[Tensor, Tensor]]):
    """Random points (count, 8) in two classes; ``on_fetch`` is called for every batch fetched."""

    def __init__(
        self, count: int, batch_size: int, on_fetch: Callable[[], Any] = lambda: None
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.points = torch.randn(count, 8, generator=generator)
        self.labels = (self.points.sum(1) > 0).long()
        self.batch_size = batch_size
        self.on_fetch = on_fetch

    def __len__(self) -> int:
        return -(-len(self.labels) // self.batch_size)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.on_fetch()
        chosen = slice(index * self.batch_size, (index + 1) * self.batch_size)
        return self.points[chosen], self.labels[chosen]

    def loader(self, **options: Any) -> DataLoader[Any]:
        return DataLoader(self, batch_size=None, **options)


class Layer(nn.Linear):
    """With a forward of its own: torch 2.11 compiles none of torch.nn."""

    def forward(self, points: Tensor) -> Tensor:
        return super().forward(points)


class Linear(LightningModule):
    """Logistic regression; ``on_step`` and ``on_validation`` are called in every training and
    validation step.
    """

    def __init__(
        self,
        on_step: Callable[[], Any] = lambda: None,
        on_validation: Callable[[], Any] = lambda: None,
    ) -> None:
        super().__init__()
        self.on_step = on_step
        self.on_validation = on_validation
        self.layer = Layer(8, 2)

    def forward(self, points: Tensor) -> Tensor:
        return self.layer(points)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.on_step()
        points, labels = batch
        return nn.functional.cross_entropy(self(points), labels)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.on_validation()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.125)


def make_trainer(folder: Path, *callbacks: Any, **options: Any) -> tuple[Trainer, Rows]:
    """A quiet Trainer on the CPU with ``callbacks``, and the rows it will log."""
    rows = Rows()
    quiet = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    defaults = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "num_sanity_val_steps": 0}
    trainer = Trainer(
        **{**quiet, **defaults, **options},
        logger=rows,
        callbacks=list(callbacks),
        default_root_dir=folder,
    )
    return trainer, rows
