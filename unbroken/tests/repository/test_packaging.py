"""What a clone, an image and an installed library hold: locked versions and every needed file."""

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
SOURCE = ROOT / "unbroken"
LIBRARY = "unbroken"
LOCK = (ROOT / "requirements.lock").read_text()
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGE: str = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"][0]
METADATA: dict[str, Any] = PYPROJECT["project"]
OF_LIBRARY: dict[str, Any] = tomllib.loads((SOURCE / "pyproject.toml").read_text())["project"]
# Extras whose packages nobody gets without asking for them
ASKED_FOR = ("mirror-", "trackers")
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


def declared(*tables: dict[str, Any]) -> list[Requirement]:
    """What the template and the library ask for, without the extras that few people want."""
    lines = []
    for table in tables or (METADATA, OF_LIBRARY):
        lines += table["dependencies"]
        for name, extra in table["optional-dependencies"].items():
            # The extra `all` only names the other extras.
            if name != "all" and not name.startswith(ASKED_FOR):
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


@pytest.mark.parametrize(
    ("code", "tables"),
    [(ROOT / PACKAGE, (METADATA,)), (SOURCE / "src" / LIBRARY, (OF_LIBRARY,))],
    ids=["template", "library"],
)
def test_every_imported_library_is_declared(code: Path, tables: tuple[dict[str, Any]]) -> None:
    provided = {code.name, LIBRARY, *sys.stdlib_module_names}
    # A tracker's package is needed by who names it, and a line says so.
    provided |= {package for package in TRACKERS.values() if package is not None}
    for requirement in declared(*tables):
        # A requirement that is not wanted on this platform is not installed.
        with contextlib.suppress(PackageNotFoundError):
            provided |= provided_by(requirement)
    undeclared = {}
    for path in code.rglob("*.py"):
        for module in imported_by(path) - provided:
            undeclared[module] = path.name
    assert undeclared == {}


def test_the_template_asks_for_no_library_by_its_name_alone() -> None:
    """Pip would look for it in a registry, where the name is not ours."""
    assert LIBRARY not in {requirement.name for requirement in declared(METADATA)}
    groups = PYPROJECT["dependency-groups"]
    assert [name for name, lines in groups.items() if LIBRARY in str(lines)] == ["library"]
    assert PYPROJECT["tool"]["uv"]["sources"][LIBRARY] == {"path": LIBRARY, "editable": True}
    by_name = rf"pip install [^.&|]*\b(?<!/){LIBRARY}\b(?!/)"
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        assert not re.search(by_name, page.read_text()), page


