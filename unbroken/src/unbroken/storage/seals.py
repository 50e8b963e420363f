"""Seals and fingerprints: whose a checkpoint is, and whether it is still what was read before."""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from unbroken.errors import UserError
from unbroken.lightning_internals import METADATA
from unbroken.storage.contents import (
    LEAVES,
    MAPPINGS,
    RESTORED,
    RUN_KEY,
    SEQUENCES,
    STATES,
    leaves,
    record_in,
)
from unbroken.trust import keys

# How a seal begins that is over all of a checkpoint, and is followed by the length of the text that
# it is over, the seal of that length, and the seal of the text
SEAL = "seal"
# How one of an older version begins that is over all but the attributes of dictionaries
SEAL_OF_ALL = "all:"
# What a seal looks like in a pickle: with a length that is sealed, and without. The latter is one
# of an older version: the key "seal", how the pickle remembers it (q or r), and a text (X) of a
# known length.
WITH_LENGTH = re.compile(rb"seal:([0-9]{1,15}):([0-9a-f]{64}):")
WITHOUT_LENGTH = re.compile(rb"seal(?:q.|r....)X(?:D\0\0\0all:|@\0\0\0)[0-9a-f]{64}", re.DOTALL)
# Python writes no longer whole numbers in decimals.
MOST_BITS_IN_DECIMAL = 10_000
# A pickle has fewer steps than four times the letters of the text that is sealed.
STEPS_OF_LETTER = 4
# As many steps has a file that an older version may have sealed.
MOST_STEPS_BEFORE = 1_000_000
# Seals in one file that are looked at: a run's record may hold an older one.
MOST_SEALS = 10


def sign(checkpoint: dict[str, Any]) -> None:
    """Add what tells later whether the file was changed, and that it is the user's."""
    run = checkpoint[RUN_KEY]
    state = run.get("state")
    if state:
        state["outline"] = outline(checkpoint)
    run["seal"] = None
    text = Measured(_sealed(checkpoint))
    seal = keys.seal(text)
    if seal is not None:
        length = keys.seal([_length_sealed(text.length)])
        run["seal"] = f"{SEAL}:{text.length}:{length}:{seal}"


def is_own(checkpoint: dict[str, Any]) -> bool:
    """Whether a run with a key of this user wrote a checkpoint, and nothing but the values of
    tensors was changed since.
    """
    found = record_in(checkpoint).get("seal")
    if not isinstance(found, str):
        return False
    if found.startswith(f"{SEAL}:"):
        return keys.is_sealed(lambda: _sealed(checkpoint), found.rpartition(":")[2])
    if not _has_usual_attributes(checkpoint):
        return False
    if found.startswith(SEAL_OF_ALL):
        before = found.removeprefix(SEAL_OF_ALL)
        return keys.is_sealed(lambda: _all_sealed_before(checkpoint), before)
    # Still older versions sealed the configuration, and the texts of callbacks and attributes.
    return keys.is_sealed(lambda: _sealed_before(checkpoint), found)


class Measured:
    """The pieces of a text, and its length after they were asked for."""

    def __init__(self, pieces: Iterator[str]) -> None:
        self._pieces = pieces
        self.length = 0

    def __iter__(self) -> Iterator[str]:
        for piece in self._pieces:
            self.length += len(piece)
            yield piece


def _with_versions_alone(weights: dict[str, Any]) -> dict[str, Any]:
    """Weights, and of what steers how they are loaded the versions of parts alone: nn.Module would
    put other tensors in the place of its own.
    """
    made: Any = OrderedDict(weights)
    parts = getattr(weights, METADATA, None)
    if isinstance(parts, dict):
        setattr(made, METADATA, OrderedDict((part, _versions_of(parts[part])) for part in parts))
    return cast("dict[str, Any]", made)


def _length_sealed(length: int) -> str:
    """The text that is sealed for the length of another one. No other text begins like this."""
    return f"length {length}"


def fingerprint(checkpoint: dict[str, Any]) -> str:
    """What tells the contents of a checkpoint from any others, but for the values of tensors.

    A path is no such thing: another file may lie there a moment later.
    """
    found = hashlib.sha256()
    for part in _pieces(checkpoint, with_all=True):
        found.update(part.encode(errors="backslashreplace"))
    return found.hexdigest()


def refuse_other_contents(checkpoint: dict[str, Any], expected: str, path: Path) -> None:
    """A UserError where a file that was read again does not hold what was judged before."""
    if fingerprint(checkpoint) != expected:
        raise UserError(
            f"--ckpt_path {path} was replaced while it was read, and nothing of the new file was"
            " used. If it is yours, try again."
        )


