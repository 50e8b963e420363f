"""The largest batch that fits, by doubling and then halving the gap."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from project.tuning.training_steps import Measured

FIRST = 16


@dataclass
class Search:
    """What the search found."""

    largest: int = 0  # 0: not even one sample fits
    limited_by: str = "memory"  # or what else kept it from trying larger ones
    tries: list[Measured] = field(default_factory=list)  # those that fitted, in the order they were made
    smallest_failed: int | None = None


def find_largest(
    one_try: Callable[[int], Measured],
    ceiling: int,
    ceiling_name: str,
    max_step_seconds: float,
    tell: Callable[[str], None],
) -> Search:
    """The exact largest batch size for which ``one_try`` does not raise ``torch.OutOfMemoryError``.

    Args:
        one_try: Makes training steps at a batch size.
        ceiling: Largest size to try.
        ceiling_name: What sets it, for the report.
        max_step_seconds: No size is doubled whose step takes longer than half of this: larger ones would not end.
        tell: Is told of every try.
    """
    search = Search()

    def fits(size: int) -> bool:
        try:
            search.tries.append(one_try(size))
        except torch.OutOfMemoryError:
            search.smallest_failed = size
            tell(f"batch size {size:,}: out of memory")
            return False
        search.largest = size
        tell(f"batch size {size:,}: fits, {search.tries[-1].step_ms:,.1f} ms per step")
        return True

    size = min(FIRST, ceiling)
    while fits(size):
        if size == ceiling:
            search.limited_by = ceiling_name
            return search
        if search.tries[-1].step_ms > 500 * max_step_seconds:
            search.limited_by = "larger steps take longer than --max_step_seconds"
            return search
        size = min(2 * size, ceiling)
    failed = size
    while failed - search.largest > 1:
        middle = (search.largest + failed) // 2
        if not fits(middle):
            failed = middle
    return search
