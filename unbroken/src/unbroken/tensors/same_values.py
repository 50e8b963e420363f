"""Copies of values, and whether two values are the same, whatever they are made of."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

# The types of whole numbers that have the bits of others, by their bytes
AS_WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
    """
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return _is_same_tensor(a, b)
    if isinstance(a, np.ndarray):
        return _is_same_array(a, b)
    if isinstance(a, Mapping):
        return list(a) == list(b) and all(is_same(a[key], b[key]) for key in a)
    if isinstance(a, (str, bytes)):
        return bool(a == b)
    if type(a) in (float, complex):
        # The texts are as exact as the numbers, and have the sign of a zero.
        return repr(a) == repr(b)
    if isinstance(a, np.generic):
        return a.tobytes() == b.tobytes()
    if isinstance(a, Sequence):
        return len(a) == len(b) and all(map(is_same, a, b))
    if "__eq__" not in _names_of_classes(a) and hasattr(a, "__dict__"):
        # An object of the user's own without a comparison.
        return is_same(vars(a), vars(b))
    return bool(a == b) or (a != a and b != b)


def is_ordinary(tensor: Tensor) -> bool:
    """Whether a tensor has its own numbers: not a quantized or nested one, or one of MKL-DNN."""
    return not (tensor.is_quantized or tensor.is_nested or tensor.is_mkldnn)


def _is_same_tensor(a: Tensor, b: Tensor) -> bool:
    if not is_ordinary(a) or not is_ordinary(b):
        parts = tensors_inside(a), tensors_inside(b)
        return len(parts[0]) == len(parts[1]) and all(map(_is_same_tensor, *parts))
    if a.shape != b.shape or a.dtype != b.dtype or a.layout != b.layout:
        return False
    if a.layout != torch.strided:
        return all(map(_is_same_tensor, tensors_inside(a), tensors_inside(b)))
    return bool(torch.equal(bits_of(a), bits_of(b)))


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
        return np.array_equal(a, b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def _names_of_classes(value: Any) -> set[str]:
    """What a value's classes define, other than what every object has."""
    return {name for each in type(value).__mro__[:-1] for name in vars(each)}
