"""Bounds what a stranger's configuration makes by the weights that its file holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from unbroken.errors import UserError
from unbroken.lightning_internals import operations_in, takes_device
from unbroken.tensors.same_values import is_ordinary, tensors_inside

# A network may take this many times the bytes of its file: it may be saved in half precision, and
# have buffers that are not saved. For a small one, some memory is free.
MOST_TIMES = 3
FREE_BYTES = 64 * 2**20
# So many tensors may be made for each of the file, and so many in any case. To fill a layer with
# random numbers takes a few.
MOST_TENSORS = 20
FREE_TENSORS = 1000


@contextmanager
def bounded_by(path: Path, tensors: int) -> Iterator[None]:
    """Inside, the tensors that are made are no more and no larger than the file's can fill.

    A configuration can name a layer of any size in few bytes, and any number of small ones. The
    memory of a tensor is counted before it is taken, at the one place where PyTorch makes tensors.

    Args:
        path: The file.
        tensors: How many it holds.

    Raises:
        UserError: They are more, or larger.
    """
    refusal = UserError(
        f"--ckpt_path {path}: its configuration makes larger layers than the file holds."
        " Give another checkpoint."
    )
    left = MOST_TIMES * path.stat().st_size + FREE_BYTES
    tensors_left = MOST_TENSORS * tensors + FREE_TENSORS

    def count(operation: Any, arguments: Any, named: dict[str, Any]) -> Any:
        nonlocal left, tensors_left
        given = [each for each in arguments if isinstance(each, Tensor)]
        told_before = 0
        if not given and takes_device(operation):
            told_before = size_of_result(operation, arguments, named)
        left -= told_before
        if left < 0:
            raise refusal
        result = operation(*arguments, **named)
        size = told_before or taken(result, given)
        left -= size - told_before
        tensors_left -= size > 0
        if min(left, tensors_left) < 0:
            raise refusal
        return result

    with operations_in(count):
        yield
    # What was made may have caught it.
    if min(left, tensors_left) < 0:
        raise refusal


def size_of_result(operation: Any, arguments: Any, named: dict[str, Any]) -> int:
    """The bytes that an operation will take for its result; 0 where only the result tells."""
    try:
        # A tensor on this device has a size and no memory.
        result = operation(*arguments, **{**named, "device": "meta"})
        storages = storages_of(result) if isinstance(result, Tensor) else []
        return sum(storage.nbytes() for storage in storages)
    except (RuntimeError, TypeError):
        return 0


def taken(result: Any, given: list[Tensor]) -> int:
    """The bytes of a new tensor; 0 for what shares the memory of those that were given."""
    if not isinstance(result, Tensor) or result.is_meta or any(each is result for each in given):
        return 0
    with_memory = [each for each in given if not each.is_meta]
    theirs = {storage.data_ptr() for each in with_memory for storage in storages_of(each)}
    mine = [storage for storage in storages_of(result) if storage.data_ptr() not in theirs]
    return sum(storage.nbytes() for storage in mine)


def storages_of(tensor: Tensor) -> list[torch.UntypedStorage]:
    """Where a tensor's numbers are. A sparse or nested one has several such places."""
    is_dense = tensor.layout == torch.strided and is_ordinary(tensor)
    parts = (tensor,) if is_dense else tensors_inside(tensor)
    return [part.untyped_storage() for part in parts]
