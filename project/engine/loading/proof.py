"""Whether the state of a loader or stream is worth keeping: proved with copies before training, not
believed.
"""

import copy
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from project.engine.loading.passes import Start
from project.engine.loading.samplers import has_state, is_stream
from project.engine.loading.watched_loader import WatchedLoader

# Batches that come before the state that is tried, and batches that are compared behind it.
BEFORE = 2
COMPARED = 2


def fault_of_state(loader: Any, owner: Any, seed: int) -> str | None:
    """Why a resumed run could not go on from the owner's state; None where it can.

    One copy of the loader gives a few batches. Another copy starts from the state that the first
    one had in between. It must give the same next batches. The loader itself is not touched. Nor
    are the generators.

    Args:
        loader: As the user gave it.
        owner: The loader itself or its dataset, which has ``state_dict`` and ``load_state_dict``.
        seed: As training uses it.

    Returns:
        The end of a sentence whose subject is the owner, such as "cannot be copied (...)".
    """
    # Each copy is made before anything is read: loaders in use hold processes and open files.
    with isolate_rng(include_cuda=False):
        try:
            first = WatchedLoader(*copied(loader, owner), seed)
            second = WatchedLoader(*copied(loader, owner), seed)
        except Exception as error:
            return f"cannot be copied, so its state_dict cannot be tried ({_in_one_line(error)})"
        try:
            batches = iter(first)
            for _ in islice(batches, BEFORE):
                pass
            place = first.state_after(BEFORE, epoch_ends=False)
            expected = list(islice(batches, COMPARED))
            batches.close()  # type: ignore[attr-defined]
            if place[0] != BEFORE:
                # Fewer batches than that: every state is that of an epoch's start.
                return None
            second.start_at(Start(batches=BEFORE), *place)
            # As Lightning does once more.
            second.set_epoch(0)
            found = list(islice(second, COMPARED))
        except Exception as error:
            return f"has a state_dict that fails ({_in_one_line(error)})"
    if not is_same(found, expected):
        return "gives other samples when it goes on from its state_dict"
    return None


def copied(loader: Any, owner: Any) -> tuple[Any, Any]:
    """A copy of a loader and its owner, which may be a part of it. Data that are read by a key are
    not copied.
    """
    shared: dict[int, Any] = {}
    dataset = getattr(loader, "dataset", None)
    if dataset is not None and not is_stream(dataset) and not has_state(dataset):
        shared[id(dataset)] = dataset
    return copy.deepcopy((loader, owner), shared)


def is_same(a: Any, b: Any) -> bool:
    """Whether two batches hold the same values; a value that is not a number equals another one."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return _is_same_tensor(a, b)
    if isinstance(a, np.ndarray):
        return _is_same_array(a, b)
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(is_same(a[key], b[key]) for key in a)
    if isinstance(a, (str, bytes)):
        return bool(a == b)
    if isinstance(a, Sequence):
        return len(a) == len(b) and all(map(is_same, a, b))
    if "__eq__" not in _names_of_classes(a) and hasattr(a, "__dict__"):
        # An object of the user's own without a comparison.
        return is_same(vars(a), vars(b))
    return bool(a == b) or (a != a and b != b)


def _is_same_tensor(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype or a.layout != b.layout:
        return False
    if a.layout != torch.strided:
        return _is_same_tensor(a.to_dense(), b.to_dense())
    return bool(torch.equal(a, b)) or bool(torch.all((a == b) | ((a != a) & (b != b))))


def _is_same_array(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    if a.dtype.kind in "fc":
        return np.array_equal(a, b, equal_nan=True)
    return np.array_equal(a, b)


def _names_of_classes(value: Any) -> set[str]:
    """What a value's classes define, other than what every object has."""
    return {name for each in type(value).__mro__[:-1] for name in vars(each)}


def _in_one_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
