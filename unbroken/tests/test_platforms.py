"""Every command runs where Linux' own names, folders and links are missing: on Windows and macOS.

Nobody has to own such a system for this. ``tests/other_systems.yaml`` lists what is hidden from our
code, and the CI workflow runs this file on the systems themselves, too.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numerals
import pytest
import unbroken

from tests.commands import complete
from tests.other_systems import VALUES
from tests.promises import SEARCHED

FIT = ["--data.source", "sample", "--data.train_samples", "640", "--data.val_samples", "128"]
FIT += ["--data.test_samples", "128", "--data.batch_size", "64", "--model.network", "MLP"]
FIT += ["--max_epochs", "2", "--accelerator", "cpu", "--log_every_n_steps", "5"]
UNREPORTED = ["--report", "false"]
BY_WORKERS = [*FIT, "--max_epochs", "1", "--run_name", "by_workers"]
BY_WORKERS += ["--data.num_workers", "1"]
# The commands in the order in which a user types them. Each finds what those before it have left.
COMMANDS: dict[str, list[list[str]]] = {
    "__main__": [[]],
    "fit": [
        [*FIT, "--run_name", "first"],
        # The first run has written a report.
        [*FIT, *("--run_name", "first", "--ckpt_path", "last", "--max_epochs", "3"), *UNREPORTED],
    ],
    "test": [["--accelerator", "cpu", "--output", "metrics.json"]],
}
COMMANDS["predict"] = [["digit.png", "--output", "labels.csv"]]
COMMANDS["export"] = [[]]
COMMANDS["runs"] = [["--report", "runs.html"]]
COMMANDS["devices"] = [[]]
COMMANDS["tune"] = [["lr", *FIT, "--steps", "20"]]
COMMANDS["sweep"] = [["--name", "search", "--trials", "1", "--jobs", "2", *FIT]]
COMMANDS["benchmark"] = [["memory", "--quick", "--batch_sizes", "32"]]
COMMANDS["dashboard"] = [["--print"]]
COMMANDS["rename"] = [["--help"]]
COMMANDS["verify"] = [["--help"]]


# What macOS lacks is a part of what Windows lacks, and no code of ours asks whether it is macOS.
SYSTEMS = ["windows", pytest.param("macos", marks=pytest.mark.nightly)]


@pytest.fixture(scope="module", params=SYSTEMS)
def system(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def place(system: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which all commands of one system run; it holds what hides the names."""
    folder = tmp_path_factory.mktemp(system)
    plug_in = folder / "plug_in"
    plug_in.mkdir()
    (plug_in / "sitecustomize.py").write_text(
        f"from tests.other_systems import hide\nhide({system!r})\n"
    )
    draw_digit(folder / "digit.png")
    return folder


def draw_digit(path: Path) -> None:
    """A black one on white."""
    from PIL import Image, ImageDraw

    picture = Image.new("L", (60, 80), "white")
    ImageDraw.Draw(picture).line((30, 10, 30, 70), fill="black", width=8)
    picture.save(path)


