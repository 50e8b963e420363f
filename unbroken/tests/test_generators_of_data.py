"""Wherever a data set draws its random numbers from, and however it is asked for its samples: a run
that is stopped and resumed sees the same batches, and ends with the same weights.
"""

from __future__ import annotations

import functools
import random
import signal
import sys
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset
from unbroken import ExactCheckpoint, Stopped
from unbroken.tensors.same_values import is_same

ROWS = 12
BATCHES_OF_EPOCH = 6
EPOCHS = 2

# Where the numbers come from

made_late: Any = None


class Rows(Dataset[Tensor]):
    """Each row has its number, and what is drawn for it.

    Args:
        draw: Draws a number, given the data set.
        generator: What it may draw from.
    """

    def __init__(self, draw: Callable[[Any], float], generator: Any = None) -> None:
        self.draw = draw
        self.generator = generator

    def __len__(self) -> int:
        return ROWS

    def row(self, index: int) -> Tensor:
        return torch.tensor([index / ROWS, self.draw(self)])


class Noise:
    """A transform that has a generator of its own."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __call__(self) -> float:
        return float(self.generator.random())


def of_torch(rows: Rows) -> float:
    return float(torch.rand(()))


def of_torchs_generator(rows: Rows) -> float:
    return float(torch.rand((), generator=rows.generator))


def of_generator(rows: Rows) -> float:
    """NumPy's generators and Python's have the method."""
    return float(rows.generator.random())


def of_attribute_made_late(rows: Rows) -> float:
    if rows.generator is None:
        rows.generator = np.random.default_rng(0)
    return float(rows.generator.random())


def of_global_made_late(rows: Rows | None = None) -> float:
    global made_late
    if made_late is None:
        made_late = np.random.default_rng(0)
    return float(made_late.random())


def of_a_child_for_each(rows: Rows) -> float:
    (child,) = rows.generator.spawn(1)
    return float(child.random())


def of_a_child_that_is_kept(rows: Rows) -> float:
    rows.generator = rows.generator or np.random.default_rng(0).spawn(1)[0]
    return float(rows.generator.random())


def of_transforms(rows: Rows) -> float:
    noise = rows.generator[0]["noise"]
    return float(noise())


def transforms() -> list[dict[str, Noise]]:
    return [{"noise": Noise(np.random.default_rng(0))}]


# How it is asked for samples


class ByItem(Rows):
    def __getitem__(self, index: int) -> Tensor:
        return self.row(index)


class ByItems(Rows):
    def __getitem__(self, index: int) -> Tensor:
        raise AssertionError("samples are asked for together")

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        return [self.row(index) for index in indices]


class ByGather(Rows):
    def gather(self, indices: Tensor) -> Tensor:
        return torch.stack([self.row(int(index)) for index in indices])


class Forwards(Dataset[Tensor]):
    """Gathers from another data set."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return ROWS

    def gather(self, indices: Tensor) -> Any:
        return self.dataset.gather(indices)


def wrapped(rows: Any) -> Any:
    """The same rows, held by another data set that is asked in the same way."""
    if isinstance(rows, ByGather):
        return Forwards(rows)
    if isinstance(rows, ByItems):
        return Subset(rows, range(ROWS))
    first = Subset(rows, range(4))
    second = Subset(rows, range(4, ROWS))
    return ConcatDataset([first, second])


class Source(NamedTuple):
    """Where a data set draws its numbers from.

    Attributes:
        draw: Draws one.
        make: Makes what the data set keeps for it.
        is_wrapped: Whether another data set holds this one.
    """

    draw: Callable[[Any], float]
    make: Callable[[], Any] = lambda: None
    is_wrapped: bool = False


ASKED = {"getitem": ByItem, "getitems": ByItems, "gather": ByGather}
EXACT = {
    "torch": Source(of_torch),
    "torch_generator": Source(of_torchs_generator, torch.Generator),
    "numpy_generator": Source(of_generator, lambda: np.random.default_rng(0)),
    "python_generator": Source(of_generator, lambda: random.Random(0)),
    "attribute_made_late": Source(of_attribute_made_late),
    "global_made_late": Source(of_global_made_late),
    "child_that_is_kept": Source(of_a_child_that_is_kept),
    "transforms": Source(of_transforms, transforms),
    "wrapped": Source(of_generator, lambda: np.random.default_rng(0), is_wrapped=True),
    "wrapped_made_late": Source(of_attribute_made_late, is_wrapped=True),
}
# The library says that these are not exact.
TOLD = {
    "child_for_each": Source(of_a_child_for_each, lambda: np.random.default_rng(0)),
    "wrapped_child_for_each": Source(
        of_a_child_for_each, lambda: np.random.default_rng(0), is_wrapped=True
    ),
}
WORKERS = (0, 2)
# Steps after which a run is stopped, by the epoch in which they are.
STOPS = {"first_epoch": 3, "second_epoch": 9}
DAILY = (
    ("global_made_late", "getitems", 0, "first_epoch"),
    ("global_made_late", "gather", 2, "second_epoch"),
    ("wrapped_made_late", "getitem", 0, "first_epoch"),
    ("child_for_each", "getitem", 0, "second_epoch"),
)


# A training