def offered(module: str) -> set[str]:
    """What a room of the library, or a file beside the rooms, offers: names that its __init__.py
    imports as such or holds.
    """
    path = SOURCE / "src" / Path(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            names |= {alias.asname for alias in node.names if alias.asname}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
    return names


USING = [*(ROOT / PACKAGE).rglob("*.py"), *(ROOT / "configs").rglob("*.py")]


@pytest.mark.parametrize("path", USING, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_template_uses_public_names_of_the_library_alone(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert not [each.name for each in node.names if each.name.startswith(f"{LIBRARY}.")]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(LIBRARY):
            module = str(node.module)
            # A room is one word behind the library's name, and files inside of rooms are private.
            assert module.count(".") <= 1, module
            rooms = {
                each.parent.name for each in (ROOT / "unbroken/src/unbroken").glob("*/__init__.py")
            }
            known = offered(module) | (rooms if module == LIBRARY else set())
            missing = {alias.name for alias in node.names} - known
            assert not missing, f"{module} offers no {missing}"


def test_pyproject_lock_classifiers_linter_image_and_ci_name_the_same_pythons() -> None:
    supported = Requirement(f"python{METADATA['requires-python']}").specifier
    assert [f"3.{n}" for n in range(20) if supported.contains(f"3.{n}.1")] == PYTHONS
    assert f"--universal --python-version {PYTHONS[0]}" in LOCK
    for table in (METADATA, OF_LIBRARY):
        named = " :: ".join(table["classifiers"])
        assert re.findall(r"Python :: (3\.\d+)", named) == PYTHONS
        assert table["requires-python"] == METADATA["requires-python"]
    assert PYPROJECT["tool"]["ruff"]["target-version"] == "py" + PYTHONS[0].replace(".", "")
    assert f"Python {PYTHONS[0]} to {PYTHONS[-1]}" in (ROOT / "Dockerfile").read_text()
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert workflow["jobs"]["linux"]["strategy"]["matrix"]["python"] == PYTHONS


def test_the_group_of_tools_is_the_extra_with_everything() -> None:
    """``uv sync`` and ``pip install --group dev`` then install what the lock file holds."""
    assert PYPROJECT["dependency-groups"]["dev"] == [f"{PACKAGE}[all]"]
    assert METADATA["optional-dependencies"]["all"] == [f"{PACKAGE}[dev]"]
    extras = OF_LIBRARY["optional-dependencies"]
    (every,) = extras["all"]
    few_want = {name for name in extras if name.startswith(ASKED_FOR)}
    assert Requirement(every).extras == extras.keys() - few_want - {"all"}


def test_no_lightning_that_was_malware_or_runs_code_from_a_checkpoint() -> None:
    for wanted in [requirement for requirement in declared() if requirement.name == "lightning"]:
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
    assert f"{LIBRARY}/tests/" in rules
    let_in = [rule.strip("!/") for rule in rules if rule.startswith("!")]
    assert sorted(let_in) == sorted(copied)
    assert all((ROOT / name).exists() for name in copied)


def test_the_image_is_locked_and_not_root() -> None:
    text = (ROOT / "Dockerfile").read_text()
    for line in text.splitlines():
        # What is copied from the clone has no hash, and fetches nothing.
        locked_or_local = "--require-hashes" in line or "--no-deps --no-build-isolation" in line
        assert "pip install" not in line or locked_or_local
    (user,) = re.findall(r"^USER (\S+)$", text, flags=re.MULTILINE)
    assert all(int(number) > 0 for number in user.split(":"))
    assert f'ENTRYPOINT ["python", "-m", "{PACKAGE}.fit"]' in text


def build_wheel(source: Path, target: str, folder: Path) -> zipfile.ZipFile:
    """Build a wheel of a folder with the locked build backend, as pip and uv do."""
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "--target", target]
    command += ["--directory", str(folder)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=120)
    (wheel,) = folder.glob("*.whl")
    return zipfile.ZipFile(wheel)


# Of each distribution: where it is built, and the folder in which its package lies
BUILT = [(ROOT, ROOT, PACKAGE), (SOURCE, SOURCE / "src", LIBRARY)]


@pytest.mark.parametrize(("source", "above", "package"), BUILT, ids=["template", "library"])
def test_a_wheel_holds_the_whole_package_and_its_licence(
    source: Path, above: Path, package: str, tmp_path: Path
) -> None:
    with build_wheel(source, "wheel", tmp_path) as wheel:
        named = wheel.namelist()
    names = {name for name in named if ".dist-info/" not in name}
    on_disk = {f"{LIBRARY}/CHANGELOG.md"} if package == LIBRARY else set()
    for path in (above / package).rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            on_disk.add(path.relative_to(above).as_posix())
    assert names == on_disk
    assert f"{package}/py.typed" in names
    assert any(name.endswith("/licenses/LICENSE") for name in named)


@pytest.mark.parametrize(("source", "above", "package"), BUILT, ids=["template", "library"])
def test_an_editable_install_points_at_the_clone(
    source: Path, above: Path, package: str, tmp_path: Path
) -> None:
    with build_wheel(source, "wheel:editable", tmp_path) as wheel:
        (pointer,) = (name for name in wheel.namelist() if name.endswith(".pth"))
        assert wheel.read(pointer).decode().strip() == str(above)


def test_a_python_without_the_library_is_told_in_one_line() -> None:
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    # -S leaves out the installed packages.
    command = [sys.executable, "-S", "-m", f"{PACKAGE}.fit"]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line == f"error: unbroken is not installed for {sys.executable}: see README.md"


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda p: p.name)
def test_workflows_and_forms_are_read_and_actions_are_pinned_by_commit(path: Path) -> None:
    text = path.read_text()
    assert isinstance(yaml.safe_load(text), dict)
    for action in re.findall(r"uses: (\S+)", text):
        assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action), action


def test_every_test_file_that_ci_names_is_there() -> None:
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    named = re.findall(r"[\w/]*tests/[\w/]+\.py", text)
    assert "unbroken/tests/repository/test_packaging.py" in named
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
