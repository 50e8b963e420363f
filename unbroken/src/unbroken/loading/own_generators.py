"""Random generators of the user's own: how they are found, saved and seeded.

A dataset or a module may keep a generator of Python, NumPy or torch in an attribute, and a script
may have one in a global variable, instead of drawing from those that everybody shares. It may also
keep one of these there: whoever seeds what is found here must seed these afterwards, or isolate
them.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from unbroken.holding.users_modules import users_modules
from unbroken.holding.walk import Place, children_of, walk

KINDS = (
    random.Random,
    np.random.Generator,
    np.random.BitGenerator,
    np.random.RandomState,
    np.random.SeedSequence,
    torch.Generator,
)
# In the state of a generator of NumPy that has children: what they are made of, and how many there
# are.
SEED = "seed"
# A file may be a stranger's, and each child takes a microsecond.
MOST_CHILDREN = 10_000_000


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


def generators_of_modules() -> dict[str, Any]:
    """Every generator in a global variable of the user's own modules, his script among them."""
    found: dict[str, Any] = {}
    kinds = classes_of_generators()
    for name in users_modules():
        variables = vars(sys.modules[name]).copy()
        # Each global variable is asked at each save. That there is none is told soonest by the set.
        if kinds.isdisjoint(map(type, variables.values())):
            continue
        for variable, value in variables.items():
            if type(value) in kinds and draws_from_a_state(value):
                found[f"{name}.{variable}"] = value
    return found


def classes_of_generators() -> set[type]:
    """All classes of generators that there are now."""
    found: set[type] = set()
    waiting: list[Any] = list(KINDS)
    while waiting:
        kind = waiting.pop()
        found.add(kind)
        waiting += kind.__subclasses__()
    return found


def generator_of_the_gpu() -> dict[str, torch.Generator]:
    """The generator that torch draws from on this process's GPU, once it uses one."""
    if not torch.cuda.is_initialized():
        return {}
    return {"cuda": torch.cuda.default_generators[torch.cuda.current_device()]}


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
        elif not isinstance(generator, np.random.SeedSequence):
            generator.seed(own_seed % 2**32)


def state_of(generator: Any) -> Any:
    """A generator's state, as plain values and tensors."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        version, words, gauss = generator.getstate()
        return {"version": version, "words": torch.tensor(words), "gauss": gauss}
    if isinstance(generator, np.random.SeedSequence):
        return {SEED: _plain(generator.state)}
    if isinstance(generator, np.random.Generator | np.random.BitGenerator):
        bits = _bit_generator_of(generator)
        seed = _seed_of(bits)
        # Without children any seed is as good, and one that nobody has given is another one in each
        # process.
        has_children = seed is not None and seed.n_children_spawned > 0
        return _plain(bits.state) | (state_of(seed) if has_children else {})
    return _plain(generator.get_state(legacy=False))


def can_be_restored(generator: Any, kind: str, state: Any) -> bool:
    """Whether a generator is of the class of this name, and draws the same kind of bits."""
    if type(generator).__name__ != kind:
        return False
    if isinstance(generator, np.random.Generator | np.random.BitGenerator):
        now: Any = _bit_generator_of(generator).state
        return isinstance(state, dict) and state.get("bit_generator") == now["bit_generator"]
    return True


def has_the_same_children(generator: Any, state: Any) -> bool:
    """Whether what a generator's ``spawn`` makes is what it made where the state was taken. One
    that has made none may be of any seed: its state alone counts.
    """
    seed = generator if isinstance(generator, np.random.SeedSequence) else None
    if isinstance(generator, np.random.Generator | np.random.BitGenerator):
        seed = _seed_of(_bit_generator_of(generator))
    saved = state.get(SEED) if isinstance(state, dict) else None
    if seed is None or saved is None:
        return True
    now = _plain(seed.state)
    return bool(now | {"n_children_spawned": saved["n_children_spawned"]} == saved)


@contextmanager
def put_back(generators: Iterable[Any]) -> Iterator[None]:
    """Put generators back at the end of the block."""
    before = [(generator, state_of(generator)) for generator in generators]
    try:
        yield
    finally:
        for generator, state in before:
            restore(generator, state)


def restore(generator: Any, state: Any) -> None:
    """Put a generator where :func:`state_of` found it, or another of the same kind."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate((state["version"], tuple(state["words"].tolist()), state["gauss"]))
    elif isinstance(generator, np.random.Generator | np.random.BitGenerator):
        bits = _bit_generator_of(generator)
        bits.state = _like(bits.state, state)
        _give_children(_seed_of(bits), state)
    elif isinstance(generator, np.random.SeedSequence):
        _give_children(generator, state)
    else:
        generator.set_state(_like(generator.get_state(legacy=False), state))


def made_of(kind: str, state: Any) -> Any:
    """A generator of a class of this name, in the state that :func:`state_of` has returned; None
    where it cannot be made, such as one of a GPU.
    """
    if isinstance(state, torch.Tensor):
        made: Any = torch.Generator()
        if state.shape != made.get_state().shape:
            return None
    elif kind == "Random":
        made = random.Random()
    elif kind == "RandomState":
        made = np.random.RandomState()
    elif kind == "SeedSequence":
        made = np.random.SeedSequence(**state[SEED])
    elif isinstance(state, dict) and "bit_generator" in state:
        bits: Any = getattr(np.random, str(state["bit_generator"]), None)
        if not isinstance(bits, type) or not issubclass(bits, np.random.BitGenerator):
            return None
        seeded = bits(np.random.SeedSequence(**state[SEED])) if SEED in state else bits()
        made = seeded if kind == bits.__name__ else np.random.Generator(seeded)
    else:
        return None
    restore(made, state)
    return made


def _seed_of(bits: Any) -> np.random.SeedSequence | None:
    """What ``spawn`` makes a generator's children of. It counts them."""
    seed = getattr(bits, "seed_seq", None)
    return seed if isinstance(seed, np.random.SeedSequence) else None


def _give_children(seed: np.random.SeedSequence | None, state: Mapping[str, Any]) -> None:
    """Let the next child be the one that came next at the save."""
    if seed is not None and SEED in state:
        missing = state[SEED].get("n_children_spawned", 0) - seed.n_children_spawned
        for _ in range(min(missing, MOST_CHILDREN)):
            seed.spawn(1)


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
