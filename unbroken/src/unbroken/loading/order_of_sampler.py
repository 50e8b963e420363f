"""By what a sampler without a ``state_dict`` gives its order, beside the length of its data and
torch's global generator, which is seeded: the weights and indices of torch's own samplers, which
training may change (importance sampling), and any generator of random numbers in an attribute.
"""

import copy
import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import data
from unbroken.loading.own_generators import (
    KINDS,
    can_be_restored,
    draws_from_a_state,
    restore,
    state_of,
)
from unbroken.loading.samplers import samplers_within
from unbroken.tensors.same_values import is_same
from unbroken.tensors.written_into import is_written_into

# These draw from torch's generator only.
SEEDABLE = (
    data.RandomSampler,
    data.SequentialSampler,
    data.SubsetRandomSampler,
    data.WeightedRandomSampler,
)
# Their attributes that decide the order
DECIDING = ("weights", "indices", "num_samples", "_num_samples", "replacement")
NUMBERS = {bool, int, float}
# An array of NumPy's becomes a tensor.
ARRAY = "numpy.ndarray"
GENERATOR = "generator"
RANGE = "range"
# Bytes of values that training has not changed: more of them are not kept in every checkpoint.
MOST_BYTES = 2**20
BYTES_OF_A_NUMBER = 8


def draws_as_torch_does(source: Any) -> bool:
    """Whether a sampler gives its order by torch's own code. A subclass may do otherwise."""
    return any(type(source).__iter__ is kind.__iter__ for kind in SEEDABLE)


def kept_with_the_loader(sampler: Any) -> list[str]:
    """The names of a sampler's attributes that a checkpoint keeps in the state of its loader."""
    attributes = getattr(sampler, "__dict__", {})
    return [name for name in attributes if _is_kept(sampler, name, attributes[name])]


def order_of(source: Any) -> dict[str, Any]:
    """Copies of what decides the order of a sampler, and of samplers within it, as plain data."""
    return {
        f"{number}.{name}": _plain_copy(vars(sampler)[name])
        for number, sampler in enumerate(samplers_within(source))
        for name in kept_with_the_loader(sampler)
    }


def give_order(source: Any, values: dict[str, Any]) -> None:
    """Let samplers give the order that they gave when :func:`order_of` returned these values.

    A value is written into the one that there is, where it is of the same form: a module may hold
    that one, too.
    """
    for number, sampler in enumerate(samplers_within(source)):
        for name, now in list(getattr(sampler, "__dict__", {}).items()):
            saved = values.get(f"{number}.{name}")
            if saved is not None and not _is_filled(now, saved):
                vars(sampler)[name] = _made(now, saved)


def is_same_order(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two orders were decided by the same values."""
    return one.keys() == other.keys() and all(_is_same(one[place], other[place]) for place in one)


def _is_same(one: Any, other: Any) -> bool:
    if type(one) is type(other) is list:
        # Of numbers, and it may be long: it is compared at once.
        return bool(one == other)
    return is_same(one, other)


def is_long(values: dict[str, Any]) -> bool:
    """Whether so many values are kept only where training has changed them."""
    return sum(map(_bytes_of, _long_ones(values).values())) > MOST_BYTES


def _bytes_of(value: Any) -> int:
    """The bytes of a tensor, or of a list of numbers as one."""
    return value.nbytes if isinstance(value, Tensor) else BYTES_OF_A_NUMBER * len(value)


def digests_of(values: dict[str, Any]) -> dict[str, int]:
    """A number for each of the tensors and lists among these values."""
    return {
        place: zlib.crc32(torch.as_tensor(value).contiguous().numpy().tobytes())
        for place, value in _long_ones(values).items()
    }


def _long_ones(values: dict[str, Any]) -> dict[str, Tensor | list[Any]]:
    """The tensors, arrays and lists among these values."""
    found = {}
    for place, value in values.items():
        inside = value.get(ARRAY, value.get(RANGE)) if isinstance(value, dict) else value
        if isinstance(inside, (Tensor, list)):
            found[place] = inside
    return found


def _is_kept(sampler: Any, name: str, value: Any) -> bool:
    if isinstance(value, KINDS):
        return draws_from_a_state(value)
    if not isinstance(sampler, SEEDABLE) or name not in DECIDING:
        return False
    if isinstance(value, Tensor):
        return value.layout == torch.strided
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biuf" and value.dtype.isnative
    if type(value) is range:
        return True
    return type(value) in NUMBERS or (type(value) is list and NUMBERS.issuperset(map(type, value)))


def _plain_copy(value: Any) -> Any:
    if isinstance(value, KINDS):
        return {GENERATOR: [type(value).__name__, state_of(value)]}
    if isinstance(value, np.ndarray):
        return {ARRAY: torch.from_numpy(value.copy())}
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if type(value) is range:
        return {RANGE: [value.start, value.stop, value.step]}
    return copy.copy(value)


def _is_filled(now: Any, saved: Any) -> bool:
    """Fill a value with a saved one of the same form; returns whether they are of one."""
    if isinstance(saved, dict) and GENERATOR in saved:
        kind, state = saved[GENERATOR]
        if isinstance(now, KINDS) and can_be_restored(now, kind, state):
            restore(now, state)
        return True
    is_array = isinstance(saved, dict) and ARRAY in saved
    array = saved[ARRAY].numpy() if is_array else None
    if isinstance(now, np.ndarray) and array is not None:
        is_alike = now.shape == array.shape and now.dtype == array.dtype and now.flags.writeable
        if is_alike:
            now[...] = array
        return is_alike
    if isinstance(now, Tensor) and isinstance(saved, Tensor):
        return is_written_into(now, saved)
    if type(now) is type(saved) is list:
        now[:] = saved
        return True
    return False


def _made(now: Any, saved: Any) -> Any:
    """A value of the form of a saved one, on the device of the one that it takes the place of."""
    if isinstance(saved, dict):
        return range(*saved[RANGE]) if RANGE in saved else saved[ARRAY].numpy().copy()
    if isinstance(saved, Tensor):
        return saved.to(now.device if isinstance(now, Tensor) else "cpu", copy=True)
    return copy.copy(saved)
