"""Code that is written for ``pytorch_lightning`` runs, whether or not that package is installed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from unbroken.lightning_names import name_in_lightning

from tests.commands import assert_same_run, complete, summary
from tests.promises import ROOT, SEARCHED, environment

THEIRS = "tests.written_for_pytorch_lightning"
SWITCHED_ON = "from unbroken.lightning_names import alias; alias()\n"
# Takes the installed package away, also from the worker processes that a process starts.
NOT_INSTALLED = """
import sys
from importlib.abc import MetaPathFinder

class Missing(MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        # The files of ours that worker processes find on sys.path stay.
        is_ours = any(entry.endswith("other_names") for entry in sys.path)
        if fullname in ("pytorch_lightning", "lightning_fabric") and not is_ours:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)

sys.meta_path.insert(0, Missing())
"""


@pytest.fixture(scope="module", params=["installed", "not installed"])
def python_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """PYTHONPATH of a process in which the package ``pytorch_lightning`` is installed, or not."""
    if request.param == "installed":
        if importlib.util.find_spec("pytorch_lightning") is None:
            pytest.skip("the package pytorch_lightning is not installed")
        return SEARCHED
    folder = tmp_path_factory.mktemp("not_installed")
    (folder / "not_installed.py").write_text(NOT_INSTALLED)
    (folder / "sitecustomize.py").write_text("import not_installed")
    return f"{folder}:{SEARCHED}"


def mostly(quick: str) -> pytest.MarkDecorator:
    """For a test that takes long: which of the two every day tries. The other one is nightly."""
    names = ("installed", "not installed")
    found = [
        pytest.param(name, marks=() if name == quick else pytest.mark.nightly) for name in names
    ]
    return pytest.mark.parametrize("python_path", found, indirect=True, scope="module")


def python(
    code: str, *arguments: str, python_path: str, fresh: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process with this search path."""
    if python_path != SEARCHED:
        code = f"import not_installed\n{code}"
    return complete(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env={**environment(), "PYTHONPATH": python_path},
        fresh=fresh,
    )


def printed(code: str, python_path: str, fresh: bool = False) -> list[str]:
    """The lines that Python code prints once the names are switched on."""
    done = python(SWITCHED_ON + code, python_path=python_path, fresh=fresh)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@mostly("not installed")
def test_without_the_other_names_the_package_is_missing_where_it_is_not_installed(
    python_path: str,
) -> None:
    done = python("import pytorch_lightning", python_path=python_path, fresh=True)
    assert (done.returncode == 0) == (python_path == SEARCHED)


def test_every_module_is_the_same_object_under_both_names(python_path: str) -> None:
    code = """
import importlib, sys
import lightning.pytorch, lightning.fabric
specs = {name: module.__spec__.name for name, module in sys.modules.items()
         if name.startswith("lightning.") and module.__spec__}
for name in specs:
    other = name.replace("lightning.pytorch", "pytorch_lightning", 1)
    other = other.replace("lightning.fabric", "lightning_fabric", 1)
    assert importlib.import_module(other) is sys.modules[name], other
assert specs == {name: sys.modules[name].__spec__.name for name in specs}
print(len(specs) > 200)
import pytorch_lightning as pl
from pytorch_lightning.callbacks.early_stopping import EarlyStopping
print(pl is lightning.pytorch, pl.callbacks.EarlyStopping is EarlyStopping)
print(EarlyStopping.__module__)
"""
    assert printed(code, python_path) == [
        "True",
        "True True",
        "lightning.pytorch.callbacks.early_stopping",
    ]


def test_switching_on_imports_nothing_and_is_done_once(python_path: str) -> None:
    code = """
import sys
before = list(sys.path), list(sys.meta_path)
alias()
print((list(sys.path), list(sys.meta_path)) == before, "lightning" in sys.modules)
"""
    assert printed(code, python_path, fresh=True) == ["True False"]


def test_a_module_that_lightning_does_not_have_is_missing_by_the_name_that_was_asked_for(
    python_path: str,
) -> None:
    code = """
import importlib.util
print(importlib.util.find_spec("pytorch_lightning.nowhere"))
try:
    import pytorch_lightning.callbacks.nowhere
except ModuleNotFoundError as error:
    print(error)
"""
    assert printed(code, python_path) == [
        "None",
        "No module named 'pytorch_lightning.callbacks.nowhere'",
    ]


def test_pickles_that_name_either_package_give_the_same_class(python_path: str) -> None:
    code = """
import pickle
import lightning.pytorch.callbacks
names = "pytorch_lightning.callbacks.early_stopping", "lightning.pytorch.callbacks"
found = [pickle.loads(f"c{name}\\nEarlyStopping\\n.".encode()) for name in names]
print(found == [lightning.pytorch.callbacks.EarlyStopping] * 2)
"""
    assert printed(code, python_path) == ["True"]


