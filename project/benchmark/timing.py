"""How everything here is timed: alternating runs, medians, and how far they spread."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch

from project.benchmark.steps import Steps

T = TypeVar("T")


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that was asked of it: only then may a clock be read."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def alternate(variants: Mapping[str, Callable[[], T]], rounds: int, steps: Steps) -> dict[str, list[T]]:
    """Results of every variant, ``rounds`` of each, one after the other in turn.

    In turn, and every other round backwards, so that a machine that grows slower or busier during the measurement
    does so for all variants alike.

    Args:
        variants: Name → function that does one measurement.
        rounds: Measurements per variant.
        steps: Told of every measurement.
    """
    results: dict[str, list[T]] = {name: [] for name in variants}
    for number in range(rounds):
        for name in list(variants)[:: -1 if number % 2 else 1]:
            steps.begin(f"{name} ({number + 1} of {rounds})")
            results[name].append(variants[name]())
    return results


def median_and_spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """``name``: the median; ``n``; ``spread_pct``: (largest − smallest) / median, 0 or more; left out for one value."""
    median = statistics.median(values)
    row: dict[str, float] = {name: median, "n": len(values)}
    if len(values) > 1 and median:
        row["spread_pct"] = 100 * (max(values) - min(values)) / median
    return row
