from __future__ import annotations

import contextlib
import csv
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import wandb
import yaml
from lightning.pytorch import LightningModule, Trainer
from numerals.fit import job as fit
from torch.utils.data import DataLoader
from unbroken.checkpoint.following import Best
from unbroken.cli.program import Program
from unbroken.errors import UserError
from unbroken.loggers import wandb as wandb_logging
from unbroken.loggers.wandb import WandbRunLogger, make_wandb_logger, sync_command
from unbroken.results.facts import Summary
from unbroken.results.run_result import RunResult as RunRecord
from unbroken.run_folder import RunFolder as Run
from unbroken.stopping import signals

from tests.commands import (
    REPORTED,
    SMALL,
    WHOLE_NETWORK,
    checkpoint,
    command,
    complete,
    differences,
    run,
    start,
    summary,
    wait_for,
)
from tests.reported import MONITORED, of_type, reported_run, wandb_folders, wandb_records
from tests.wandb_server import StandIn

EVERY_CPU_METRIC = {
    *("train/loss", "train/accuracy", "val/loss", "val/accuracy", "test/loss", "test/accuracy"),
    *MONITORED,
}

PROGRAM = Program("numerals", wandb_project="mnist-lightning")


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")


@pytest.fixture(scope="module")
def records() -> list[dict[str, Any]]:
    (folder,) = wandb_folders(reported_run())
    return wandb_records(folder)


def test_offline_file_holds_every_value_of_metrics_csv_at_its_step(
    records: list[dict[str, Any]],
) -> None:
    history = [row["item"] for row in of_type(records, "history")]
    logged = {
        (int(row["trainer/global_step"]), name): row[name]
        for row in history
        for name in row
        if "/" in name
    }
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
    metrics = {
        metric.get("name") or metric["glob_name"]: metric for metric in of_type(records, "metric")
    }
    assert metrics["*"]["step_metric"] == "trainer/global_step"
    assert metrics["val/accuracy"]["step_metric"] == "trainer/global_step"
    summed_up: dict[str, Any] = {}
    for update in of_type(records, "summary"):
        summed_up |= update["update"]
    facts = summary(reported_run())
    assert summed_up["val/accuracy"] == {"max": pytest.approx(facts["val/accuracy"])}
    assert summed_up["test/accuracy"] == pytest.approx(facts["test/accuracy"])
    for name in ("git_commit", "command", "fit_seconds", "data_source"):
        assert summed_up[name] == facts[name]


def test_configuration_is_the_resolved_one_with_what_the_run_found(
    records: list[dict[str, Any]],
) -> None:
    (first,) = of_type(records, "run")
    resolved = yaml.safe_load((reported_run() / "config.yaml").read_text())
    config = first["config"]["update"]
    assert not differences({key: config[key] for key in resolved}, resolved, "config")
    for update in of_type(records, "config"):
        config |= update["update"]
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
    assert (reported_run() / "wandb/artifacts/staging").is_dir(), (
        "staged files belong beside the run"
    )
    assert list((folder / "files/media/html").glob("report_*.html"))


def test_best_checkpoint_waits_offline_as_an_artifact_that_later_runs_do_not_change(
    records: list[dict[str, Any]],
) -> None:
    (artifact,) = [
        artifact for artifact in of_type(records, "artifact") if artifact["type"] == "model"
    ]
    assert "best" in artifact["aliases"]
    (entry,) = artifact["manifest"]["contents"]
    assert entry["path"] == "best.ckpt"
    assert Path(entry["local_path"]).read_bytes() == (reported_run() / "best.ckpt").read_bytes()


def test_a_run_prints_no_word_of_wandb_but_how_to_publish() -> None:
    output = (reported_run().parent.parent / "output.txt").read_text()
    assert [line for line in output.splitlines() if "wandb" in line.lower()] == [
        line for line in output.splitlines() if line.strip().startswith("wandb sync")
    ]


