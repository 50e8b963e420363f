"""Seeds for everything that draws random numbers while data are loaded."""

import random
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch


class Seeds(NamedTuple):
    """What a loader's numbers come from."""

    # The order of its samples.
    order: int
    # What is drawn as a batch is loaded.
    draws: int


def seed_from(generator: torch.Generator) -> int:
    """A seed that is drawn from a generator, which moves on. PyTorch's own loader does the same."""
    return int(torch.randint(2**32, (), generator=generator, device=generator.device))


def seed_generators(seed: int) -> None:
    """Seed Python's, NumPy's and torch's CPU generators."""
    torch.default_generator.manual_seed(seed % 2**63)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def torch_seeded(seed: int) -> Iterator[None]:
    """Seed torch's CPU generator inside, as :func:`seed_generators` does, and put it back. It takes
    two microseconds; with Python's and NumPy's generators it is a hundred.
    """
    generator = torch.default_generator
    before = generator.get_state()
    generator.manual_seed(seed % 2**63)
    try:
        yield
    finally:
        generator.set_state(before)


def generator_states() -> tuple[Any, ...]:
    """The states of the generators that :func:`seed_generators` seeds, to be compared with
    ``==``.
    """
    return torch.get_rng_state().tolist(), *states_without_torch()


def states_without_torch() -> tuple[Any, ...]:
    """The same of Python's and NumPy's generators."""
    numpy_state: Any = np.random.get_state()
    name, keys, *rest = numpy_state
    return random.getstate(), name, keys.tobytes(), rest


def number_of(key: Any) -> int:
    """A number for a sample's key that is the same in every process. ``hash()`` of a text is
    not.
    """
    return key if isinstance(key, int) else zlib.crc32(repr(key).encode())
