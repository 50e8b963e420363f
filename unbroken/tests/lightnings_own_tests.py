"""A plugin of pytest that gives every Trainer of a test-suite ExactCheckpoint, and notes how each
test ended. test_lightnings_own_tests.py begins pytest with it.

Without the option ``--every`` nothing of ours is imported: that alone gives ``pytorch_lightning`` a
meaning.
"""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.strategies import launchers

if TYPE_CHECKING:
    from unbroken import ExactCheckpoint


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", help="file of the outcomes, a line for each")
    parser.addoption("--every", help="of each ExactCheckpoint; without it there is none")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Outcomes(config.option.outcomes))


class Outcomes:
    """Notes how each test ended, and the first line of its error."""

    def __init__(self, path: str) -> None:
        self.path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # To set up and to take down counts where it does not pass.
        if report.when != "call" and report.passed:
            return
        crash = getattr(report.longrepr, "reprcrash", None)
        told = str(report.longrepr) if crash is None else crash.message
        line = told.strip().partition("\n")[0]
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps([report.nodeid, report.outcome, line]) + "\n")


@pytest.fixture(autouse=True)
def _exact_checkpoint_in_every_trainer(request: pytest.FixtureRequest) -> Iterator[None]:
    every = request.config.option.every
    if every is None:
        yield
        return
    folder = tempfile.mkdtemp()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "__init__", with_ours(Trainer.__init__, Path(folder), every))
        patch.setattr(launchers._MultiProcessingLauncher, "launch", skip)
        yield
    shutil.rmtree(folder, ignore_errors=True)


def skip(*_: Any, **__: Any) -> NoReturn:
    pytest.skip("ranks that are functions are refused beside ExactCheckpoint")


def with_ours(make: Any, folder: Path, every: str) -> Any:
    """A Trainer's ``__init__`` that adds an ExactCheckpoint, with a new folder below that one."""
    from unbroken import ExactCheckpoint

    @functools.wraps(make)
    def __init__(self: Trainer, **flags: Any) -> None:  # noqa: N807
        keep = ExactCheckpoint(tempfile.mkdtemp(dir=folder), every=every)
        make(self, **with_callback(flags, keep))

    return __init__


def with_callback(flags: dict[str, Any], keep: ExactCheckpoint) -> dict[str, Any]:
    """A Trainer's arguments with one more callback, and otherwise meant as before."""
    given = flags.get("callbacks") or []
    callbacks = [*given] if isinstance(given, list | tuple) else [given]
    have_one = any(isinstance(each, Checkpoint) for each in callbacks)
    is_off = flags.get("enable_checkpointing") is False
    # These are to have none: Lightning says so. Callbacks of another Trainer have ours among them.
    has_ours = any(isinstance(each, type(keep)) for each in callbacks)
    if flags.get("barebones") or (is_off and have_one) or has_ours:
        return flags
    # It adds its own where no other is, and refuses any where it is to add none.
    own = [] if have_one or is_off or flags.get("model_registry") else [ModelCheckpoint()]
    more = {"enable_checkpointing": None} if is_off else {}
    return flags | more | {"callbacks": [*callbacks, *own, keep]}
