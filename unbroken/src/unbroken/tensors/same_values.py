"""Copies of values, and whether two values are the same, whatever they are made of."""

import copy
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import MethodType
from typing import Any

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

# Of pickle, as copy.deepcopy asks for it
PROTOCOL = 4
# The types of whole numbers that have the bits of others, by their bytes
AS_WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Bytes of a large value that are compared at a time: so few stay in the processor's cache.
PIECE = 2**18


def deep_copy(value: Any) -> Any:
    """``copy.deepcopy``, also of compressed sparse tensors, which it cannot copy."""
    copies: dict[int, Any] = {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.layout not in (torch.strided, torch.sparse_coo):
            copies[id(tensor)] = tensor.detach().clone()
        return tensor

    apply_to_collection(value, Tensor, note, allow_frozen=True)
    return copy.deepcopy(value, copies)


def is_same(a: Any, b: Any) -> bool:
    """Whether two nested values hold the same, bit by bit, in the same order. So not a number is
    the same as itself, and 0.0 is another number than -0.0.

    An object is the same as another of its class that is made of the same, as pickle and deepcopy
    take it apart, also where its own comparison says that it is not: many compare only who they
    are. A weak reference holds nothing.
    """
    return _is_same(a, b, frozenset())


def _is_same(a: Any, b: Any, outer: frozenset[tuple[int, int]]) -> bool:
    """The same inside of others that are being compared, which are named by their ids."""
    if type(a) is not type(b):
        return False
    for kinds, is_same_one in LEAVES:
        if isinstance(a, kinds):
            return bool(is_same_one(a, b))
    pair = (id(a), id(b))
    # One that holds itself is the same if all else that it holds is.
    return pair in outer or _holds_same(a, b, outer | {pair})


def _holds_same(a: Any, b: Any, outer: frozenset[tuple[int, int]]) -> bool:
    if isinstance(a, Mapping):
        return list(a) == list(b) and all(_is_same(a[key], b[key], outer) for key in a)
    if isinstance(a, Sequence):
        return len(a) == len(b) and all(_is_same(*pair, outer) for pair in zip(a, b, strict=True))
    if isinstance(a, MethodType):
        return a.__func__ is b.__func__ and _is_same(a.__self__, b.__self__, outer)
    # A comparison of the user's may fail: that of two dataclasses with tensors does.
    with suppress(Exception):
        if a == b:
            return True
    parts = _parts_of(a)
    return parts is not None and _is_same(parts, _parts_of(b), outer)


def _parts_of(value: Any) -> list[Any] | None:
    """What an object is made of, as pickle takes it apart: attributes, also in slots, entries, and
    what a class of C's holds. None: it cannot be taken apart.
    """
    try:
        made_by = value.__reduce_ex__(PROTOCOL)
    except Exception:
        return None
    if isinstance(made_by, str):
        # The name of something global, such as a function.
        return None
    return [_listed(each) for each in made_by]


def _listed(part: Any) -> Any:
    """The entries of a list or dictionary come as an iterator."""
    return list(part) if isinstance(part, Iterator) else part


def is_ordinary(tensor: Tensor) -> bool:
    """Whether a tensor has its own numbers: not a quantized or nested one, or one of MKL-DNN."""
    return not (tensor.is_quantized or tensor.is_nested or tensor.is_mkldnn)


def computes_itself(tensor: Tensor) -> bool:
    """Whether a tensor's class does each operation itself, as a masked tensor does: what its
    numbers are made of, the class alone knows.
    """
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


def is_strided(tensor: Tensor) -> bool:
    """Whether a tensor's numbers lie in memory of its own, where they can be read."""
    is_there = tensor.layout == torch.strided and not tensor.is_meta
    return is_there and is_ordinary(tensor) and not computes_itself(tensor)


def _is_same_tensor(a: Tensor, b: Tensor) -> bool:
    if not is_ordinary(a) or not is_ordinary(b):
        parts = tensors_inside(a), tensors_inside(b)
        return len(parts[0]) == len(parts[1]) and all(map(_is_same_tensor, *parts))
    if a.shape != b.shape or a.dtype != b.dtype or a.layout != b.layout:
        return False
    if a.layout != torch.strided:
        return all(map(_is_same_tensor, tensors_inside(a), tensors_inside(b)))
    one, other = bits_of(a), bits_of(b)
    if one.nbytes > PIECE and one.is_cpu and type(one) is Tensor:
        # torch.equal takes nearly twice as long.
        return _is_same_array(one.numpy(), other.numpy())
    return bool(torch.equal(one, other))


def bits_of(tensor: Tensor) -> Tensor:
    """A strided tensor's bits as whole numbers. To compare numbers takes several passes, because of
    those that are not a number.
    """
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    return plain.view(AS_WHOLE_NUMBERS[plain.itemsize])


def tensors_inside(sparse: Tensor) -> tuple[Tensor, ...]:
    """The dense tensors that a sparse one, or one that is not ordinary, consists of. Made dense, a
    sparse one might fit no memory.
    """
    if sparse.is_quantized:
        return (sparse.int_repr(),)
    if sparse.is_nested:
        return tuple(sparse.unbind())
    if sparse.layout == torch.sparse_coo:
        whole = sparse.coalesce()
        return whole.indices(), whole.values()
    if sparse.layout in (torch.sparse_csr, torch.sparse_bsr):
        return sparse.crow_indices(), sparse.col_indices(), sparse.values()
    if sparse.layout in (torch.sparse_csc, torch.sparse_bsc):
        return sparse.ccol_indices(), sparse.row_indices(), sparse.values()
    return (sparse.to_dense(),)


def _is_same_array(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    if a.dtype.hasobject:
        return a.shape == b.shape and is_same(a.ravel().tolist(), b.ravel().tolist())
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    one, other = a.reshape(-1), b.reshape(-1)
    is_whole_numbers = type(a) is np.ndarray and a.dtype.kind in "biu"
    is_same_piece = np.array_equal if is_whole_numbers else _has_same_bytes
    step = max(1, PIECE // max(1, a.itemsize))
    pieces = (slice(start, start + step) for start in range(0, a.size, step))
    return all(is_same_piece(one[piece], other[piece]) for piece in pieces)


def _has_same_bytes(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    return a.tobytes() == b.tobytes()


def _has_same_text(a: Any, b: Any) -> bool:
    """A number's text is as exact as the number, and has the sign of a zero."""
    return repr(a) == repr(b)


# Classes of what holds nothing further, each with the comparison of two.
LEAVES: tuple[tuple[Any, Callable[[Any, Any], bool]], ...] = (
    (Tensor, _is_same_tensor),
    (np.ndarray, _is_same_array),
    (np.generic, lambda a, b: a.tobytes() == b.tobytes()),
    ((str, bytes, int, range), operator.eq),
    ((float, complex), _has_same_text),
    (weakref.ReferenceType, lambda a, b: True),
)
