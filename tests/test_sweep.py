from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from PIL import Image

from project.engine import command as entry
from project.errors import UserError
from project.sweep import __main__ as sweep
from project.sweep.trials import Parameter, read_space
from tests import made_data
from tests.promises import ROOT

optuna = pytest.importorskip("optuna")

SPACE = """
metric: {name: val/accuracy, goal: maximize}
parameters:
  model.lr: {distribution: log_uniform_values, min: 0.00000001, max: 0.01}
early_terminate: {type: hyperband, min_iter: 1}
"""


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    """Options of a sweep whose trials take a second or two, besides starting up."""
    made_data.make_tensor_files(tmp_path / "data")
    (tmp_path / "space.yaml").write_text(SPACE)
    config = str(ROOT / "configs" / "examples" / "tensor_dataset.yaml")
    data = ["--config", config, "--data.root", str(tmp_path / "data"), "--data.batch_size", "20"]
    short = ["--max_epochs", "3", "--accelerator", "cpu", "--model.schedule", "constant"]
    return ["--space", str(tmp_path / "space.yaml"), "--root", str(tmp_path), "--name", "lr", *data, *short]


def run(words: list[str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "WANDB_MODE": "disabled"}
    command = [sys.executable, "-m", "project.sweep", *words]
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, stdout=-1, stderr=subprocess.STDOUT)


@pytest.mark.slow
def test_eight_trials_survive_a_kill_stop_early_and_beat_the_worst_start(tmp_path: Path, flags: list[str]) -> None:
    output = str(tmp_path / "trials.json")
    killed = run([*flags, "--trials", "8", "--jobs", "2"])
    while not (tmp_path / "lr" / "trial-003" / "metrics.csv").exists() and killed.poll() is None:
        time.sleep(0.1)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    begun = open_study(tmp_path).trials
    assert [t for t in begun if t.state.name == "RUNNING"]

    # the same name is enough to go on, even while the orphaned trials are still saving
    told, _ = (job := run([*flags[:6], "--trials", "8", "--jobs", "2", "--output", output])).communicate(timeout=240)
    assert job.returncode == 0, told
    assert f"going on with lr: {len(begun)} of 8 trials were begun." in told
    trials = open_study(tmp_path).trials
    assert len(trials) == 8
    assert {t.state.name for t in trials} <= {"COMPLETE", "PRUNED"}, told
    for before, after in zip(begun, trials, strict=False):
        assert before.params == after.params
    rows = json.loads(Path(output).read_text())
    assert [row["val/accuracy"] for row in rows] == sorted((row["val/accuracy"] for row in rows), reverse=True)
    first = next(row for row in rows if row["trial"] == 0)
    worst_start = min(row["val/accuracy"] for row in rows if row["trial"] < 3)
    assert rows[0]["val/accuracy"] > worst_start, first
    assert told.rstrip().splitlines()[-1].startswith("python -m project.fit --config ")
    with Image.open(tmp_path / "lr" / "sweep.png") as picture:
        assert picture.width > 600
        assert len(picture.convert("RGB").getcolors(1_000_000)) > 50


def open_study(tmp_path: Path) -> optuna.Study:
    space = read_space(tmp_path / "space.yaml")
    return sweep.open_study(tmp_path / "lr", space, trials=8, seed=0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--trials", "0"], "--trials must be at least 1, got 0."),
        (["--jobs", "-1"], "--jobs must be at least 1, got -1."),
        (["--name", "../x"], "--name must be 1 to 100 letters"),
        (["--run_name", "x"], "--run_name is set for every trial"),
        (["--space", "missing.yaml"], "--space: missing.yaml cannot be read"),
    ],
)
def test_bad_options_are_told_in_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], workplace: Path
) -> None:
    assert entry.exit_code(sweep.main, words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert not list(workplace.iterdir())


def test_what_fit_refuses_ends_the_sweep_with_fits_own_line(flags: list[str]) -> None:
    told, _ = (job := run([*flags, "--trials", "4", "--model.lrr", "1"])).communicate(timeout=120)
    assert job.returncode == 2
    assert "unknown option --model.lrr" in [line for line in told.splitlines() if line.startswith("error: ")][-1]


def test_another_space_or_other_options_need_another_name(tmp_path: Path) -> None:
    space = tmp_path / "space.yaml"
    space.write_text(SPACE)
    sweep.claim(tmp_path / "lr", space, ["--max_epochs", "3"])[1].close()
    arguments, lock = sweep.claim(tmp_path / "lr", space, [])
    assert arguments == ["--max_epochs", "3"]
    with pytest.raises(UserError, match="another process is sweeping there"):
        sweep.claim(tmp_path / "lr", space, [])
    lock.close()
    with pytest.raises(UserError, match="was begun with `--max_epochs 3`"):
        sweep.claim(tmp_path / "lr", space, ["--max_epochs", "4"])
    space.write_text(SPACE.replace("0.01", "0.1"))
    with pytest.raises(UserError, match="another search space"):
        sweep.claim(tmp_path / "lr", space, [])


@pytest.mark.parametrize(
    ("entry", "parameter"),
    [
        ({"values": [1, 2]}, Parameter("x", "categorical", [1, 2])),
        ({"value": "a"}, Parameter("x", "constant", ["a"])),
        ({"min": 1, "max": 5}, Parameter("x", "int_uniform", [1, 5])),
        ({"min": 0.5, "max": 5}, Parameter("x", "uniform", [0.5, 5])),
        ({"distribution": "log_uniform_values", "min": 0.1, "max": 5}, Parameter("x", "log_uniform_values", [0.1, 5])),
    ],
)
def test_wandbs_distributions_are_understood(entry: dict, parameter: Parameter, tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(yaml.safe_dump({"parameters": {"x": entry}}))
    assert read_space(tmp_path / "s.yaml").parameters == [parameter]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("parameters: {x: {distribution: q_normal}}", "x.distribution must be one of"),
        ("parameters: {x: {min: 1e-4, max: 1}}", "write 0.0001"),
        ("parameters: {x: {min: 3, max: 1}}", "min below max"),
        ("method: grid", "must have a section `parameters:`"),
    ],
)
def test_a_bad_sweep_file_is_told_in_one_line(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(text)
    with pytest.raises(UserError, match=message):
        read_space(tmp_path / "s.yaml")


def test_the_command_that_wandbs_agent_would_run_is_one_that_fit_understands(monkeypatch: pytest.MonkeyPatch) -> None:
    from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

    from project.engine.cli import ProjectCLI

    content = yaml.safe_load((ROOT / "configs" / "sweep.yaml").read_text())
    space = read_space(ROOT / "configs" / "sweep.yaml")
    values = {p.name: {"value": p.values[0]} for p in space.parameters}
    words = create_sweep_command(list(content["command"]))
    flags = create_sweep_command_args({"args": values})["args"]
    assert words == ["${env}", "${interpreter}", "-m", "project.fit", "${args}"]
    monkeypatch.chdir(ROOT)
    cli = ProjectCLI(flags)
    assert cli.config.model.init_args.lr == values["model.lr"]["value"]
    assert cli.datamodule.batch_size == values["data.batch_size"]["value"]
    assert (ROOT / content["program"]).is_file()
