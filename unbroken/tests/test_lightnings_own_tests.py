"""Lightning's own tests, with ExactCheckpoint in every Trainer: what passes without it passes with
it, but for the tests that lightnings_own_tests.yaml lists with the reason.

``LIGHTNING_CHECKOUT`` names the folder of Lightning's repository, at the tag of the version that is
installed. Nothing is fetched, and nothing is written there.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

CHECKOUT = Path(os.environ.get("LIGHTNING_CHECKOUT", ""))
FOLDER = "tests/tests_pytorch/"
GROUPS = [
    *("accelerators", "callbacks", "checkpointing", "core", "loggers", "loops", "models"),
    *("overrides", "plugins", "profilers", "serve", "strategies", "test_cli.py", "trainer"),
    *("tuner", "utilities"),
]
# It trains for minutes.
LEFT_OUT = "spike_detection"
# Reason → tests that fail for it: all cases of one, or a case
DECLARED: dict[str, list[str]] = yaml.safe_load(
    Path(__file__).with_name("lightnings_own_tests.yaml").read_text("utf-8")
)
# What Lightning's tests import or ask of pytest, besides its own requirements
NEEDED = ("cloudpickle", "pytest_rerunfailures", "pytest_timeout")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(4 * 3600),
    pytest.mark.skipif(
        not os.environ.get("LIGHTNING_CHECKOUT"),
        reason="LIGHTNING_CHECKOUT is not set: this needs a checkout of Lightning's repository",
    ),
    pytest.mark.skipif(bool(MISSING), reason=f"Lightning's tests need {', '.join(MISSING)}"),
]


class Outcome(NamedTuple):
    """How a test ended, and the first line of its error."""

    name: str
    line: str


def outcomes(tests: list[str], every: str | None) -> dict[str, Outcome]:
    """Run tests of Lightning's, and say of each how it ended."""
    file = Path(f"every-{every}.jsonl").absolute()
    words = [sys.executable, "-m", "pytest", "-p", "lightnings_own_tests", "-p", "no:cacheprovider"]
    words += ["-c", str(CHECKOUT / "pyproject.toml"), "--rootdir", str(CHECKOUT)]
    words += ["-k", f"not {LEFT_OUT}", "--timeout", "300"]
    words += ["--basetemp", str(Path("tests").absolute()), "--outcomes", str(file)]
    words += ["--every", every] if every else []
    done = subprocess.run(
        [*words, *(str(CHECKOUT / each) for each in tests)],
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
    )
    # All passed, some failed, none was chosen.
    assert done.returncode in (0, 1, 5), done.stdout[-3000:] + done.stderr[-3000:]
    found: dict[str, Outcome] = {}
    for name, *outcome in map(json.loads, file.read_text("utf-8").splitlines()):
        # The last counts of those that are tried again; and to fail counts, before what follows.
        if name not in found or found[name].name != "failed":
            found[name] = Outcome(*outcome)
    return found


def environment() -> dict[str, str]:
    """Variables of a pytest that is not part of this one, on the CPU and without a network."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    proxies = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    kept |= proxies | {"no_proxy": "localhost,127.0.0.1", "HF_HUB_OFFLINE": "1"}
    kept |= {"WANDB_MODE": "offline", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    # Nothing is written between the checkout's files.
    return kept | {"TMPDIR": str(Path.cwd()), "PYTHONDONTWRITEBYTECODE": "1"}


def failed(found: dict[str, Outcome]) -> dict[str, str]:
    """The tests that failed, and the first line of each one's error."""
    return {test: outcome.line for test, outcome in found.items() if outcome.name == "failed"}


def is_case_of(test: str, declared: str) -> bool:
    return test.removeprefix(FOLDER) == declared or test.startswith(f"{FOLDER}{declared}[")


@pytest.mark.parametrize("group", GROUPS)
def test_what_passes_without_exact_checkpoint_passes_with_it(group: str, workplace: Path) -> None:
    runs = [outcomes([FOLDER + group], every) for every in ("5000", "1")]
    failing = {test: line for found in runs for test, line in failed(found).items()}
    # What fails without it as well is not ours.
    others = failed(outcomes(list(failing), None)) if failing else {}
    declared = [each for tests in DECLARED.values() for each in tests if each.startswith(group)]
    told = [
        f"{test} passes without ExactCheckpoint, and not with it: {line}"
        for test, line in failing.items()
        if test not in others and not any(is_case_of(test, each) for each in declared)
    ]
    # A test that is skipped here may fail elsewhere.
    all_ended = [each for found in runs for each in found.items()]
    excused = {test for test, outcome in all_ended if outcome.name != "passed"}
    told += [
        f"{each} is listed in lightnings_own_tests.yaml, and passes"
        for each in declared
        if not any(is_case_of(test, each) for test in excused)
    ]
    assert not told, "\n".join(told)
