"""What fit.py trains, whatever that is: every config file trains it, and it can be killed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml
from unbroken.commands.verify import main as verify

from project.fit import job

HERE = Path(__file__).parent
CONFIGS = HERE.parent / "configs"
SMALL = HERE / "small.yaml"
DATA = ["--config", str(SMALL)] if SMALL.exists() else []
QUICK = [*DATA, "--accelerator", "cpu", "--precision", "32-true", "--report", "false"]
FEW = [
    *(*QUICK, "--run_name", "mine", "--max_epochs", "1", "--check_val_every_n_epoch", "1"),
    *("--limit_train_batches", "2", "--limit_val_batches", "2", "--limit_test_batches", "2"),
]
SPACES = sorted(CONFIGS.glob("sweep*.yaml"))
# These are no settings of a run.
OTHERS = {CONFIGS / "kubernetes.yaml", CONFIGS / "skypilot.yaml", *SPACES}
SETTINGS = sorted(set(CONFIGS.glob("*.yaml")) - OTHERS)

# What you train may warn. The profiler waits for more steps than two.
pytestmark = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.filterwarnings("ignore:nothing was profiled"),
]


def name_of(path: Path) -> str:
    return path.stem


@pytest.mark.parametrize("settings", SETTINGS, ids=name_of)
def test_a_config_file_trains(settings: Path) -> None:
    assert job.main(["--config", str(settings), *FEW]) == 0
    summary = json.loads(Path("checkpoints/mine/summary.json").read_text())
    assert summary["steps"] >= 1


@pytest.mark.parametrize("space", SPACES, ids=name_of)
def test_the_search_names_options_that_there_are(space: Path) -> None:
    typed = []
    for name, values in yaml.safe_load(space.read_text())["parameters"].items():
        first = values["values"][0] if "values" in values else values["min"]
        typed.append(f"--{name}={first}")
    assert job.main([*FEW, *typed]) == 0


def test_a_run_that_is_killed_ends_as_one_that_was_never_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A run that is killed starts again in an interpreter of its own.
    monkeypatch.setenv("PYTHONPATH", str(HERE.parent), prepend=os.pathsep)
    assert verify(job.package, [*QUICK, "--steps", "10", "--kills", "1"]) == 0