def test_wandb_changes_nothing_in_training_and_is_not_imported_when_disabled(
    tmp_path: Path,
) -> None:
    script = [
        "import sys",
        "from numerals.fit import job as fit",
        "assert fit.main(sys.argv[1:]) == 0",
        "assert 'wandb' not in sys.modules",
    ]
    words = [
        sys.executable,
        "-c",
        "\n".join(script),
        *SMALL,
        *WHOLE_NETWORK,
        "--run_name",
        "without",
    ]
    done = complete(words, cwd=tmp_path, env={**os.environ, "WANDB_MODE": "disabled"})
    assert done.returncode == 0, done.stderr
    other = tmp_path / "checkpoints" / "without"
    assert not (other / "wandb").exists()
    weights = [checkpoint(folder / "last.ckpt")["state_dict"] for folder in (other, reported_run())]
    assert not differences(*weights, "weights")


# A run of fit in which nothing has imported W&B Launch, and then a run for which an input is staged
LAUNCH = """
import sys
from numerals.fit import job as fit

assert fit.main([*sys.argv[1:], "--run_name", "first"]) == 0
assert "wandb" in sys.modules
assert "wandb.sdk.launch" not in sys.modules

from wandb.sdk.launch import manage_wandb_config
from wandb.sdk.launch.inputs import internal

applied = []
internal._publish_job_input = lambda staged, run: applied.append((staged.include, run.name))
manage_wandb_config(include=["model.lr"])
assert fit.main([*sys.argv[1:], "--run_name", "second"]) == 0
assert applied == [(["model.lr"], "second")], applied
"""


