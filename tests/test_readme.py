"""The README: every command of this project that it shows is accepted by that command, and its links lead somewhere."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest

import project

PACKAGE = project.__name__
README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
LINES = [line.split("  #")[0].strip() for block in BLOCKS for line in block.replace("\\\n", " ").splitlines()]
COMMANDS = [line for line in LINES if f"-m {PACKAGE}." in line and "pip install" not in line]
TAKES_FIT_FLAGS = {"tune", "benchmark", "sweep"}
RUN_ELSEWHERE = {"predict", "export", "tune", "benchmark", "devices", "rename", "sweep", "dashboard"}


def module_and_arguments(line: str) -> tuple[str, list[str]]:
    """``fit`` and its arguments of a line that runs it."""
    words = shlex.split(line)
    at = next(i for i, word in enumerate(words) if word.startswith(f"{PACKAGE}."))
    return words[at].removeprefix(f"{PACKAGE}."), words[at + 1 :]


def test_the_two_commands_of_the_set_up_are_there() -> None:
    assert sum("pip install --require-hashes -r requirements.lock" in line for line in LINES) == 1
    assert "python -m pytest" in LINES


@pytest.mark.parametrize("line", [c for c in COMMANDS if module_and_arguments(c)[0] in ("fit", "test")])
def test_every_training_command_is_accepted(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from project.engine.cli import ProjectCLI, TestCLI

    monkeypatch.chdir(Path(__file__).parent.parent)
    module, arguments = module_and_arguments(line)
    arguments = [word for word in arguments if word not in ("--print_config", "--help")]
    # a value that a shell would fill in
    arguments = [re.sub(r"\$\{?\w+[^}]*\}?", "1", word) for word in arguments]
    if "mine.yaml" in line:
        pytest.skip("its file is written by the test of that README page")
    (TestCLI if module == "test" else ProjectCLI)(arguments)


@pytest.mark.parametrize("line", [c for c in COMMANDS if module_and_arguments(c)[0] in RUN_ELSEWHERE])
def test_every_other_command_has_its_module_and_options(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    module, arguments = module_and_arguments(line)
    found = importlib.import_module(f"{PACKAGE}.{module}" + (".__main__" if module == "benchmark" else ""))
    first = [word for word in arguments[:1] if module in ("tune", "benchmark") and not word.startswith("-")]
    with pytest.raises(SystemExit) as end:
        found.main([*first, "--help"])
    assert not end.value.code
    shown = capsys.readouterr().out
    for option in (word for word in arguments if word.startswith("--")):
        assert option in shown or module in TAKES_FIT_FLAGS, f"{module} does not know {option}"


def test_links_lead_somewhere() -> None:
    root = Path(__file__).parent.parent
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if not target.startswith("http"):
            assert (root / target).exists(), target


def test_the_tour_names_every_file() -> None:
    root = Path(__file__).parent.parent / PACKAGE
    missing = [path.name for path in root.glob("*.py") if path.name != "__init__.py" and f"`{path.name}`" not in README]
    missing += [
        path.name
        for path in root.iterdir()
        if path.is_dir() and path.name[0] != "_" and f"`{path.name}/`" not in README
    ]
    assert not missing
