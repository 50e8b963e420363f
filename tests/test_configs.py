"""Every config file that is shipped can be read, and trains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from project.fit import job
from tests.small_sets import CONFIGS

FEW = [
    *("--data.source", "sample", "--data.train_samples", "512", "--data.val_samples", "100"),
    *("--data.test_samples", "100", "--max_epochs", "1", "--limit_train_batches", "2"),
    *("--check_val_every_n_epoch", "1", "--report", "false", "--accelerator", "cpu"),
    *("--precision", "32-true", "--run_name", "mine"),
]
# These are no settings of a run.
OTHERS = {"sweep", "kubernetes", "skypilot"}
SETTINGS = sorted(path.stem for path in CONFIGS.glob("*.yaml") if path.stem not in OTHERS)


# The profiler waits for more steps than two.
@pytest.mark.filterwarnings("ignore:nothing was profiled")
@pytest.mark.parametrize("name", SETTINGS)
def test_a_config_file_trains(name: str) -> None:
    assert job.main(["--config", str(CONFIGS / f"{name}.yaml"), *FEW]) == 0
    summary = json.loads(Path("checkpoints/mine/summary.json").read_text())
    assert summary["steps"] == 2
    assert 0 <= summary["test/accuracy"] <= 1


def test_the_search_names_options_that_there_are() -> None:
    space = yaml.safe_load((CONFIGS / "sweep.yaml").read_text())
    typed = []
    for name, values in space["parameters"].items():
        first = values["values"][0] if "values" in values else values["min"]
        typed.append(f"--{name}={first}")
    assert job.main([*FEW, *typed, "--data.batch_size", "64"]) == 0


def test_a_run_without_a_word_is_what_the_default_file_says() -> None:
    default = yaml.safe_load((CONFIGS / "default.yaml").read_text())
    assert job.main(FEW) == 0
    resolved = yaml.safe_load(Path("checkpoints/mine/config.yaml").read_text())
    for section in ("model", "data"):
        assert resolved[section]["class_path"] == default[section]["class_path"]
