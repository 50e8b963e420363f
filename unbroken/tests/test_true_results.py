"""A number in a result is of the weights that it stands beside."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping
from numerals.fit import job
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from unbroken import ExactCheckpoint
from unbroken.checkpoint.restoring import who_keeps_the_best_of_before
from unbroken.commands import test as test_command
from unbroken.commands.sweep.space import Space
from unbroken.commands.sweep.trials import RunningTrial
from unbroken.loggers.metrics_csv import MetricsCSV
from unbroken.loggers.wandb import send_result
from unbroken.results.facts import Summary, training_samples
from unbroken.results.run_result import RunResult, read_epochs, read_series
from unbroken.run.final_test import as_test, final_test
from unbroken.run.main_job import finish
from unbroken.run.run_record import RunRecord
from unbroken.run.wrong_numbers import holds_finite_weights
from unbroken.storage.files import NotWritten

from tests.commands import SMALL, checkpoint
from tests.monitored import make_trainer
from tests.plain_module import Dies, Regression, SplitsByChance

STEPS = 6


def fit(
    make: Any, monitor: str, mode: Any, epochs: int, *further: Callback, **flags: Any
) -> ExactCheckpoint:
    """Train, and follow a metric."""
    seed_everything(7, verbose=False)
    keep = ExactCheckpoint("run", monitor=monitor, mode=mode, every="5")
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        limit_train_batches=STEPS,
        callbacks=[keep, *further],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **flags,
    )
    trainer.fit(make(), ckpt_path=keep.resume_from)
    return keep


class Dear(Regression):
    """Measures a dear metric after every third epoch."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", 1.0)

    def on_validation_epoch_end(self) -> None:
        if self.current_epoch % 3 == 0:
            self.log("val_fid", 10.0)


class InTraining(Regression):
    """Logs a metric of each epoch's training, which is best in the second epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        value = [3.0, 2.0, 5.0, 4.0][self.current_epoch]
        self.log("cost", value, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


class Overflows(Regression):
    """Has an infinite value after its second epoch."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_gain", [1.0, math.inf, 5.0, 3.0][self.current_epoch])


CASES = [
    (Dear, "val_fid", "min", 0, 10.0),
    (InTraining, "cost", "min", 1, 2.0),
    (Overflows, "val_gain", "max", 2, 5.0),
]


@pytest.mark.daily(2)
@pytest.mark.parametrize("killed_at", [None, 2 * STEPS + 3])
@pytest.mark.parametrize(("make", "monitor", "mode", "epoch", "score"), CASES)
def test_the_best_is_of_the_weights_that_were_measured(
    workplace: Path,
    make: Any,
    monitor: str,
    mode: Any,
    epoch: int,
    score: float,
    killed_at: int | None,
) -> None:
    epochs = 3 if make is Dear else 4
    if killed_at is not None:
        with pytest.raises(RuntimeError, match="died"):
            fit(make, monitor, mode, epochs, Dies(killed_at))
    keep = fit(make, monitor, mode, epochs)
    assert (keep.best.epoch, keep.best.score) == (epoch, score)
    assert checkpoint(Path("run/best.ckpt"))["global_step"] == (epoch + 1) * STEPS


class HeldOut(Regression):
    """Logs the mean of the numbers that it validates with, and a cost of its training."""

    def __init__(self, *numbers: float) -> None:
        super().__init__()
        self.numbers = numbers

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("cost", float(self.current_epoch), on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.tensor(self.numbers)), batch_size=1)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", batch[0].mean())


