"""What a clone, an image and an installed package hold: locked versions, every needed file, nothing private."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
LOCK = (ROOT / "requirements.lock").read_text()
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGE: str = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"][0]
METADATA: dict[str, Any] = next(table for table in PYPROJECT.values() if "requires-python" in table)
PYTHONS = ["3.10", "3.11", "3.12", "3.13"]
MACHINES = [("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64")]


def locked() -> list[tuple[Requirement, list[str]]]:
    """Every requirement of the lock file with its hashes."""
    entries = re.sub(r"\\\n\s*", "", LOCK).splitlines()
    entries = [entry for entry in entries if entry and not entry.startswith(("#", "--only-binary"))]
    return [
        (Requirement(entry.split("--hash=")[0]), entry.split("--hash=")[1:]) for entry in entries
    ]


def declared() -> list[Requirement]:
    """What pyproject.toml asks for, all extras included."""
    extras = METADATA["optional-dependencies"]
    lines = METADATA["dependencies"] + [
        line for name in extras if name != "all" for line in extras[name]
    ]
    return [Requirement(line) for line in lines]


def environment(python: str, platform: str, machine: str) -> dict[str, str]:
    return {
        "python_version": python,
        "python_full_version": f"{python}.1",
        "sys_platform": platform,
        "platform_machine": machine,
        "platform_python_implementation": "CPython",
    }


def test_every_locked_requirement_has_one_version_and_hashes() -> None:
    assert len(locked()) > 100
    for requirement, hashes in locked():
        assert [spec.operator for spec in requirement.specifier] == ["=="], requirement
        assert hashes, requirement
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}\s*", digest) for digest in hashes), (
            requirement
        )


def test_the_lock_names_no_registry_and_runs_no_build_scripts() -> None:
    options = [line for line in LOCK.splitlines() if line.startswith("-")]
    assert options == ["--only-binary :all:"]
    assert "://" not in LOCK
    assert not [requirement for requirement, _ in locked() if requirement.url]


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize(("platform", "machine"), MACHINES)
def test_every_dependency_is_locked_once_for_every_python(
    python: str, platform: str, machine: str
) -> None:
    here = environment(python, platform, machine)
    versions: dict[str, list[str]] = {}
    for requirement, _ in locked():
        if requirement.marker is None or requirement.marker.evaluate(here):
            versions.setdefault(requirement.name, []).append(
                str(requirement.specifier).removeprefix("==")
            )
    assert not {name: found for name, found in versions.items() if len(found) > 1}
    for wanted in declared():
        if wanted.marker is None or wanted.marker.evaluate(here):
            (version,) = versions[wanted.name]
            assert wanted.specifier.contains(version), f"{wanted} is locked at {version}"


def test_every_imported_library_is_declared() -> None:
    imported: dict[str, str] = {}
    for path in (ROOT / PACKAGE).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            imported.update({name.split(".")[0]: path.name for name in names})
    provided = {PACKAGE, *sys.stdlib_module_names}
    for requirement in declared():
        with contextlib.suppress(PackageNotFoundError):  # not wanted on this platform
            provided |= {
                Path(file.parts[0]).stem for file in distribution(requirement.name).files or ()
            }
    assert {module: file for module, file in imported.items() if module not in provided} == {}


def test_the_supported_pythons_are_those_the_lock_is_made_for() -> None:
    assert f"--universal --python-version {PYTHONS[0]}" in LOCK
    supported = Requirement(f"python{METADATA['requires-python']}").specifier
    assert [minor for minor in range(20) if supported.contains(f"3.{minor}.1")] == [10, 11, 12, 13]


def test_no_lightning_that_was_malware_or_runs_code_from_a_checkpoint() -> None:
    (wanted,) = (requirement for requirement in declared() if requirement.name == "lightning")
    assert not [bad for bad in ("2.6.2", "2.6.3", "2.6.5") if wanted.specifier.contains(bad)]
    versions = {
        r.name: str(r.specifier).removeprefix("==") for r, _ in locked() if "lightning" in r.name
    }
    assert Version(versions["lightning"]) >= Version("2.6.6")
    assert Version(versions["pytorch-lightning"]) >= Version("2.6.6")


@pytest.mark.parametrize("name", ["torch", "torchvision"])
def test_torch_is_the_same_on_every_machine(name: str) -> None:
    (requirement,) = (requirement for requirement, _ in locked() if requirement.name == name)
    assert requirement.marker is None


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
    except FileNotFoundError:
        pytest.skip("git is not installed")


def test_git_ignores_data_and_runs_but_no_code() -> None:
    if git("rev-parse").returncode:
        pytest.skip("not a git clone")
    for private in (
        "data/MNIST/raw/x",
        "checkpoints/run/best.ckpt",
        "checkpoints/latest",
        ".venv/bin/python",
    ):
        assert git("check-ignore", private).returncode == 0, private
    for ours in (
        f"{PACKAGE}/data/new.py",
        f"{PACKAGE}/checkpoints.py",
        "checkpoints/.gitkeep",
        "configs/new.yaml",
    ):
        assert git("check-ignore", "--no-index", ours).returncode == 1, ours


def test_the_image_gets_what_its_dockerfile_copies_and_nothing_else() -> None:
    copied = re.findall(r"^COPY (\S+) ", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    rules = [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if not line.startswith("#")
    ]
    assert rules[0] == "*"
    assert sorted(rule.strip("!/") for rule in rules if rule.startswith("!")) == sorted(copied)
    assert all((ROOT / name).exists() for name in copied)


def test_the_image_is_locked_and_not_root() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert all("--require-hashes" in line for line in text.splitlines() if "pip install" in line)
    (user,) = re.findall(r"^USER (\S+)$", text, flags=re.MULTILINE)
    assert min(int(number) for number in user.split(":")) > 0
    assert f'ENTRYPOINT ["python", "-m", "{PACKAGE}.fit"]' in text


def test_a_wheel_holds_the_whole_package(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    command = [
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "--target",
        "wheel",
        "--directory",
        str(tmp_path),
    ]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    on_disk = {
        path
        for path in (ROOT / PACKAGE).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert names == {path.relative_to(ROOT).as_posix() for path in on_disk}
    assert f"{PACKAGE}/py.typed" in names


def test_an_editable_install_points_at_the_clone(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    options = [
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
        "--prefix",
        str(tmp_path),
        "--editable",
        str(ROOT),
    ]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options],
        check=True,
        capture_output=True,
        timeout=120,
    )
    (pointer,) = tmp_path.rglob("*.pth")
    assert pointer.read_text().split() == [str(ROOT)]


# Plays Python, which makes a virtual environment of copies of this script, and each of its tools; one call fails
STAND_IN = """#!/bin/sh
echo "$*" >> "$CALLS"
if [ "$2" = venv ]; then
  mkdir -p "$3/bin"
  for name in python ruff mypy lint-imports hadolint; do cp "$0" "$3/bin/$name"; done
fi
[ "$*" != "$FAILS" ]
"""
TESTS = ["-m pytest", "-m pytest -m nightly"]


@pytest.mark.parametrize(
    ("words", "fails", "code", "tests"),
    [
        ([], "nothing", 0, TESTS[:1]),
        ([], TESTS[0], 1, TESTS[:1]),
        (["nightly"], "nothing", 0, TESTS),
        *((["nightly"], x, 1, TESTS) for x in TESTS),
        ([], "check", 1, []),
    ],
)
def test_ci_runs_each_group_of_tests_once_and_fails_where_one_does(
    words: list[str], fails: str, code: int, tests: list[str], tmp_path: Path
) -> None:
    stand_in, calls = tmp_path / "stand-in", tmp_path / "calls"
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(stand_in), "CALLS": str(calls), "FAILS": fails}
    done = subprocess.run(
        [ROOT / ".ci" / "run", *words], env=environment, capture_output=True, timeout=60
    )
    assert done.returncode == code
    assert [call for call in calls.read_text().splitlines() if "pytest" in call] == tests
