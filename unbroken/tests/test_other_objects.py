"""What training puts in the place of something of the start comes back, or is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR
from torch.utils.data import DataLoader, TensorDataset
from unbroken import ExactCheckpoint

STEPS = 5


class Killed(Exception):
    """Ends a run in the middle of an epoch."""


class Task(LightningModule):
    """Five steps an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 2), nn.Dropout(0.2), nn.Linear(2, 1))
        self.measure: Any = nn.functional.mse_loss
        self.factor = 1.0

    def rows(self) -> Any:
        return TensorDataset(torch.arange(2.0 * STEPS)[:, None])

    def train_dataloader(self) -> Any:
        return DataLoader(self.rows(), 2, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self.rows(), 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0] / 10
        return self.measure(self.net(x), x.sin()) * self.factor

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", float(self.current_epoch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        return [optimizer], [{"scheduler": ExponentialLR(optimizer, 0.9), "interval": "step"}]


class NewSchedule(Task):
    """Makes its schedule again when it knows how long the training is."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        return [optimizer], [{"scheduler": CosineAnnealingLR(optimizer, 99), "interval": "step"}]

    def on_train_start(self) -> None:
        optimizer = self.trainer.optimizers[0]
        self.trainer.lr_scheduler_configs[0].scheduler = CosineAnnealingLR(optimizer, 15)


class LessOften(Task):
    """Steps its schedule less often after the first epoch."""

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 0:
            self.trainer.lr_scheduler_configs[0].frequency = 3


class MorePatient(Task):
    """Waits longer for a better value after the first epoch."""

    def on_train_epoch_end(self) -> None:
        stopping: Any = self.trainer.early_stopping_callback
        if self.current_epoch == 0:
            stopping.patience = 2


class Reads(Task):
    """Weighs its loss by what was logged last."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        found: list[Any] = [self.trainer.logged_metrics, self.trainer.progress_bar_metrics]
        weights = [1 + float(each.get("val_loss", 0.0)) for each in found]
        return super().training_step(batch, batch_idx) * sum(weights)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", float(self.current_epoch), prog_bar=True)


class OwnFormat(TorchCheckpointIO):
    """Reads what it has written alone."""

    def load_checkpoint(self, path: Any, *args: Any, **options: Any) -> Any:
        raise AssertionError("another one has written that")


class Kills(Callback):
    """Ends a run before a step."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            raise Killed


def trained(
    folder: Path,
    make: Callable[[], Task],
    killed_at: int | None = None,
    more: Any = (),
    plugins: Any = (),
) -> Trainer:
    """Train for three epochs."""
    torch.manual_seed(0)
    keep = ExactCheckpoint(folder, every="1")
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=3,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Kills(killed_at), *(each() for each in more), keep],
        plugins=[*plugins],
    )
    trainer.fit(make(), ckpt_path=keep.resume_from)
    return trainer


def stopping() -> Callback:
    return EarlyStopping("val_loss", patience=1, mode="min")


@pytest.mark.parametrize("make", [NewSchedule, LessOften, MorePatient, Reads])
def test_what_training_sets_anew_comes_back(make: Any, tmp_path: Path) -> None:
    more = [stopping] if make is MorePatient else []
    undisturbed = trained(tmp_path / "undisturbed", make, more=more)
    with pytest.raises(Killed):
        trained(tmp_path / "killed", make, 2 * STEPS - 2, more)
    resumed = trained(tmp_path / "killed", make, more=more)
    assert resumed.global_step == undisturbed.global_step
    ours, theirs = (each.lightning_module.state_dict() for each in (resumed, undisturbed))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_checkpoint_io_of_the_users_does_not_read_what_it_has_not_written(
    tmp_path: Path,
) -> None:
    with pytest.raises(Killed):
        trained(tmp_path, Task, 2 * STEPS - 2, plugins=[OwnFormat()])
    assert trained(tmp_path, Task, plugins=[OwnFormat()]).global_step == 3 * STEPS


class OtherLayer(Task):
    """Takes a layer out after the first epoch."""

    def on_train_epoch_end(self) -> None:
        self.net[1] = nn.Identity()


class OtherFunction(Task):
    """Measures in another way after the first epoch."""

    def on_train_epoch_end(self) -> None:
        self.measure = nn.functional.l1_loss


class Hooked(Task):
    """Has a hook after the first epoch."""

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 0:
            self.net[0].register_forward_hook(lambda layer, inputs, output: output * 0.9)


class Leaves(Callback):
    """Takes part in the first epoch alone."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        trainer.callbacks.remove(self)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("make", "more", "line"),
    [
        (OtherLayer, [], "Identity in the place of Dropout at module.net.1"),
        (OtherFunction, [], "l1_loss in the place of mse_loss at module.measure"),
        (Hooked, [], "the number of hooks of module.net.0 from 0 to 1"),
        (Task, [Leaves], "has changed the callbacks from Kills Leaves to Kills"),
    ],
)
def test_what_a_resumed_run_has_of_its_start_is_told_once(
    make: Any, more: Any, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path / "undisturbed", make, more=more)
    assert capsys.readouterr().out.count(line) == 1
    # A resume is not exact, and comes to its end.
    with pytest.raises(Killed):
        trained(tmp_path / "killed", make, 2 * STEPS - 2, more)
    assert trained(tmp_path / "killed", make, more=more).global_step == 3 * STEPS


class Counts(Callback):
    """Counts epochs, and nobody keeps the count."""

    def __init__(self) -> None:
        self.count = 0
        self.epoch = -1

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.count += 1
        self.epoch = trainer.current_epoch
        pl_module.factor = 1 / self.count


def test_what_the_starts_of_epochs_add_up_is_told_at_the_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Killed):
        trained(tmp_path, Task, 2 * STEPS - 2, [Counts])
    assert "Counts" not in capsys.readouterr().out
    trained(tmp_path, Task, more=[Counts])
    told = capsys.readouterr().out
    assert told.count("callbacks.Counts.0.count was 2 at the save and is 1 now") == 1
    assert "Counts.0.epoch" not in told, "it is set alike"
