"""When memory is used up: what errors say so, and the CPU's tensors counted, with a limit as a GPU has one."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from project.engine.lightning_internals import each_result
from project.hardware import GIB

# What devices, the CPU, cuBLAS and cuDNN (three ways) say when memory is used up
OUT_OF_MEMORY = (
    *("out of memory", "can't allocate memory", "_STATUS_ALLOC_FAILED"),
    *("CUDNN_STATUS_NOT_SUPPORTED", "nable to find an engine"),
)


def is_out_of_memory(exception: BaseException) -> bool:
    """Whether an exception says that a device's or the host's memory is used up."""
    if isinstance(exception, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(exception, RuntimeError) and any(words in str(exception) for words in OUT_OF_MEMORY)


class LiveMemory:
    """Counts the bytes of every tensor that is made while this is active and still alive. Costs microseconds per call.

    Temporary memory inside one operation is not counted. A compiled network runs eagerly meanwhile.

    Args:
        limit_bytes: Raise ``torch.OutOfMemoryError`` when more than this is alive; None for no limit.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.live_bytes = self.peak_bytes = 0
        self._counted: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._counting = each_result(self.count)

    def __enter__(self) -> LiveMemory:
        self._counting.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._counting.__exit__(*error)

    def count(self, tensors: Iterable[Any]) -> None:
        """Count tensors that were made before, such as weights; one that is counted already is not counted again.

        Raises:
            torch.OutOfMemoryError: More than ``limit_bytes`` are alive.
        """
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                # PyTorch keeps one Python object per storage for as long as the storage lives
                if storage not in self._counted:
                    self._counted.add(storage)
                    weakref.finalize(storage, self._add, -storage.nbytes())
                    self._add(storage.nbytes())
        if self.limit_bytes is not None and self.live_bytes > self.limit_bytes:
            raise torch.OutOfMemoryError(
                f"{self.live_bytes / GIB:.3f} GiB of tensors, the limit is {self.limit_bytes / GIB:.3f} GiB"
            )

    def _add(self, size: int) -> None:
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
