"""Other packages, installed from the registry: trained, killed twice, resumed, compared.

An environment of its own is made once for all tests, above the running one. ``THIRD_PARTY_FOLDER``
keeps it for the next time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from tests.environments import make_environment_above
from tests.third_party.trial import CASES, KILLED

REQUIREMENTS = Path(__file__).parent / "third_party" / "requirements.txt"
# What pip says where there is no registry.
UNREACHABLE = ("No matching distribution", "Connection", "Max retries", "Temporary failure")

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL is no signal of Windows"),
]


@pytest.fixture(scope="session")
def python() -> str:
    """The interpreter of an environment that has the packages."""
    shared = Path(os.environ.get("THIRD_PARTY_FOLDER") or os.environ["TESTS_SHARED_FOLDER"])
    folder = shared / "third-party"
    interpreter = folder / "bin" / "python"
    wanted = REQUIREMENTS.read_text()
    installed = folder / "installed.txt"
    shared.mkdir(parents=True, exist_ok=True)
    with FileLock(shared / "third-party.lock"):
        if not installed.exists() or installed.read_text() != wanted:
            install_above(folder)
            installed.write_text(wanted)
    return str(interpreter)


def install_above(folder: Path) -> None:
    """Make a virtual environment that sees the running one's packages, and install the others."""
    python = make_environment_above(folder)
    pip = [python, "-m", "pip", "install", "--quiet", "--retries", "1"]
    done = subprocess.run(
        [*pip, "--requirement", REQUIREMENTS], capture_output=True, text=True, check=False
    )
    if done.returncode and any(words in done.stderr for words in UNREACHABLE):
        pytest.skip("the registry cannot be reached: the packages cannot be installed")
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture
def environment() -> dict[str, str]:
    """Variables for the trial: no network, no thread that another test needs."""
    proxies = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    return {**os.environ, **proxies, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("seed", range(int(os.environ.get("THIRD_PARTY_SEEDS", "1"))))
@pytest.mark.parametrize("name", CASES)
def test_a_task_of_another_package_that_is_killed_twice_ends_as_if_it_were_not(
    name: str, seed: int, python: str, environment: dict[str, str], workplace: Path
) -> None:
    case = CASES[name]
    words = [python, "-m", "tests.third_party.trial", name, str(seed)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])

    assert found["codes"] == [0, KILLED, KILLED, 0], found
    # The two lines, in any order, say all that is not exact.
    said = "\n".join(found["lines"])
    if case.says:
        assert case.says in said, found
    else:
        assert said == "", found
    if case.is_exact:
        assert "not exact" not in said, found
        assert found["differences"] == [], found
    else:
        # A line that says so is true.
        assert found["differences"], found


def test_a_class_of_another_package_that_was_typed_needs_no_flag_afterwards(
    python: str, environment: dict[str, str], workplace: Path
) -> None:
    """Going on, testing, predicting and exporting, with chemprop's classes."""
    flags = ["--model.class_path", "tests.third_party.chemprop_molecules.network"]
    flags += ["--data.class_path", "tests.third_party.chemprop_molecules.Molecules"]
    flags += ["--max_epochs", "1", "--limit_train_batches", "2", "--run_name", "typed"]
    flags += ["--report", "false"]

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [python, "-m", *words], capture_output=True, text=True, check=False, env=environment
        )

    first = run("numerals.fit", *flags)
    assert first.returncode == 0, first.stderr
    more = run("numerals.fit", "--run_name", "typed", "--ckpt_path", "auto", "--max_epochs", "2")
    assert more.returncode == 0, more.stderr
    tested = run("numerals.test")
    assert tested.returncode == 0, tested.stderr
    Path("molecule.txt").write_text("CCO")
    commands = [
        ["numerals.predict", "molecule.txt"],
        ["numerals.export"],
    ]
    for command in commands:
        # Graphs are no image, and have no form in ONNX. Nobody asks whether to trust the classes.
        refused = run(*command)
        assert "--trust_checkpoint" not in refused.stdout + refused.stderr
        assert "Traceback" not in refused.stderr
