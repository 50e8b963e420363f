from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml

from project import fit
from project.loggers.metrics_csv import wandb as wandb_logging
from project.loggers.wandb import WandbRunLogger
from project.loggers.wandb_pictures import log_results, staged_in
from project.report import RunRecord
from tests.commands import SMALL, checkpoint, command, differences, run, start, summary, wait_for
from tests.reported import of_type, reported_run, wandb_folders, wandb_records

EVERY_CPU_METRIC = {
    *("train/loss", "train/accuracy", "val/loss", "val/accuracy", "test/loss", "test/accuracy"),
    *("optimizer/lr", "optimizer/grad_norm"),
    *("throughput/samples_per_sec", "throughput/device_samples_per_sec", "throughput/batches_per_sec"),
    *("throughput/step_ms", "throughput/data_wait_pct", "memory/rss_gib"),
}


@pytest.fixture(scope="module")
def records() -> list[dict[str, Any]]:
    (folder,) = wandb_folders(reported_run())
    return wandb_records(folder)


def test_offline_file_holds_every_value_of_metrics_csv_at_its_step(records: list[dict[str, Any]]) -> None:
    history = [row["item"] for row in of_type(records, "history")]
    logged = {(int(row["trainer/global_step"]), name): row[name] for row in history for name in row if "/" in name}
    with open(reported_run() / "metrics.csv", newline="") as file:
        wanted = {
            (int(row["step"]), name): float(value)
            for row in csv.DictReader(file)
            for name, value in row.items()
            if value and name not in ("step", "epoch")
        }
    assert {name for _, name in wanted} == EVERY_CPU_METRIC
    assert {place: logged[place] for place in wanted} == pytest.approx(wanted)
    steps = [row["trainer/global_step"] for row in history if EVERY_CPU_METRIC & row.keys()]
    assert len(steps) == len(set(steps)), "a row per step, as in metrics.csv"


def test_every_panel_is_drawn_over_optimizer_steps_and_runs_are_summed_up_by_their_best(
    records: list[dict[str, Any]],
) -> None:
    metrics = {metric.get("name") or metric["glob_name"]: metric for metric in of_type(records, "metric")}
    assert metrics["*"]["step_metric"] == "trainer/global_step"
    assert metrics["val/accuracy"]["step_metric"] == "trainer/global_step"
    summed_up: dict[str, Any] = {}
    for update in of_type(records, "summary"):
        summed_up |= update["update"]
    facts = summary(reported_run())
    assert summed_up["val/accuracy"] == {"max": pytest.approx(facts["val/accuracy"])}
    assert summed_up["test/accuracy"] == pytest.approx(facts["test/accuracy"])
    for name in ("git_commit", "command", "fit_seconds", "data_source", "memory/peak_rss_gib"):
        assert summed_up[name] == facts[name]


def test_configuration_is_the_resolved_one_with_what_the_run_found(records: list[dict[str, Any]]) -> None:
    (first,) = of_type(records, "run")
    resolved = yaml.safe_load((reported_run() / "config.yaml").read_text())
    config = first["config"]["update"]
    assert not differences({key: config[key] for key in resolved}, resolved, "config")
    assert (config["data_source"], config["device"], config["world_size"]) == ("sample", "cpu", 1)
    assert first["run_id"] == (reported_run() / "run-id.txt").read_text().strip()
    assert of_type(records, "exit")[-1].get("exit_code", 0) == 0


def test_pictures_and_tables_are_those_of_the_report() -> None:
    (folder,) = wandb_folders(reported_run())
    tables = {
        path.name.split("_table")[0].split("_3")[0]: json.loads(path.read_text())
        for path in (folder / "files/media/table/test").glob("*.json")
    }
    confusion = next(table for name, table in tables.items() if name.startswith("confusion"))
    mistakes = next(table for name, table in tables.items() if name.startswith("mistakes"))
    assert confusion["columns"] == ["Actual", "Predicted", "nPredictions"]
    right = sum(count for label, prediction, count in confusion["data"] if label == prediction)
    everything = sum(count for _, _, count in confusion["data"])
    assert everything == 200
    assert right / everything == pytest.approx(summary(reported_run())["test/accuracy"])
    assert len(mistakes["data"]) == min(24, everything - right)
    assert (reported_run() / "wandb/artifacts/staging").is_dir(), "staged files belong beside the run"
    assert list((folder / "files/media/html").glob("report_*.html"))


def test_a_run_prints_no_word_of_wandb_but_how_to_publish() -> None:
    output = (reported_run().parent.parent / "output.txt").read_text()
    assert [line for line in output.splitlines() if "wandb" in line.lower()] == [
        line for line in output.splitlines() if line.strip().startswith("wandb sync")
    ]


def test_wandb_changes_nothing_in_training_and_is_not_imported_when_disabled(tmp_path: Path) -> None:
    script = (
        "import sys; from project import fit; assert fit.main(sys.argv[1:]) == 0; assert 'wandb' not in sys.modules"
    )
    words = [sys.executable, "-c", script, *SMALL, "--run_name", "without"]
    subprocess.run(words, cwd=tmp_path, env={**os.environ, "WANDB_MODE": "disabled"}, check=True, timeout=180)
    other = tmp_path / "checkpoints" / "without"
    assert not (other / "wandb").exists()
    weights = [checkpoint(folder / "last.ckpt")["state_dict"] for folder in (other, reported_run())]
    assert not differences(*weights, "weights")


