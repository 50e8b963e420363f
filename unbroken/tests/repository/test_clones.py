"""Clones of this template that were renamed: whole, without leftovers, and they train."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from unbroken import __version__
from unbroken.commands.rename.clone import Clone
from unbroken.commands.rename.command import rename
from unbroken.storage.checkpoint_files import read

from tests.repository.clones import ROOT, commit, fresh_clone, git

NAME = "digits"
FORMS = ["wheel", "source"]
FEW = ["--data.source", "sample", "--data.train_samples", "640", "--logger", "false"]
FEW += ["--max_epochs", "2", "--checkpoint_every", "2", "--report", "false"]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    return fresh_clone(tmp_path)


def texts(clone: Path) -> dict[str, str]:
    """The text files of a clone, but for the library's and those of others."""
    listed = git(clone, "grep", "-I", "--files-with-matches", "--cached", "").splitlines()
    others = ("unbroken/", "requirements.lock", "LICENSE")
    return {name: (clone / name).read_text() for name in listed if not name.startswith(others)}


def leftovers(clone: Path) -> list[str]:
    """Lines that still mean the package by its old name."""
    means = re.compile(r"\bproject\.(?:[a-z_]+\b(?!-))|\bproject/|\b(?:from|import|-m) project\b")
    found = []
    for name, text in texts(clone).items():
        # [project.optional-dependencies] is another's word.
        lines = [line for line in text.splitlines() if "[project." not in line]
        found += [f"{name}: {line}" for line in lines if means.search(line)]
    return found


def dead_links(clone: Path) -> list[str]:
    """Links of pages to what is not there."""
    found = []
    for name, text in texts(clone).items():
        if not name.endswith(".md"):
            continue
        targets = [each for each in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in each]
        above = (clone / name).parent
        found += [f"{name}: {target}" for target in targets if not (above / target).exists()]
    return found