@pytest.mark.nightly
def test_a_run_starts_without_wandb_launch_unless_it_has_staged_inputs(tmp_path: Path) -> None:
    words = [sys.executable, "-c", LAUNCH, *SMALL]
    done = complete(words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for name in ("first", "second"):
        (folder,) = wandb_folders(tmp_path / "checkpoints" / name)
        assert "Problem" not in (folder / "logs" / "debug.log").read_text()


def resumed_run(place: Path) -> tuple[Path, str]:
    """Make a finished run longer. Returns its folder, and the printed line that publishes it."""
    folder = place / "checkpoints" / "small"
    shutil.copytree(reported_run(), folder, symlinks=True)
    done = run("fit", "--run_name", "small", "--ckpt_path", "last", "--max_epochs", "4", cwd=place)
    assert done.returncode == 0, done.stderr
    (publish,) = [line for line in done.stdout.splitlines() if "wandb sync" in line]
    return folder, publish


def test_a_resumed_run_goes_on_in_the_same_wandb_run(tmp_path: Path) -> None:
    folder, publish = resumed_run(tmp_path)
    first, second = (wandb_records(part) for part in wandb_folders(folder))
    assert of_type(first, "run")[0]["run_id"] == of_type(second, "run")[0]["run_id"]
    last = max(
        row["item"]["trainer/global_step"]
        for row in of_type(first, "history")
        if "train/loss" in row["item"]
    )
    steps = [
        row["item"]["trainer/global_step"]
        for row in of_type(second, "history")
        if "train/loss" in row["item"]
    ]
    assert steps == sorted(steps)
    assert steps[0] > last
    assert (
        publish
        == "  wandb sync checkpoints/small/wandb/offline-run-*   # publish this run's dashboard"
    )


@pytest.mark.nightly
def test_the_printed_line_publishes_a_resumed_run_as_a_whole(tmp_path: Path) -> None:
    folder, publish = resumed_run(tmp_path)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with closing(StandIn()) as server:
        environ = {**os.environ, **server.environment, "PATH": path}
        synced = subprocess.run(
            publish, shell=True, cwd=tmp_path, env=environ, capture_output=True, text=True
        )
        assert synced.returncode == 0, synced.stderr
        assert_arrived(server, folder)


def assert_arrived(server: StandIn, folder: Path) -> None:
    """The server holds every row of metrics.csv in its order, the exit code, and this best.ckpt as
    an artifact.
    """
    steps = [row["trainer/global_step"] for row in server.history if "train/loss" in row]
    with open(folder / "metrics.csv", newline="") as file:
        assert steps == [int(row["step"]) for row in csv.DictReader(file) if row["train/loss"]]
    assert server.run["displayName"] == folder.name
    assert server.exit_code == 0
    assert any(name.startswith("model-") for name in server.artifacts)
    assert server.files["best.ckpt"] == (folder / "best.ckpt").read_bytes()


@pytest.mark.nightly
def test_a_run_its_resume_and_its_best_checkpoint_arrive_online(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "r"
    with closing(StandIn()) as server:
        environ = {**os.environ, **server.environment, "WANDB_FINISH_TIMEOUT": "60"}
        for flags in ([], ["--ckpt_path", "last", "--max_epochs", "4"]):
            done = run("fit", *SMALL, "--run_name", "r", *flags, cwd=tmp_path, env=environ)
            assert done.returncode == 0, done.stderr
            assert "W&B: http" in done.stdout
            assert_arrived(server, folder)


@pytest.mark.nightly
@pytest.mark.parametrize("fails", [401, 500, "garbage", "refused"])
def test_a_server_that_fails_costs_a_run_nothing_but_its_dashboard(
    fails: int | str, tmp_path: Path
) -> None:
    with closing(StandIn(fails)) as server:
        environ = {**os.environ, **server.environment}
        if fails == "refused":
            server.close()
        began = time.monotonic()
        done = run("fit", *REPORTED, "--run_name", "r", cwd=tmp_path, env=environ)
        assert time.monotonic() - began < 60
    assert done.returncode == 0, done.stderr
    assert "W&B" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert summary(tmp_path / "checkpoints" / "r")["test/accuracy"] > 0.5
    assert server.requests or fails == "refused"


@pytest.mark.nightly
def test_a_stopped_run_ends_in_wandb_with_its_exit_code_and_has_a_report(tmp_path: Path) -> None:
    flags = [
        *REPORTED,
        "--max_epochs",
        "1000",
        "--run_name",
        "stopped",
        "--default_root_dir",
        str(tmp_path),
    ]
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


@pytest.mark.nightly
def test_a_wandb_logger_of_the_users_takes_our_ones_place_and_no_home_is_no_matter(
    tmp_path: Path,
) -> None:
    left = {name: value for name, value in os.environ.items() if name not in ("WANDB_MODE", "HOME")}
    environ = {**left, "NETRC": str(tmp_path / "none")}
    done = run(
        "fit",
        *SMALL,
        "--run_name",
        "r",
        "--trainer.logger",
        "WandbLogger",
        cwd=tmp_path,
        env=environ,
    )
    assert done.returncode == 0, done.stderr  # offline: there is no key
    # It lies in the run's folder, as Lightning's other loggers do. Ours would be a second one.
    (theirs,) = wandb_folders(tmp_path / "checkpoints" / "r")
    assert not (tmp_path / "wandb").exists()
    assert of_type(wandb_records(theirs), "history")
    assert "INFO" not in done.stdout + done.stderr  # of W&B's own log


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("WANDB_MODE", "junk", "WANDB_MODE must be one of online, offline, disabled, got junk."),
        ("WANDB_PROJECT", "a/b", "WANDB_PROJECT must have none of / \\ # ? % :, got a/b."),
        ("WANDB_FINISH_TIMEOUT", "inf", "WANDB_FINISH_TIMEOUT must be seconds, got inf."),
    ],
)
def test_what_wandb_would_refuse_is_an_error(
    variable: str, value: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(UserError) as refused:
        logger_in(tmp_path, {})
    assert str(refused.value) == said
    without: Any = SimpleNamespace(trackers=["tensorboard"], resolved={}, program=PROGRAM)
    assert make_wandb_logger(without, Run(tmp_path, run_id="id"), Best()) is None


def test_a_wandb_that_does_not_tell_what_it_has_gets_no_row_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logger_in(tmp_path, {})
    assert logger is not None
    sent: list[Any] = []
    logger._run = SimpleNamespace(dir=str(tmp_path / "wandb/offline/files"), log=sent.append)

    def fail(*_: Any) -> None:
        raise subprocess.TimeoutExpired("wandb", 60)

    monkeypatch.setattr(wandb_logging, "last_steps_offline", fail)
    with pytest.warns(UserWarning, match="W&B does not tell which rows of before it has"):
        logger.go_on_after([{"step": 1, "a": 0.5}])
    logger.log_metrics({"a": 0.25}, 2)
    logger._send_row()
    assert sent == [{"a": 0.25, "trainer/global_step": 2}]


@pytest.mark.nightly
def test_a_wandb_that_cannot_start_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: Any) -> None:
        raise OSError("no space")

    monkeypatch.setattr(wandb, "init", fail)
    flags = [*REPORTED, "--max_epochs", "1", "--default_root_dir", str(tmp_path), "--run_name", "r"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert fit.main([*flags, "--accelerator", "cpu"]) == 0
    (about_wandb,) = [str(warning.message) for warning in caught if "W&B" in str(warning.message)]
    assert about_wandb == "W&B could not start and records nothing (OSError: no space)."
    assert "W&B" not in capsys.readouterr().err
    assert (tmp_path / "r" / "report.html").exists()


# Loggers without a training


@pytest.fixture
def _wandb_leaves_no_trace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """What a logger or W&B itself sets for the process is taken back, and nothing is left of an
    earlier test.
    """
    wandb.teardown()  # it reads its variables once, and names its process in one
    for name in ("WANDB_SILENT", "WANDB_ERROR_REPORTING", "WANDB_DATA_DIR", "WANDB_SERVICE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_MODE", "")
    monkeypatch.delenv("WANDB_MODE")
    yield
    wandb.teardown()


def logger_in(folder: Path, config: dict[str, Any]) -> WandbRunLogger | None:
    settings: Any = SimpleNamespace(trackers=["wandb"], resolved=config, program=PROGRAM)
    return make_wandb_logger(settings, Run(folder, run_id="id"), Best())


def small_record(stopped_by: str | None = None) -> RunRecord:
    facts = Summary(
        "r",
        True,
        "cpu",
        "32-true",
        1,
        parameters=10,
        epochs=1,
        steps=2,
        fit_seconds=1.0,
        command="fit",
    )
    return RunRecord(facts, config="", stopped_by=stopped_by)


@pytest.mark.nightly
@pytest.mark.usefixtures("_wandb_leaves_no_trace")
def test_wandbs_own_variables_name_project_entity_group_tags_and_notes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = {
        "PROJECT": "p1",
        "ENTITY": "team",
        "RUN_GROUP": "g1",
        "TAGS": "a,b",
        "NOTES": "why",
        "JOB_TYPE": "j",
    }
    for name, value in chosen.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    logger = logger_in(tmp_path, {"lr": 0.1})
    assert logger is not None
    logger.begin()
    logger.finish(0)
    (first,) = of_type(wandb_records(wandb_folders(tmp_path)[0]), "run")
    assert (first["project"], first["entity"], first["run_group"]) == ("p1", "team", "g1")
    assert (first["tags"], first["notes"], first["job_type"]) == (["a", "b"], "why", "j")
    assert (first["display_name"], first["run_id"]) == (tmp_path.name, "id")


@pytest.mark.usefixtures("_wandb_leaves_no_trace")
@pytest.mark.parametrize(("rank", "mode"), [("1", "offline"), ("0", "disabled")])
def test_further_ranks_and_a_run_without_wandb_take_what_a_modules_own_code_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: str, mode: str
) -> None:
    for name, value in {
        "RANK": rank,
        "WORLD_SIZE": "2",
        "WANDB_MODE": mode,
        "WANDB_PROJECT": "a/b",
    }.items():
        monkeypatch.setenv(name, value)
    logger = logger_in(tmp_path, {})
    assert logger is not None
    logger.begin()
    logger.log_metrics({"a": 1.0}, 1)
    logger.experiment.log({"b": 1.0})
    logger.log_text("c", ["d"], [["e"]], step=2)
    logger.finish(0)
    assert list(tmp_path.iterdir()) == []
    assert "WANDB_DATA_DIR" not in os.environ


