"""Memory of tensors on the CPU, counted as they come and go, with a limit that raises as a GPU's allocator does."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from project.hardware import GIB


class LiveMemory(TorchDispatchMode):
    """Counts the bytes of every tensor that is made while this is active and still alive. Costs microseconds per call.

    Temporary memory inside one operation is not counted. A compiled network runs eagerly meanwhile.

    Args:
        limit_bytes: Raise ``torch.OutOfMemoryError`` when more than this is alive; None for no limit.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        super().__init__()
        self.limit_bytes = limit_bytes
        self.live_bytes = 0
        self.peak_bytes = 0
        self._storages: dict[int, tuple[weakref.ref[Any], int]] = {}

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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count(tree_leaves(result))
        return result
