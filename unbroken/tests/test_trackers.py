"""Trackers by one word: what ``--logger`` takes, and a run that was killed, read back with the
tracker's own client.
"""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from numerals.fit import job as fit
from tensorboard.summary.writer import event_file_writer
from unbroken.cli import trackers
from unbroken.cli.cli import configure
from unbroken.errors import UserError
from unbroken.loggers import followers, mlflow
from unbroken.loggers.chosen import commands_to_look
from unbroken.loggers.followers import WholeRows
from unbroken.loggers.metrics_csv import MetricsCSV
from unbroken.loggers.mlflow import name_in_mlflow
from unbroken.loggers.tensorboard import TensorBoardRunLogger
from unbroken.mirror.manifest import MIRRORED
from unbroken.run_folder import RunFolder

from tests.commands import complete, rows
from tests.reported import of_type, wandb_folders, wandb_records

TASK = ["--model", "configs.examples.autoencoder.LitAutoEncoder"]
TASK += ["--data", "configs.examples.autoencoder.Waves"]
SHORT = ["--monitor", "val_loss", "--max_epochs", "2", "--log_every_n_steps", "3"]
SHORT += ["--report", "false"]
# An epoch has 57 steps. The run is killed five steps after it was saved.
SHORT += ["--checkpoint_every", "10", "--val_check_interval", "25"]
KILLED_AT = "75"
# Metric → its values in their order, each with its step
History = dict[str, list[tuple[int, float]]]


@pytest.mark.parametrize(
    ("words", "chosen"),
    [
        ([], list(trackers.USUAL)),
        (["--logger", "false"], []),
        (["--logger", "csv"], ["csv"]),
        (["--logger", "csv,tensorboard"], ["csv", "tensorboard"]),
        (["--logger=[tensorboard,csv]"], ["tensorboard", "csv"]),
        (["--trainer.logger+=csv", "--trainer.logger+=CSVLogger"], ["csv"]),
        (["--logger", "csv", "--tensorboard", "true"], ["csv", "tensorboard"]),
        # A class of a logger takes no tracker's place.
        (["--logger", "CSVLogger"], list(trackers.USUAL)),
    ],
)
def test_a_word_or_several_say_which_trackers_log(words: list[str], chosen: list[str]) -> None:
    config = configure(fit, "fit", [*TASK, *words])
    assert config.trackers == chosen
    # What config.yaml and the checkpoint hold means the same.
    assert config.lost_in_record() == []


@pytest.mark.parametrize("typed", ["tensorbord", "csv,tensorbord", "nowhere.Logger"])
def test_a_word_that_is_none_is_told_with_those_that_there_are(typed: str) -> None:
    with pytest.raises(UserError) as error:
        configure(fit, "fit", [*TASK, "--logger", typed])
    told = str(error.value)
    assert told.startswith(f"--logger must be any of {', '.join(trackers.TRACKERS)}")
    hint = " Did you mean tensorboard?" if "tensorbord" in typed else ""
    assert told.endswith(f"got {typed}.{hint}")


@pytest.mark.parametrize(
    ("typed", "package"),
    [
        ("tensorboard", "tensorboard"),
        ("csv,tensorboard", "tensorboard"),
        ("TensorBoardLogger", "tensorboard"),
        ("mlflow", "mlflow"),
        ("trackio", "trackio"),
        ("MLFlowLogger", "mlflow"),
    ],
)
def test_a_missing_package_is_named_before_any_file_is_written(
    typed: str,
    package: str,
    workplace: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == package else find(name)
    )
    assert fit.main([*TASK, *SHORT, "--logger", typed]) == 2
    told = capsys.readouterr().err
    assert re.search(rf"needs the package {package}, .* pip install {package}", told)
    assert list(workplace.iterdir()) == []


def test_two_names_are_two_names_in_mlflow() -> None:
    names = ["recall<0.5", "recall>0.5", "准确率", "损失", "val/loss"]
    told = [name_in_mlflow(name) for name in names]
    assert len(set(told)) == 5
    assert told[0] == "recall_x3c_0.5"
    assert told[-1] == "val/loss"
    assert all(re.fullmatch(r"[A-Za-z0-9_/. :-]+", name) for name in told)


