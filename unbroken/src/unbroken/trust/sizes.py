"""Bounds what a stranger's configuration makes by the weights that its file holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor
from unbroken.errors import UserError
from unbroken.lightning_internals import operations_in, takes_device

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
        makes_new = not given and takes_device(operation)
        if makes_new:
            # A tensor on this device has a size and no memory.
            left -= taken(operation(*arguments, **{**named, "device": "meta"}), given)
        if left < 0:
            raise refusal
        result = operation(*arguments, **named)
        size = taken(result, given)
        tensors_left -= size > 0
        if not makes_new:
            left -= size
        if min(left, tensors_left) < 0:
            raise refusal
        return result

    with operations_in(count):
        yield
    # What was made may have caught it.
    if min(left, tensors_left) < 0:
        raise refusal


def taken(result: Any, given: list[Tensor]) -> int:
    """The bytes of a new tensor; 0 for what shares the memory of those that were given."""
    if not isinstance(result, Tensor):
        return 0
    if result.is_meta:
        return result.numel() * result.element_size()
    if any(each is result or shares_memory(each, result) for each in given):
        return 0
    return result.untyped_storage().nbytes()


def shares_memory(one: Tensor, other: Tensor) -> bool:
    """Whether one tensor is a view of the other."""
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
