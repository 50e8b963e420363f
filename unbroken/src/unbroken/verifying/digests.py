"""Short digests of values, and the short text by which a person knows a value again."""

from __future__ import annotations

import hashlib
import pickle
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from unbroken.tensors.same_values import tensors_inside

# Characters of a value that is shown.
LONGEST_SHOWN = 40
# A tensor of at most so many numbers is shown with them.
FEW_NUMBERS = 4
# Bytes of a value that is pickled to be compared.
LARGEST_PICKLE = 2**22
# A larger tensor or array outside of the trained weights is compared by a sample of its numbers.
LARGEST_WHOLE = 2**26
SAMPLED_NUMBERS = 2**16


class Entry(NamedTuple):
    """What is kept of a value. Two values are the same where their digests are."""

    digest: str
    # For a person; equal texts prove nothing.
    shown: str
    # Of a tensor of samples: a digest of each row.
    rows: tuple[str, ...] = ()


def digest_of(*parts: bytes) -> str:
    """A digest of bytes, which differs where they do."""
    found = hashlib.blake2b(digest_size=8)
    for part in parts:
        found.update(part)
    return found.hexdigest()


def of_plain(value: Any) -> Entry:
    """The entry of a number, a text or another value whose ``repr`` tells all of it."""
    if isinstance(value, np.number):
        # A resumed run may have Python's number in its place.
        value = value.item()
    text = repr(value)
    return Entry(digest_of(type(value).__name__.encode(), text.encode()), shortened(text))


def of_tensor(tensor: Tensor, with_rows: bool = False) -> Entry:
    """The entry of a tensor: its type, shape and bits.

    Args:
        tensor: On any device, of any layout.
        with_rows: Whether each row, along the first dimension, gets a digest as well.
    """
    if is_lazy(tensor):
        return Entry("lazy", "no size yet")
    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):
        # A shard: every rank compares its own.
        tensor = tensor.to_local()
    kind = f"{tensor.dtype} {tuple(tensor.shape)}".removeprefix("torch.")
    if tensor.layout != torch.strided:
        digests = [of_tensor(each).digest for each in tensors_inside(tensor)]
        return Entry(digest_of(kind.encode(), *(each.encode() for each in digests)), kind)
    content = bytes_of(tensor)
    rows: tuple[str, ...] = ()
    if with_rows and tensor.ndim > 0 and len(tensor) > 0:
        width = len(content) // len(tensor)
        starts = range(0, width * len(tensor), max(width, 1))
        rows = tuple(digest_of(content[start : start + width]) for start in starts)
    shown = kind
    if tensor.numel() <= FEW_NUMBERS:
        shown = shortened(str(tensor.tolist()))
    return Entry(digest_of(kind.encode(), content), shown, rows)


def bytes_of(tensor: Tensor) -> bytes:
    """The bits of a dense tensor, in order."""
    flat = tensor.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def of_array(array: np.ndarray[Any, Any]) -> Entry:
    """The entry of an array."""
    kind = f"array {array.dtype} {array.shape}"
    if array.dtype.hasobject:
        return of_pickle(array) or Entry(kind, kind)
    content = array.tobytes()
    shown = shortened(str(array.tolist())) if array.size <= FEW_NUMBERS else kind
    return Entry(digest_of(kind.encode(), content), shown)


def sampled(tensor: Tensor) -> Tensor:
    """A tensor, or numbers from all over it where it is very large."""
    is_small = tensor.numel() * tensor.element_size() <= LARGEST_WHOLE
    if is_small or tensor.layout != torch.strided:
        return tensor
    step = tensor.numel() // SAMPLED_NUMBERS
    return tensor.detach().reshape(-1)[::step]


def of_pickle(value: Any) -> Entry | None:
    """The entry of an object that can be pickled; None where it cannot, or is very large."""
    try:
        content = pickle.dumps(value)
    except Exception:  # an object of any class may refuse in its own way
        return None
    if len(content) > LARGEST_PICKLE:
        return None
    return Entry(digest_of(content), type(value).__name__)


def shortened(text: str) -> str:
    """A text of one line that fits into a table."""
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_SHOWN else f"{line[: LONGEST_SHOWN - 3]}..."
