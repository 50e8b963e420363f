"""A resumed run makes its loaders of what ``train_dataloader`` found before the save."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from unbroken import ExactCheckpoint

# Lightning's advice on workers and logging is not what is tested.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Killed(Exception):
    """Ends a run, and nothing is saved any more."""


class Numbers(Dataset[Any]):
    """The numbers of a list, which it shares."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, place: int) -> Tensor:
        return torch.tensor([float(self.numbers[place])])


def loader_of(numbers: list[int]) -> DataLoader[Any]:
    return DataLoader(Numbers(numbers), 2)


def shuffled_loader(numbers: list[int]) -> DataLoader[Any]:
    random.shuffle(numbers)
    return loader_of(numbers)


class Reads(LightningModule):
    """Trains on numbers, and notes those that it reads.

    Args:
        killed_at: The step that ends the run.
    """

    def __init__(self, killed_at: int | None = None) -> None:
        super().__init__()
        self.net = torch.nn.Linear(1, 1)
        self.killed_at = killed_at
        self.read: list[list[float]] = []
        self.steps = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.steps == self.killed_at:
            raise Killed
        self.steps += 1
        self.read.append(batch[:, 0].tolist())
        return self.net(batch / 10).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


class Shuffles(Reads):
    """Shuffles a list in its place."""

    def __init__(self, killed_at: int | None = None) -> None:
        super().__init__(killed_at)
        self.numbers = list(range(6))

    def train_dataloader(self) -> Any:
        return shuffled_loader(self.numbers)


class ShufflesLater(Shuffles):
    """In another hook of the epoch's start."""

    def on_train_epoch_start(self) -> None:
        random.shuffle(self.numbers)

    def train_dataloader(self) -> Any:
        return loader_of(self.numbers)


class TakesOff(Reads):
    """Takes entries off a list, of which there are just enough."""

    def __init__(self, killed_at: int | None = None) -> None:
        super().__init__(killed_at)
        self.numbers = list(range(18))

    def train_dataloader(self) -> Any:
        return loader_of([self.numbers.pop() for _ in range(6)])


class Draws(Reads):
    """Draws its samples."""

    def train_dataloader(self) -> Any:
        return loader_of(random.sample(range(100), 6))


class Count:
    """Declares its state."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


class Counts(Reads):
    """Counts the loaders in an object with a state."""

    def __init__(self, killed_at: int | None = None) -> None:
        super().__init__(killed_at)
        self.count = Count()

    def train_dataloader(self) -> Any:
        self.count.value += 1
        return loader_of([self.count.value * 10 + n for n in range(6)])


class Grows(Reads):
    """Makes loaders of a copy of what its steps change."""

    def __init__(self, killed_at: int | None = None) -> None:
        super().__init__(killed_at)
        self.numbers = list(range(6))

    def on_train_batch_end(self, *_: Any) -> None:
        self.numbers[self.steps % 6] += 100

    def train_dataloader(self) -> Any:
        return loader_of(list(self.numbers))


class ShuffledData(LightningDataModule):
    """Shuffles a list in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = list(range(6))

    def train_dataloader(self) -> Any:
        return shuffled_loader(self.numbers)


class CountedData(LightningDataModule):
    """Has a state of its own, which Lightning loads before loaders are made."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.count = state_dict["count"]

    def train_dataloader(self) -> Any:
        self.count += 1
        return loader_of([self.count * 10 + n for n in range(6)])


class StartsData(Reads):
    """Changes the state of the data module in a hook that a resumed run calls again."""

    def on_fit_start(self) -> None:
        self.trainer.datamodule.count += 5  # type: ignore[attr-defined]


CASES: dict[str, tuple[type[Reads], type[LightningDataModule] | None]] = {
    "takes off": (TakesOff, None),
    "state of the data module": (Reads, CountedData),
    "state that a hook of the start changes": (StartsData, CountedData),
    "draws": (Draws, None),
    "shuffles": (Shuffles, None),
    "shuffles later": (ShufflesLater, None),
    "counts": (Counts, None),
    "grows": (Grows, None),
    "data module": (Reads, ShuffledData),
}
EPOCHS = 3


def trained(
    folder: Path, what: str, killed_at: int | None = None, reload: int = 1, epochs: int = EPOCHS
) -> Any:
    """The module, trained on from its checkpoint, if there is one."""
    kind, data = CASES[what]
    torch.manual_seed(0)
    random.seed(0)
    module = kind(killed_at)
    keep = ExactCheckpoint(folder, every="1")
    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=epochs,
        callbacks=[keep],
        reload_dataloaders_every_n_epochs=reload,
    )
    trainer.fit(module, datamodule=data and data(), ckpt_path=keep.resume_from)
    return module


def assert_ends_alike(resumed: Any, undisturbed: Any) -> None:
    assert resumed.read
    assert resumed.read == undisturbed.read
    for mine, theirs in zip(resumed.parameters(), undisturbed.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.daily(4)
@pytest.mark.parametrize("what", CASES)
@pytest.mark.parametrize("reload", [1, 0])
@pytest.mark.parametrize("killed_at", [8, 2, 4])
def test_loaders_are_made_of_what_their_maker_held(
    killed_at: int, reload: int, what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    undisturbed = trained(tmp_path / "undisturbed", what, reload=reload)
    with pytest.raises(Killed):
        trained(tmp_path / "killed", what, killed_at, reload)
    assert_ends_alike(trained(tmp_path / "killed", what, reload=reload), undisturbed)
    assert "other samples" not in capsys.readouterr().out


@pytest.mark.daily(1)
@pytest.mark.parametrize("what", CASES)
def test_a_training_that_is_made_longer_makes_the_loaders_of_its_next_epoch(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    undisturbed = trained(tmp_path / "undisturbed", what)
    trained(tmp_path / "longer", what, epochs=1)
    # It is killed after it was made longer, too.
    with pytest.raises(Killed):
        trained(tmp_path / "longer", what, killed_at=5)
    assert_ends_alike(trained(tmp_path / "longer", what), undisturbed)
    assert "other samples" not in capsys.readouterr().out
