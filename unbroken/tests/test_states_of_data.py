"""What data sets and samplers that only a loader holds keep, and what of it comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from torch.utils.data import DataLoader, Dataset, Sampler, Subset
from unbroken import ExactCheckpoint

from tests.plain_module import Dies, Regression, rows


class Relabelled(Dataset[Any]):
    """Rows whose targets training moves. It declares them."""

    def __init__(self) -> None:
        self.x, self.y = (tensor.clone() for tensor in rows(80, 0).tensors)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, key: int) -> Any:
        return self.x[key], self.y[key]

    def state_dict(self) -> dict[str, Any]:
        return {"targets": self.y.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.y.copy_(state["targets"])


class Relabels(Regression):
    """Moves all targets after each step and epoch. Its loader alone holds the data set."""

    def train_dataloader(self) -> Any:
        return DataLoader(Relabelled(), 4, shuffle=True)

    def on_train_batch_end(self, *_: Any) -> None:
        self.relabel()

    def on_train_epoch_end(self) -> None:
        self.relabel()

    def relabel(self) -> None:
        data: Any = self.trainer.train_dataloader
        while not isinstance(data, Relabelled):
            data = data.dataset
        data.y.mul_(0.99)


class RelabelsSome(Relabels):
    def train_dataloader(self) -> Any:
        return DataLoader(Subset(Relabelled(), range(60)), 4, shuffle=True)


class Draws(Sampler[int]):
    """Gives five rows by a generator of its own, others in each pass."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(3)

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[int]:
        return iter(self.generator.permutation(37)[:5].tolist())


class ValidatesSome(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.validated: list[float] = []

    def val_dataloader(self) -> Any:
        return DataLoader(rows(37, 1), 1, sampler=Draws())

    def validation_step(self, batch: list[Any], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        if not self.trainer.sanity_checking:
            self.validated.append(float(batch[0][0, 0]))


class Turns(Draws):
    """Gives the next five rows in each pass, and declares the place."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[int]:
        self.place += 5
        return iter(range(self.place - 5, self.place))

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class ValidatesInTurn(Regression):
    def val_dataloader(self) -> Any:
        return DataLoader(rows(37, 1), 1, sampler=Turns())


def train(folder: str, make: Callable[[], Regression], *further: Any) -> Any:
    seed_everything(7, verbose=False)
    keep = ExactCheckpoint(folder, monitor="val_loss", mode="min", every="5")
    module = make()
    trainer = Trainer(
        max_epochs=2,
        accelerator="cpu",
        callbacks=[keep, *further],
        limit_train_batches=12,
        val_check_interval=4,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, ckpt_path=keep.resume_from)
    return module


@pytest.mark.daily(1)
@pytest.mark.parametrize("make", [Relabels, RelabelsSome])
def test_a_state_that_a_data_set_declares_is_kept_though_a_loader_alone_holds_it(
    workplace: Path, capsys: pytest.CaptureFixture[str], make: Any
) -> None:
    undisturbed = train("undisturbed", make)
    for step in (8, 14):
        with pytest.raises(RuntimeError, match="died"):
            train("killed", make, Dies(step))
    resumed = train("killed", make)
    for name, weight in undisturbed.named_parameters():
        assert torch.equal(weight, resumed.get_parameter(name))
    told = capsys.readouterr().out
    assert "a resume" not in told
    assert "not exact" not in told


def test_a_generator_of_a_validations_sampler_keeps_its_place(workplace: Path) -> None:
    undisturbed = train("undisturbed", ValidatesSome)
    with pytest.raises(RuntimeError, match="died"):
        train("killed", ValidatesSome, Dies(13))
    resumed = train("killed", ValidatesSome)
    assert resumed.validated == undisturbed.validated[-len(resumed.validated) :]


def test_a_place_that_a_validations_sampler_declares_is_told(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """To load it may mean the rest of an ended pass."""
    train("run", ValidatesInTurn)
    told = capsys.readouterr().out
    assert "begins anew with val_dataloaders.sampler.place" in told
    assert "Keep it in an attribute of the data module, or let a set_epoch set it." in told
