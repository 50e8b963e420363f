"""Fixtures of all tests: a folder of their own, no W&B account, no variables of the caller."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from importlib import metadata
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from tests.own_environment import no_surprises

# Two tests run at a time, each on one of two cores. torch reads the variable as it is imported, and
# the runs that tests start inherit it.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# The assertions of these files show values, as those of tests do.
for module in ("commands", "promises"):
    pytest.register_assert_rewrite(f"tests.{module}")

# No file was named on the command line.
ALL_FILES = pytest.Config.ArgsSource.TESTPATHS

# Long files are begun first, so that at the end no process waits long for another.
LONG = {
    f"test_{name}.py"
    for name in (
        *("any_task", "chain", "checkpoint_files", "core", "ddp", "errors", "exact_checkpoint"),
        *("exact_loading", "examples", "export", "fit", "interrupted_tasks", "platforms", "rename"),
        *("resume", "same_trainer", "start_methods", "stop", "tune", "untrusted", "users_objects"),
        *("verify", "wandb", "wrong_numbers"),
    )
}


# Each Trainer asks every installed package whether it brings callbacks.
ENTRY_POINTS = functools.cache(metadata.entry_points)

# The modules of all tests that were collected.
NAMES_OF_TESTS: set[str] = set()


def pytest_xdist_auto_num_workers() -> int:
    """At most two tests at a time, because each of them may need more than a gigabyte of memory."""
    return min(2, os.cpu_count() or 1)


def pytest_configure(config: pytest.Config) -> None:
    """Make what the processes of this test session share, and give them a terminal's signals."""
    # Under nohup, or in the background of a script, a process ignores some of the signals.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.platform != "win32":
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if config.option.markexpr == "lightning" and config.args_source is ALL_FILES:
        # With another version, other files may fail to be imported.
        config.args = [str(Path(__file__).with_name("test_new_lightning.py"))]
    is_worker = hasattr(config, "workerinput")
    if not is_worker:
        shared = tempfile.TemporaryDirectory(prefix="tests-", ignore_cleanup_errors=True)
        # The other processes inherit the variable.
        os.environ["TESTS_SHARED_FOLDER"] = shared.name
        config.add_cleanup(shared.cleanup)


def machine_locks(alone: bool) -> list[FileLock]:
    """The locks that a test holds while it runs: that of its own process, or those of all."""
    shared = Path(os.environ["TESTS_SHARED_FOLDER"])
    own = os.environ.get("PYTEST_XDIST_WORKER", "gw0")
    names = [own]
    if alone:
        count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
        names = [f"gw{number}" for number in range(count)]
    return [FileLock(shared / f"{name}.lock") for name in names]


# This hook stands outside pytest-timeout, which should not count the waiting.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """A test that is marked ``alone`` or ``gpu`` waits for the others, and they wait for it.

    It measures time, or takes much of a GPU's memory. Where the variable ``GPU_TESTS_TOGETHER`` is
    set, the GPU has enough for several.
    """
    marks = {mark.name for mark in item.iter_markers()}
    together = "GPU_TESTS_TOGETHER" in os.environ
    alone = "alone" in marks or ("gpu" in marks and not together)
    turn = FileLock(Path(os.environ["TESTS_SHARED_FOLDER"]) / "turn.lock")
    with contextlib.ExitStack() as held:
        # Who waits for the machine holds the turn, so that no later test gets in between.
        with turn:
            for lock in machine_locks(alone):
                held.enter_context(lock)
        return (yield)


# This hook runs before the option -m chooses.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out nightly tests that were not asked for, and skip tests of a GPU where there is none.

    Nightly tests are asked for by ``-m nightly``, ``NIGHTLY=1``, or by name. ``NIGHTLY_PART=2/3``
    keeps every third of them, beginning with the second.
    """
    items.sort(key=lambda item: item.path.name not in LONG)
    for item in items:
        if isinstance(item, pytest.Function) and "mnist_root" in item.fixturenames:
            item.add_marker(pytest.mark.nightly)

    for several in variants_of(items).values():
        for item in left_for_the_night(several):
            item.add_marker(pytest.mark.nightly)
    forget_marks_of_functions(items)

    left_out = [item for item in items if item.get_closest_marker("nightly")]
    if is_nightly(config):
        part, count = os.environ.get("NIGHTLY_PART", "1/1").split("/")
        del left_out[int(part) - 1 :: int(count)]
    if left_out:
        names = {item.nodeid for item in left_out}
        items[:] = [item for item in items if item.nodeid not in names]
        config.hook.pytest_deselected(items=left_out)

    # torch is imported here, and not above, because it takes seconds.
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Collecting tests makes a million objects that stay, and garbage is not looked for meanwhile.
    Each look of the tests then passes over them, which takes a second less.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Note the names of all tests' modules, for :func:`_modules_of_a_user`."""
    NAMES_OF_TESTS.update(
        item.module.__name__ for item in session.items if isinstance(item, pytest.Function)
    )


