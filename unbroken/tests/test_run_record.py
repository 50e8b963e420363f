"""What a run records of itself, in a plain Trainer: its folder, and its part of a checkpoint."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from numerals.fit import callbacks
from numerals.fit import job as fit
from unbroken import ExactCheckpoint
from unbroken.monitors import LogLastStep, MemorySnapshot, SlowPrecision, TestPredictions
from unbroken.monitors.monitor import Monitor
from unbroken.report import Report
from unbroken.results import facts
from unbroken.results.facts import summarize
from unbroken.results.run_result import RunResult
from unbroken.run import RunTimer, WrongNumbers, uncommitted
from unbroken.run.run_record import RunRecord

from tests.commands import checkpoint, run
from tests.typed_settings import Numbers, Typed

# A folder that is there already, and a callback's state without the callback
pytestmark = pytest.mark.filterwarnings(
    "ignore:Checkpoint directory", "ignore:The dirpath has changed"
)
CONFIG: dict[str, Any] = {"model": {"optimizer": "SGD", "text": "1e5"}, "seed_everything": 42}

CODE = Path(__file__).parent / "numerals"


def trainer_with(record: RunRecord, *more: Callback, epochs: int = 1) -> Trainer:
    saves = ModelCheckpoint(record.folder, filename="last", enable_version_counter=False)
    return Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        callbacks=[record, *more, saves],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run's folder, as it is made before the training."""
    made = tmp_path / "runs" / "mine"
    made.mkdir(parents=True)
    return made


def test_a_checkpoint_holds_what_the_run_is(folder: Path) -> None:
    trainer_with(RunRecord(folder, "id1", CONFIG, CODE)).fit(Typed(), Numbers())
    run = checkpoint(folder / "last.ckpt")["run"]
    assert {key: run[key] for key in ("run_name", "run_id", "config")} == {
        "run_name": "mine",
        "run_id": "id1",
        "config": CONFIG,
    }
    assert (run["precision"], run["world_size"], run["global_step"]) == ("32-true", 1, 4)
    assert run["metrics"]["val/loss"] > 0
    assert "torch" in run["versions"]
    assert (run["data_source"], run["data"]) == (None, {})


def test_what_the_engine_has_put_there_stays() -> None:
    record = RunRecord(Path("runs/mine"), "id1", CONFIG, CODE)
    trainer = trainer_with(record)
    trainer.datamodule = None  # type: ignore[attr-defined]
    whole: dict[str, Any] = {"run": {"state": {"place": "epoch"}}}
    record.on_save_checkpoint(trainer, Typed(), whole)
    assert whole["run"]["state"] == {"place": "epoch"}
    assert whole["run"]["run_id"] == "id1"


def test_a_repository_above_that_does_not_know_the_code_is_none_of_its(tmp_path: Path) -> None:
    def git_here(*words: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *words], check=True)

    code = tmp_path / "code"
    code.mkdir()
    (code / "model.py").touch()
    (tmp_path / ".token").write_text("secret")
    git_here("init", "--quiet")
    git_here("add", ".token")
    git_here("commit", "--quiet", "-m", "dotfiles")
    (tmp_path / ".token").write_text("changed")
    assert facts.git(code, "diff", "HEAD") is None
    assert facts.git_state(code) == (os.environ.get("GIT_COMMIT"), None)
    git_here("add", "code")
    assert "secret" in (facts.git(code, "diff", "HEAD") or "")


