"""How ranks agree between two steps that something is due: one small all-reduce a step that nobody waits for."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class Agreement:
    """The largest request of any rank, known to all ranks at the same step.

    Each call starts an all-reduce over CPU memory (gloo, so never a wait for a GPU) and returns the outcome of the one
    started a call earlier, which has long arrived. Lightning instead broadcasts rank 0's flag on the device at
    every step and waits for it, and so neither hears the other ranks nor leaves the device alone.
    """

    def __init__(self, world_size: int) -> None:
        self.group: Any = dist.new_group(backend="gloo") if world_size > 1 else None
        self._pending: tuple[Any, torch.Tensor] | None = None

    def latest(self, request: int) -> int:
        """Hand in this rank's request; returns what all ranks agreed on a call ago (alone: the request itself)."""
        if self.group is None:
            return request
        agreed = self._outcome()
        value = torch.tensor([request])
        self._pending = (dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self.group, async_op=True), value)
        return agreed

    def settle(self, request: int) -> int:
        """Agree now, waiting for the other ranks. Every rank must call it."""
        if self.group is None:
            return request
        value = torch.tensor([max(request, self._outcome())])
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self.group)
        return int(value)

    def gather(self, value: Any) -> list[Any]:
        """``value`` of every rank, in rank order. Every rank must call it."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value, group=self.group)
        return values

    def _outcome(self) -> int:
        if self._pending is None:
            return 0
        work, value = self._pending
        self._pending = None
        work.wait()
        return int(value)