def variants_of(items: list[pytest.Item]) -> dict[str, list[pytest.Item]]:
    """The variants of each test that is marked ``daily``, by the name of its function; those that
    are nightly already are not counted.
    """
    found: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("daily") and not item.get_closest_marker("nightly"):
            found.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return found


def forget_marks_of_functions(items: list[pytest.Item]) -> None:
    """Take the marks off the tests' functions. The items have them by now, and a run would look
    through those of the functions in its module, whose tables are long, at every save.
    """
    for item in items:
        if isinstance(item, pytest.Function):
            function = getattr(item.function, "__func__", item.function)
            vars(function).pop("pytestmark", None)


def left_for_the_night(variants: list[pytest.Item]) -> list[pytest.Item]:
    """All but as many as the mark ``daily`` says, which are spread over the list."""
    marker = variants[0].get_closest_marker("daily")
    assert marker is not None
    (count,) = marker.args
    by_day = {len(variants) * number // count for number in range(count)}
    return [item for number, item in enumerate(variants) if number not in by_day]


def is_nightly(config: pytest.Config) -> bool:
    """Whether the nightly tests were asked for."""
    if "nightly" in config.option.markexpr or "NIGHTLY" in os.environ:
        return True
    return any("::" in argument for argument in config.args)


@pytest.fixture(autouse=True)
def _no_surprises(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    no_surprises(monkeypatch)
    from lightning.fabric.utilities import registry
    from unbroken.lightning_internals import unwrap_classes_of_loaders
    from unbroken.stopping.signals import STOP_SIGNALS

    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    environment = dict(os.environ)
    monkeypatch.setattr(registry, "entry_points", ENTRY_POINTS)
    # What a loader's worker replaces in its own process, where a test prepares one in this process.
    monkeypatch.setattr(Queue, "_on_queue_feeder_error", vars(Queue)["_on_queue_feeder_error"])
    yield
    # Lightning leaves them wrapped where a hook that makes loaders has failed.
    unwrap_classes_of_loaders()
    # A run in this process may have set variables for ranks and threads. Later processes would
    # inherit them, and those that Python reads as it starts keep the server from forking.
    os.environ.clear()
    os.environ.update(environment)
    # A library that configures its own logging switches that of the others off.
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.disabled = False
    # Processes that later tests start would inherit an ignored signal.
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _modules_of_a_user(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all tests' modules a run in this process finds the test's own alone, and those whose
    classes and functions it uses.

    A run goes over the global variables of all modules of the user's own at each save. A user has
    some of them, the tests have thousands.
    """
    from unbroken.holding import users_modules

    usual = users_modules._users_among
    used = {getattr(value, "__module__", "") for value in vars(request.module).values()}
    others = NAMES_OF_TESTS - used - {request.module.__name__}

    def users_among(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name for name in usual(names) if name not in others)

    monkeypatch.setattr(users_modules, "_users_among", users_among)


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def mnist_root() -> Path:
    """The folder of the full MNIST set, which MNIST_ROOT names. Without it the test is skipped."""
    root = os.environ.get("MNIST_ROOT", "")
    if not root or not Path(root).is_dir():
        pytest.skip("MNIST_ROOT is not set: this test needs the full MNIST set")
    return Path(root)