@pytest.mark.usefixtures("_wandb_leaves_no_trace")
@pytest.mark.parametrize(
    "mode", ["", *(pytest.param(mode, marks=pytest.mark.nightly) for mode in ("OFFLINE", "dryrun"))]
)
def test_a_mode_that_is_empty_or_in_capitals_is_given_to_wandb_as_it_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setenv("WANDB_MODE", mode)
    logger = logger_in(tmp_path, {})
    assert logger is not None
    logger.begin()
    logger.finish(0)
    assert wandb_records(wandb_folders(tmp_path)[0])
    assert os.environ["WANDB_MODE"] == "offline"  # for a WandbLogger of the user's


@pytest.mark.nightly
@pytest.mark.usefixtures("_wandb_leaves_no_trace")
def test_runs_are_summed_up_by_the_metric_that_is_monitored(tmp_path: Path) -> None:
    logger = logger_in(tmp_path, {})
    assert logger is not None
    logger.best = Best("val/error", "min")
    trainer_with(logger).fit(OneWeight(), DataLoader([torch.ones(1)]))
    logger.finish(0)
    metrics = of_type(wandb_records(wandb_folders(tmp_path)[0]), "metric")
    (monitored,) = [metric for metric in metrics if metric.get("name") == "val/error"]
    assert monitored["summary"] == {"min": True}


