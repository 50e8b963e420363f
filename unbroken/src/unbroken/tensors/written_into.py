"""A value that is written into a tensor, instead of taking its place."""

import torch
from torch import Tensor


def is_written_into(tensor: Tensor, value: Tensor) -> bool:
    """Write a value into a tensor of its shape and type: others may share the tensor's memory.

    Returns:
        Whether that could be done. Entries of a tensor that was expanded lie in one place.
    """
    if tensor.shape != value.shape or tensor.dtype != value.dtype or tensor.layout != value.layout:
        return False
    try:
        with torch.no_grad():
            tensor.copy_(value)
    except RuntimeError:
        return False
    return True
