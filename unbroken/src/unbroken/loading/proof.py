"""What a loader or stream gives when a run is resumed: tried with copies before training, not
believed.

Two things are tried: whether the same batches follow where the loader goes on from its state
(:func:`fault_of_state`), and whether a new loader begins the next epoch as one does that has been
read (:func:`fault_of_next_epoch`).
"""

import copy
import gc
import multiprocessing
import time
from itertools import islice
from typing import Any, NamedTuple

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities.seed import isolate_rng
from unbroken.loading.position import DataStart
from unbroken.loading.samplers import has_state, is_stream
from unbroken.loading.watched_loader import WatchedLoader
from unbroken.loading.workers import workers_end_with_block
from unbroken.tensors.same_values import is_same

# The states after so many batches of an epoch are tried. Some loaders are right at first, and wrong
# when a buffer of theirs has been filled anew.
TRIED = (1, 4, 16, 64)
# Batches that are compared behind each of them.
COMPARED = 3
# A loader that is right in its first epoch may give the first epoch's order again in the second.
EPOCHS = 2
# A first epoch that is longer than this is not read to its end.
MOST_BATCHES = max(TRIED) + COMPARED
# A slow stream or data set is not tried further after so many seconds.
PATIENCE_SECONDS = 10.0


# What is said of a loader that a new process reads in another way.
OTHER_SAMPLES = "gives other samples when it is begun anew"


class Proof(NamedTuple):
    """How a run with a loader can be resumed."""

    # What has a state worth keeping; None where nothing has.
    stateful: Any
    # Why a resumed run cannot go on inside an epoch, without the loader's name. None: it can.
    fault: str | None
    # Why a resumed run is not exact at the beginning of an epoch either. None: it is.
    next_fault: str | None = None


class Trial(NamedTuple):
    """A place in an epoch, and what comes next there."""

    start: DataStart
    batches: list[Any]


def proved(loader: Any, stateful: Any, fault: str | None, seed: int, batches: int | None) -> Proof:
    """Try how a run with this loader can be resumed: inside an epoch, else at its beginning.

    Args:
        loader: As the user gave it.
        stateful: The loader itself or its dataset, whichever says that it has a state; None:
            neither.
        fault: Why neither has one.
        seed: As training uses it.
        batches: How many batches an epoch of the training has; None: all that the loader gives.
    """
    if stateful is not None:
        fault = fault_of_state(loader, stateful, seed)
        if fault is None:
            return Proof(stateful, None)
        # A state that is wrong inside an epoch may be right at its end.
        if fault_of_next_epoch(loader, stateful, seed, batches) is None:
            return Proof(stateful, fault)
    return Proof(None, fault, fault_of_next_epoch(loader, None, seed, batches))


def fault_of_state(loader: Any, stateful: Any, seed: int) -> str | None:
    """Why a resumed run could not go on from the state of ``stateful``; None where it can.

    One copy of the loader is read. Other copies start from the states that it had in between. They
    must give the same next batches. The loader itself is not touched. Nor are the generators.

    Args:
        loader: As the user gave it.
        stateful: The loader itself or its dataset, which has ``state_dict`` and
            ``load_state_dict``.
        seed: As training uses it.

    Returns:
        What a line says after its name, such as "which cannot be copied (...)".
    """
    if multiprocessing.active_children():
        # Loaders that nobody holds any more are let go of first. They may wait for their workers
        # for seconds, and that is not the time of this trial.
        gc.collect()
    end = time.monotonic() + PATIENCE_SECONDS
    with isolate_rng(include_cuda=False):
        try:
            copied(loader, stateful)
        except Exception as error:
            reason = _in_one_line(error)
            return f"which cannot be copied, so its state_dict cannot be tried ({reason})"
        try:
            is_exact = _is_exact(loader, stateful, seed, end)
        except Exception as error:
            return f"which has a state_dict that cannot be used ({_in_one_line(error)})"
    return None if is_exact else "which gives other samples when it goes on from its state_dict"