def without_states(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """What is used of a stranger's checkpoint: no states of callbacks, loops, optimizers and
    attributes.
    """
    kept = {key: value for key, value in checkpoint.items() if key not in STATES}
    kept["state_dict"] = _with_versions_alone(checkpoint["state_dict"])
    run = {key: value for key, value in record_in(checkpoint).items() if key != "state"}
    return kept | {RUN_KEY: run, "loops": {}}


def _sealed(checkpoint: dict[str, Any]) -> Iterator[str]:
    """All that the reader gives but the values of tensors, in pieces of one text.

    Its beginning is that of no older seal's text.
    """
    yield "all with attributes:"
    yield from _pieces(_without_seal(checkpoint), with_all=True)


def _all_sealed_before(checkpoint: dict[str, Any]) -> Iterator[str]:
    yield from _pieces(_without_seal(checkpoint), with_all=False)


def _without_seal(checkpoint: dict[str, Any]) -> dict[str, Any]:
    return {**checkpoint, RUN_KEY: {**checkpoint[RUN_KEY], "seal": None}}


def _pieces(value: Any, with_all: bool) -> Iterator[str]:
    kind = type(value)
    if kind in MAPPINGS:
        yield f"{kind.__name__}{len(value)}:"
        for each in chain.from_iterable(value.items()):
            if type(each) in LEAVES:
                yield f"{each!r},"
            else:
                yield from _pieces(each, with_all)
        if with_all and isinstance(value, OrderedDict):
            yield "attributes "
            yield from _pieces(vars(value), with_all)
    elif kind in SEQUENCES:
        yield f"{kind.__name__}{len(value)}:"
        # A set has no order of its own.
        items = sorted(value, key=repr) if kind is set else value
        for item in items:
            # The most frequent ones need no generator of their own.
            if type(item) in LEAVES:
                yield f"{item!r},"
            else:
                yield from _pieces(item, with_all)
    elif isinstance(value, Tensor):
        yield f"{value.dtype}{list(value.shape)}"
        if with_all:
            # torch does not save it of others.
            needs_grad = value.requires_grad and (
                value.layout == torch.strided or kind is not Tensor
            )
            yield f"{value.layout} {kind.__name__} {needs_grad},"
    else:
        yield f"{value!r},"


def _has_usual_attributes(contents: Any) -> bool:
    """Whether no dictionary in contents has other attributes than those of nn.Module's state dict:
    the versions of its parts.
    """
    waiting = [contents]
    while waiting:
        value = waiting.pop()
        kind = type(value)
        if kind is OrderedDict and not _are_versions(vars(value)):
            return False
        if kind in MAPPINGS:
            waiting += value.values()
        elif kind in SEQUENCES:
            waiting += value
    return True


def _are_versions(attributes: dict[str, Any]) -> bool:
    if not attributes:
        return True
    versions: Any = attributes.get(METADATA)
    if attributes.keys() != {METADATA} or type(versions) is not OrderedDict or vars(versions):
        return False
    return all(
        type(part) is str and _versions_of(found) == found for part, found in versions.items()
    )


def _versions_of(found: Any) -> dict[str, int]:
    """What is used of what nn.Module knows of a part: the number of its version."""
    version = found.get("version") if type(found) is dict else None
    return {"version": version} if type(version) is int else {}


def _sealed_before(checkpoint: dict[str, Any]) -> Iterator[str]:
    yield f"[{checkpoint[RUN_KEY].get('config')!r}, ["
    between = ""
    for place, text in _texts_of_states(checkpoint):
        yield f"{between}{(place, text)!r}"
        between = ", "
    yield "]]"


def _texts_of_states(checkpoint: dict[str, Any]) -> Iterator[tuple[str, str]]:
    states = [(checkpoint.get("callbacks"), True)]
    states += [(attributes, False) for attributes in _attributes_in(checkpoint)]
    for state, has_keys in states:
        for place, leaf in leaves(state):
            if isinstance(leaf, str) and (has_keys or not place.startswith("a key of")):
                yield place, leaf


def _attributes_in(checkpoint: dict[str, Any]) -> list[dict[str, Any]]:
    """What each rank keeps of attributes of the module and data module, as a checkpoint has it."""
    found: list[dict[str, Any]] = []
    state = record_in(checkpoint).get("state")
    while isinstance(state, dict):
        ranks = state.get("ranks")
        if isinstance(ranks, list):
            objects = [rank.get("objects") for rank in ranks if isinstance(rank, dict)]
            for kept in objects:
                kinds = kept if isinstance(kept, dict) else {}
                states = [kinds.get("attributes"), kinds.get("declared")]
                found += [each for each in states if isinstance(each, dict)]
        inside = state.get("inside_epoch")
        state = inside.get("state") if isinstance(inside, dict) else None
    return found


def steps_vouched_for(pickle: bytes) -> int:
    """How many steps of a pickle this user's key vouches for, before it is read."""
    for found in islice(WITH_LENGTH.finditer(pickle), MOST_SEALS):
        length = int(found[1])
        text = [_length_sealed(length)]
        if keys.is_sealed(partial(list, text), found[2].decode()):
            return STEPS_OF_LETTER * length
    return MOST_STEPS_BEFORE if WITHOUT_LENGTH.search(pickle) else 0


def outline(checkpoint: dict[str, Any]) -> str:
    """A hash of what a resume restores besides weights and callbacks. A misfit would show only
    after files changed.
    """
    state = {**checkpoint[RUN_KEY]["state"], "outline": None}
    parts = [state, *(checkpoint.get(key) for key in RESTORED)]
    plain: list[Any] = []
    for _, leaf in leaves(parts, with_places=False):
        plain.append((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf)
        if type(leaf) is int and leaf.bit_length() > MOST_BITS_IN_DECIMAL:
            # Python refuses to write it in decimal numbers.
            plain[-1] = hex(leaf)
    return hashlib.sha256(repr(plain).encode()).hexdigest()
