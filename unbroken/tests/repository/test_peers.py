"""The comparison with other ways to train, in docs/peers."""

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from unbroken.cli.cli import configure
from unbroken.tables import flat

from project.fit import job as fit

COMPARE = Path(__file__).parents[3] / "docs" / "peers" / "compare.py"
SETTINGS = {
    "network": "MLP",
    "batch_size": 64,
    "epochs": 3,
    "lr": 0.002,
    "samples": 1200,
    "seed": 5,
}


def compare() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compare", COMPARE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_this_template_trains_with_the_peers_settings(tmp_path: Path) -> None:
    options = argparse.Namespace(root=tmp_path, **SETTINGS)
    command = compare().template_command(options, tmp_path)
    assert command[:3] == [sys.executable, "-m", "project.fit"]
    config = configure(fit, "fit", command[3:])
    settings = flat(config.resolved)
    expected = {
        "seed_everything": 5,
        "trainer.max_epochs": 3,
        "model.network.class_path": "project.model.MLP",
        "model.optimizer": "Adam",
        "model.lr": 0.002,
        "model.schedule": "constant",
        "data.batch_size": 64,
        "data.train_samples": 1100,
        "data.val_samples": 100,
        "data.test_samples": 1200,
    }
    assert {name: settings[name] for name in expected} == expected


def test_the_table_has_median_lowest_and_highest() -> None:
    runs = {"one": [], "two": []}
    for number in (3.0, 1.0, 2.0):
        facts = dict.fromkeys(compare().COLUMNS, number)
        runs["one"].append(facts)
        runs["two"].append(facts | {"samples_per_sec": 1000 * number, "test_accuracy": 0.98765})
    lines = compare().table(runs).splitlines()
    assert lines[2].startswith("| one | 2.0 (1.0–3.0) | 2.00 (1.00–3.00) | 2 (1–3) |")
    assert "2,000 (1,000–3,000) | 98.77% (98.77%–98.77%)" in lines[3]


@pytest.mark.nightly
def test_all_peers_train_and_are_measured(mnist_root: Path, tmp_path: Path) -> None:
    output = tmp_path / "runs.json"
    words = ["--root", str(mnist_root), "--samples", "600", "--epochs", "1", "--n", "1"]
    command = [sys.executable, str(COMPARE), *words, "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    runs = json.loads(output.read_text())
    assert len(runs) == 3
    for (facts,) in runs.values():
        assert set(facts) >= set(compare().COLUMNS)
        assert facts["command_s"] > facts["training_s"] > 0
        assert 0.05 < facts["test_accuracy"] < 1
