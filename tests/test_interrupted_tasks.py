"""Modules, callbacks and flags of all kinds, interrupted in validation, in the test and between two epochs."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from project import fit
from project.engine import command as entry
from project.engine import signals
from project.engine.exact_loading import ExactLoading
from tests.commands import assert_same_run, checkpoint, rows, run_ranks, summary
from tests.other_tasks import Noisy, table
from tests.test_any_task import SHORT, AskToStop, resume, train

HERE = "tests.test_interrupted_tasks"  # as a run imports it


@pytest.fixture(autouse=True)
def _no_wandb(monkeypatch: pytest.MonkeyPatch, workplace: Path) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")


class Task(LightningModule):
    """A small regression with all its loaders, 13 batches an epoch; ``gamma`` of its schedule may be typed."""

    monitor, mode = "val_loss", "min"

    def __init__(self, lr: float = 0.02, gamma: float = 0.9) -> None:
        super().__init__()
        self.lr, self.gamma = lr, gamma
        self.net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.1), nn.Linear(6, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).squeeze(1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", nn.functional.mse_loss(self(batch[0]), batch[1]))

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test_loss", nn.functional.mse_loss(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), self.lr)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, self.gamma)]

    def train_dataloader(self) -> Any:
        return DataLoader(Noisy(table(101)), 8, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(table(53), 10)

    def test_dataloader(self) -> Any:
        return DataLoader(table(37), 10)


class RandomStream(IterableDataset[Any]):
    """Draws while it is read, in the main process; a loader draws for it, too."""

    def __iter__(self) -> Any:
        return ((x + 0.1 * torch.randn(4), y) for x, y in table(53))


class ValidatesOnAStream(Task):
    """Its author's code looks at the loader."""

    def val_dataloader(self) -> Any:
        return DataLoader(RandomStream(), 10)

    def on_validation_epoch_start(self) -> None:
        assert self.trainer.val_dataloaders.batch_size == 10  # type: ignore[union-attr]


class LogsValidationSteps(Task):
    """Two validation sets, with values of each step."""

    monitor = "val_loss_epoch/dataloader_idx_0"

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", nn.functional.mse_loss(self(batch[0]), batch[1]), on_step=True, on_epoch=True)

    def val_dataloader(self) -> Any:
        return [DataLoader(table(53), 10), DataLoader(table(21), 4)]


class Wrapped(Task):
    """Metrics that keep more than sums."""

    def __init__(self) -> None:
        super().__init__()
        self.running, self.range = torchmetrics.RunningMean(5), torchmetrics.MinMaxMetric(torchmetrics.MeanMetric())
        self.tracker = torchmetrics.MetricTracker(torchmetrics.MeanSquaredError())

    def on_train_epoch_start(self) -> None:
        self.tracker.increment()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.running.update(loss.detach())
        self.tracker.update(self(batch[0]).detach(), batch[1])
        self.range.update(loss.detach())
        self.log("running", self.running.compute())
        self.log("lowest", self.range.compute()["min"])
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("best_epoch", float(self.tracker.best_metric(return_step=True)[1]))


class AddsToATrainingMetric(Task):
    """A value that was logged in training has its precision after a resume, too."""

    def on_validation_epoch_end(self) -> None:
        self.log("val_sum", torch.rand(()) + self.trainer.callback_metrics["train_loss_step"])


class CountsEpochs(Callback):
    """A callback with a state that changes as an epoch begins."""

    epochs = 0

    def on_train_epoch_start(self, trainer: Any, pl_module: LightningModule) -> None:
        self.epochs += 1
        pl_module.log("counted", float(self.epochs))

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epochs = state_dict["epochs"]


class EndsItself(Task):
    """Ends the training as its own code finds right."""

    def on_train_epoch_end(self) -> None:
        self.trainer.should_stop = self.current_epoch == 1


class Interrupts(Callback):
    """Asks the run to stop, or dies, at the ``number``-th call of a hook."""

    def __init__(self, hook: str, number: int, dies: bool) -> None:
        asks, self.left = AskToStop(0, dies), number
        setattr(self, hook, partial(self.count, asks.do))

    def count(self, do: Any, *_: Any) -> None:
        self.left -= 1
        if not self.left:
            do()