@pytest.mark.daily(1)
@pytest.mark.parametrize("form", FORMS)
def test_a_renamed_clone_has_no_leftovers_and_its_style(clone: Path, form: str) -> None:
    assert rename(Clone(clone, "project"), [NAME, "--library", form]) == 0
    assert leftovers(clone) == []
    assert dead_links(clone) == []
    assert not (clone / ".template").exists()
    # Names of older versions of the template are of no use in a clone.
    assert "moved" not in (clone / NAME / "fit.py").read_text()
    assert not (clone / NAME / "moved.py").exists()
    assert (clone / "unbroken").exists() == (form == "source")
    for name, text in texts(clone).items():
        if form == "wheel" and not name.startswith(("docs/", ".gitignore")):
            # The library is a package as any other. Its files are nowhere here.
            assert not re.search(r"(?<![\w/])(?:\./)?unbroken/", text), name
        if form == "wheel" and name != "docs/upgrade_a_clone.md":
            assert "./unbroken" not in text, name
        if name.endswith(".py"):
            ast.parse(text)
    for words in (["check"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *words, "--no-cache"]
        done = subprocess.run(command, cwd=clone, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
    status = git(clone, "status", "--porcelain")
    assert [line for line in status.splitlines() if line[1] != " "] == []


class Environment:
    """A virtual environment with the packages of this one, and the library of a clone.

    Attributes:
        clone: The clone's folder.
    """

    def __init__(self, clone: Path, folder: Path) -> None:
        self.clone = clone
        command = [sys.executable, "-m", "venv", "--without-pip", str(folder)]
        subprocess.run(command, check=True, timeout=120)
        self.python = folder / "bin" / "python"
        (self.packages,) = folder.glob("lib/python*/site-packages")
        here = [entry for entry in sys.path if entry.endswith("site-packages")]
        (self.packages / "here.pth").write_text("\n".join(here))

    def install_library(self) -> None:
        """What the README's first line does beyond installing other packages."""
        shutil.rmtree(self.packages / "unbroken", ignore_errors=True)
        if (self.clone / "unbroken").exists():
            (self.packages / "library.pth").write_text(str(self.clone / "unbroken" / "src"))
            return
        lock = (self.clone / "requirements.lock").read_text()
        (self.packages / "wheel.lock").write_text(lock[lock.index("wheels/") :])
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
        command += ["--require-hashes", "-r", str(self.packages / "wheel.lock")]
        command += ["--target", str(self.packages), "--upgrade"]
        subprocess.run(command, cwd=self.clone, check=True, timeout=120)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a module or script in the clone."""
        variables = {key: value for key, value in os.environ.items() if "PYTEST" not in key}
        variables.pop("PYTHONPATH", None)
        return subprocess.Popen(
            [str(self.python), *arguments],
            cwd=self.clone,
            env=variables | {"WANDB_MODE": "disabled", "PYTHONDONTWRITEBYTECODE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *arguments: str, timeout: float = 280) -> str:
        """Run a module or script in the clone; returns what it prints."""
        process = self.start(*arguments)
        told, _ = process.communicate(timeout=timeout)
        assert process.returncode == 0, told
        return told


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
@pytest.mark.parametrize("form", FORMS)
def test_a_renamed_clone_trains_is_killed_resumes_exactly_and_takes_a_later_library(
    clone: Path, form: str, tmp_path: Path
) -> None:
    environment = Environment(clone, tmp_path / "environment")
    rename(Clone(clone, "project"), [NAME, "--library", form])
    commit(clone)
    environment.install_library()
    where = environment.run("-c", "import unbroken; print(unbroken.__file__)").strip()
    assert Path(where).is_relative_to(clone if form == "source" else environment.packages)

    fit = ["-m", f"{NAME}.fit", *FEW, "--ckpt_path", "auto"]
    environment.run(*fit, "--run_name", "whole")
    killed = environment.start(*fit, "--run_name", "killed")
    saved = clone / "checkpoints" / "killed" / "last.ckpt"
    while not saved.exists() and killed.poll() is None:
        time.sleep(0.005)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    environment.run(*fit, "--run_name", "killed")
    assert_same(clone, "whole", "killed")
    summary = json.loads((clone / "checkpoints" / "whole" / "summary.json").read_text())
    assert summary["versions"]["unbroken"] == __version__

    later = ".".join([*__version__.split(".")[:2], "99"])
    update_to(environment, later, tmp_path / "later")
    told = environment.run(*fit, "--run_name", "killed", "--max_epochs", "3")
    assert f"saved by unbroken {__version__}, and this is {later}: both resume it exactly" in told
    # The tests of the template's own, under the new name and with the later library
    if (clone / "tests").exists():
        environment.run("-m", "pytest", "-q", "-n", "0", timeout=900)


def assert_same(clone: Path, one: str, other: str) -> None:
    """Two runs have the same weights at their end, bit for bit."""
    expected = read(clone / "checkpoints" / one / "last.ckpt")["state_dict"]
    weights = read(clone / "checkpoints" / other / "last.ckpt")["state_dict"]
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(weights[name], value), name


def update_to(environment: Environment, version: str, folder: Path) -> None:
    """Let a clone take a later version of the library, which is made here."""
    kept = shutil.ignore_patterns("__pycache__", "tests", "dist")
    shutil.copytree(ROOT / "unbroken", folder, ignore=kept)
    code = folder / "src" / "unbroken" / "version.py"
    code.write_text(code.read_text().replace(f'"{__version__}"', f'"{version}"'))
    changelog = folder / "CHANGELOG.md"
    before, heading, after = changelog.read_text().partition("\n## ")
    changelog.write_text(f"{before}\n## {version}\n\n- Something new.\n{heading}{after}")
    told = environment.run("-m", f"{NAME}.rename", "--library", str(folder))
    assert f"## {version}\n\n- Something new." in told
    commit(environment.clone)
    environment.install_library()


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("form", FORMS)
def test_a_renamed_clone_passes_its_types_and_contracts(
    clone: Path, form: str, tmp_path: Path
) -> None:
    environment = Environment(clone, tmp_path / "environment")
    rename(Clone(clone, "project"), [NAME, "--library", form])
    environment.install_library()
    environment.run(
        "-c", "from importlinter.cli import lint_imports_command as c; c()", "--no-cache"
    )
    # What mypy has found about other packages is used again.
    environment.run("-m", "mypy", "--cache-dir", str(ROOT / ".mypy_cache"), timeout=1000)
