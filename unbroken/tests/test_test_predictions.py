"""What the test pass shows of a classifier, and that it disturbs no other task."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader
from unbroken.machine.live_memory import LiveMemory
from unbroken.monitors import monitor
from unbroken.monitors.test_predictions import TestPredictions

from tests.monitored import make_trainer, one_thread  # noqa: F401 - the fixture of every test here

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Answers(LightningModule):
    """A module whose ``test_step`` returns what the batch holds in its last place."""

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return batch[-1]


def pass_over(folder: Any, *batches: Any, most: int = 24) -> TestPredictions:
    callback = TestPredictions(most)
    trainer, _ = make_trainer(folder, callback)
    trainer.test(Answers(), DataLoader(list(batches), batch_size=None), verbose=False)
    return callback


def batch_of(
    labels: list[int], answers: list[list[float]], images: Tensor | None = None
) -> tuple[Any, ...]:
    count = len(labels)
    pictures = torch.full((count, 1, 2, 2), 0.5) if images is None else images
    return pictures, torch.tensor(labels), torch.tensor(answers).log()


def test_predictions_are_counted_and_the_surest_mistakes_kept(tmp_path):
    grey = torch.arange(4).view(4, 1, 1, 1).expand(4, 3, 2, 2).to(torch.uint8)
    first = batch_of([0, 1, 1, 0], [[0.9, 0.1], [0.8, 0.2], [0.4, 0.6], [0.3, 0.7]], grey)
    second = batch_of([1, 0], [[0.95, 0.05], [0.55, 0.45]], grey[:2])
    callback = pass_over(tmp_path, first, second, most=2)
    assert callback.confusion is not None
    assert callback.confusion.tolist() == [[2, 1], [2, 1]]
    assert [(m.label, m.prediction) for m in callback.mistakes] == [(1, 0), (1, 0)]
    assert [m.probability for m in callback.mistakes] == pytest.approx([0.95, 0.8])
    assert [m.image.tolist() for m in callback.mistakes] == [[[[i] * 3] * 2] * 2 for i in (0, 1)]


def test_many_classes_take_little_memory_also_in_a_deterministic_run(
    tmp_path,
):
    answers = torch.zeros(64, 1000)
    torch.use_deterministic_algorithms(True)
    try:
        with LiveMemory(limit_bytes=100 * 2**20):
            callback = pass_over(
                tmp_path, (torch.zeros(64, 7), torch.zeros(64, dtype=torch.int64), answers)
            )
    finally:
        torch.use_deterministic_algorithms(False)
    assert callback.confusion is not None
    assert (callback.confusion.sum(), callback.confusion[0, 0]) == (64, 64)


def test_pictures_in_0_to_1_are_shown_as_they_are(tmp_path):
    image = torch.tensor([0.0, 0.5, 1.0, 1.25]).view(1, 1, 2, 2)
    (mistake,) = pass_over(tmp_path, batch_of([1], [[0.9, 0.1]], image)).mistakes
    assert mistake.image[..., 0].tolist() == [[0, 128], [255, 255]]


def test_inputs_that_are_no_pictures_are_counted_without_them(tmp_path):
    for inputs in (torch.zeros(1, 7), torch.zeros(1, 4, 2, 2), ["text"]):
        callback = pass_over(tmp_path, batch_of([1], [[0.9, 0.1]], inputs))
        assert callback.confusion is not None
        assert callback.confusion.tolist() == [[0, 0], [1, 0]]
        assert callback.mistakes == []


def test_pictures_of_several_sizes_are_shown_as_they_are(tmp_path):
    batches = [batch_of([1], [[0.9, 0.1]], torch.zeros(1, 1, size, size)) for size in (2, 3)]
    callback = pass_over(tmp_path, *batches)
    assert callback.confusion is not None
    assert callback.confusion.tolist() == [[0, 0], [2, 0]]
    assert [mistake.image.shape for mistake in callback.mistakes] == [(2, 2, 1), (3, 3, 1)]


def test_samples_that_do_not_count_are_left_out(tmp_path):
    callback = pass_over(tmp_path, batch_of([-100, 1, 2], [[0.9, 0.1], [0.1, 0.9], [0.9, 0.1]]))
    assert callback.confusion is not None
    assert callback.confusion.tolist() == [[0, 0], [0, 1]]
    assert callback.mistakes == []


@pytest.mark.parametrize(
    "batch",
    [
        (torch.zeros(2, 7), torch.zeros(2), torch.zeros(2, 1)),  # regression
        (torch.zeros(2, 7), torch.zeros(2, 5), torch.zeros(2, 5)),  # several labels
        (torch.zeros(2, 7), torch.zeros(2, 5).long(), torch.zeros(2, 5)),
        (torch.zeros(2, 7), torch.zeros(2, dtype=torch.bool), torch.zeros(2, 2)),
        (torch.zeros(2, 7), torch.zeros(2).long(), torch.zeros(2, 3, 4, 4)),  # segmentation
        (torch.zeros(2, 7), torch.zeros(2).long(), torch.zeros(2, 5).long()),  # no logits
        (torch.zeros(2, 7), torch.zeros(2).long(), torch.zeros(2, 50_000)),  # a vocabulary
        (torch.zeros(2, 7), torch.zeros(2, 5)),
        [torch.zeros(2, 7)],
    ],
)
def test_other_tasks_are_left_alone(tmp_path, batch):
    callback = pass_over(tmp_path, batch)
    assert callback.confusion is None
    assert callback.mistakes == []


def test_a_batch_that_is_a_dictionary_is_left_alone(tmp_path):
    class Dictionaries(LightningModule):
        def test_step(self, batch: Any, batch_idx: int) -> Tensor:
            return torch.zeros(2, 3)

    callback = TestPredictions()
    trainer, _ = make_trainer(tmp_path, callback)
    batches = [{"x": torch.zeros(2, 7), "y": torch.zeros(2).long()}]
    trainer.test(Dictionaries(), DataLoader(batches, batch_size=None), verbose=False)
    assert callback.confusion is None


def test_what_was_predicted_is_in_the_runs_result(tmp_path):
    callback = pass_over(tmp_path, batch_of([1, 0], [[0.9, 0.1], [0.4, 0.6]]))
    result = SimpleNamespace(confusion=None, mistakes=[])
    callback.add_facts(None, result)
    assert result.confusion.tolist() == [[0, 1], [1, 0]]
    assert result.mistakes == callback.mistakes
    assert len(result.mistakes) == 2


def test_results_of_all_ranks_are_put_together(tmp_path, monkeypatch):
    monkeypatch.setattr(monitor, "gather_from_ranks", lambda mine: [mine, (None, []), mine])
    callback = pass_over(tmp_path, batch_of([1, 0], [[0.9, 0.1], [0.4, 0.6]]), most=3)
    assert callback.confusion is not None
    assert callback.confusion.tolist() == [[0, 2], [2, 0]]
    assert [m.probability for m in callback.mistakes] == pytest.approx([0.9, 0.9, 0.6])