def test_the_folder_holds_the_configuration_and_nothing_of_an_earlier_try(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing differs from the commit.
    monkeypatch.setattr(uncommitted, "git", lambda *_: "")
    for name in ("summary.json", "report.html", "uncommitted.diff"):
        (folder / name).write_text("old")
    trainer_with(RunRecord(folder, "id1", CONFIG, CODE)).fit(Typed(), Numbers())
    assert yaml.safe_load((folder / "config.yaml").read_text()) == CONFIG
    assert (folder / "config.yaml").read_text().startswith("# python")
    assert (folder.parent / "latest").resolve() == folder
    assert not (folder / "summary.json").exists()
    assert not (folder / "report.html").exists()
    assert not (folder / "uncommitted.diff").exists()


def test_a_resumed_run_keeps_its_page_and_says_that_another_optimizer_starts_anew(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer_with(RunRecord(folder, "id1", CONFIG, CODE)).fit(Typed(), Numbers())
    (folder / "report.html").write_text("of the first part")
    other = CONFIG | {"model": {"optimizer": "Adam"}}
    trainer = trainer_with(RunRecord(folder, "id1", other, CODE), epochs=2)
    trainer.fit(Typed(), Numbers(), ckpt_path=folder / "last.ckpt", weights_only=True)
    assert "optimizer SGD → Adam: its state starts anew.\n" in capsys.readouterr().out
    assert (folder / "report.html").exists()
    assert checkpoint(folder / "last.ckpt")["run"]["config"] == other


def test_the_configuration_says_what_every_resume_has_changed(folder: Path) -> None:
    sgd, adam = CONFIG, CONFIG | {"model": {"optimizer": "Adam", "text": "1e5"}}
    path = None
    changed = [[], ["model.optimizer: SGD → Adam"], [], ["model.optimizer: Adam → SGD"]]
    for epochs, config in enumerate((sgd, adam, adam, sgd), start=1):
        record = RunRecord(folder, "id1", config, CODE, changed[epochs - 1])
        trainer = trainer_with(record, epochs=epochs)
        trainer.fit(Typed(), Numbers(), ckpt_path=path, weights_only=True)
        path = folder / "last.ckpt"
    lines = (folder / "config.yaml").read_text().splitlines()
    said = [f"step 4: {changed[1][0]}", f"step 12: {changed[3][0]}"]
    assert lines[1:3] == [f"# {line}" for line in said]
    summary = summarize(trainer, "r", CODE, finished=True)
    record.add_facts(trainer, RunResult(summary, config=""))
    assert summary.to_plain()["resumed_with"] == said
    assert yaml.safe_load("\n".join(lines)) == CONFIG


class DeletesFolder(Callback):
    """What a cleaning script does to the folder of a run that still trains."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch == 0:
            shutil.rmtree(next(each.folder for each in trainer.callbacks if is_record(each)))  # type: ignore[attr-defined]


def is_record(callback: Callback) -> bool:
    return isinstance(callback, RunRecord)


def test_a_folder_that_is_deleted_during_the_run_is_said_and_made_again(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = RunRecord(folder, "id1", CONFIG, CODE)
    trainer_with(record, DeletesFolder(), epochs=2).fit(Typed(), Numbers())
    lost = "what metrics.csv held before is lost"
    line = f"the run's folder was deleted in epoch 1, and made again: {lost}.\n"
    assert capsys.readouterr().out.count(line) == 1
    names = {path.name for path in folder.iterdir()}
    assert {"config.yaml", "run-id.txt", "last.ckpt"} <= names
    assert (folder / "run-id.txt").read_text() == "id1\n"


class DeletesFolderInAStep(Callback):
    """Deletes the folder while rows of metrics.csv wait to be saved."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            shutil.rmtree(trainer.default_root_dir)


@pytest.mark.nightly
def test_a_folder_that_is_deleted_before_rows_are_saved_ends_no_run(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    flags = ["--model.class_path", "tests.typed_settings.Typed", "--accelerator", "cpu"]
    flags += ["--data.class_path", "tests.typed_settings.Numbers", "--max_epochs", "2"]
    flags += ["--trainer.callbacks", "tests.test_run_record.DeletesFolderInAStep"]
    flags += ["--checkpoint_every", "1", "--log_every_n_steps", "1", "--run_name", "r"]
    assert fit.main(flags) == 0
    line = "the run's folder was deleted in epoch 1, and made again"
    assert capsys.readouterr().out.count(line) == 2, "at once, and in the closing lines"
    folder = Path("checkpoints/r")
    names = {path.name for path in folder.iterdir()}
    assert {"config.yaml", "run-id.txt", "last.ckpt", "metrics.csv", "summary.json"} <= names


def without(kind: type[Any]) -> Any:
    """The main job, with a list of callbacks that lacks those of a class."""

    def listed(run: Any) -> list[Any]:
        return [each for each in callbacks(run) if not isinstance(each, kind)]

    return dataclasses.replace(fit, callbacks=listed)


SHORT = [
    "--data.source",
    "sample",
    "--max_epochs",
    "1",
    "--limit_train_batches",
    "2",
    "--limit_val_batches",
    "1",
]


@pytest.mark.daily(1)
@pytest.mark.parametrize("needed", [RunTimer, RunRecord, ExactCheckpoint])
def test_a_list_of_callbacks_without_one_that_every_run_needs_is_refused(
    needed: type[Any], workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert without(needed).main([*SHORT, "--run_name", "short"]) == 2
    said = f"the callbacks of fit.py lack {needed.__name__}, which every run needs."
    assert said in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.parametrize(
    "needless",
    [Monitor, MemorySnapshot, TestPredictions, Report, SlowPrecision, WrongNumbers, LogLastStep],
)
def test_any_other_callback_may_be_left_out(needless: type[Any], workplace: Path) -> None:
    assert without(needless).main([*SHORT, "--run_name", "short"]) == 0
    tested = run("test", "--ckpt_path", "checkpoints/short/best.ckpt")
    assert tested.returncode == 0, tested.stderr
    resumed = [*SHORT, "--max_epochs", "2", "--run_name", "short", "--ckpt_path", "auto"]
    assert without(needless).main(resumed) == 0