@pytest.mark.daily(3)
@pytest.mark.parametrize("killed_at", [None, STEPS + 3])
@pytest.mark.parametrize(
    ("numbers", "limit", "is_looked_for_anew"),
    [
        ((1.0, 5.0), 1, False),
        ((1.0, 5.0), 1.0, True),
        ((2.0, 5.0), 1, True),
        ((1.0, 5.0, 9.0), 1, True),
    ],
)
def test_a_best_of_other_samples_is_no_rival(
    workplace: Path,
    capsys: pytest.CaptureFixture[str],
    numbers: tuple[float, ...],
    limit: float,
    is_looked_for_anew: bool,
    killed_at: int | None,
) -> None:
    first = partial(fit, lambda: HeldOut(1.0, 5.0), "val_loss", "min", limit_val_batches=1)
    if killed_at is None:
        first(1)
    else:
        with pytest.raises(RuntimeError, match="died"):
            first(2, Dies(killed_at))
    keep = fit(lambda: HeldOut(*numbers), "val_loss", "min", 2, limit_val_batches=limit)
    line = "validations read other samples than before, so the best so far (val_loss 1)"
    assert (line in capsys.readouterr().out) == is_looked_for_anew
    read = numbers[:1] if limit == 1 and isinstance(limit, int) else numbers
    assert (keep.best.epoch, keep.best.score) == (1, sum(read) / len(read))
    assert checkpoint(Path("run/best.ckpt"))["global_step"] == 2 * STEPS


