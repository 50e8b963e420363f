"""What a checkpoint is made of: the names of its parts, and walks through plain values."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Any

import torch

MAPPINGS = (dict, OrderedDict, Counter)
SEQUENCES = (list, tuple, set, torch.Size)
LEAVES = (type(None), bool, int, float, str)
# In a configuration; the last two are empty ones
VALUES = (*LEAVES, dict, list)
PLAIN = (*VALUES, complex, bytes, torch.dtype, torch.device, *MAPPINGS, *SEQUENCES)
# What this project adds to Lightning's checkpoint: name, configuration, data source, ...
RUN_KEY = "run"
# What the run chose by itself, in what this project adds: see :mod:`unbroken.chosen`.
CHOSEN = "chosen"
# The names of entries that were left out, in what this project adds.
LEFT_OUT = "left_out"
# Entries that a resume alone needs
STATES = ("callbacks", "optimizer_states", "lr_schedulers", "loops")
# Those that Lightning restores after files of the run may have been changed
RESTORED = ("loops", "optimizer_states", "lr_schedulers")


def record_in(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """What this project has added to a checkpoint; nothing where another program wrote the file."""
    record = checkpoint.get(RUN_KEY)
    return record if isinstance(record, dict) else {}


def leaves(value: Any, where: str = "", with_places: bool = True) -> Iterator[tuple[str, Any]]:
    """The keys and values in nested plain containers, and containers that are empty, each with its
    place in words.

    Only exact types are opened: a subclass, as NumPy's numbers and text are, would not load again.
    """
    kind = type(value)
    if kind in MAPPINGS and value:
        for key, item in value.items():
            key_place = f"a key of {where}" if with_places else ""
            yield from leaves(key, key_place, with_places)
            item_place = f"{where}[{key!r}]" if with_places else ""
            yield from leaves(item, item_place, with_places)
    elif kind in SEQUENCES and value:
        items = sorted(value, key=repr) if kind is set else value
        for index, item in enumerate(items):
            item_place = f"{where}[{index}]" if with_places else ""
            yield from leaves(item, item_place, with_places)
    else:
        yield where, value


def with_own_containers(value: Any) -> Any:
    """A value whose containers a hook may change without changing the value's own. The tensors are
    the same ones.
    """
    kind = type(value)
    if kind in MAPPINGS:
        made: Any = kind()
        for key, item in value.items():
            made[key] = with_own_containers(item)
        if kind is OrderedDict:
            vars(made).update(vars(value))
        return made
    if kind in (list, tuple):
        return kind([with_own_containers(item) for item in value])
    return set(value) if kind is set else value
