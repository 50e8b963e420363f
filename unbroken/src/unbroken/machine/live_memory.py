"""How much memory the tensors of a step take on the CPU, whose allocator does not tell."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from unbroken.lightning_internals import results_of_operations
from unbroken.machine.hardware import GIB


class LiveMemory:
    """Counts the bytes of every CPU tensor that is made while this is active and still alive.

    What one operation needs for itself is not counted. Counting costs microseconds for each
    operation, and a compiled network runs eagerly. Use it in a ``with`` statement, or call
    ``start`` and ``close``.

    Args:
        limit_bytes: Above it, an operation raises ``torch.OutOfMemoryError``. None: no limit.

    Attributes:
        live_bytes: Bytes of the counted tensors that are alive now.
        peak_bytes: The most that were alive at a time.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.live_bytes = 0
        self.peak_bytes = 0
        self._counted: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._watching = ExitStack()

    def start(self) -> None:
        """Count from now on."""
        self._watching.enter_context(results_of_operations(self.count))

    def close(self) -> None:
        """Count no more. Nothing happens where counting has not begun."""
        self._watching.close()

    def __enter__(self) -> LiveMemory:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def count(self, tensors: Iterable[Any]) -> None:
        """Count tensors that were made before, such as weights. A tensor that is counted already
        counts once.
        """
        for tensor in tensors:
            if not isinstance(tensor, Tensor) or tensor.device.type != "cpu":
                continue
            # A sparse tensor has no storage of its own. Its indices and values are dense, and are
            # counted. A lazy parameter has none yet.
            if tensor.layout is torch.strided and not torch.nn.parameter.is_lazy(tensor):
                self._count_storage(tensor.untyped_storage())
        if self.limit_bytes is not None and self.live_bytes > self.limit_bytes:
            used = f"{self.live_bytes / GIB:.3f} GiB"
            limit = f"{self.limit_bytes / GIB:.3f} GiB"
            raise torch.OutOfMemoryError(f"{used} of tensors, the limit is {limit}")

    def _count_storage(self, storage: torch.UntypedStorage) -> None:
        # PyTorch keeps one Python object per storage while the storage lives.
        if storage not in self._counted:
            self._counted.add(storage)
            weakref.finalize(storage, self._add, -storage.nbytes())
            self._add(storage.nbytes())

    def _add(self, size: int) -> None:
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