class Worsens(Regression):
    """Is worse in each validation."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", float(self.current_epoch))


@pytest.mark.nightly
@pytest.mark.parametrize("flags", [{"check_val_every_n_epoch": 2}, {"limit_val_batches": 0}])
def test_validations_that_are_not_made_yet_are_no_other_ones(
    workplace: Path, capsys: pytest.CaptureFixture[str], flags: dict[str, int]
) -> None:
    every = {"check_val_every_n_epoch": 2}
    with pytest.raises(RuntimeError, match="died"):
        fit(Worsens, "val_loss", "min", 4, Dies(2 * STEPS + 3), **every)
    with pytest.raises(RuntimeError, match="died"):
        fit(Worsens, "val_loss", "min", 4, Dies(3 * STEPS + 3), **every | flags)
    keep = fit(Worsens, "val_loss", "min", 4, **every)
    assert (keep.best.epoch, keep.best.score) == (1, 1.0)
    assert "other samples" not in capsys.readouterr().out


def test_callbacks_that_keep_their_best_of_other_samples_are_named(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stop = EarlyStopping("val_loss")
    fit(lambda: HeldOut(1.0, 5.0), "val_loss", "min", 1, stop, limit_val_batches=1)
    fit(lambda: HeldOut(1.0, 5.0), "val_loss", "min", 2, stop, limit_val_batches=2)
    line = "looked for anew. The one before still counts for EarlyStopping.\n"
    assert line in capsys.readouterr().out


def test_a_schedule_of_a_plateau_goes_by_its_best_as_well() -> None:
    schedule = ReduceLROnPlateau(torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1))
    trainer: Any = SimpleNamespace(
        callbacks=[EarlyStopping("val_loss"), Callback()],
        lr_scheduler_configs=[SimpleNamespace(scheduler=schedule)],
    )
    told = " The one before still counts for EarlyStopping and ReduceLROnPlateau."
    assert who_keeps_the_best_of_before(trainer) == told


def test_facts_are_added_where_the_rows_cannot_be_written(tmp_path: Path) -> None:
    # Other ranks may exchange something in their add_facts.
    class AddsFacts(Callback):
        added = 0

        def add_facts(self, trainer: Trainer, result: RunResult) -> None:
            self.added += 1

    class OnAFullDisk(MetricsCSV):
        def write(self, to_disk: bool = False) -> None:
            raise NotWritten("the disk is full")

    adds = AddsFacts()
    trainer = Trainer(
        accelerator="cpu", callbacks=[adds], logger=OnAFullDisk(tmp_path / "metrics.csv")
    )
    facts = Summary("r", True, "cpu", "32-true", 1, 10, 2, 20)
    with pytest.raises(NotWritten):
        finish(trainer, RunResult(facts, config=""))
    assert adds.added == 1


def test_a_best_of_training_outlasts_another_validation(workplace: Path) -> None:
    fit(lambda: HeldOut(1.0, 5.0), "cost", "min", 1, limit_val_batches=1)
    keep = fit(lambda: HeldOut(2.0, 5.0), "cost", "min", 2, limit_val_batches=1.0)
    assert (keep.best.epoch, keep.best.score) == (0, 0.0)


POINTS = TensorDataset(torch.zeros(100, 1))
BY_EIGHT = partial(DataLoader, POINTS, 8)
LOADERS = [
    (BY_EIGHT(drop_last=True), 100),
    (BY_EIGHT(sampler=WeightedRandomSampler(torch.ones(100), 300)), 300),
    (BY_EIGHT(sampler=SubsetRandomSampler(range(40))), 40),
    (BY_EIGHT(sampler=DistributedSampler(POINTS, 3, 0)), 100),
    # Nobody knows how many samples these batches have.
    (DataLoader(POINTS, batch_size=None), None),
    (DataLoader(POINTS, batch_sampler=[[0, 1], [2]]), None),
    ([BY_EIGHT(), BY_EIGHT()], None),
]


@pytest.mark.parametrize(("loader", "samples"), LOADERS)
def test_the_samples_of_an_epoch_are_those_that_are_drawn(loader: Any, samples: int | None) -> None:
    facts = {"train_dataloader": loader, "world_size": 2}
    whole: Any = SimpleNamespace(**facts, limit_train_batches=1.0)
    assert training_samples(whole) == samples
    limited: Any = SimpleNamespace(**facts, limit_train_batches=1, num_training_batches=1)
    assert training_samples(limited) == (None if samples is None else 16)


def test_a_result_of_the_test_takes_no_other_ones_place() -> None:
    logged = {"val_acc", "train_loss"}
    assert as_test("val_acc", logged) == "test/val_acc"
    assert as_test("test_acc", logged) == "test_acc"
    assert as_test("precision", logged) == "precision"
    # Also where no validation ran
    assert as_test("val_acc") == "test/val_acc"


def test_loggers_get_the_results_of_the_test_under_their_own_names(workplace: Path) -> None:
    class TestsAsItValidates(Regression):
        test_step = Regression.validation_step
        test_dataloader = Regression.val_dataloader

    trainer, rows = make_trainer(workplace)
    module: Any = TestsAsItValidates()
    trainer.fit(module)
    before = len(rows.rows)
    config: Any = SimpleNamespace(module=module, datamodule=None)
    result = final_test(trainer, config, None)
    assert result.keys() == {"test/val_loss"}
    ((_, logged),) = rows.rows[before:]
    assert logged == {**result, "epoch": 1}
    rows.log_metrics({"val_loss": 1.0})
    assert rows.rows[-1][1] == {"val_loss": 1.0}


def test_the_test_at_a_runs_end_and_the_command_read_the_rows_that_a_split_has_held_out(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    SplitsByChance.splits.clear()
    words = ["--model", "tests.plain_module.AlsoTested"]
    words += ["--data", "tests.plain_module.SplitsByChance"]
    assert job.main([*words, "--max_epochs", "1", "--accelerator", "cpu"]) == 0
    assert test_command.main("numerals", ["--accelerator", "cpu"]) == 0
    of_training, of_its_test, of_command = SplitsByChance.splits
    assert of_its_test == of_training
    assert of_command == of_training


def test_a_row_without_an_epoch_is_of_the_moment_of_the_row_before(tmp_path: Path) -> None:
    # A module that logs "step" has Lightning log its values under it, and without an epoch.
    lines = ["step,epoch,train_loss,val_x", "9,0,0.5,", "0,,,7.0", "19,1,0.4,", "1,,,8.0"]
    path = tmp_path / "metrics.csv"
    path.write_text("".join(f"{line}\n" for line in lines))
    assert read_series(path, 2)["val_x"] == [(9, 7.0), (19, 8.0)]
    shown = [{"epoch": 1, "train_loss": 0.5, "val_x": 7.0}]
    assert read_epochs(path, 1) == shown
    goal: Any = SimpleNamespace(goal="minimize")
    space = SimpleNamespace(metric="val_x", best=partial(Space.best, goal))
    trial: Any = SimpleNamespace(space=space, folder=tmp_path)
    assert RunningTrial.scores(trial, RunningTrial.rows(trial)) == {0: 7.0, 1: 8.0}
    path.write_text("step,val_x\n5,7.0\n")
    assert RunningTrial.scores(trial, RunningTrial.rows(trial)) == {0: 7.0}
    # Lightning's LearningRateMonitor logs as an epoch begins.
    path.write_text("step,epoch,train_loss,lr\n9,0,0.5,\n10,,,0.1\n19,1,0.4,\n")
    assert read_series(path, 2)["lr"] == [(10, 0.1)]
    assert read_epochs(path, 2)[1] == {"epoch": 2, "train_loss": 0.4, "lr": 0.1}


def test_a_checkpoints_record_has_the_metrics_of_its_own_weights(workplace: Path) -> None:
    (workplace / "r").mkdir()
    record = RunRecord(workplace / "r", "id1", {}, workplace)
    trainer, _ = make_trainer(workplace, record, max_epochs=2)
    saved: dict[str, Any] = {}

    class Saves(Dear):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx < 2:
                trainer.save_checkpoint(workplace / "any.ckpt")
                name = (self.current_epoch, batch_idx)
                saved[name] = checkpoint(workplace / "any.ckpt")["run"]["metrics"].keys()

        def on_train_end(self) -> None:
            trainer.save_checkpoint(workplace / "any.ckpt")
            saved["end"] = checkpoint(workplace / "any.ckpt")["run"]["metrics"].keys()

    trainer.fit(Saves())
    assert saved[1, 0] >= {"val_loss", "val_fid"}
    assert not saved[1, 1], "these weights were not validated"
    # val_fid is that of the first epoch.
    assert "val_loss" in saved["end"]
    assert "val_fid" not in saved["end"]


def test_a_trials_value_of_an_epoch_is_its_best() -> None:
    goal: Any = SimpleNamespace(goal="maximize")
    space = SimpleNamespace(metric="val_x", best=partial(Space.best, goal))
    trial: Any = SimpleNamespace(space=space)
    values = [(0, 9.0), (0, 1.0), (1, math.nan), (1, 2.0), (2, math.inf)]
    rows = [{"epoch": float(epoch), "val_x": value} for epoch, value in values]
    assert RunningTrial.scores(trial, rows) == {0: 9.0, 1: 2.0}


@pytest.mark.parametrize("is_kept_by_wandb", [False, True])
def test_wandbs_summary_has_the_best_of_the_metric_that_is_followed(
    tmp_path: Path, is_kept_by_wandb: bool
) -> None:
    facts = Summary("r", False, "cpu", "32-true", 1, 10, 2, 20, monitor="val_acc", best_score=0.5)
    result = RunResult(facts, config="", stopped_by="SIGTERM")
    result.series = {"val_acc": [(1, 0.5), (2, 0.4)], "val_loss": [(1, 1.0)]}
    facts.metrics = {"val_loss": 1.0, "test_acc": 0.6}
    there: Any = {"val_acc": {"max": 0.5} if is_kept_by_wandb else 0.4}
    send_result(SimpleNamespace(log=lambda _: None, summary=there), result, tmp_path)
    assert there["val_acc"] == ({"max": 0.5} if is_kept_by_wandb else 0.5)
    assert there["test_acc"] == 0.6
    assert "val_loss" not in there, "W&B has its last value"


def test_the_followed_metric_of_a_summary_is_the_bests() -> None:
    facts = Summary("r", True, "cpu", "32-true", 1, 10, 2, 20, monitor="val_acc", best_score=0.5)
    facts.metrics = {"val_acc": 0.9}
    assert facts.to_plain()["val_acc"] == 0.5


def test_the_line_of_an_epoch_shows_what_was_logged_in_it(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--max_epochs", "3", "--check_val_every_n_epoch", "2", "--logger", "false"]
    assert job.main([*SMALL, *flags, "--run_name", "r"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch ")]
    assert ["val/accuracy" in line for line in lines] == [False, True, False]
    assert all("train/loss" in line for line in lines)


@pytest.mark.parametrize(("weight", "is_sound"), [(1.0, True), (math.nan, False)])
def test_the_weights_of_the_best_say_whether_it_is_sound(
    tmp_path: Path, weight: float, is_sound: bool
) -> None:
    weights = {"weight": torch.tensor([weight, 1.0]), "count": torch.tensor(3)}
    torch.save({"state_dict": weights}, tmp_path / "best.ckpt")
    assert holds_finite_weights(tmp_path) == is_sound
    assert holds_finite_weights(tmp_path / "elsewhere")