@mostly("installed")
# A fork has what its parent has, and forkserver's workers import as those of spawn do.
@pytest.mark.nightly
@pytest.mark.parametrize("start_method", ["fork", "forkserver", "spawn"])
def test_worker_processes_see_the_same_classes(start_method: str, python_path: str) -> None:
    """The main module is none of ours, so that a worker can only know from its search path."""
    code = f"""
import {THEIRS} as theirs
for images, targets in theirs.Rows({start_method!r}, workers=1).train_dataloader():
    pass
print(tuple(images.shape))
"""
    assert printed(code, python_path, fresh=True) == ["(10, 8)"]


@pytest.mark.parametrize(
    ("name", "real"),
    [
        ("pytorch_lightning.callbacks.EarlyStopping", "lightning.pytorch.callbacks.EarlyStopping"),
        ("lightning_fabric.strategies", "lightning.fabric.strategies"),
        ("pytorch_lightning", "lightning.pytorch"),
        ("lightning.pytorch.Trainer", "lightning.pytorch.Trainer"),
        ("pytorch_lightning_of_mine.Net", "pytorch_lightning_of_mine.Net"),
        ("mine.pytorch_lightning.Net", "mine.pytorch_lightning.Net"),
    ],
)
def test_a_name_in_a_config_or_checkpoint_is_translated(name: str, real: str) -> None:
    assert name_in_lightning(name) == real


@pytest.mark.nightly
def test_a_package_that_was_imported_too_early_is_reported_and_its_trainer_refused(
    tmp_path: Path,
) -> None:
    """It would train, and its resume would fail."""
    code = f"""
import pytorch_lightning
from pytorch_lightning.demos.boring_classes import BoringModel
from unbroken import ExactCheckpoint
keep = ExactCheckpoint({str(tmp_path / "run")!r})
trainer = pytorch_lightning.Trainer(callbacks=[keep], logger=False, accelerator="cpu")
trainer.fit(BoringModel())
"""
    done = python(code, python_path=SEARCHED, fresh=True)
    assert done.returncode == 1
    assert "pytorch_lightning was imported before unbroken" in done.stderr
    assert "ExactCheckpoint cannot resume a Trainer of pytorch_lightning" in done.stderr
    assert "Import unbroken first" in done.stderr
    assert not (tmp_path / "run").exists()


def flags(folder: Path, start_method: str = "fork") -> list[str]:
    return [
        *("--model.class_path", f"{THEIRS}.Sum"),
        *("--data.class_path", f"{THEIRS}.Rows", "--data.start_method", start_method),
        *("--monitor", "val_loss", "--mode", "min"),
        *("--trainer.callbacks+", f"{THEIRS}.CountsSteps"),
        *("--trainer.callbacks+", "pytorch_lightning.callbacks.LearningRateMonitor"),
        *("--trainer.logger+", f"{THEIRS}.PrintsMetrics"),
        *("--max_epochs", "2", "--log_every_n_steps", "4", "--accelerator", "cpu"),
        *("--checkpoint_every", "3"),
        *("--default_root_dir", str(folder)),
    ]


FIT = f"{SWITCHED_ON}import sys; from numerals.fit import job; sys.exit(job.main(sys.argv[1:]))"
TEST = f"{SWITCHED_ON}import sys; from unbroken.commands import test as command; "
TEST += "sys.exit(command.main('numerals', sys.argv[1:]))"
INTERRUPTED = f"{SWITCHED_ON}from tests import interrupted; interrupted.main()"


@pytest.mark.nightly
@mostly("not installed")
def test_a_run_that_was_killed_and_resumed_is_bit_identical_and_can_be_tested(
    python_path: str, tmp_path: Path
) -> None:
    named = [*flags(tmp_path), "--run_name"]
    whole = python(FIT, *named, "whole", python_path=python_path)
    assert whole.returncode == 0, whole.stderr
    assert "32 steps were counted" in whole.stdout
    assert "logged at 3: " in whole.stdout

    killed = python(INTERRUPTED, "21", "SIGKILL", *named, "killed", python_path=python_path)
    assert killed.returncode == -9, killed.stderr
    assert not (tmp_path / "killed" / "summary.json").exists()

    resumed = python(FIT, *named, "killed", "--ckpt_path", "auto", python_path=python_path)
    assert resumed.returncode == 0, resumed.stderr
    assert "32 steps were counted" in resumed.stdout
    assert_same_run(tmp_path / "whole", tmp_path / "killed")

    output = tmp_path / "metrics.json"
    words = ["--ckpt_path", str(tmp_path / "killed" / "best.ckpt"), "--output", str(output)]
    tested = python(TEST, *words, "--accelerator", "cpu", python_path=python_path)
    assert tested.returncode == 0, tested.stderr
    assert json.loads(output.read_text())["test_loss"] == summary(tmp_path / "whole")["test_loss"]
