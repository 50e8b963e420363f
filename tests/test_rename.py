from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from project.rename import CLONE, PACKAGE
from project.renaming.words import rewrite

NAME = "handwriting"


@pytest.mark.parametrize(
    ("path", "before", "after"),
    [
        ("a.py", "from P.data import x\nimport P.fit as f\n", "from N.data import x\nimport N.fit as f\n"),
        ("a.py", "import P\nP.fit.main([])\nself.P.fit\n", "import N\nN.fit.main([])\nself.P.fit\n"),
        ("a.py", 'wandb.init(P="a", b={"P": 1}["P"])\n', 'wandb.init(P="a", b={"P": 1}["P"])\n'),
        ("a.py", 'x = ROOT / "P" / "data"\nfind_spec("P")\n', 'x = ROOT / "N" / "data"\nfind_spec("N")\n'),
        ("a.py", '"P.model.ConvNet", f"python -m P.fit {y}"\n', '"N.model.ConvNet", f"python -m N.fit {y}"\n'),
        ("a.py", '"""This P: see :mod:`P.fit`."""  # a P\n', '"""This P: see :mod:`N.fit`."""  # a P\n'),
        ("a.py", '"import P.fit; me/P/runs, wandb.ai/me/P"\n', '"import N.fit; me/P/runs, wandb.ai/me/P"\n'),
        ("a.py", 'word.startswith("P.") or "-m P." in word\n', 'word.startswith("N.") or "-m N." in word\n'),
        ("a.py", 'f"P.{x}", f"-m P.{x}", f"a P. {x}"\n', 'f"N.{x}", f"-m N.{x}", f"a P. {x}"\n'),
        ("a.yaml", "P: mnist\nclass_path: P.model.MLP # this P\n", "P: mnist\nclass_path: N.model.MLP # this P\n"),
        ("a.yaml", "command: [python, -m, P.fit]\n", "command: [python, -m, N.fit]\n"),
        ("a.md", "# P\nA P in P/data.\n", "# N\nA P in N/data.\n"),
        ("a.md", "```\ndocker run P --x\nP: a\nwandb --P b\n```\n", "```\ndocker run N --x\nP: a\nwandb --P b\n```\n"),
        ("a.toml", '[P]\nname = "P"\n[P.urls]\n', '[P]\nname = "N"\n[P.urls]\n'),
        ("a.toml", 'all = ["P[dev]"]\npath = "P/__init__.py" # P\n', 'all = ["N[dev]"]\npath = "N/__init__.py" # P\n'),
        ("Dockerfile", 'COPY P P\nENTRYPOINT ["-m", "P.fit"]\n', 'COPY N N\nENTRYPOINT ["-m", "N.fit"]\n'),
        (".dockerignore", "!P/\n", "!N/\n"),
        ("run", "#!/bin/sh\n# a P\npytest --cov=P tests\n", "#!/bin/sh\n# a P\npytest --cov=N tests\n"),
        ("LICENSE", "The P maintainers, P/data\n", "The P maintainers, P/data\n"),
    ],
)
def test_only_what_means_the_package_is_renamed(path: str, before: str, after: str) -> None:
    old = "pro" + "ject"  # this file is renamed as well
    written = rewrite(Path(path), re.sub(r"\bP\b", old, before), old, "thing")
    assert written == re.sub(r"\bN\b", "thing", re.sub(r"\bP\b", old, after))


