"""Promise 18: wrong numbers are said, in the closing lines and in summary.json."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from numerals.fit import job as fit
from torch import nn
from unbroken.cli import start as entry
from unbroken.commands import test as test_command
from unbroken.run import wrong_numbers

from tests.commands import summary

QUICK = ["--model.class_path", "tests.typed_settings.Typed"]
QUICK += ["--data.class_path", "tests.typed_settings.Numbers", "--accelerator", "cpu"]
QUICK += ["--max_epochs", "2", "--run_name", "r"]
QUICK += ["--report", "false"]
FOLDER = Path("checkpoints/r")


@pytest.fixture(autouse=True)
def _quiet(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")


def notes_of(capsys: pytest.CaptureFixture[str], *flags: str) -> list[str]:
    """The notes of a run, each of which stands in its closing lines as well."""
    assert fit.main([*QUICK, *flags]) == 0
    told = capsys.readouterr().out
    notes: list[str] = summary(FOLDER)["notes"]
    for note in notes:
        assert f"\n{note}\n" in told
    return notes


def test_a_run_in_which_all_is_well_has_no_notes(capsys: pytest.CaptureFixture[str]) -> None:
    assert notes_of(capsys) == []


@pytest.mark.filterwarnings("ignore:.training_step. returned .None.")
def test_a_training_step_that_returns_no_loss_is_said_after_one_epoch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--model", "tests.odd_modules.Silent", "--data", "null", "--accelerator", "cpu"]
    words += ["--max_epochs", "3", "--run_name", "r", "--report", "false"]
    assert fit.main(words) == 0
    assert summary(FOLDER)["epochs"] == 1
    note = (
        "nothing was trained: no training_step has returned a loss. Does it end in `return loss`?"
    )
    assert note in summary(FOLDER)["notes"]
    assert note in capsys.readouterr().out


def test_a_run_that_leaves_its_test_out_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--limit_test_batches", "0"]
    assert notes_of(capsys, *flags) == ["not tested: --limit_test_batches is 0."]


def test_a_best_that_does_not_fit_the_trained_module_loses_no_summary_and_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--model", "tests.odd_modules.Grows", "--data", "null", "--accelerator", "cpu"]
    words += ["--monitor", "val_epoch", "--mode", "min"]
    words += ["--max_epochs", "2", "--run_name", "r", "--report", "false"]
    assert fit.main(words) == 0
    (note,) = summary(FOLDER)["notes"]
    assert note.startswith(
        "not tested: best.ckpt does not fit the module as training has left it (RuntimeError: "
    )
    assert '"further.weight"' in note
    told = capsys.readouterr()
    assert f"\n{note}\n" in told.out
    assert "Traceback" not in told.err
    # A module as it is made has the layers of the best.
    best = str(FOLDER / "best.ckpt")
    assert test_command.main("numerals", ["--ckpt_path", best]) == 0


def test_a_followed_metric_that_never_came_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--check_val_every_n_epoch", "5", "--monitor", "val/loss"]
    assert notes_of(capsys, *flags) == [
        "best.ckpt is only the last: val/loss never had a value, for no validation ran."
    ]


def test_a_run_without_validation_says_that_its_best_is_the_last(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert notes_of(capsys, "--limit_val_batches", "0") == [
        "best.ckpt is only the last: there was no metric to follow, for no validation ran."
    ]


def test_numbers_that_are_not_finite_are_said_at_once_and_at_the_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--model.lr", "1e30", "--monitor", "val/size", "--mode", "max"]
    assert fit.main([*QUICK, *flags]) == 0
    told = capsys.readouterr().out
    assert told.index("weights are not finite numbers any more in epoch 1.") < told.index(
        "epoch 1/"
    )
    assert "(best," not in told
    assert "(no best: weights are not numbers, epoch 2 of 2)" in told
    notes = summary(FOLDER)["notes"]
    assert "val/loss is not a finite number since epoch 1." in notes
    assert "weights are not finite numbers since epoch 1." in notes
    assert "best.ckpt holds such weights: it predicts nothing." in notes


def test_what_is_wrong_after_the_best_epoch_is_noted_though_the_test_loads_the_best(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--model.lr", "1e3", "--monitor", "train/loss", "--mode", "min", "--max_epochs", "3"]
    notes = notes_of(capsys, *flags)
    assert summary(FOLDER)["best_epoch"] == 0
    assert "train/loss is not a finite number since epoch 2." in notes
    assert "weights are not finite numbers since epoch 3." in notes


class FirstIsBest(Callback):
    """Lets the first epoch be the best, and the others last longer than it."""

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pl_module.log("val/epoch", float(trainer.current_epoch))
        if trainer.current_epoch > 0:
            time.sleep(0.5)


def test_the_seconds_of_a_run_are_those_of_all_its_epochs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--trainer.callbacks", "tests.test_wrong_numbers.FirstIsBest"]
    notes_of(capsys, *flags, "--monitor", "val/epoch", "--mode", "min")
    assert summary(FOLDER)["best_epoch"] == 0
    assert summary(FOLDER)["fit_seconds"] >= 0.5


def test_numbers_that_are_not_finite_leave_no_room_for_advice(
    capsys: pytest.CaptureFixture[str],
) -> None:
    advice = " a batch, "
    assert fit.main([*QUICK]) == 0
    assert advice in capsys.readouterr().out
    assert fit.main([*QUICK, "--run_name", "wrong", "--model.lr", "1e30"]) == 0
    assert advice not in capsys.readouterr().out


def test_a_loss_that_is_never_a_number_makes_no_best(capsys: pytest.CaptureFixture[str]) -> None:
    notes = notes_of(capsys, "--model.lr", "1e30", "--monitor", "val/loss")
    assert "best.ckpt is only the last: val/loss never had a value." in notes
    assert "best_epoch" not in summary(FOLDER)


@pytest.mark.parametrize(
    "flags", [["--limit_train_batches", "0"], ["--max_time", "00:00:00:00"], ["--max_epochs", "0"]]
)
def test_a_new_run_that_trains_no_step_is_told_why(
    capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    assert entry.exit_code(fit.main, [*QUICK, *flags]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert told.count("\n") == 1
    assert flags[0] in told
    assert "that checkpoint" not in told
    assert not FOLDER.exists()


def test_a_rehearsal_that_goes_on_from_a_checkpoint_is_told_what_leaves_no_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert fit.main(QUICK) == 0
    again = ["--run_name", "r", "--ckpt_path", "auto", "--max_epochs", "3"]
    capsys.readouterr()
    assert entry.exit_code(fit.main, [*again, "--fast_dev_run", "true"]) == 2
    assert "Add --fast_dev_run false to go on with it." in capsys.readouterr().err
    assert entry.exit_code(fit.main, [*again, "--fast_dev_run", "3"]) == 2
    assert "--fast_dev_run trains the first 3 steps alone" in capsys.readouterr().err


def test_a_run_that_its_steps_have_ended_is_told_to_raise_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert fit.main(QUICK) == 0
    again = ["--run_name", "s", "--ckpt_path", "checkpoints/r/last.ckpt", "--max_steps", "2"]
    capsys.readouterr()
    assert entry.exit_code(fit.main, again) == 2
    assert capsys.readouterr().err.endswith("has trained already, got 2.\n")


class InfiniteAtFirst(Callback):
    """Logs a metric that is not finite in the first epoch alone."""

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pl_module.log("val/late", math.inf if trainer.current_epoch == 0 else 1.0)


def test_a_metric_that_is_finite_again_is_said_once_and_is_no_note(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--trainer.callbacks", "tests.test_wrong_numbers.InfiniteAtFirst"]
    assert fit.main([*QUICK, *flags]) == 0
    assert "val/late is not a finite number (inf) in epoch 1." in capsys.readouterr().out
    assert summary(FOLDER)["notes"] == []


@pytest.mark.parametrize("value", [1.0, complex(math.nan, 0)])
def test_complex_weights_are_looked_at_as_well(value: complex) -> None:
    module = LightningModule()
    module.real = nn.Parameter(torch.ones(2))
    module.complex = nn.Parameter(torch.full((2,), value, dtype=torch.complex64))
    assert wrong_numbers._are_finite(module) == (value == 1)


def test_that_a_validation_ran_is_known_after_a_resume() -> None:
    before = wrong_numbers.WrongNumbers()
    before._has_validated = True
    after = wrong_numbers.WrongNumbers()
    after.load_state_dict(before.state_dict())
    assert after._has_validated


class DiesLater(Callback):
    """Raises in the third epoch."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch == 2:
            raise RuntimeError("died")


def test_a_run_that_is_made_longer_has_no_result_before_its_new_end() -> None:
    assert fit.main(QUICK) == 0
    assert summary(FOLDER)["finished"]
    longer = ["--run_name", "r", "--ckpt_path", "auto", "--max_epochs", "4"]
    dies = ["--trainer.callbacks", "tests.test_wrong_numbers.DiesLater"]
    assert entry.exit_code(fit.main, [*longer, *dies]) == 1
    assert not (FOLDER / "summary.json").exists()
    assert fit.main([*longer, "--trainer.callbacks", "[]"]) == 0
    assert summary(FOLDER)["epochs"] == 4


class LogsPrecision(Callback):
    """Logs a metric that has the name of a fact."""

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pl_module.log("precision", 0.5)


def test_a_metric_with_the_name_of_a_fact_stands_beside_it() -> None:
    flags = ["--trainer.callbacks", "tests.test_wrong_numbers.LogsPrecision"]
    assert fit.main([*QUICK, *flags]) == 0
    assert summary(FOLDER)["precision"] == "32-true"
    assert summary(FOLDER)["metric/precision"] == 0.5
