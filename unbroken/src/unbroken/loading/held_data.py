"""A look at which data a rank holds, to tell whether its user has shared them among the ranks.

A ``Subset`` of every other row, or a list of every other file, is a rank's own share without a
sampler that says so. To share it once more would leave samples out that nobody trains on. Ranks
that hold the same data tell the same here, and ranks that hold shares do not.
"""

import math
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import data
from unbroken.loading.samplers import is_stream, samplers_within, source_of
from unbroken.tensors.same_values import is_strided

# Entries that are looked at of everything that has one for each sample, evenly spaced.
MOST_ENTRIES = 64
# Numbers that are looked at of an entry, evenly spaced: each save looks once.
MOST_NUMBERS = 1024
# Whose entries lie in memory
IN_MEMORY: tuple[Any, ...] = (list, tuple, range, Tensor, np.ndarray)
# A dataset may hold another one, and that one another.
MOST_DEPTH = 5
# Numbers that differ by less are the same, as after a computation on another machine.
RELATIVE_TOLERANCE = 1e-4
TOLERANCE = 1e-5


def held_data(loader: data.DataLoader[Any]) -> list[Any]:
    """What a loader's dataset and samplers hold, as plain values that ranks can compare.

    No sample is asked for, for that may take long, draw random numbers or count.
    """
    told: list[Any] = list(_tell_data(loader.dataset, MOST_DEPTH))
    for sampler in samplers_within(source_of(loader)):
        told += _tell_entries_of(sampler, _length_of(sampler))
    return told


def outline_of_samples(loader: Any) -> list[Any]:
    """The class and the length of a loader's dataset, and a number for the entries that it holds.

    Samplers are left out: their order is another one in each epoch.
    """
    dataset = getattr(loader, "dataset", None)
    told = list(_tell_data(dataset, MOST_DEPTH))
    # A loader without a dataset tells nothing.
    return [type(dataset).__name__, _length_of(dataset), zlib.crc32(repr(told).encode())]


def is_alike(one: Any, other: Any) -> bool:
    """Whether two ranks have told the same."""
    if isinstance(one, float) and isinstance(other, float):
        are_close = math.isclose(one, other, rel_tol=RELATIVE_TOLERANCE, abs_tol=TOLERANCE)
        return are_close or (math.isnan(one) and math.isnan(other))
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_alike, one, other))
    return type(one) is type(other) and bool(one == other)


def _tell_data(dataset: Any, depth: int) -> Iterator[Any]:
    """Class and length of a dataset, what it holds for each sample, and the datasets in it."""
    length = _length_of(dataset)
    yield [type(dataset).__qualname__, length]
    yield from _tell_entries(dataset, length)
    yield from _tell_entries_of(dataset, length)
    if depth == 0:
        return
    for value in getattr(dataset, "__dict__", {}).values():
        for part in _first_of(value) if isinstance(value, (list, tuple)) else [value]:
            if isinstance(part, data.Dataset) and not is_stream(part):
                yield from _tell_data(part, depth - 1)


def _tell_entries_of(owner: Any, length: int | None) -> Iterator[Any]:
    """The entries of each attribute that has as many as there are samples."""
    for value in getattr(owner, "__dict__", {}).values():
        # TensorDataset keeps a tuple of tensors.
        parts = [value]
        if isinstance(value, tuple):
            parts += _first_of(value)
        for part in parts:
            if _length_of(part) == length:
                yield from _tell_entries(part, length)


def _tell_entries(values: Any, length: int | None) -> Iterator[Any]:
    """Some entries of what lies in memory: a list, a tensor, an array, a table of pandas."""
    if isinstance(values, Tensor) and not is_strided(values):
        return
    read = _reader_of(values)
    if not length or read is None:
        return
    # A class of the user's may say another length.
    with suppress(IndexError):
        for place in range(0, length, max(1, length // MOST_ENTRIES)):
            yield _tell_entry(read(place), MOST_DEPTH)


def _reader_of(values: Any) -> Callable[[Any], Any] | None:
    """Reads entries of what lies in memory, or None. A class of the user's that is derived from a
    list, say, may compute its entries, and is not asked.
    """
    for kind in IN_MEMORY:
        if isinstance(values, kind):
            return partial(kind.__getitem__, values)
    # A table gives its rows by ``iloc`` alone.
    rows = getattr(values, "iloc", None)
    return None if rows is None else rows.__getitem__


def _first_of(values: list[Any] | tuple[Any, ...]) -> Sequence[Any]:
    """Some of what a list or tuple holds, from its beginning."""
    kind: Any = list if isinstance(values, list) else tuple
    some: Sequence[Any] = kind.__getitem__(values, slice(MOST_ENTRIES))
    return some


def _tell_entry(entry: Any, depth: int) -> Any:
    """A number, a text, or a list of both, that stands for the entry of one sample."""
    if isinstance(entry, Tensor):
        return _tell_numbers(entry)
    if isinstance(entry, (np.ndarray, np.generic)):
        # Torch cannot take an array that is flipped, or of a foreign byte order.
        if entry.dtype.kind not in "biuf":
            return str(entry)
        return float(_some_of(np.asarray(entry).reshape(-1)).sum(dtype=np.float64))
    if isinstance(entry, (bool, int, float)):
        return float(entry)
    if isinstance(entry, (str, os.PathLike)):
        # Two machines may keep the same files in folders of other names.
        return str(entry).replace("\\", "/").rpartition("/")[2]
    if hasattr(entry, "tolist"):
        # A row of pandas.
        entry = entry.tolist()
    if isinstance(entry, dict):
        entry = list(dict.values(entry))
    if isinstance(entry, (list, tuple)) and depth > 0:
        return [_tell_entry(value, depth - 1) for value in _first_of(entry)]
    return type(entry).__qualname__


def _tell_numbers(entry: Tensor) -> float:
    some = entry.detach()
    if some.layout == torch.strided:
        some = _some_of(some.flatten())
    real = some.abs() if some.is_complex() else some
    return float(real.sum(dtype=torch.float64).cpu())


def _some_of(row: Any) -> Any:
    """Some numbers of a flat tensor or array, evenly spaced; all where they are few."""
    return row[:: max(1, len(row) // MOST_NUMBERS)]


def _length_of(value: Any) -> int | None:
    # Most values have no length, and the class of one may raise what it likes.
    with suppress(Exception):
        return len(value)
    return None
