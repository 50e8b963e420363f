"""A stretch of training that is measured as one: what was counted in it, and the rates that follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass
class Window:
    """Counts of one rank since ``started``.

    Args:
        started: The clock's reading (s) at the window's beginning; moved on by what was excluded.
        batches: Batches trained on.
        steps: Optimizer steps done; fewer than batches with ``--accumulate_grad_batches``.
        samples: Samples in those batches; 0 where a batch does not tell.
        waited: Seconds in which training waited for the next batch.
    """

    started: float
    batches: int = 0
    steps: int = 0
    samples: int = 0
    waited: float = 0.0

    def totals(self, now: float) -> list[float]:
        """Seconds up to ``now``, batches, samples and seconds waited: what is summed over ranks."""
        return [now - self.started, self.batches, self.samples, self.waited]


def rates(totals: Sequence[Sequence[float]], steps: int) -> dict[str, float]:
    """The ``throughput/*`` metrics of one window.

    Args:
        totals: :meth:`Window.totals` of every rank.
        steps: Optimizer steps in the window, the same on every rank.
    """
    world_size = len(totals)
    seconds, batches, samples, waited = (sum(column) for column in zip(*totals, strict=True))
    if seconds <= 0 or not steps:
        return {}
    seconds_per_rank = seconds / world_size
    metrics = {
        "throughput/batches_per_sec": batches / seconds_per_rank,
        "throughput/step_ms": 1000 * seconds_per_rank / steps,
        "throughput/data_wait_pct": 100 * waited / seconds,
    }
    if samples:
        metrics["throughput/samples_per_sec"] = samples / seconds_per_rank
        metrics["throughput/device_samples_per_sec"] = samples / seconds
    return metrics


def samples_in(batch: Any) -> int:
    """Length of the first tensor found in a batch (tensors in tuples, lists or mappings), 0 where there is none."""
    while not isinstance(batch, Tensor):
        if isinstance(batch, (tuple, list)) and batch:
            batch = batch[0]
        elif isinstance(batch, Mapping) and batch:
            batch = next(iter(batch.values()))
        else:
            return 0
    return batch.size(0) if batch.ndim else 1
