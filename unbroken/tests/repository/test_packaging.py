"""What a clone, an image and an installed package hold: locked versions and every needed file."""

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
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from unbroken.cli.tracker_words import TRACKERS

ROOT = Path(__file__).parents[3]
LOCK = (ROOT / "requirements.lock").read_text()
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGE: str = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"][0]
METADATA: dict[str, Any] = next(table for table in PYPROJECT.values() if "requires-python" in table)
PYTHONS = ["3.11", "3.12", "3.13", "3.14"]
MACHINES = [
    ("linux", "x86_64"),
    ("linux", "aarch64"),
    ("darwin", "arm64"),
    ("win32", "AMD64"),
]


def locked() -> list[tuple[Requirement, list[str]]]:
    """Every requirement of the lock file with its hashes."""
    found = []
    for entry in re.sub(r"\\\n\s*", "", LOCK).splitlines():
        if entry and not entry.startswith(("#", "--only-binary")):
            requirement, *hashes = entry.split("--hash=")
            found.append((Requirement(requirement), hashes))
    return found


def version_of(requirement: Requirement) -> str:
    """The version that a requirement of the lock file stands for."""
    return str(requirement.specifier).removeprefix("==")


def declared() -> list[Requirement]:
    """What pyproject.toml asks for, all extras included but those of one store each."""
    lines = list(METADATA["dependencies"])
    for name, extra in METADATA["optional-dependencies"].items():
        # The extra `all` only names the other extras.
        if name != "all" and not name.startswith("mirror-"):
            lines += extra
    return [Requirement(line) for line in lines]


def environment(python: str, platform: str, machine: str) -> dict[str, str]:
    """What the markers of requirements ask about a machine."""
    return {
        "python_version": python,
        "python_full_version": f"{python}.1",
        "sys_platform": platform,
        "platform_machine": machine,
        "platform_python_implementation": "CPython",
    }


def is_wanted(requirement: Requirement, here: dict[str, str]) -> bool:
    return requirement.marker is None or requirement.marker.evaluate(here)


def test_every_locked_requirement_has_one_version_and_hashes() -> None:
    assert len(locked()) > 100
    for requirement, hashes in locked():
        assert [spec.operator for spec in requirement.specifier] == ["=="], requirement
        assert hashes, requirement
        for digest in hashes:
            assert re.fullmatch(r"sha256:[0-9a-f]{64}\s*", digest), requirement


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
        if is_wanted(requirement, here):
            versions.setdefault(requirement.name, []).append(version_of(requirement))
    assert not {name: found for name, found in versions.items() if len(found) > 1}
    for wanted in declared():
        if is_wanted(wanted, here):
            (version,) = versions[wanted.name]
            assert wanted.specifier.contains(version), f"{wanted} is locked at {version}"


def imported_by(path: Path) -> set[str]:
    """The top-level packages that a file imports."""
    modules = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            modules.append(node.module or "")
    return {module.split(".")[0] for module in modules}


def provided_by(requirement: Requirement) -> set[str]:
    """The top-level packages that an installed distribution brings."""
    files = distribution(requirement.name).files or ()
    return {Path(file.parts[0]).stem for file in files}


def test_every_imported_library_is_declared() -> None:
    provided = {PACKAGE, *sys.stdlib_module_names}
    # A tracker's package is needed by who names it, and a line says so.
    provided |= {package for package in TRACKERS.values() if package is not None}
    for requirement in declared():
        # A requirement that is not wanted on this platform is not installed.
        with contextlib.suppress(PackageNotFoundError):
            provided |= provided_by(requirement)
    undeclared = {}
    for path in (ROOT / PACKAGE).rglob("*.py"):
        for module in imported_by(path) - provided:
            undeclared[module] = path.name
    assert undeclared == {}


def test_pyproject_lock_classifiers_linter_image_and_ci_name_the_same_pythons() -> None:
    supported = Requirement(f"python{METADATA['requires-python']}").specifier
    assert [f"3.{n}" for n in range(20) if supported.contains(f"3.{n}.1")] == PYTHONS
    assert f"--universal --python-version {PYTHONS[0]}" in LOCK
    named = " :: ".join(METADATA["classifiers"])
    assert re.findall(r"Python :: (3\.\d+)", named) == PYTHONS
    assert PYPROJECT["tool"]["ruff"]["target-version"] == "py" + PYTHONS[0].replace(".", "")
    assert f"Python {PYTHONS[0]} to {PYTHONS[-1]}" in (ROOT / "Dockerfile").read_text()
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert workflow["jobs"]["linux"]["strategy"]["matrix"]["python"] == PYTHONS


def test_the_group_of_tools_is_the_extra_with_everything() -> None:
    """``uv sync`` and ``pip install --group dev`` then install what the lock file holds."""
    assert PYPROJECT["dependency-groups"] == {"dev": [f"{PACKAGE}[all]"]}
    extras = METADATA["optional-dependencies"]
    of_a_store = {name for name in extras if name.startswith("mirror-")}
    every = {f"{PACKAGE}[{name}]" for name in extras.keys() - of_a_store - {"all"}}
    assert set(extras["all"]) == every