def interrupted(name: str, hook: str, number: int, dies: bool, *flags: str) -> None:
    """A run that ends at a hook."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit, "build", partial(fit.build, extra=[Interrupts(hook, number, dies)]))
        try:
            assert entry.exit_code(fit.main, [*flags, "--run_name", name]) == (1 if dies else 143)
        finally:
            signals.state.requested = 0


def of(module: str, *flags: str) -> list[str]:
    return ["--model", f"{HERE}.{module}", "--data", "null", "--accelerator", "cpu", *SHORT, *flags]


EARLY = ["--trainer.callbacks", "EarlyStopping", "--trainer.callbacks.monitor", "train_loss"]
EARLY += ["--trainer.callbacks.patience", "1", "--trainer.callbacks.min_delta", "100", "--max_epochs", "6"]
CASES: dict[str, tuple[list[str], str, int, bool]] = {
    "validation on a stream": (of("ValidatesOnAStream"), "on_validation_batch_start", 3, False),
    "steps of a validation": (of("LogsValidationSteps"), "on_validation_batch_start", 15, False),
    "between such validations": (
        of("LogsValidationSteps", "--val_check_interval", "5"),
        "on_train_batch_end",
        22,
        False,
    ),
    "wrapped metrics": (of("Wrapped", "--log_every_n_steps", "1"), "on_train_batch_end", 33, False),
    "wrapped metrics, a validation": (of("Wrapped"), "on_validation_batch_start", 8, False),
    "a metric's precision": (of("AddsToATrainingMetric"), "on_validation_batch_start", 8, False),
    "a callback's state": (of("Task", "--trainer.callbacks", f"{HERE}.CountsEpochs"), "on_train_batch_end", 20, False),
    "double precision": (of("Task", "--precision", "64-true"), "on_train_batch_end", 20, False),
    "steps, between epochs": (of("Task", "--max_steps", "24"), "on_train_epoch_start", 2, True),
    "steps, in the last validation": (of("Task", "--max_steps", "26"), "on_validation_batch_start", 8, False),
    "stopped early, in the test": (of("Task", *EARLY), "on_test_start", 1, True),
    "ended itself, in the test": (of("EndsItself", "--max_epochs", "5"), "on_test_batch_end", 1, False),
    "early, but not before": (of("Task", *EARLY, "--min_epochs", "4"), "on_train_batch_end", 32, False),
}


@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`")
@pytest.mark.parametrize("case", CASES)
def test_an_interrupted_run_is_bit_identical(case: str) -> None:
    flags, hook, number, dies = CASES[case]
    random.seed(0)
    reference = train("reference", *flags)
    interrupted("other", hook, number, dies, *flags)
    other = resume("other")
    assert_same_run(reference, other)
    for name in ("last.ckpt", "best.ckpt"):
        ours, theirs = (checkpoint(run / name)["callbacks"] for run in (reference, other))
        kept = [{k: x for k, x in each.items() if k != "RunTimer"} for each in (ours, theirs)]
        assert str(kept[0]) == str(kept[1])
    ours, theirs = (summary(run) for run in (reference, other))
    for name in ("epochs", "steps", "best_epoch", "test_loss", "train_samples", ours["monitor"]):
        assert ours[name] == theirs[name], name


def test_what_is_typed_beats_a_schedules_state() -> None:
    rate = lambda run: checkpoint(run / "last.ckpt")["optimizer_states"][0]["param_groups"][0]["lr"]  # noqa: E731
    assert rate(train("r", *of("Task", "--max_epochs", "2"))) == pytest.approx(0.02 * 0.9**2)
    assert rate(resume("r", "--max_epochs", "3", "--model.gamma", "0.5")) == pytest.approx(0.02 * 0.9**2 * 0.5)
    assert rate(resume("r", "--max_epochs", "4")) == pytest.approx(0.02 * 0.9**2 * 0.5**2)


class Cycle(Task):
    """Its schedule is as long as the run."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), self.lr)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.lr, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def test_a_schedule_is_as_long_as_the_run_that_was_typed() -> None:
    train("r", *of("Cycle", "--max_epochs", "2"))
    resumed = checkpoint(resume("r", "--max_epochs", "3") / "last.ckpt")
    assert resumed["lr_schedulers"][0]["total_steps"] == resumed["global_step"] == 39


def test_a_patience_that_is_typed_beats_the_checkpoints() -> None:
    run = train("r", *of("Task", *EARLY))
    assert summary(run)["epochs"] == 2
    resumed = resume("r", "--trainer.callbacks.patience", "3", "--max_epochs", "7")
    assert summary(resumed)["epochs"] == 4
    assert len([row for row in rows(resumed) if "val_loss" in row]) == 4


@pytest.mark.parametrize("kind", ["distributed", "drop_last"])
def test_ranks_evaluate_the_samples_that_one_process_does(kind: str) -> None:
    class Ranks:
        training, current_epoch, reload_dataloaders_every_n_epochs = False, 0, 0

        def __init__(self, global_rank: int, world_size: int) -> None:
            self.global_rank, self.world_size = global_rank, world_size

    def seen(rank: int, ranks: int) -> list[int]:
        numbers: Any = range(53)
        sampler: Any = DistributedSampler(numbers, ranks, rank, shuffle=False) if kind == "distributed" else None
        loader = DataLoader(numbers, 10, sampler=sampler, drop_last=kind == "drop_last")
        trainer: Any = Ranks(rank, ranks)
        return [int(number) for batch in ExactLoading(seed=0).exact(loader, trainer) for number in batch]

    assert sorted([*seen(0, 2), *seen(1, 2)]) == sorted(seen(0, 1))


class Joins(Task):
    """Joins its ranks' values itself, as Lightning's documents advise."""

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)
        self.log("val_mean", batch[1].mean(), sync_dist=True)
        self.log("val_samples", float(len(batch[1])), reduce_fx="sum", sync_dist=True)
        self.log("val_largest", batch[1].max(), reduce_fx="max", sync_dist=True)


def test_values_that_a_module_joins_itself_are_those_of_one_process() -> None:
    one = train("one", *of("Joins", "--max_epochs", "1"))
    two = run_ranks("fit", *of("Joins", "--max_epochs", "1"), "--run_name", "two")
    assert two.returncode == 0, two.stderr
    for name in ("val_mean", "val_samples", "val_largest"):
        ours, theirs = ([float(row[name]) for row in rows(run) if name in row] for run in (one, one.with_name("two")))
        assert ours == pytest.approx(theirs, rel=1e-6), name