def git(clone: Path, *arguments: str) -> str:
    who = ["-c", "user.name=Somebody", "-c", "user.email=somebody@example.org", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", *who, *arguments], cwd=clone, check=True, capture_output=True, text=True).stdout


def python(clone: Path, *arguments: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTEST_ADDOPTS")}
    environment |= {"PYTHONPATH": str(clone), "WANDB_MODE": "disabled", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=clone, env=environment, capture_output=True, text=True, timeout=timeout
    )


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A fresh clone of this repository as it is committed, without its history."""
    if subprocess.run(["git", "rev-parse", "HEAD"], cwd=CLONE, capture_output=True).returncode:
        pytest.skip("not a git clone")
    git(tmp_path, "clone", "--quiet", "--depth", "1", f"file://{CLONE}", "clone")
    return tmp_path / "clone"


def test_a_renamed_clone_works_under_its_new_name_and_twice(clone: Path) -> None:
    told = python(clone, "-m", f"{PACKAGE}.rename", NAME)
    assert told.returncode == 0, told.stderr
    assert f"moved {PACKAGE}/ to {NAME}/" in told.stdout
    assert not (clone / PACKAGE).exists()
    assert leftovers(clone, PACKAGE) == []

    refused = python(clone, "-m", f"{NAME}.rename", "numerals")
    assert refused.returncode == 2
    assert "uncommitted changes" in refused.stderr
    git(clone, "add", "--all")
    git(clone, "commit", "--quiet", "-m", "Rename")

    shown = python(clone, "-m", f"{NAME}.fit", "--print_config")
    assert f"class_path: {NAME}.model.ConvNet" in shown.stdout, shown.stderr
    # the last of them starts a command as a process, by a name that an f-string makes
    some = ["tests/test_packaging.py", "tests/test_tables.py", "tests/test_stop.py"]
    tests = python(clone, "-m", "pytest", "-q", *some, "-k", "not install and (packaging or tables or while_starting)")
    assert tests.returncode == 0, tests.stdout

    again = python(clone, "-m", f"{NAME}.rename", "numerals")
    assert again.returncode == 0, again.stderr
    assert leftovers(clone, NAME) == []
    assert "unused" not in python(clone, "-m", "compileall", "-q", "numerals", "tests").stdout


def test_a_bare_clone_has_no_digits_and_tests_that_pass(clone: Path) -> None:
    told = python(clone, "-m", f"{PACKAGE}.rename", NAME, "--bare")
    assert told.returncode == 0, told.stderr
    assert not (clone / NAME / "data" / "bundled").exists()
    readme = (clone / "README.md").read_text()
    assert "<!-- mnist -->" not in readme
    assert "trains on digits" not in readme
    first = readme.partition("```bash\n")[2].partition("\n```")[0].split(" && ")[-1]
    assert python(clone, *first.split()[1:]).returncode == 0, first
    assert told.stdout.splitlines()[-1].strip() == first  # what to do next, once the clone is installed
    assert not (clone / "tests" / "digit_files.py").exists()
    collected = python(clone, "-m", "pytest", "-q", "--collect-only", "tests")
    assert collected.returncode == 0, collected.stdout
    assert "TestTensorFiles::test_a_run_that_was_stopped_and_resumed_is_bit_identical" in collected.stdout
    tests = python(clone, "-m", "pytest", "-q", "tests/test_examples.py", "-k", "TensorFiles and trains or newcomer")
    assert tests.returncode == 0, tests.stdout


def leftovers(clone: Path, name: str) -> list[str]:
    """Lines of tracked files where a name still looks like a package's: dotted, a folder, imported."""
    git(clone, "add", "--all")
    pattern = rf"(^|[^][A-Za-z0-9_./-])({name}\.([a-z_]+\b|\{{)|{name}/|(from|import|-m) {name}\b)"
    found = subprocess.run(["git", "grep", "-nE", pattern], cwd=clone, capture_output=True, text=True).stdout
    return [line for line in found.splitlines() if not line.startswith(("requirements.lock", "LICENSE"))]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("My-Digits", "lower-case Python identifier"),
        ("2digits", "lower-case Python identifier"),
        ("class", "no keyword"),
        ("json", "standard library"),
        ("torch", "an installed package"),
        ("tests", "is taken"),
    ],
)
def test_a_name_that_cannot_be_is_refused_and_nothing_touched(
    name: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from project import rename
    from project.engine import command as entry

    monkeypatch.setattr(rename, "rename", None)  # whatever happens, this clone stays what it is
    monkeypatch.setattr(rename, "remove_example", None)
    assert entry.exit_code(rename.main, [name]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error


def test_renaming_to_the_present_name_does_nothing(clone: Path) -> None:
    told = python(clone, "-m", f"{PACKAGE}.rename", PACKAGE)
    assert told.returncode == 0
    assert "nothing to do" in told.stdout
    assert git(clone, "status", "--porcelain") == ""
