"""What several of the user's objects hold as one list, tensor or array is one after a resume."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from unbroken import ExactCheckpoint

# A constant of a file, which no training changes.
WEIGHTS = {"first": 1.0, "second": [1.0, 2.0]}
KEPT_WEIGHTS = {"first": 1.0, "second": [1.0, 2.0]}


class Killed(Exception):
    """Ends a run in the middle of an epoch."""


class Bonus:
    """Adds up what another object collects."""

    def __init__(self, seen: list[float], half: Tensor) -> None:
        self.seen = seen
        self.half = half

    def value(self) -> float:
        return sum(self.seen) + float(self.half.sum())


class Shares(LightningModule):
    """Holds one list, tensor or array at several places, and trains with what all of them say."""

    collected: list[float] = []

    def __init__(self, killed_at: int | None = None) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.killed_at = killed_at
        self.seen: list[float] = []
        self.same = self.seen
        self.by_name = {"seen": self.seen, "queue": deque([0.0], maxlen=3)}
        self.queue = self.by_name["queue"]
        self.total = torch.zeros(4)
        self.half = self.total[:2]
        self.array = np.zeros(3)
        self.of_array = torch.from_numpy(self.array)
        self.bonus = Bonus(self.seen, self.half)
        # What training puts another one in the place of
        self.weights = WEIGHTS
        self.current: list[float] = []
        self.before = self.current
        self.then: list[float] = [1.0]

    def on_train_epoch_start(self) -> None:
        self.then = self.current

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.killed_at == self.global_step:
            raise Killed
        x, noted = batch
        number = float(self.global_step + 1)
        self.seen.append(number)
        self.queue.append(number)
        self.collected.append(number)
        self.total += number
        self.array += number / 2
        second = [each + 1 for each in self.weights["second"]]
        self.weights = {**self.weights, "first": self.weights["first"] + 1, "second": second}
        self.current = [*self.current, number]
        self.before.append(number)
        self.trainer.datamodule.noted.append(number)  # type: ignore[attr-defined]
        told = (
            *(self.bonus.value(), sum(self.same), sum(self.by_name["queue"])),
            *(sum(self.half), self.of_array.sum(), noted.sum(), self.weights["first"]),
            *(sum(self.weights["second"]), sum(self.before), sum(self.current), sum(self.then)),
            *(sum(self.by_name["seen"]), sum(Shares.collected)),
        )
        scale = torch.tanh(torch.tensor([float(each) for each in told]) / 100).sum()
        return self.net(x).pow(2).mean() * (1 + scale)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01, momentum=0.9)


class Rows(Dataset[Any]):
    """Gives with each row what was noted so far."""

    def __init__(self, noted: list[float]) -> None:
        self.noted = noted

    def __len__(self) -> int:
        return 8

    def __getitem__(self, key: int) -> Any:
        return torch.tensor([float(key)]), torch.tensor([sum(self.noted)])


class Data(LightningDataModule):
    """Notes something in a list that its data set has, too."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[float] = []

    def setup(self, stage: str) -> None:
        self.rows = Rows(self.noted)

    def train_dataloader(self) -> Any:
        return DataLoader(self.rows, 2, shuffle=True)


class Watches(Callback):
    """Holds a list of the module's."""

    def __init__(self, seen: list[float]) -> None:
        self.seen = seen


def trained(folder: Path, killed_at: int | None = None, **options: Any) -> Shares:
    """The module, trained for three epochs."""
    torch.manual_seed(0)
    Shares.collected = []
    module = Shares(killed_at)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(0.5)
    keep = ExactCheckpoint(folder, every="1")
    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=3,
        callbacks=[Watches(module.seen), keep],
        **options,
    )
    trainer.fit(module, datamodule=Data(), ckpt_path=keep.resume_from)
    return module


@pytest.mark.daily(1)
@pytest.mark.parametrize("killed_at", [1, 4, 6])
def test_what_two_objects_share_they_share_after_a_resume(
    killed_at: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    undisturbed = trained(tmp_path / "undisturbed")
    with pytest.raises(Killed):
        trained(tmp_path / "killed", killed_at)
    resumed = trained(tmp_path / "killed")
    assert resumed.same is resumed.seen
    assert resumed.bonus.seen is resumed.seen
    assert resumed.by_name["seen"] is resumed.seen
    assert resumed.by_name["queue"] is resumed.queue
    assert resumed.before is not resumed.current
    assert resumed.current == undisturbed.current
    assert resumed.before == undisturbed.before
    assert Shares.collected == [float(step) for step in range(1, 13)], "a list of the class"
    assert WEIGHTS == KEPT_WEIGHTS, "a constant stays what it is"
    assert torch.equal(resumed.net.weight, undisturbed.net.weight)
    captured = capsys.readouterr()
    assert "begins anew" not in captured.out, "what a callback holds is the module's"
    assert "may not be exact" not in captured.out
