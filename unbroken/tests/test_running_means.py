"""Means of a module that writes its steps itself: exact over samples, batches of any size, log
steps, ranks and resumes.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from unbroken.parts.held import held_by_users
from unbroken.parts.metrics import ModuleSums
from unbroken.tasks import RunningMeans, is_right
from unbroken.tasks.waiting_batches import MOST_BATCHES


def values(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs[:, 0]


def doubled(outputs: Tensor, targets: Tensor) -> Tensor:
    return 2 * outputs[:, 0]


class OneRank:
    """A strategy whose other ranks have added what ``others`` says."""

    def __init__(self, *others: Tensor) -> None:
        self.others = others

    def reduce(self, tensor: Tensor, reduce_op: str) -> Tensor:
        assert reduce_op == "sum"
        return tensor + sum(self.others)


def means_on(*others: Tensor) -> RunningMeans:
    module = LightningModule()
    module.trainer = SimpleNamespace(strategy=OneRank(*others))  # type: ignore[assignment]
    return RunningMeans(module, loss=values, more=doubled)


def add(means: RunningMeans, *numbers: float) -> None:
    """A batch whose loss is these numbers."""
    means.add(torch.tensor(numbers)[:, None], torch.zeros(len(numbers)))


def test_a_mean_is_that_of_all_samples_and_not_of_the_batches() -> None:
    means = means_on()
    add(means, 1.0, 1.0, 1.0)
    add(means, 5.0)
    assert means.of_epoch("val/") == {"val/loss": 2.0, "val/more": 4.0}
    assert means.of_epoch("val/") == {}  # the next epoch has begun


def test_a_log_step_gives_what_was_added_since_the_one_before() -> None:
    means = means_on()
    add(means, 1.0)
    assert means.since_log_step("train/", "loss") == {"train/loss": 1.0}
    add(means, 3.0)
    assert means.since_log_step("train/", "more") == {"train/more": 6.0}
    assert means.since_log_step("train/", "loss") == {}
    assert means.of_epoch("train/") == {"train/loss": 2.0, "train/more": 4.0}


def test_batches_wait_and_are_measured_together() -> None:
    means = means_on()
    for number in range(2 * MOST_BATCHES + 3):
        add(means, float(number), 0.0)
        assert len(means.waiting) < MOST_BATCHES
    add(means, 7.0)  # the last of an epoch is smaller
    assert len(means.waiting) == 1
    total = sum(range(2 * MOST_BATCHES + 3)) + 7
    expected = pytest.approx(total / (4 * MOST_BATCHES + 7), rel=1e-6)
    assert float(means.of_epoch("")["loss"]) == expected


@pytest.mark.parametrize("numbers", [(), (4.0, 4.0, 4.0)])
def test_the_samples_of_other_ranks_count_also_where_this_one_has_none(numbers: Any) -> None:
    other = torch.tensor([1.0, 8.0, 0.0]).double()  # one sample, of a loss of 8
    means = means_on(other)
    if numbers:
        add(means, *numbers)
    expected = (sum(numbers) + 8) / (len(numbers) + 1)
    assert float(means.of_epoch("")["loss"]) == expected


def test_a_checkpoint_keeps_the_sums_of_an_unfinished_epoch() -> None:
    cut, resumed = LightningModule(), LightningModule()
    for module in (cut, resumed):
        module.trainer = SimpleNamespace(strategy=OneRank())  # type: ignore[assignment]
        module.mine = RunningMeans(module, loss=values)
        module.other = RunningMeans(module, loss=values)
    add(cut.mine, 1.0, 2.0)
    part = ModuleSums()
    saved = part.take(SimpleNamespace(lightning_module=cut))
    add(cut.mine, 100.0)
    part.give_back(SimpleNamespace(lightning_module=resumed), saved)
    add(resumed.mine, 6.0)
    assert resumed.mine.since_log_step("", "loss") == {"loss": 3.0}
    assert resumed.mine.of_epoch("") == {"loss": 3.0}
    assert resumed.other.of_epoch("") == {}


def test_the_sums_are_kept_in_one_place_alone() -> None:
    module = LightningModule()
    module.mine = RunningMeans(module, loss=values)
    trainer = SimpleNamespace(lightning_module=module, datamodule=None)
    nothing = ("optimizers", "lr_scheduler_configs", "callbacks", "loggers")
    vars(trainer).update({name: [] for name in nothing})
    vars(trainer).update(train_dataloader=None, val_dataloaders=None)
    assert list(held_by_users(trainer).owners) == ["module"]


def test_a_label_is_right_where_its_logit_is_the_largest() -> None:
    logits = torch.tensor([[1.0, 2.0], [3.0, 2.0], [0.0, 1.0]])
    assert is_right(logits, torch.tensor([1, 1, 0])).tolist() == [True, False, False]
    mixed = torch.tensor([[0.4, 0.6], [0.4, 0.6], [0.9, 0.1]])
    assert is_right(logits, mixed).tolist() == [True, False, False]
    assert is_right(logits[:0], torch.empty(0, dtype=torch.int64)).tolist() == []
