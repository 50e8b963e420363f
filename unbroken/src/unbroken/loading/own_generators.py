"""Random generators that the user's own objects hold: how they are found, saved and seeded.

A dataset or a module may keep a generator of Python, NumPy or torch in an attribute, instead of
drawing from the global ones. It may also keep one of these: whoever seeds what is found here must
seed the global ones afterwards, or isolate them.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn

KINDS = (
    random.Random,
    np.random.Generator,
    np.random.BitGenerator,
    np.random.RandomState,
    torch.Generator,
)
# Nothing of the user's is looked for in these.
CLOSED = (Tensor, np.ndarray, str, bytes, int, float, type, ModuleType, Trainer)
# What every module has. The walk goes on through a module's own attributes and its layers.
OF_EVERY_MODULE = {*vars(LightningModule()), *vars(LightningDataModule())} - {"_modules"}
# A longer list or dictionary holds samples.
LONGEST = 256
# A generator lies at most so deep: a dataset, its transform, a list, and what is in it.
DEEPEST = 8
MOST_OBJECTS = 10_000


def generators_in(holder: Any) -> dict[str, Any]:
    """Every generator that an object holds in its attributes, at any depth, by its path."""
    found: dict[str, Any] = {}
    seen: dict[int, Any] = {}
    waiting: list[tuple[str, int, Any]] = [("", 0, holder)]
    while waiting and len(seen) < MOST_OBJECTS:
        path, depth, value = waiting.pop()
        if id(value) in seen or value is None or isinstance(value, CLOSED):
            continue
        # The object itself is kept, for its id would be given to another one.
        seen[id(value)] = value
        if isinstance(value, random.SystemRandom):
            # It has no state.
            continue
        if isinstance(value, KINDS):
            found[path] = value
        elif depth < DEEPEST:
            parts = [(f"{path}.{name}", depth + 1, each) for name, each in _parts(value)]
            waiting += parts
    return found


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    """What an object holds, each with a name."""
    if isinstance(value, dict):
        if len(value) <= LONGEST:
            yield from value.items()
    elif isinstance(value, (list, tuple, deque)):
        if len(value) <= LONGEST:
            yield from enumerate(value)
    else:
        for name, each in getattr(value, "__dict__", {}).items():
            if not isinstance(value, nn.Module) or name not in OF_EVERY_MODULE:
                yield name, each
        for name in _names_of_slots(type(value)):
            if hasattr(value, name):
                yield name, getattr(value, name)


def _names_of_slots(kind: type) -> list[str]:
    """The attributes that a class of the user's keeps in slots, instead of a dictionary."""
    names: list[str] = []
    for each in kind.__mro__:
        slots = vars(each).get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    # Python gives a private name another one.
    return [name for name in names if not name.startswith("__")]


def seed_them(generators: dict[str, Any], seed: int) -> None:
    """Seed generators that :func:`generators_in` found, each in another way."""
    for path in sorted(generators):
        generator = generators[path]
        # Paths are texts, whose hash() is another one in every process.
        own_seed = hash((seed, *path.encode())) % 2**63
        if isinstance(generator, torch.Generator):
            generator.manual_seed(own_seed)
        elif isinstance(generator, np.random.Generator | np.random.BitGenerator):
            bits: Any = _bit_generator_of(generator)
            bits.state = type(bits)(own_seed).state
        else:
            generator.seed(own_seed % 2**32)


def state_of(generator: Any) -> Any:
    """A generator's state, as plain values and tensors."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        version, words, gauss = generator.getstate()
        return {"version": version, "words": torch.tensor(words), "gauss": gauss}
    if isinstance(generator, np.random.Generator | np.random.BitGenerator):
        return _plain(_bit_generator_of(generator).state)
    return _plain(generator.get_state(legacy=False))


def restore(generator: Any, state: Any) -> None:
    """Put a generator where :func:`state_of` found it, or another of the same kind."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate((state["version"], tuple(state["words"].tolist()), state["gauss"]))
    elif isinstance(generator, np.random.Generator | np.random.BitGenerator):
        bits = _bit_generator_of(generator)
        bits.state = _like(bits.state, state)
    else:
        generator.set_state(_like(generator.get_state(legacy=False), state))


def _bit_generator_of(generator: Any) -> Any:
    """What holds the state of a generator of NumPy: it may be that itself."""
    return getattr(generator, "bit_generator", generator)


def _plain(state: Any) -> Any:
    """NumPy's state with lists instead of arrays."""
    if isinstance(state, dict):
        return {name: _plain(each) for name, each in state.items()}
    return state.tolist() if isinstance(state, np.ndarray) else state


def _like(now: Any, saved: Any) -> Any:
    """A saved state with arrays where the present one has them."""
    if isinstance(now, dict):
        return {name: _like(each, saved[name]) for name, each in now.items()}
    return np.array(saved, dtype=now.dtype) if isinstance(now, np.ndarray) else saved
