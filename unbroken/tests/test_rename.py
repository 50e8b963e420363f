"""``rename`` renames what means the package alone, and changes a clone whole or not at all."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import zipfile
from pathlib import Path, PurePosixPath

import psutil
import pytest
import yaml
from _pytest.mark import ParameterSet
from filelock import FileLock
from packaging.requirements import Requirement
from unbroken.commands.rename import library, swap
from unbroken.commands.rename.clone import Clone, File
from unbroken.commands.rename.command import check_name, rename
from unbroken.commands.rename.names import renamed, without_dead_links
from unbroken.errors import UserError


# P stands for the package of before, N for its new name.
@pytest.mark.parametrize(
    ("path", "before", "after"),
    [
        (
            "a.py",
            "from P.data import x\nimport P.fit as f\n",
            "from N.data import x\nimport N.fit as f\n",
        ),
        (
            "a.py",
            "import P\nP.fit.main([])\nself.P.fit\n",
            "import N\nN.fit.main([])\nself.P.fit\n",
        ),
        ("a.py", 'wandb.init(P="a", b={"P": 1}["P"])\n', 'wandb.init(P="a", b={"P": 1}["P"])\n'),
        ("a.py", 'x = "P.model.Net", f"-m P.fit {y}"\n', 'x = "N.model.Net", f"-m N.fit {y}"\n'),
        (
            "a.py",
            '"""This P: see :mod:`P.fit`."""  # a P\n',
            '"""This P: see :mod:`N.fit`."""  # a P\n',
        ),
        (
            "a.py",
            '"import P.fit; me/P/runs, x.ai/me/P"\n',
            '"import N.fit; me/P/runs, x.ai/me/P"\n',
        ),
        (
            "a.py",
            'f"P.{x}", f"-m P.{x}", f"from P. {x}"\n',
            'f"N.{x}", f"-m N.{x}", f"from P. {x}"\n',
        ),
        ("a.py", '[python, "-m", "P", "P"]\n', '[python, "-m", "N", "P"]\n'),
        (
            "a.py",
            'from unbroken.run import Job as J\nJ("P", x="P")\nK("P")\n',
            'from unbroken.run import Job as J\nJ("N", x="P")\nK("P")\n',
        ),
        (
            "a.py",
            'from unbroken.commands import run_command\nrun_command("P", "P")  # é "P"\n',
            'from unbroken.commands import run_command\nrun_command("N", "N")  # é "P"\n',
        ),
        ("a.py", 'é = ("P"; import P.x\n', 'é = ("P"; import N.x\n'),
        (
            "a.yaml",
            "P: mnist\nclass_path: P.MLP # this P\n",
            "P: mnist\nclass_path: N.MLP # this P\n",
        ),
        ("a.yaml", "P: w-b\nwandb --P w-b\n", "P: w-b\nwandb --P w-b\n"),
        ("a.yaml", "command: [python, -m, P.fit]\n", "command: [python, -m, N.fit]\n"),
        ("README.md", "# P\nA P in P/data, `P`.\n", "# N\nA P in N/data, `N`.\n"),
        ("README.md", "```\ndocker run P --x\nP: a\n", "```\ndocker run N --x\nP: a\n"),
        ("docs/a.md", "docker build -t P .\n", "docker build -t N .\n"),
        ("pyproject.toml", '[P]\nname = "P"\n[P.urls]\n', '[P]\nname = "N"\n[P.urls]\n'),
        (
            "pyproject.toml",
            'all = ["P[dev]"]\npath = "P/a.py" # P\n',
            'all = ["N[dev]"]\npath = "N/a.py" # P\n',
        ),
        (
            "Dockerfile",
            '# docker build -t P .\n#   -v "$PWD:/app" P --x\nCOPY P P\n["P.fit"]\n',
            '# docker build -t N .\n#   -v "$PWD:/app" N --x\nCOPY N N\n["N.fit"]\n',
        ),
        (".dockerignore", "!P/\n", "!N/\n"),
        (
            "run",
            "#!/bin/sh\n# a P\n[[ $m == P.* ]] && ls P/*.py; _P_all\n",
            "#!/bin/sh\n# a P\n[[ $m == N.* ]] && ls N/*.py; _N_all\n",
        ),
        ("LICENSE", "The P maintainers, P/data\n", "The P maintainers, P/data\n"),
    ],
)
def test_only_what_means_the_package_is_renamed(path: str, before: str, after: str) -> None:
    def spelt(text: str) -> str:
        return re.sub(r"(?<![A-Za-z])[PN](?![A-Za-z])", lambda word: WORDS[word[0]], text)

    assert renamed(PurePosixPath(path), spelt(before), "project", "thing") == spelt(after)


WORDS = {"P": "project", "N": "thing"}


def test_a_link_to_what_is_not_there_becomes_its_words() -> None:
    text = (
        "![p](../x.png)[a](b.md#c), [d](../gone/e.md), [f](https://g/h), [i](#j), [k](../there)\n"
    )
    kept = "[a](b.md#c), d, [f](https://g/h), [i](#j), [k](../there)\n"
    assert without_dead_links(PurePosixPath("docs/l.md"), text, {"docs/b.md", "there"}) == kept


@pytest.mark.parametrize(
    "name", ["Digits", "1digits", "my-digits", "class", "json", "torch", "tests", "unbroken", ""]
)
def test_a_name_that_is_taken_or_no_name_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"NAME must .*, got {name}"):
        check_name(name, {"tests/a.py": File(b"")})


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("match", "be no word of Python"),
        ("self", "be no word of Python"),
        ("print", "be no word of Python"),
        ("true", "be no word of YAML"),
        ("null", "be no word of YAML"),
        ("con", "be no name of a device of Windows"),
        ("lpt1", "be no name of a device of Windows"),
        ("lightning_logs", "be no folder that runs or builds use"),
        ("mlruns", "be no folder that runs or builds use"),
        ("dist", "be no folder that runs or builds use"),
        ("a" * 300, "have at most 60 letters, got a{60}[.]"),
    ],
)
def test_a_name_that_would_be_taken_for_something_else_is_refused_with_why(
    name: str, why: str
) -> None:
    with pytest.raises(UserError, match=f"NAME must {why}"):
        check_name(name, {"tests/a.py": File(b"")})


def test_a_name_whose_folder_git_ignores_is_refused(clone: Clone) -> None:
    with open(clone.folder / ".gitignore", "a") as file:
        file.write("\n/figures_*/\n")
    commit(clone)
    before = contents(clone)
    with pytest.raises(UserError, match="NAME must be no folder that git ignores"):
        rename(clone, ["figures_1"])
    assert contents(clone) == before


# A template of a few files, whose library is a folder of two


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    command = ["git", *who, *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


LIBRARY_PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "unbroken"
version = "{version}"
requires-python = ">=3.11"
dependencies = ["torch>=2.11"]
[project.optional-dependencies]
store = ["boto>=1"]
[tool.hatch.build.targets.wheel]
packages = ["src/unbroken"]
[tool.hatch.build.targets.wheel.force-include]
"CHANGELOG.md" = "unbroken/CHANGELOG.md"
"""
SAID = {
    "left_behind": ["CHANGELOG.md", "pictures/"],
    "words": {"my-runs": "NAME"},
    "texts": {"pyproject.toml": [["A template.", "A program."]]},
    "library_as_wheel": {
        "pyproject.toml": [['path = "unbroken"', 'path = "WHEEL"']],
        "docs/faq.md": [["./unbroken[all]", "./WHEEL[all]"]],
    },
    "library_as_source": {},
}
SMALL = {
    ".template/rename.yaml": yaml.safe_dump(SAID),
    ".template/README.md": "# project\n[a](project/fit.py)[b](CHANGELOG.md)\n",
    "CHANGELOG.md": "news\n",
    "README.md": "Buy this.\n",
    "docs/faq.md": 'pip install "./unbroken[all]"\n',
    "pictures/a.png": "\0project.fit",
    "pyproject.toml": '# A template.\nname = "project"\npath = "unbroken"\n',
    "requirements.lock": "torch==2.14.1 \\\n    --hash=sha256:00\n",
    "project/__init__.py": "",
    "project/fit.py": "from project import data  # my-runs\n",
    "project/data/__init__.py": "",
    "unbroken/pyproject.toml": LIBRARY_PROJECT.format(version="1.2.0"),
    "unbroken/CHANGELOG.md": "# Changes\n\n## 1.2.0\n\n- one: my-runs, project.fit\n",
    "unbroken/src/unbroken/__init__.py": "",
}


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    folder = write(tmp_path / "clone", SMALL)
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "A template")
    (folder / ".git" / "info" / "exclude").write_text("runs/\n*.pyc\n")
    write(folder, {"runs/a/last.ckpt": "weights", "project/__pycache__/fit.pyc": "x"})
    return Clone(folder, "project")