def trainer_with(logger: WandbRunLogger, **options: Any) -> Trainer:
    """A quiet Trainer of one step."""
    return Trainer(
        logger=logger,
        callbacks=[logger],
        max_steps=1,
        log_every_n_steps=1,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **options,
    )


class OneWeight(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return ((self.weight - batch) ** 2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SilentServer:
    """Takes every request and answers none."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.taken: list[socket.socket] = []
        threading.Thread(target=self.take, daemon=True).start()

    def take(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self.taken.append(self.socket.accept()[0])


@pytest.mark.nightly
def test_a_server_that_does_not_answer_holds_up_neither_training_nor_the_end(
    tmp_path: Path,
) -> None:
    server = SilentServer()
    environ = {**os.environ, "WANDB_BASE_URL": server.address, "WANDB_API_KEY": "0" * 40}
    environ.pop("WANDB_MODE")
    log = tmp_path / "log"
    process = start(command("fit", *SMALL, "--run_name", "r"), log, cwd=tmp_path, env=environ)
    assert wait_for("W&B cannot be reached, this run is recorded offline", log, process)
    assert wait_for("epoch 3/3", log, process)
    began = time.monotonic()
    assert process.wait(60) == 0
    assert time.monotonic() - began < 20, "the final test, the report and a busy machine"
    server.socket.close()
    assert server.taken, "W&B was not asked at all"
    assert "wandb sync" in log.read_text()
    assert wandb_folders(tmp_path / "checkpoints" / "r")


class FakeRun:
    """A W&B run that keeps what it is given, in a folder of its own."""

    id = "abc"

    def __init__(self, folder: Path) -> None:
        self.dir = str(folder / "wandb" / "run-1-abc" / "files")
        self.url = "https://example.invalid"
        self.rows: list[dict[str, Any]] = []
        self.artifacts: list[Any] = []
        self.summary: dict[str, Any] = {}
        self.exit_codes: list[int] = []
        self.takes = threading.Event()  # set: the server answers

    def log(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def define_metric(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_artifact(self, artifact: Any, aliases: list[str]) -> None:
        self.artifacts.append((artifact, aliases))

    def finish(self, exit_code: int) -> None:
        self.takes.wait(20)
        self.exit_codes.append(exit_code)


@pytest.fixture
def online(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, _wandb_leaves_no_trace: None
) -> Iterator[tuple[WandbRunLogger, FakeRun]]:
    """A logger that is online, and the W&B run that it gets, whose server answers."""
    fake = FakeRun(tmp_path)
    fake.takes.set()
    monkeypatch.setattr(wandb, "init", lambda **_: fake)
    yield WandbRunLogger(Run(tmp_path, run_id="id"), "project", {"a": 1}, "online"), fake
    fake.takes.set()


def test_training_outlives_wandbs_own_process_and_the_end_tells_of_it(
    online: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(row: dict[str, Any]) -> None:
        raise ConnectionResetError("what a run raises once its process was killed")

    logger, fake = online
    logger.begin()
    monkeypatch.setattr(fake, "log", fail)
    for step in range(3):
        logger.log_metrics({"train/loss": float(step)}, step)
    with pytest.warns(UserWarning, match=r"W&B did not take everything\. .* wandb sync "):
        logger.finish(0)
    assert fake.exit_codes == [0]


def test_a_step_is_one_row(online: Any) -> None:
    logger, fake = online
    for step in range(100):
        logger.log_metrics({"train/loss": float(step)}, step)
        logger.log_metrics({"optimizer/lr": 0.1}, step)
    logger.finish(0)
    assert fake.rows == [
        {"train/loss": float(step), "optimizer/lr": 0.1, "trainer/global_step": step}
        for step in range(100)
    ]
    assert fake.exit_codes == [0]


@pytest.mark.parametrize("exit_code", [0, 143])
def test_the_end_waits_for_wandb_only_so_long(
    online: Any, exit_code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger, fake = online
    monkeypatch.setattr(wandb_logging, "STOP_PATIENCE", 0.3)
    monkeypatch.setenv("WANDB_FINISH_TIMEOUT", "0.3")
    fake.takes.clear()
    logger.begin()
    monkeypatch.chdir(logger.folder)
    with pytest.warns(
        UserWarning, match=r"did not take everything. To complete it: wandb sync wandb/run-1-abc$"
    ):
        logger.finish(exit_code)  # would hang here, were it to wait
    assert fake.exit_codes == []


def test_a_run_that_never_began_leaves_nothing(online: Any, tmp_path: Path) -> None:
    logger, fake = online
    logger.finish(2)
    assert fake.exit_codes == []
    assert not list(tmp_path.iterdir())


def test_what_users_call_on_the_experiment_reaches_the_run(online: Any) -> None:
    logger, fake = online
    logger.experiment.log({"mine": 1})
    assert fake.rows == [{"mine": 1}]


@pytest.mark.parametrize(
    ("stopped_by", "exit_code"), [(None, 0), ("SIGTERM", 143), ("SIGINT", 130)]
)
def test_leaving_sends_the_best_checkpoint_of_a_finished_run_and_ends_with_the_exit_code(
    online: Any, tmp_path: Path, stopped_by: str | None, exit_code: int
) -> None:
    logger, fake = online
    for name in ("best.ckpt", "last.ckpt"):
        torch.save({}, tmp_path / name)
    logger.begin()
    logger.leave(None, small_record(stopped_by))
    logger.finish(1)  # it has ended already
    names = [(list(artifact.manifest.entries), aliases) for artifact, aliases in fake.artifacts]
    assert names == ([] if stopped_by else [(["best.ckpt"], ["best"])])
    assert fake.exit_codes == [exit_code]


def test_a_run_that_fails_ends_in_wandb_and_one_that_is_stopped_still_leaves_something(
    online: Any,
) -> None:
    logger, fake = online
    logger.begin()
    logger.on_exception(None, None, signals.Stopped(15))
    assert fake.exit_codes == []
    logger.on_exception(None, None, ValueError("of the user's code"))
    assert fake.exit_codes == [1]


def test_pictures_that_fail_are_a_warning_and_the_run_is_closed(
    online: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger, fake = online
    logger.begin()
    monkeypatch.setattr(fake, "summary", None)
    with pytest.warns(
        UserWarning, match=r"W&B got no pictures \(AttributeError: .*\). The run is not affected."
    ):
        logger.leave(None, small_record())
    assert fake.exit_codes == [0]


@pytest.mark.parametrize("chosen", [None, "chosen"])
def test_a_runs_folder_for_staged_files_is_not_left_to_later_runs(
    online: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str | None
) -> None:
    if chosen:
        monkeypatch.setenv("WANDB_DATA_DIR", chosen)
    logger, _ = online
    logger.begin()
    assert os.environ["WANDB_DATA_DIR"] == (chosen or str(tmp_path / "wandb"))
    logger.finish(0)
    assert os.environ.get("WANDB_DATA_DIR") == chosen


@pytest.mark.nightly
@pytest.mark.usefixtures("_wandb_leaves_no_trace")
def test_the_users_variables_name_the_run_and_what_is_not_used_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RUN_ID": "mine", "NAME": "my name", "RESUME": "never"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "elsewhere"))
    logger = logger_in(tmp_path / "run", {})
    assert logger is not None
    assert capsys.readouterr().out == (
        "WANDB_DIR is not used: the files of a W&B run lie in the run's own folder.\n"
    )
    options = logger._options()
    assert not {"id", "name", "resume"} & options.keys()
    logger.begin()
    logger.finish(0)
    (first,) = of_type(wandb_records(wandb_folders(tmp_path / "run")[0]), "run")
    assert (first["display_name"], first["run_id"]) == ("my name", "mine")
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.nightly
@pytest.mark.usefixtures("_wandb_leaves_no_trace")
def test_a_home_that_cannot_be_written_costs_one_line(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("no folder")
    environ = {**os.environ, "HOME": str(tmp_path / "home" / "me"), "WANDB_MODE": "offline"}
    environ.pop("XDG_CACHE_HOME", None)
    environ["MPLCONFIGDIR"] = str(tmp_path)
    done = run("fit", *REPORTED, "--report", "false", "--run_name", "r", cwd=tmp_path, env=environ)
    assert done.returncode == 0, done.stderr
    shown = done.stdout + done.stderr
    assert "The home folder cannot be written: W&B's cache lies in the run's folder." in shown
    assert "INFO" not in shown
    assert "ERROR" not in shown


@pytest.mark.usefixtures("_wandb_leaves_no_trace")
def test_a_disabled_run_is_wandbs_own_and_takes_what_is_for_another_kind_of_logger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    logger = logger_in(tmp_path, {})
    assert logger is not None
    assert logger.experiment.config.get("lr", 0.1) == 0.1
    assert wandb.run is not None
    assert Path(logger.experiment.dir).name == "files"
    logger.experiment.add_scalar("for TensorBoard", 1.0)
    logger.finish(0)
    assert wandb.run is None


class UsesWandb(OneWeight):
    """Logs with wandb's own functions in every hook, as W&B's documentation shows."""

    def setup(self, stage: str) -> None:
        wandb.define_metric("own/loss")
        assert wandb.run is not None

    def on_train_start(self) -> None:
        if self.trainer.fast_dev_run:
            return  # Lightning has put its own stand-in in the logger's place
        assert self.logger is not None
        self.found = self.logger.experiment.dir, self.logger.experiment.config.get("lr", 0.1)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        loss = super().training_step(batch)
        wandb.log({"own/loss": loss.item()})
        return loss

    def on_train_end(self) -> None:
        wandb.run.summary["own"] = 2


@pytest.mark.usefixtures("_wandb_leaves_no_trace")
@pytest.mark.parametrize("mode", ["disabled", "offline"])
@pytest.mark.parametrize("is_rehearsal", [False, True])
def test_wandbs_own_functions_work_in_every_hook_of_a_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, is_rehearsal: bool
) -> None:
    monkeypatch.setenv("WANDB_MODE", mode)
    logger = logger_in(tmp_path, {"lr": 0.5})
    assert logger is not None
    module = UsesWandb()
    trainer_with(logger, fast_dev_run=is_rehearsal).fit(module, DataLoader([torch.ones(1)]))
    logger.finish(0)
    assert wandb.run is None
    is_real = mode == "offline" and not is_rehearsal
    assert bool(wandb_folders(tmp_path)) == is_real
    if is_real:
        assert module.found == (str(wandb_folders(tmp_path)[0] / "files"), 0.5)
        (own,) = [
            row["item"]["own/loss"]
            for row in of_type(wandb_records(wandb_folders(tmp_path)[0]), "history")
            if "own/loss" in row["item"]
        ]
        assert own == 1.0


@pytest.mark.usefixtures("_wandb_leaves_no_trace")
def test_wandbs_own_functions_work_without_any_logger(tmp_path: Path) -> None:
    settings: Any = SimpleNamespace(trackers=[], resolved={}, program=PROGRAM)
    assert make_wandb_logger(settings, Run(tmp_path, run_id="id"), Best()) is None
    wandb.log({"own/loss": 1.0})
    assert wandb.run is not None
    assert wandb.run.disabled


def test_the_printed_folders_are_those_that_wandb_sync_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert sync_command(tmp_path / "my run") == []
    for name in ("offline-run-1-a", "offline-run-2-a"):
        (tmp_path / "my run" / "wandb" / name).mkdir(parents=True)
        (line,) = sync_command(tmp_path / "my run")
        pattern = line.removeprefix("  wandb sync ").partition("   #")[0]
        assert subprocess.run(f"ls -d {pattern}", shell=True, capture_output=True).returncode == 0
    assert pattern == "'my run/wandb'/offline-run-*"


def test_an_infinite_best_is_no_reason_to_leave_the_checkpoint_out(tmp_path: Path) -> None:
    sent: list[Any] = []
    best = tmp_path / "best.ckpt"
    best.write_bytes(b"weights")
    run: Any = SimpleNamespace(id="x", log_artifact=lambda artifact, aliases: sent.append(artifact))
    facts = {"val/loss": float("inf"), "val/f1": float("nan"), "epochs": 2, "device": "cpu"}
    wandb_logging.send_checkpoint(run, best, facts)
    (artifact,) = sent
    assert artifact.metadata == {"epochs": 2, "device": "cpu"}
