"""Random generators that the user's own objects hold: how they are found, saved and seeded.

A dataset or a module may keep a generator of Python, NumPy or torch in an attribute, instead of
drawing from the global ones. It may also keep a global one in an attribute: whoever seeds what is
found here must seed the global ones afterwards, or isolate them.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from unbroken.holding.walk import Place, children_of, walk

KINDS = (
    random.Random,
    np.random.Generator,
    np.random.BitGenerator,
    np.random.RandomState,
    torch.Generator,
)


def generators_in(holder: Any) -> dict[str, Any]:
    """Every generator that an object holds in its attributes, at any depth, by its path."""
    found: dict[str, Any] = {}

    def opened(place: Place) -> Iterable[Place]:
        if not isinstance(place.value, KINDS):
            return children_of(place)
        if draws_from_a_state(place.value):
            found[place.name] = place.value
        return ()

    walk([Place("", holder)], opened)
    return found


def draws_from_a_state(generator: Any) -> bool:
    """Whether a generator goes on from a state, and does not ask the system for each number."""
    return not isinstance(generator, random.SystemRandom)


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