def commit(clone: Clone) -> None:
    git(clone.folder, "add", "--all")
    git(clone.folder, "commit", "--quiet", "--message", "Changed")


def contents(clone: Clone) -> dict[str, bytes]:
    """Every file, but for git's own."""
    found = {}
    for path in clone.folder.rglob("*"):
        name = path.relative_to(clone.folder).as_posix()
        if path.is_file() and not name.startswith(".git/"):
            found[name] = path.read_bytes()
    return found


def newer_library(folder: Path, version: str, lines: str = "") -> Path:
    """A later version of the library, as a checkout."""
    changelog = (
        f"# Changes\n\n## Unreleased\n\n- three\n\n## {version}\n\n- two\n\n## 1.2.0\n\n- one\n"
    )
    declared = LIBRARY_PROJECT.format(version=version).replace(
        '"torch>=2.11"', f'"torch>=2.11"{lines}'
    )
    return write(
        folder,
        {
            "unbroken/pyproject.toml": declared,
            "unbroken/CHANGELOG.md": changelog,
            "unbroken/src/unbroken/__init__.py": "later = True\n",
        },
    )


def test_a_clone_takes_the_library_along_as_a_wheel_locked_by_its_hash(
    clone: Clone, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rename(clone, ["digits"]) == 0
    after = contents(clone)
    wheel = "wheels/unbroken-1.2.0-py3-none-any.whl"
    assert after.keys() == {
        *("README.md", "pyproject.toml", "requirements.lock", wheel, "runs/a/last.ckpt"),
        "docs/faq.md",
        *("digits/__init__.py", "digits/fit.py", "digits/data/__init__.py"),
    }
    assert after["digits/fit.py"] == b"from digits import data  # digits\n"
    assert after["README.md"] == b"# digits\n[a](digits/fit.py)b\n"
    assert after["pyproject.toml"].decode() == f'# A program.\nname = "digits"\npath = "{wheel}"\n'
    locked = library.Wheel(Path(wheel).name, after[wheel]).locked
    assert after["requirements.lock"].decode() == SMALL["requirements.lock"] + locked
    assert f"the library is {wheel}" in capsys.readouterr().out
    # Git sees what has moved.
    assert "R  project/__init__.py -> digits/__init__.py" in git(
        clone.folder, "status", "--porcelain"
    )


def test_with_source_the_library_stays_as_it_is(clone: Clone) -> None:
    before = contents(clone)
    assert rename(clone, ["digits", "--library", "source"]) == 0
    after = contents(clone)
    of_library = {name for name in before if name.startswith("unbroken/")}
    assert {name: after[name] for name in of_library} == {name: before[name] for name in of_library}
    assert "project/fit.py" not in after
    assert b"unbroken" not in after["requirements.lock"]


def test_a_clone_is_renamed_again_and_nothing_else_changes(clone: Clone) -> None:
    rename(clone, ["digits"])
    first = contents(clone)
    with pytest.raises(UserError, match="uncommitted changes"):
        rename(Clone(clone.folder, "digits"), ["numerals2"])
    commit(clone)
    rename(Clone(clone.folder, "digits"), ["letters"])
    expected = {
        name.replace("digits/", "letters/"): text
        if name.startswith(("wheels/", "requirements"))
        else text.replace(b"digits", b"letters")
        for name, text in first.items()
    }
    expected["letters/fit.py"] = b"from letters import data  # digits\n"
    assert contents(clone) == expected


def test_an_update_replaces_the_wheel_and_says_what_has_changed(
    clone: Clone, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rename(clone, ["digits"])
    commit(clone)
    capsys.readouterr()
    checkout = newer_library(tmp_path / "later", "1.3.0", ', "lightning>=2.6"')
    renamed_clone = Clone(clone.folder, "digits")
    assert rename(renamed_clone, ["--library", str(checkout)]) == 0
    told = capsys.readouterr().out
    assert "\n## 1.3.0\n\n- two\n" in told
    assert "- one" not in told
    assert "three" not in told
    assert "does not hold what this version needs: lightning>=2.6." in told
    after = contents(clone)
    (wheel,) = (name for name in after if name.startswith("wheels/"))
    assert wheel == "wheels/unbroken-1.3.0-py3-none-any.whl"
    assert wheel in after["pyproject.toml"].decode()
    assert after["docs/faq.md"].decode() == f'pip install "./{wheel}[all]"\n'
    locked = library.Wheel(Path(wheel).name, after[wheel]).locked
    assert after["requirements.lock"].decode() == SMALL["requirements.lock"] + locked
    # A wheel that somebody has built is taken as it is.
    commit(clone)
    built = tmp_path / Path(wheel).name
    built.write_bytes(after[wheel])
    rename(renamed_clone, ["--library", str(built)])
    assert contents(clone) == after


def test_an_update_replaces_the_source(
    clone: Clone, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rename(clone, ["digits", "--library", "source"])
    commit(clone)
    checkout = newer_library(tmp_path / "later", "1.3.0")
    rename(Clone(clone.folder, "digits"), ["--library", str(checkout / "unbroken")])
    assert (clone.folder / "unbroken/src/unbroken/__init__.py").read_text() == "later = True\n"
    assert "\n## 1.3.0\n\n- two\n" in capsys.readouterr().out
    commit(clone)
    with pytest.raises(UserError, match="this clone holds its source"):
        rename(Clone(clone.folder, "digits"), ["--library", str(tmp_path / "x.whl")])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "NAME is missing"),
        (["--library", "x"], "Name the package"),
        (["digits", "--library", "nowhere"], "--library must be a wheel"),
        (["digits", "--library", "."], "--library must be wheel, source"),
        (["project"], "NAME must be the name of nothing else here, got project"),
    ],
)
def test_a_mistake_changes_nothing(
    clone: Clone, arguments: list[str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(clone.folder / "runs")
    before = contents(clone)
    with pytest.raises(UserError, match=told):
        rename(clone, arguments)
    assert contents(clone) == before
    assert git(clone.folder, "status", "--porcelain") == ""


def test_a_file_that_somebody_has_changed_is_named(clone: Clone) -> None:
    (clone.folder / "pyproject.toml").write_text("mine")
    commit(clone)
    with pytest.raises(UserError, match=r"pyproject\.toml must hold 'A template\.' once"):
        rename(clone, ["digits"])


def test_a_second_rename_at_the_same_time_is_refused_in_one_line(clone: Clone) -> None:
    lock = FileLock(clone.workplace.with_suffix(".lock"))
    with lock, pytest.raises(UserError, match="another rename is at work"):
        rename(clone, ["digits"])
    assert rename(clone, ["digits"]) == 0


# Ends itself, as a kill would, when it does something with files for the Nth time.
DRIVER = """
import os, signal, sys
from pathlib import Path
from unbroken.commands.rename import swap
from unbroken.commands.rename.clone import Clone
from unbroken.commands.rename.command import rename

left = int(sys.argv[1])

def count(event, arguments):
    global left
    writes = event == "open" and isinstance(arguments[1], str) and arguments[1][0] in "wax"
    if writes or event in ("os.rename", "os.remove", "os.rmdir", "subprocess.Popen"):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(count)
if sys.argv[3] == "rename":
    rename(Clone(Path(sys.argv[2]), "project"), ["digits"])
else:
    swap.main(Path(sys.argv[2]))
print("done")
"""


def killed_at(moment: int, folder: Path, what: str) -> bool:
    """Run the driver; returns whether it was killed."""
    command = [sys.executable, "-c", DRIVER, str(moment), str(folder), what]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode in (0, -9), ended.stderr
    return ended.returncode != 0


def moments(some: list[int], nightly: list[int]) -> list[ParameterSet]:
    """The moments of every day, and further ones of the nights."""
    found = []
    for moment in nightly:
        marks = () if moment in some else pytest.mark.nightly
        found.append(pytest.param(moment, marks=marks))
    return found


def is_at_work(clone: Clone) -> bool:
    """Whether a process puts files in place."""
    for process in psutil.process_iter(["cmdline"]):
        if str(clone.workplace) in (process.info["cmdline"] or ()):
            return True
    return False


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
@pytest.mark.parametrize("moment", moments([23], [*range(1, 45)]))
def test_a_kill_leaves_the_clone_as_it_was_or_finished(
    clone: Clone, moment: int, tmp_path: Path
) -> None:
    before = contents(clone)
    was_killed = killed_at(moment, clone.folder, "rename")
    # What puts the files in place outlives the command.
    while is_at_work(clone):
        time.sleep(0.01)
    after = contents(clone)
    is_finished = "digits/fit.py" in after
    if not is_finished:
        assert was_killed
        assert after == before
        assert git(clone.folder, "status", "--porcelain") == ""
        assert rename(clone, ["digits"]) == 0
        after = contents(clone)
    assert not {name for name in after if name.startswith(("project/", "unbroken/", ".template/"))}
    assert after["digits/fit.py"] == b"from digits import data  # digits\n"


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
@pytest.mark.parametrize("moment", moments([4], [*range(2, 26)]))
def test_what_a_power_cut_has_left_is_finished_by_the_next_rename(
    clone: Clone, moment: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as nothing_is_swapped:
        nothing_is_swapped.setattr(Clone, "_swap", lambda self: None)
        rename(clone, ["digits"])
    plan = json.loads((clone.workplace / swap.PLAN).read_text())
    killed_at(moment, clone.workplace, "swap")
    if (clone.workplace / swap.BEGUN).exists():
        capsys.readouterr()
        assert rename(clone, ["digits"]) == 0
        assert "finished what an interrupted rename had begun" in capsys.readouterr().out
    after = contents(clone)
    assert after.keys() >= {*plan["put"]}
    assert not after.keys() & {*plan["gone"]}
    assert after["digits/fit.py"] == b"from digits import data  # digits\n"
    assert not clone.workplace.exists()


def test_what_was_not_begun_is_dropped_because_the_clone_may_have_changed_since(
    clone: Clone, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as nothing_is_swapped:
        nothing_is_swapped.setattr(Clone, "_swap", lambda self: None)
        rename(clone, ["digits"])
    write(clone.folder, {"project/fit.py": "mine = 1\n"})
    commit(clone)
    assert rename(clone, ["letters"]) == 0
    assert (clone.folder / "letters/fit.py").read_text() == "mine = 1\n"
    assert not (clone.folder / "digits").exists()
    # One that was dropped while its process was still to start does nothing.
    before = contents(clone)
    swap.main(clone.workplace)
    assert contents(clone) == before


@pytest.mark.parametrize(
    ("lock", "after", "told"),
    [
        ("a==1.0", ["a>=1"], []),
        ("a==1.0", ["a>=2"], ["a>=2"]),
        ("", ["store>=1; extra == 'x'"], []),
        ("", ["new>=1"], ["new>=1"]),
        ("", ["unbroken[x]"], []),
    ],
)
def test_what_a_lock_file_lacks_for_another_version_is_told(
    lock: str, after: list[str], told: list[str]
) -> None:
    before = [Requirement("a>=1"), Requirement("store>=1; extra == 'x'")]
    assert [*library.not_locked(lock, before, [*map(Requirement, after)])] == told


def test_news_are_those_of_the_versions_between() -> None:
    text = "# C\n## Unreleased\nu\n## 1.10.0\nd\n## 1.9.1\nc\n## 1.9.0\nb\n"
    assert library.news(text, "1.9.0", "1.10.0") == "## 1.10.0\nd\n\n## 1.9.1\nc"
    assert library.news(text, "1.10.0", "1.9.0") == ""


def test_a_file_that_is_no_wheel_of_this_library_is_refused(tmp_path: Path) -> None:
    for name in ("other-1.0-py3-none-any.whl", "unbroken-1.0-py3-none-any.whl"):
        (tmp_path / name).write_text("x")
        with pytest.raises(UserError, match="must be a wheel such as"):
            library.Wheel.read(tmp_path / name)
    good = tmp_path / "unbroken-1.1-py3-none-any.whl"
    with zipfile.ZipFile(good, "w") as packed:
        packed.writestr("unbroken/CHANGELOG.md", "x")
    assert library.Wheel.read(good).version == "1.1"
    assert os.listdir(tmp_path)
