"""Loaders' worker processes: how they start, and how they end with Python."""

import atexit
import functools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker, spawn
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils import data
from unbroken.lightning_internals import (
    let_go_of_workers,
    queues_to_workers,
    tell_what_cannot_be_sent,
)
from unbroken.stopping.signals import STOP_SIGNALS

# The iterators of loaders with workers, and the queues of each. See :func:`iterate`.
_queues: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()


def prepare_worker(worker: int, further: Callable[[int], Any] | None) -> None:
    """Let a loader's worker ignore stop signals, which a launcher or a terminal sends to all
    processes of a run, and the trainer handles; tell what it cannot send; and use one core.

    Args:
        worker: Its number.
        further: The user's own ``worker_init_fn``.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        # See stops_wait.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    tell_what_cannot_be_sent()
    # For other libraries. Torch sees to itself.
    os.environ["OMP_NUM_THREADS"] = "1"
    info: Any = data.get_worker_info()
    if info is not None:
        # The user's code expects its own dataset there, not the one that we have put around it.
        object.__setattr__(info, "dataset", info.dataset.dataset)
    if further is not None:
        further(worker)


def iterate(loader: Iterable[Any]) -> Iterator[Any]:
    """An iterator over a loader. Its workers end at once when nobody holds it any more.

    The iterator tells its workers to end as it goes. If the garbage collector finds it in a circle
    of references, the queues that the word would take are closed first. So they are held here as
    long as the iterator lives. Otherwise it would wait ten seconds for each worker.
    """
    with stops_wait(loader):
        batches = iter(loader)
    queues = queues_to_workers(batches)
    if queues:
        _queues[batches] = queues
    return batches


@contextmanager
def stops_wait(loader: Any) -> Iterator[None]:
    """Inside, stop signals wait, and workers that start are not ended by them. Python would end a
    worker, and torch with it the run.

    A worker that is forked, or spawned, inherits that they wait, until :func:`prepare_worker` lets
    it ignore them. The process that serves forks was started without; so a worker that it forks
    ignores them from the first thing that it reads (:func:`ignored_from_the_start`).

    Workers that are prepared in another way are left alone. Windows has no such signals.
    """
    prepare = getattr(loader, "worker_init_fn", None)
    is_prepared = isinstance(prepare, functools.partial) and prepare.func is prepare_worker
    if not is_prepared or not hasattr(signal, "pthread_sigmask"):
        yield
        return
    context = getattr(loader, "multiprocessing_context", None) or multiprocessing
    method = context.get_start_method()
    if method != "fork":
        # These two serve all later processes. They must not inherit the block, and the tracker ends
        # it as it starts.
        resource_tracker.ensure_running()
    if method == "forkserver":
        forkserver.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        with ignored_from_the_start():
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Ignored:
    """A signal that a process ignores as soon as it has unpickled this."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return signal.signal, (self.number, signal.SIG_IGN)


@contextmanager
def ignored_from_the_start() -> Iterator[None]:
    """Let processes that this thread starts inside, unless they are forked from this one, ignore
    stop signals before they import the main module, which takes seconds.
    """
    usual = spawn.get_preparation_data
    thread = threading.get_ident()

    def with_signals(name: str) -> dict[str, Any]:
        prepared: dict[str, Any] = usual(name)
        if threading.get_ident() != thread:
            return prepared
        # Python reads all of these entries, and uses those that it knows.
        return {"ignored": [Ignored(number) for number in STOP_SIGNALS], **prepared}

    spawn.get_preparation_data = with_signals
    try:
        yield
    finally:
        spawn.get_preparation_data = usual


@functools.cache
def end_workers_at_exit() -> None:
    """From now on :func:`end_workers` is called as Python ends."""
    atexit.register(end_workers)


def end_workers() -> None:
    """Kill the workers that are left. Python would wait for them, since they ignore the signal that
    it sends.
    """
    _kill([worker for worker in multiprocessing.active_children() if worker.daemon])


@contextmanager
def workers_end_with_block() -> Iterator[None]:
    """Kill the workers that are started inside. Their loaders would wait for them for seconds."""
    before = multiprocessing.active_children()
    try:
        yield
    finally:
        _kill([each for each in multiprocessing.active_children() if each not in before])


def _kill(workers: list[multiprocessing.process.BaseProcess]) -> None:
    if not workers:
        return
    let_go_of_workers(workers)
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.join()
