"""Memory of tensors on the CPU, counted as they come and go, with a limit that raises as a GPU's allocator does."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from project.hardware import GIB


class LiveMemory(TorchDispatchMode):
    """Counts the bytes of every tensor that is made while this is active and still alive. Costs microseconds per call.

    What one operation needs only inside itself is not seen. A compiled network runs eagerly meanwhile. Above
    ``limit_bytes`` an operation raises ``torch.OutOfMemoryError``.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        super().__init__()
        self.limit_bytes = limit_bytes
        self.live_bytes = self.peak_bytes = 0
        self._storages: dict[int, weakref.ref[Any]] = {}

    def count(self, tensors: Iterable[Any]) -> None:
        """Count tensors that were made before, such as weights; one that is counted already is not counted again."""
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                key, size = id(storage), storage.nbytes()  # PyTorch keeps one Python object per living storage
                if key not in self._storages:
                    self._storages[key] = weakref.ref(storage, partial(self._forget, key, size))
                    self.live_bytes += size
                    self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        if self.limit_bytes is not None and self.live_bytes > self.limit_bytes:
            limit = f"the limit is {self.limit_bytes / GIB:.3f} GiB"
            raise torch.OutOfMemoryError(f"{self.live_bytes / GIB:.3f} GiB of tensors, {limit}")

    def _forget(self, key: int, size: int, _: object) -> None:
        del self._storages[key]
        self.live_bytes -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count(tree_leaves(result))
        return result
