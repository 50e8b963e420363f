"""Fixtures of all tests: a folder of their own, no W&B account, no surprise from the caller's environment."""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

if (
    "PYTEST_XDIST_WORKER" in os.environ
):  # before torch is imported; the runs that tests start inherit it
    os.environ.setdefault(
        "OMP_NUM_THREADS", "1"
    )  # of two cores, one for each of the two tests at a time

for module in ("commands", "promises"):  # their assertions show values, too
    pytest.register_assert_rewrite(f"tests.{module}")

REPOSITORY = Path(__file__).parent.parent
FOREIGN = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "PL_GLOBAL_SEED",
    "PROJECT_RANK_ZERO_DECISION",
)


def pytest_xdist_auto_num_workers() -> int:
    """Two tests at a time: most of a test's time is one thread that imports torch. More would be memory's matter."""
    return min(2, os.cpu_count() or 1)


def pytest_configure(config: pytest.Config) -> None:
    """A folder that the processes of this test session share; they inherit the variable that names it."""
    # and the signals of a terminal: under nohup, or in the background of a script, some of them are ignored
    for number, handler in {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGHUP: signal.SIG_DFL,
    }.items():
        signal.signal(number, handler)
    if not hasattr(config, "workerinput"):
        shared = tempfile.TemporaryDirectory(prefix="tests-", ignore_cleanup_errors=True)
        os.environ["TESTS_SHARED_FOLDER"] = shared.name
        config.add_cleanup(shared.cleanup)


@pytest.hookimpl(
    wrapper=True, tryfirst=True
)  # outside pytest-timeout, which should not count the waiting
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """A test marked ``alone``, because it measures time or a GPU's memory, waits for the others, and they for it."""
    alone = item.get_closest_marker("alone") or item.get_closest_marker("gpu")
    shared = Path(os.environ["TESTS_SHARED_FOLDER"])
    with open(shared / "turn", "w") as turn, open(shared / "machine", "w") as machine:
        fcntl.flock(turn, fcntl.LOCK_EX)  # whoever waits for the machine is the next to have it
        fcntl.flock(machine, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(turn, fcntl.LOCK_UN)
        try:
            return (yield)
        finally:
            fcntl.flock(
                machine, fcntl.LOCK_UN
            )  # not left to close(): a forked child may hold the file open


# Begun first, so that at the end neither of two processes waits long for the other
LONG = {
    f"test_{name}.py" for name in ("fit", "export", "rename", "wandb", "examples", "resume", "ddp")
}


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Nightly tests run when asked for: ``-m nightly``, ``NIGHTLY=1``, or by name. Tests marked ``gpu`` need one.

    ``NIGHTLY_PART=2/3`` leaves every third of the nightly ones, beginning with the second.
    """
    import torch

    items.sort(key=lambda item: item.path.name not in LONG)
    for item in items:
        if "mnist_root" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.nightly)
    asked_for = (
        "nightly" in config.option.markexpr
        or "NIGHTLY" in os.environ
        or any("::" in a for a in config.args)
    )
    nightly = [item for item in items if item.get_closest_marker("nightly")]
    if asked_for:
        part, count = map(int, os.environ.get("NIGHTLY_PART", "1/1").split("/"))
        nightly = [item for number, item in enumerate(nightly) if number % count != part - 1]
    if nightly:
        items[:] = [item for item in items if item not in nightly]
        config.hook.pytest_deselected(items=nightly)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def _no_surprises(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    no_surprises(monkeypatch)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for logger in (
        logging.root.manager.loggerDict.values()
    ):  # a library's own configuration switches others' off
        if isinstance(logger, logging.Logger):
            logger.disabled = False
    for (
        number,
        handler,
    ) in handlers.items():  # processes that later tests start would inherit SIG_IGN
        signal.signal(number, handler)


def no_surprises(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment that the caller's variables, and what an earlier test set, do not change."""
    for name in FOREIGN:
        # set first, so that monkeypatch also removes what the test itself leaves behind
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    # W&B's import is most of a short run's time; test_wandb.py has it offline
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY), prepend=os.pathsep)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def mnist_root() -> Path:
    """The full MNIST set, where the environment variable MNIST_ROOT names it; otherwise the test is skipped."""
    root = os.environ.get("MNIST_ROOT", "")
    if not root or not Path(root).is_dir():
        pytest.skip("MNIST_ROOT is not set: this test needs the full MNIST set")
    return Path(root)