def python(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a Python in which the names are hidden from the start."""
    plug_in = place / "plug_in"
    searched = f"{plug_in}{os.pathsep}{SEARCHED}"
    environment = {**os.environ, "PYTHONPATH": searched, "WANDB_MODE": "disabled"}
    return complete(
        [sys.executable, *words], timeout=280, cwd=place, env=environment, start_up=plug_in
    )


def failures(done: subprocess.CompletedProcess[str]) -> str:
    """What a command wrote on stderr, and the last lines of stdout."""
    return f"{done.stderr}\n{done.stdout[-2000:]}"


@pytest.fixture(scope="module")
def place_with_a_run(place: Path) -> Path:
    """The same folder, when a run has been trained and made longer in it."""
    run_command("fit", place)
    return place


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "fit"])
def test_every_command_runs_without_what_linux_alone_has(name: str, place_with_a_run: Path) -> None:
    run_command(name, place_with_a_run)


def run_command(name: str, place: Path) -> None:
    for arguments in COMMANDS[name]:
        words = ["-m", f"{numerals.__name__}.{name}", *arguments]
        done = python(place, *words)
        assert done.returncode == 0, failures(done)


@pytest.mark.nightly
def test_workers_read_data_without_what_linux_alone_has(place: Path) -> None:
    done = python(place, "-m", f"{numerals.__name__}.fit", *BY_WORKERS)
    assert done.returncode == 0, failures(done)


@pytest.mark.nightly
def test_no_link_is_needed_and_none_is_left(system: str, place_with_a_run: Path) -> None:
    if system != "windows":
        pytest.skip("macOS has links")
    checkpoints = place_with_a_run / "checkpoints"
    assert (checkpoints / "first" / "best.ckpt").is_file()
    assert not [path for path in checkpoints.rglob("*") if path.is_symlink()]


def test_every_text_file_names_its_encoding() -> None:
    """Windows writes text in the code page of its country, unless it is told to use UTF-8."""
    rule = ["--preview", "--select", "PLW1514", "--output-format", "concise"]
    package = str(Path(unbroken.__file__).parent)
    checked = complete([sys.executable, "-m", "ruff", "check", *rule, package])
    assert checked.returncode == 0, checked.stdout


def test_every_command_is_tried() -> None:
    listed = complete([sys.executable, "-m", numerals.__name__])
    named = re.findall(rf"python -m {numerals.__name__}\.(\w+)", listed.stdout)
    assert len(named) >= 2
    assert set(named) - set(COMMANDS) == set()


# Code with such a file name is ours. What it still sees is printed.
LOOK_UP = """
import os, sys
from tests.other_systems import LACKS, OURS

def imported_by_us(name):
    names = {}
    exec(compile(f"import {name} as module", OURS + "somewhere.py", "exec"), names)
    return names["module"]

for module, attributes in LACKS[SYSTEM]["attributes"].items():
    for name in attributes:
        if hasattr(imported_by_us(module), name):
            print("seen:", module, name)
for name in LACKS[SYSTEM]["modules"]:
    try:
        imported_by_us(name)
    except ModuleNotFoundError:
        continue
    print("seen:", name)
print(imported_by_us("sys").platform, sys.platform, hasattr(os, "memfd_create"))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has all of the names")
def test_the_names_are_hidden_from_our_code_alone(system: str, place: Path) -> None:
    looked_up = python(place, "-c", f"SYSTEM = {system!r}\n{LOOK_UP}")
    assert looked_up.returncode == 0, looked_up.stderr
    platform = VALUES[system]["sys"]["platform"]
    assert looked_up.stdout.splitlines() == [f"{platform} linux True"]


# Each line fails on Windows, and the last one on macOS as well.
OTHERWISE = {
    "a symbolic link": ("import os; os.symlink('digit.png', 'link.png')", "windows"),
    "a folder that is opened": ("import os; os.open('.', os.O_RDONLY)", "windows"),
    "a rename onto a file": ("import os; os.rename('digit.png', 'digit.png')", "windows"),
    "a colon in a name": ("open('a:b', 'w', encoding='utf-8')", "windows"),
    "a function before exec": (
        "import subprocess; subprocess.Popen(['true'], preexec_fn=print)",
        "windows",
    ),
    "a file of Linux' kernel": ("open('/proc/meminfo', encoding='utf-8')", "windows macos"),
}


@pytest.mark.parametrize("what", OTHERWISE)
def test_what_the_system_refuses_is_refused_to_our_code(
    what: str, system: str, place: Path
) -> None:
    code, systems = OTHERWISE[what]
    if system not in systems:
        pytest.skip(f"{system} allows {what}")
    as_ours = (
        "from tests.other_systems import OURS\n"
        f"exec(compile({code!r}, OURS + 'somewhere.py', 'exec'))"
    )
    done = python(place, "-c", as_ours)
    assert done.stderr.splitlines()[-1].startswith(
        ("OSError", "PermissionError", "FileExistsError", "FileNotFoundError", "ValueError")
    ), done.stderr