def test_no_lightning_that_was_malware_or_runs_code_from_a_checkpoint() -> None:
    (wanted,) = (requirement for requirement in declared() if requirement.name == "lightning")
    assert not [bad for bad in ("2.6.2", "2.6.3", "2.6.5") if wanted.specifier.contains(bad)]
    versions = {requirement.name: version_of(requirement) for requirement, _ in locked()}
    assert Version(versions["lightning"]) >= Version("2.6.6")
    assert Version(versions["pytorch-lightning"]) >= Version("2.6.6")


@pytest.mark.parametrize("name", ["torch", "torchvision"])
def test_torch_is_the_same_on_every_machine(name: str) -> None:
    (requirement,) = (requirement for requirement, _ in locked() if requirement.name == name)
    assert requirement.marker is None


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run git in the clone; the test is skipped where there is no git."""
    try:
        return subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
    except FileNotFoundError:
        pytest.skip("git is not installed")


PRIVATE = [
    "data/MNIST/raw/x",
    "checkpoints/run/best.ckpt",
    "checkpoints/latest",
    ".venv/bin/python",
]
CODE = [
    f"{PACKAGE}/data/new.py",
    f"{PACKAGE}/checkpoints.py",
    "checkpoints/.gitkeep",
    "configs/new.yaml",
]


def test_git_ignores_data_and_runs_but_no_code() -> None:
    if git("rev-parse").returncode:
        pytest.skip("not a git clone")
    for private in PRIVATE:
        assert git("check-ignore", private).returncode == 0, private
    for ours in CODE:
        assert git("check-ignore", "--no-index", ours).returncode == 1, ours


def test_the_image_gets_what_its_dockerfile_copies_and_nothing_else() -> None:
    copied = re.findall(r"^COPY (\S+) ", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if not line.startswith("#")]
    assert rules[0] == "*"
    let_in = [rule.strip("!/") for rule in rules if rule.startswith("!")]
    assert sorted(let_in) == sorted(copied)
    assert all((ROOT / name).exists() for name in copied)


def test_the_image_is_locked_and_not_root() -> None:
    text = (ROOT / "Dockerfile").read_text()
    for line in text.splitlines():
        assert "pip install" not in line or "--require-hashes" in line
    (user,) = re.findall(r"^USER (\S+)$", text, flags=re.MULTILINE)
    assert all(int(number) > 0 for number in user.split(":"))
    assert f'ENTRYPOINT ["python", "-m", "{PACKAGE}.fit"]' in text


def build_wheel(target: str, folder: Path) -> zipfile.ZipFile:
    """Build a wheel with the locked build backend, as pip and uv do."""
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "--target", target]
    command += ["--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (wheel,) = folder.glob("*.whl")
    return zipfile.ZipFile(wheel)


def test_a_wheel_holds_the_whole_package(tmp_path: Path) -> None:
    with build_wheel("wheel", tmp_path) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    on_disk = set()
    for path in (ROOT / PACKAGE).rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            on_disk.add(path.relative_to(ROOT).as_posix())
    assert names == on_disk
    assert f"{PACKAGE}/py.typed" in names


def test_an_editable_install_points_at_the_clone(tmp_path: Path) -> None:
    with build_wheel("wheel:editable", tmp_path) as wheel:
        (pointer,) = (name for name in wheel.namelist() if name.endswith(".pth"))
        assert wheel.read(pointer).decode().strip() == str(ROOT)


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda p: p.name)
def test_workflows_and_forms_are_read_and_actions_are_pinned_by_commit(path: Path) -> None:
    text = path.read_text()
    assert isinstance(yaml.safe_load(text), dict)
    for action in re.findall(r"uses: (\S+)", text):
        assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action), action


def test_every_test_file_that_ci_names_is_there() -> None:
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    named = re.findall(r"tests/\w+\.py", text)
    assert "tests/test_packaging.py" in named
    assert all((ROOT / name).is_file() for name in named)


# This script plays Python. It makes a virtual environment that holds copies of itself as the tools,
# writes down how it is called, and fails in one call.
STAND_IN = """#!/bin/sh
echo "$*" >> "$CALLS"
if [ "$2" = venv ]; then
  mkdir -p "$3/bin"
  for name in python ruff mypy lint-imports hadolint; do cp "$0" "$3/bin/$name"; done
fi
[ "$*" != "$FAILS" ]
"""
QUICK = "-m pytest"
NIGHTLY = "-m pytest -m nightly"


@pytest.mark.skipif(sys.platform == "win32", reason=".ci/run is a script of bash")
@pytest.mark.parametrize(
    ("words", "fails", "code", "tests"),
    [
        ([], "nothing", 0, [QUICK]),
        ([], QUICK, 1, [QUICK]),
        (["nightly"], "nothing", 0, [QUICK, NIGHTLY]),
        (["nightly"], QUICK, 1, [QUICK, NIGHTLY]),
        (["nightly"], NIGHTLY, 1, [QUICK, NIGHTLY]),
        ([], "check", 1, []),
    ],
)
def test_ci_runs_each_group_of_tests_once_and_fails_where_one_does(
    words: list[str], fails: str, code: int, tests: list[str], tmp_path: Path
) -> None:
    stand_in = tmp_path / "stand-in"
    calls = tmp_path / "calls"
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(stand_in), "CALLS": str(calls), "FAILS": fails}
    done = subprocess.run(
        [ROOT / ".ci" / "run", *words], env=environment, capture_output=True, timeout=60
    )
    assert done.returncode == code
    assert [call for call in calls.read_text().splitlines() if "pytest" in call] == tests