def test_a_resumed_run_goes_on_in_the_same_wandb_run(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "small"
    shutil.copytree(reported_run(), folder, symlinks=True)
    done = run("fit", "--run_name", "small", "--ckpt_path", "last", "--max_epochs", "4", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = (wandb_records(part) for part in wandb_folders(folder))
    assert of_type(first, "run")[0]["run_id"] == of_type(second, "run")[0]["run_id"]
    last = max(row["item"]["trainer/global_step"] for row in of_type(first, "history") if "train/loss" in row["item"])
    steps = [row["item"]["trainer/global_step"] for row in of_type(second, "history") if "train/loss" in row["item"]]
    assert steps == sorted(steps)
    assert steps[0] > last


def test_a_stopped_run_ends_in_wandb_with_its_exit_code_and_has_a_report(tmp_path: Path) -> None:
    flags = [*SMALL, "--max_epochs", "1000", "--run_name", "stopped", "--default_root_dir", str(tmp_path)]
    log = tmp_path / "log"
    process = start(command("fit", *flags), log)
    assert wait_for("epoch 2/", log, process)
    process.terminate()
    assert process.wait(30) == 143
    folder = tmp_path / "stopped"
    (part,) = wandb_folders(folder)
    assert of_type(wandb_records(part), "exit")[-1]["exit_code"] == 143
    report = (folder / "report.html").read_text()
    assert "stopped by SIGTERM" in report
    assert "<h3>Loss</h3>" in report
    assert "Predictions on the test set" not in report


def test_online_without_a_key_is_an_error_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    done = run("fit", *SMALL, cwd=tmp_path, env={**os.environ, "WANDB_MODE": "online"})
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: WANDB_MODE=online needs an API key")
    assert not list((tmp_path / "checkpoints").glob("*/*"))


def test_a_wandb_that_cannot_start_is_a_warning(tmp_path: Path) -> None:
    flags = [*SMALL, "--max_epochs", "1", "--default_root_dir", str(tmp_path), "--run_name", "r"]
    failing = mock.patch.object(wandb_logging, "start_run", side_effect=OSError("no space"))
    with failing, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert fit.main([*flags, "--accelerator", "cpu"]) == 0
    (about_wandb,) = [str(warning.message) for warning in caught if "W&B" in str(warning.message)]
    assert about_wandb == "W&B could not start and records nothing (OSError: no space)."
    assert (tmp_path / "r" / "report.html").exists()


class FakeRun:
    """A W&B run that keeps what it is given."""

    id = "abc"

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.artifacts: list[Any] = []
        self.summary: dict[str, Any] = {}
        self.exit_codes: list[int] = []

    def log(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def define_metric(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_artifact(self, artifact: Any, aliases: list[str]) -> None:
        self.artifacts.append((artifact, aliases))

    def finish(self, exit_code: int) -> None:
        self.exit_codes.append(exit_code)


@pytest.fixture
def slow_start(tmp_path: Path) -> Any:
    """A logger whose W&B run comes up when told to, and that run."""
    up, fake = threading.Event(), FakeRun()

    def start_run(*_: Any) -> FakeRun:
        up.wait(20)
        return fake

    with mock.patch.object(wandb_logging, "start_run", start_run):
        logger = WandbRunLogger(tmp_path, "name", "id", {"a": 1}, offline=False)
        yield logger, fake, up
    up.set()


def test_training_does_not_wait_for_wandb_and_no_value_is_lost(slow_start: Any) -> None:
    logger, fake, up = slow_start
    logger.begin()
    began = time.perf_counter()
    for step in range(100):
        logger.log_metrics({"train/loss": float(step)}, step)
        logger.log_metrics({"optimizer/lr": 0.1}, step)
    _ = logger.experiment  # what Lightning asks every logger for
    assert time.perf_counter() - began < 1
    assert fake.rows == []
    up.set()
    logger.finish(0)
    assert fake.rows == [
        {"train/loss": float(step), "optimizer/lr": 0.1, "trainer/global_step": step} for step in range(100)
    ]
    assert fake.exit_codes == [0]


def test_a_run_that_is_stopped_waits_for_wandb_only_so_long(slow_start: Any) -> None:
    logger, fake, _ = slow_start
    logger.begin()
    logger.log_metrics({"train/loss": 1.0}, 1)
    began = time.perf_counter()
    with pytest.warns(UserWarning, match="W&B did not take everything in time"):
        logger.finish(143, patience=0.3)
    assert time.perf_counter() - began < 3
    assert fake.exit_codes == []


def test_a_run_that_never_began_leaves_nothing(slow_start: Any) -> None:
    logger, fake, up = slow_start
    up.set()
    logger.finish(2, patience=4)
    assert fake.exit_codes == []


def test_what_users_call_on_the_experiment_reaches_the_run(slow_start: Any) -> None:
    logger, fake, up = slow_start
    experiment = logger.experiment
    up.set()
    experiment.log({"mine": 1})
    assert fake.rows == [{"mine": 1}]


@pytest.mark.parametrize("offline", [True, False])
def test_best_checkpoint_is_uploaded_online_only(slow_start: Any, tmp_path: Path, offline: bool) -> None:
    logger, fake, up = slow_start
    up.set()
    logger._offline = offline
    torch.save({}, tmp_path / "best.ckpt")
    (tmp_path / "report.html").write_text("<p>report</p>")
    log_results(logger, RunRecord(facts={"val/accuracy": 0.5}, config=""), tmp_path)
    names = [list(artifact.manifest.entries) for artifact, aliases in fake.artifacts if aliases == ["best"]]
    assert names == ([] if offline else [["best.ckpt"]])


def test_a_runs_folder_for_staged_files_is_not_left_to_later_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_DATA_DIR", raising=False)
    with staged_in(tmp_path):
        assert os.environ["WANDB_DATA_DIR"] == str(tmp_path)
    assert "WANDB_DATA_DIR" not in os.environ
    monkeypatch.setenv("WANDB_DATA_DIR", "chosen")
    with staged_in(tmp_path):
        assert os.environ["WANDB_DATA_DIR"] == "chosen"