def fault_of_next_epoch(
    loader: Any, stateful: Any, seed: int, batches: int | None = None
) -> str | None:
    """Why a resumed run that begins the next epoch would not be exact; None where it is.

    One copy of the loader is read for an epoch, and then for a few batches more. Another copy
    begins with the second epoch, as the loader of a resumed run does.

    Args:
        loader: As the user gave it.
        stateful: What has a state at the end of an epoch, or None.
        seed: As training uses it.
        batches: How many batches an epoch of the training has; None: all that the loader gives.

    Returns:
        What a line says after the loader's name, such as "gives other samples ...".
    """
    with isolate_rng(include_cuda=False):
        try:
            with workers_end_with_block():
                trial = _trial_of_next_epoch(
                    WatchedLoader(*copied(loader, stateful), seed), batches
                )
            with workers_end_with_block():
                is_same_epoch = _goes_on_as(WatchedLoader(*copied(loader, stateful), seed), trial)
        except Exception as error:
            return f"could not be tried with a copy ({_in_one_line(error)})"
    return None if is_same_epoch else OTHER_SAMPLES


def _trial_of_next_epoch(loader: WatchedLoader, batches: int | None) -> Trial:
    """Read a loader's first epoch, and the beginning of its second one."""
    end = time.monotonic() + PATIENCE_SECONDS
    length = sized_len(loader) or 0
    # Where it is known that the epoch's end is out of reach, a few batches tell as much.
    most = COMPARED if length > MOST_BATCHES else MOST_BATCHES
    if batches is not None:
        most = min(most, batches)
    loader.set_epoch(0)
    done = 0
    for number, _ in enumerate(islice(loader, most), start=1):
        done = number
        if time.monotonic() > end:
            break
    ends_here = loader.finished or done == batches
    if loader.stateful is not None and not ends_here:
        raise TimeoutError("its first epoch is too long")
    start = DataStart(1, loader_states=[loader.state_to_start_after(done, epoch_ends=True)])
    loader.end_epoch(done)
    loader.set_epoch(1)
    return Trial(start, copy.deepcopy(list(islice(loader, COMPARED))))


def _is_exact(loader: Any, stateful: Any, seed: int, end: float) -> bool:
    """Whether fresh copies go on as a copy that was read did."""
    with workers_end_with_block():
        trials = _trials(WatchedLoader(*copied(loader, stateful), seed), end)
    for trial in trials:
        with workers_end_with_block():
            goes_on = _goes_on_as(WatchedLoader(*copied(loader, stateful), seed), trial)
        if not goes_on:
            return False
        if time.monotonic() > end:
            break
    return True


def _trials(loader: WatchedLoader, end: float) -> list[Trial]:
    """Read a loader; returns places in it, from the first to the last, with the batches that come
    next.
    """
    trials: list[Trial] = []
    done = 0
    for epoch in range(EPOCHS):
        loader.set_epoch(epoch)
        if epoch:
            start = DataStart(
                epoch, loader_states=[loader.state_to_start_after(done, epoch_ends=True)]
            )
            loader.end_epoch(done)
            trials.append(Trial(start, []))
        for done, batch in enumerate(loader, start=1):
            # Some loaders fill the same tensor again.
            kept = copy.deepcopy(batch)
            for trial in trials:
                is_behind = trial.start.epoch == epoch and trial.start.batches < done
                if is_behind and len(trial.batches) < COMPARED:
                    trial.batches.append(kept)
            if done in TRIED:
                place = loader.state_to_start_after(done, epoch_ends=False)
                trials.append(Trial(DataStart(epoch, done, loader_states=[place]), []))
            if done == MOST_BATCHES or time.monotonic() > end:
                return trials
    return trials


def _goes_on_as(loader: WatchedLoader, trial: Trial) -> bool:
    """Whether a fresh loader that starts at a place gives the batches that come there."""
    loader.start_at(trial.start, *trial.start.loader_states[0])
    # As Lightning does once more.
    loader.set_epoch(trial.start.epoch)
    found = list(islice(loader, len(trial.batches)))
    return is_same(found, trial.batches)


def copied(loader: Any, stateful: Any) -> tuple[Any, Any]:
    """A copy of a loader and of what has its state, which may be a part of it. Data that are read
    by a key are not copied.
    """
    shared: dict[int, Any] = {}
    dataset = getattr(loader, "dataset", None)
    if dataset is not None and not is_stream(dataset) and not has_state(dataset):
        shared[id(dataset)] = dataset
    return copy.deepcopy((loader, stateful), shared)


def _in_one_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