class Learns(LightningModule):
    """Draws from torch's generator itself, as it trains."""

    def __init__(self, note: Callable[[tuple[int, Tensor]], None]) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.2), nn.Linear(4, 1))
        self.note = note

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.note((self.global_step, batch.clone()))
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class OfClass:
    late: Any = None


class DrawsFromGlobal(Learns):
    """Draws from a generator that it makes late, in a global variable."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * of_global_made_late()


class DrawsFromClass(Learns):
    """The same in a class."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if OfClass.late is None:
            OfClass.late = np.random.default_rng(0)
        return super().training_step(batch, batch_idx) * OfClass.late.random()


class AsksToStop(Callback):
    """It is agreed on at the end of the next step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step - 1:
            signal.raise_signal(signal.SIGTERM)


class Trained(NamedTuple):
    # Each batch with the number of its step.
    batches: list[tuple[int, Tensor]]
    weights: dict[str, Tensor]


def forget_those_made_late() -> None:
    global made_late
    made_late = None
    OfClass.late = None


def train(
    folder: str,
    asked: str,
    name: str,
    workers: int,
    *further: Callback,
    make: type[Learns] = Learns,
) -> Trained:
    """Train as a new process does, which has made no generator yet."""
    forget_those_made_late()
    seed_everything(7, verbose=False)
    source = (EXACT | TOLD)[name]
    rows = ASKED[asked](source.draw, source.make())
    if source.is_wrapped:
        rows = wrapped(rows)
    loader = DataLoader(rows, ROWS // BATCHES_OF_EPOCH, shuffle=True, num_workers=workers)
    batches: list[tuple[int, Tensor]] = []
    module = make(batches.append)
    keep = ExactCheckpoint(folder)
    trainer = Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        callbacks=[keep, *further],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(module, loader, ckpt_path=keep.resume_from)
    finally:
        # The runs of other tests in this process would keep them.
        forget_those_made_late()
    return Trained(batches, module.state_dict())


@functools.cache
def undisturbed(asked: str, name: str, workers: int) -> Trained:
    """A run that is not stopped: one for all that are compared with it."""
    with TemporaryDirectory() as folder:
        return train(folder, asked, name, workers)


def resumed(asked: str, name: str, workers: int, step: int) -> Trained:
    """What a run does that was stopped after a step, and goes on."""
    with pytest.raises(Stopped):
        train("stopped", asked, name, workers, AsksToStop(step))
    return train("stopped", asked, name, workers)


def cells(names: Iterable[str]) -> list[Any]:
    """All of the table. Few are tried with every change, the others nightly."""
    found: list[Any] = []
    for cell in product(names, ASKED, WORKERS, STOPS):
        marks = () if cell in DAILY else pytest.mark.nightly
        found.append(pytest.param(*cell, marks=marks))
    return found


@pytest.mark.parametrize(("name", "asked", "workers", "stop"), cells(EXACT))
def test_a_resumed_run_sees_the_batches_of_one_that_was_not_stopped(
    name: str,
    asked: str,
    workers: int,
    stop: str,
    workplace: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    step = STOPS[stop]
    expected = undisturbed(asked, name, workers)
    drawn = torch.cat([batch[:, 1] for _, batch in expected.batches])
    assert len(drawn.unique()) == EPOCHS * ROWS, "each sample has a number of its own"
    rest = resumed(asked, name, workers, step)
    assert rest.batches[0][0] == step
    assert is_same(rest.batches, expected.batches[step:])
    assert is_same(rest.weights, expected.weights)
    assert "exact" not in said(capsys)


@pytest.mark.skipif(sys.platform != "linux", reason="a process is copied on Linux alone")
@pytest.mark.parametrize(("name", "asked", "workers", "stop"), cells(TOLD))
def test_children_that_are_counted_are_told_and_a_resumed_run_begins_with_an_epoch(
    name: str,
    asked: str,
    workers: int,
    stop: str,
    workplace: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The count begins anew with each epoch in worker processes, which are started for it."""
    expected = undisturbed(asked, name, workers)
    capsys.readouterr()
    rest = resumed(asked, name, workers, STOPS[stop])
    assert "which gives other samples when the same are fetched again" in said(capsys)
    first = 0 if stop == "first_epoch" else BATCHES_OF_EPOCH
    assert rest.batches[0][0] == first
    is_exact = first == 0 or workers > 0
    assert is_same(rest.batches, expected.batches[first:]) == is_exact
    assert is_same(rest.weights, expected.weights) == is_exact


@pytest.mark.daily(1)
@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("name", ["global_made_late", "torch"])
@pytest.mark.parametrize("make", [DrawsFromGlobal, DrawsFromClass])
def test_a_generator_that_training_makes_late_beside_objects_comes_back(
    make: type[Learns], name: str, stop: str, workplace: Path
) -> None:
    """The data set may draw from it, too."""
    step = STOPS[stop]
    expected = train("undisturbed", "getitem", name, 0, make=make)
    with pytest.raises(Stopped):
        train("stopped", "getitem", name, 0, AsksToStop(step), make=make)
    rest = train("stopped", "getitem", name, 0, make=make)
    assert is_same(rest.batches, expected.batches[step:])
    assert is_same(rest.weights, expected.weights)


def said(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    return captured.out + captured.err
