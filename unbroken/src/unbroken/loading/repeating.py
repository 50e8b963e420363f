"""Whether a data set gives the same samples when they are fetched again: tried before training.

A resumed run has a data set that was made anew. It sees the same samples where each is a function
of its key, the epoch, and the random numbers that are seeded for its batch. One that keeps a state
gives others when it is asked again, such as a queue of patches or a count. Or it draws other random
numbers then, such as a cache of samples that were changed at random: a new one draws them again. Or
it depends on the samples before, such as by a generator that is made of the one before.
"""

from __future__ import annotations

import copy
import dataclasses
import multiprocessing
import os
import stat
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import islice
from socket import AF_INET, AF_INET6, socket
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset
from unbroken.loading.batches import Request
from unbroken.loading.exact_loader import ExactLoader, PlainRequests
from unbroken.loading.own_generators import state_of
from unbroken.loading.proof import PATIENCE_SECONDS
from unbroken.loading.seeding import generator_states
from unbroken.loading.workers import prepare_worker, workers_end_with_block
from unbroken.tensors.same_values import is_same

# A whole batch is fetched twice where that takes no longer than this. A sample may take long.
SECONDS_FOR_A_BATCH = 0.5
# Rows of tensors, and functions that collate them, keep no state in these packages.
WITHOUT_STATE = ("torch.", "unbroken.")


def gives_others_when_asked_again(loader: ExactLoader) -> bool:
    """Whether a loader's first samples, or the random numbers that it draws for them, are others
    when they are fetched once more with the same seed.

    They are fetched in a worker process, which is a copy of this one: the data set itself, its
    files and the generators here are left alone. False, too, where it cannot be tried: a process
    is copied only on Linux, and what fails in the trial fails in training, with its own error.
    """
    if not sys.platform.startswith("linux") or _is_known_to_repeat(loader):
        return False
    trial: DataLoader[bool] = DataLoader(
        FetchedAgain(loader),
        batch_size=None,
        num_workers=1,
        timeout=PATIENCE_SECONDS,
        multiprocessing_context=multiprocessing.get_context("fork"),
        worker_init_fn=partial(_prepare_copy, further=loader.worker_init_fn),
        generator=torch.Generator().manual_seed(0),
    )
    try:
        with workers_end_with_block(), warnings.catch_warnings():
            # Python 3.12 warns of threads, which a copy lacks. Torch's workers start their own.
            warnings.simplefilter("ignore")
            (repeats,) = trial
    except Exception:
        return False
    return not repeats


def _prepare_copy(worker: int, further: Callable[[int], Any] | None) -> None:
    """Let the copy of the process disturb nothing here, and prepare it as a worker."""
    let_go_of_shared_places()
    prepare_worker(worker, further)


def let_go_of_shared_places() -> None:
    """Let a process that is a copy have places of its own in the files that it reads, and no
    connection.

    Both are shared with the process that it is a copy of: what one reads of a file or an encrypted
    connection, the other misses. Who asks a connection here gets an error.
    """
    # No process is copied where Python has no such module.
    from fcntl import F_GETFL, fcntl

    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        # What lists the folder is closed by now; some files may not be opened again.
        with suppress(OSError):
            kind = os.fstat(number).st_mode
            if stat.S_ISREG(kind) and fcntl(number, F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
                place = os.lseek(number, 0, os.SEEK_CUR)
                own = os.open(f"/proc/self/fd/{number}", os.O_RDONLY)
                os.lseek(own, place, os.SEEK_SET)
                _put_in_place_of(number, own)
            elif stat.S_ISSOCK(kind) and _is_to_another_machine(number):
                with socket() as unconnected:
                    _put_in_place_of(number, unconnected.detach())


def _put_in_place_of(number: int, other: int) -> None:
    os.dup2(other, number, inheritable=os.get_inheritable(number))
    os.close(other)


def _is_to_another_machine(number: int) -> bool:
    """Whether a socket is no pipe between processes of this machine."""
    with socket(fileno=os.dup(number)) as copied:
        return copied.family in (AF_INET, AF_INET6)


def _is_known_to_repeat(loader: ExactLoader) -> bool:
    """Whether a loader's samples are rows of tensors or entries of a list, collated as torch or the
    library does it.
    """
    dataset: Any = loader.dataset
    # A class of the user's that is derived from it may change what it gives.
    while type(dataset) is Subset:
        dataset = dataset.dataset
    collates = getattr(loader.collate_fn, "__module__", "")
    if not collates.startswith(WITHOUT_STATE):
        return False
    is_rows = isinstance(dataset, TensorDataset)
    is_rows = is_rows and type(dataset).__module__.startswith(WITHOUT_STATE)
    return is_rows or type(dataset) in (list, tuple)


class Fetched(NamedTuple):
    """A batch, and where the generators stand when it is collated, which is done last."""

    batch: Any
    draws: list[Any]


class FetchedAgain(Dataset[bool]):
    """Its only sample tells whether a loader's first samples are the same when they are fetched
    again. It is asked in a worker process.
    """

    def __init__(self, loader: ExactLoader) -> None:
        self.loader = loader
        # The user's own, for prepare_worker.
        self.dataset = loader.dataset

    def __len__(self) -> int:
        return 1

    def __getitem__(self, _: int) -> bool:
        # Where an epoch has one batch, it is both.
        first, *others = islice(PlainRequests(self.loader.exact_position), 2)
        second = others[0] if others else first
        # Samples alone, and not all in a row: a queue that takes a few is empty again after them.
        begin = time.monotonic()
        # A run that is not stopped fetches one after the other, and a resumed one begins with any.
        goes_on = self._begun()
        of_first = goes_on(_of_one_sample(first)).batch
        of_second = goes_on(_of_one_sample(second))
        # These draws are compared, because the first fetch of all may draw for what it makes, such
        # as a connection.
        pairs: list[Any] = [(of_second, self._begun()(_of_one_sample(second)))]
        pairs.append((of_first, self._begun()(_of_one_sample(first)).batch))
        seconds_of_a_sample = (time.monotonic() - begin) / 4
        if 2 * seconds_of_a_sample * _samples_of(first) <= SECONDS_FOR_A_BATCH:
            pairs.append((self._begun()(first), self._begun()(first)))
        return all(is_same(one, other) for one, other in pairs)

    def _begun(self) -> Callable[[Request], Fetched]:
        """Fetches as a process does that begins an epoch."""
        original: Any = self.loader.exact_fetching.dataset
        draws: list[Any] = []

        def collate(samples: Any) -> Any:
            batch = original.collate(samples)
            own = fetch.own_generators | fetch.global_generators
            draws[:] = [generator_states(), {name: state_of(each) for name, each in own.items()}]
            return batch

        fetch = dataclasses.replace(original, collate=collate)

        def fetched(request: Request) -> Fetched:
            # Some data sets fill the same tensor again.
            return Fetched(copy.deepcopy(fetch[request]), copy.copy(draws))

        return fetched


def _of_one_sample(request: Request) -> Request:
    epoch, number, part = request
    return epoch, number, part[:1] if isinstance(part, list) else part


def _samples_of(request: Request) -> int:
    part = request[2]
    return len(part) if isinstance(part, list) else 1
