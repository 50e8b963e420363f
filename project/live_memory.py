"""When memory is used up: what errors say so, and the CPU's tensors counted, with a limit as a GPU has one."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch.utilities.memory import is_oom_error
from torch import Tensor

from project.engine.lightning_internals import each_result
from project.hardware import GIB

# What cuBLAS, cuDNN and MPS say when memory is used up, besides what Lightning's is_oom_error knows of CUDA and the CPU
OUT_OF_MEMORY = ("MPS backend out of memory", "_STATUS_ALLOC_FAILED", "nable to find an engine")


def is_out_of_memory(exception: BaseException) -> bool:
    """Whether an exception says that a device's or the host's memory is used up."""
    if isinstance(exception, (torch.OutOfMemoryError, MemoryError)):
        return True
    if not (isinstance(exception, RuntimeError) and len(exception.args) == 1 and isinstance(exception.args[0], str)):
        return False
    return is_oom_error(exception) or any(words in exception.args[0] for words in OUT_OF_MEMORY)


class LiveMemory:
    """Counts the bytes of every tensor that is made while this is active and still alive. Costs microseconds per call.

    Temporary memory inside one operation is not counted. A compiled network runs eagerly meanwhile.

    Args:
        limit_bytes: Raise ``torch.OutOfMemoryError`` when more than this is alive; None for no limit.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.live_bytes = 0
        self.peak_bytes = 0
        self._storages: dict[int, tuple[weakref.ref[Any], int]] = {}
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
                self._count_storage(tensor.untyped_storage())
        if self.limit_bytes is not None and self.live_bytes > self.limit_bytes:
            raise torch.OutOfMemoryError(
                f"{self.live_bytes / GIB:.3f} GiB of tensors, the limit is {self.limit_bytes / GIB:.3f} GiB"
            )

    def _count_storage(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)  # PyTorch keeps one Python object per storage for as long as the storage lives
        if key in self._storages:
            return
        size = storage.nbytes()
        self._storages[key] = (weakref.ref(storage, lambda _: self._forget(key)), size)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _forget(self, key: int) -> None:
        self.live_bytes -= self._storages.pop(key)[1]