def test_each_run_of_a_process_has_its_own_database_in_mlflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    places: list[Any] = []

    class Started:
        def __init__(self, run: Any, uri: str | None, experiment: str) -> None:
            places.append(uri)

        def begin(self, settings: Any) -> None:
            # MLflow itself does so.
            os.environ["MLFLOW_TRACKING_URI"] = "sqlite:///first.db"

    monkeypatch.setattr(mlflow, "MLFlowRunLogger", Started)
    config: Any = SimpleNamespace(program=fit, resolved={})
    for name in ("first", "second"):
        mlflow.make_mlflow_logger(config, SimpleNamespace(folder=tmp_path / name))  # type: ignore[arg-type]
    assert places == [None, None]
    for odd in ("a?b", "a#b"):
        with pytest.raises(UserError, match=r"without \? # and % in its path.*got .*/a"):
            mlflow.make_mlflow_logger(config, SimpleNamespace(folder=tmp_path / odd))  # type: ignore[arg-type]


@pytest.mark.parametrize("typed", ["mlflow", "MLFlowLogger"])
def test_a_run_says_how_to_look_at_mlflow(
    typed: str, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    # MLflow itself need not be installed.
    monkeypatch.setattr("unbroken.cli.cli.check_packages", lambda *_: None)
    config = configure(fit, "fit", [*TASK, "--logger", typed])
    folder = Path("checkpoints/a run")
    folder.mkdir(parents=True)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:secret@mlflow.here/x")
    assert commands_to_look(config, folder) == ["MLflow has this run: https://me:***@mlflow.here/x"]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///all runs.db")
    command = "  mlflow ui --backend-store-uri 'sqlite:///all runs.db'"
    assert commands_to_look(config, folder) == [command]
    # The run's own database is what MLflow has set the variable to.
    (folder / "mlflow.db").touch()
    command = "  mlflow ui --backend-store-uri sqlite:///'checkpoints/a run'/mlflow.db"
    assert commands_to_look(config, folder) == [command]


def test_a_logger_of_lightnings_lies_in_the_runs_folder(workplace: Path) -> None:
    words = ["--max_steps", "4", "--limit_val_batches", "1", "--log_every_n_steps", "2"]
    words += ["--trainer.logger+=CSVLogger", "--trainer.logger+=csv"]
    assert fit.main([*TASK, *SHORT, *words, "--run_name", "r"]) == 0
    folder = workplace / "checkpoints" / "r"
    assert (folder / "lightning_logs" / "version_0" / "metrics.csv").is_file()
    # A run that is made again from this one's configuration has a folder of its own.
    again = ["--config", str(folder / "config.yaml"), "--run_name", "again"]
    assert fit.main(again) == 0
    assert (workplace / "checkpoints/again/lightning_logs/version_0/metrics.csv").is_file()
    assert [path.name for path in workplace.iterdir()] == ["checkpoints"]


def test_a_row_is_passed_on_as_a_whole_and_only_what_the_tracker_lacks() -> None:
    passed: list[tuple[int, dict[str, float]]] = []
    tracker = WholeRows(lambda step, row: passed.append((step, dict(row))), {"a": 4, "b": 2})
    tracker.go_on_after([{"step": 2, "a": 1.0, "b": 2.0}, {"step": 4, "a": 3.0, "b": 4.0}])
    tracker.add({"c": 5, "note": "of a module that tells all of its loggers"}, 4)
    tracker.add({"a": 6.0}, 6)
    assert passed == [(4, {"b": 4.0, "c": 5.0})]
    tracker.flush()
    tracker.flush()
    assert passed[1:] == [(6, {"a": 6.0})]


def killed_and_resumed(logger: str) -> Path:
    """The folder of a run that was killed once and has gone on."""
    words = [*TASK, *SHORT, "--logger", logger, "--run_name", "killed"]
    first = complete([sys.executable, "-m", "tests.interrupted", KILLED_AT, "SIGKILL", *words])
    assert first.returncode == -signal.SIGKILL, first.stderr
    # The checkpoint knows which loggers there were.
    words = ["-m", "numerals.fit", "--run_name", "killed", "--ckpt_path", "auto"]
    second = complete([sys.executable, *words])
    assert second.returncode == 0, second.stderr
    return Path("checkpoints/killed").resolve()


def expected_of(folder: Path) -> History:
    """What metrics.csv says, without what depends on the machine's speed."""
    found: History = {}
    for row in rows(folder):
        for name, cell in row.items():
            if name != "step":
                found.setdefault(name, []).append((int(row["step"]), float(cell)))
    return found


def assert_has_every_value_once(history: History, folder: Path) -> None:
    expected = expected_of(folder)
    assert len(expected["train_loss"]) == 38
    for name, values in expected.items():
        assert [step for step, _ in history[name]] == [step for step, _ in values], name
        # TensorBoard has 32 bits for a number.
        assert [value for _, value in history[name]] == pytest.approx(
            [value for _, value in values], rel=1e-6
        ), name


def in_tensorboard(folder: Path) -> History:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    names = events.Tags()["scalars"]
    return {name: [(each.step, each.value) for each in events.Scalars(name)] for name in names}


@pytest.mark.nightly
def test_tensorboard_has_every_value_of_a_killed_run_once(workplace: Path) -> None:
    folder = killed_and_resumed("tensorboard,csv")
    assert not (folder / "wandb").exists()
    assert_has_every_value_once(in_tensorboard(folder), folder)


def test_a_resumed_run_leaves_no_value_twice_in_tensorboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A file's name has the second and a number that counts the process' files. TensorBoard reads
    # files by their names, and of two in the same second it would read the tenth before the ninth.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    run = RunFolder(tmp_path)
    for kept in (0, 3):
        # The first logger is never closed, as in a process that was killed.
        logger = TensorBoardRunLogger(run)
        csv = MetricsCSV(tmp_path / "metrics.csv")
        csv.followers = [logger]
        csv.keep_rows(kept)
        for step in range(max(0, kept - 1), 5):
            for each in (logger, csv):
                each.log_metrics({"epoch": 0, "train/loss": step / 2}, step)
                each.log_metrics({"epoch": 0, "val/loss": 10 + step + kept}, step)
                each.save()
    logger.leave(None, None)  # type: ignore[arg-type]
    csv.finalize("success")
    assert expected_of(tmp_path)["val/loss"] == [(0, 10), (1, 11), (2, 15), (3, 16), (4, 17)]
    history = in_tensorboard(tmp_path)
    assert history == expected_of(tmp_path)


@pytest.mark.nightly
def test_wandb_has_every_value_of_a_killed_run_once(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = killed_and_resumed("wandb")
    history: History = {}
    for place in wandb_folders(folder):
        for row in of_type(wandb_records(place), "history"):
            values = row["item"]
            for name, value in values.items():
                history.setdefault(name, []).append((values.get("trainer/global_step"), value))
    assert_has_every_value_once(history, folder)


def in_mlflow(folder: Path) -> History:
    with warnings.catch_warnings():
        # Those of MLflow itself
        warnings.simplefilter("ignore")
        return read_with_mlflow(folder)


def read_with_mlflow(folder: Path) -> History:
    from mlflow.tracking import MlflowClient

    uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder / 'mlflow.db'}"
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("numerals")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.run_name == folder.name
    assert found.info.status == "FINISHED"
    assert found.data.params["trainer.max_epochs"] == "2"
    history: History = {}
    for name in found.data.metrics:
        values = client.get_metric_history(found.info.run_id, name)
        history[name] = [(value.step, value.value) for value in values]
    return history


def in_trackio(folder: Path) -> History:
    import trackio

    (found,) = trackio.Api().runs("numerals")
    assert found.name == folder.name
    history: History = {}
    for row in trackio.SQLiteStorage.get_logs("numerals", found.name):
        for name, value in row.items():
            if name not in ("step", "timestamp"):
                history.setdefault(name, []).append((row["step"], value))
    return history


@pytest.mark.nightly
@pytest.mark.parametrize(("tracker", "read"), [("mlflow", in_mlflow), ("trackio", in_trackio)])
def test_a_tracker_has_every_value_of_a_killed_run_once(
    tracker: str,
    read: Callable[[Path], History],
    workplace: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if importlib.util.find_spec(tracker) is None:
        pytest.skip(f"{tracker} is not installed")
    folder = killed_and_resumed(tracker)
    # Trackio reads the variable when it is imported.
    monkeypatch.setenv("TRACKIO_DIR", str(folder / "trackio"))
    assert_has_every_value_once(read(folder), folder)


def test_a_run_that_goes_on_from_a_mirror_goes_on_in_its_trackers() -> None:
    assert followers.NAMES in MIRRORED
