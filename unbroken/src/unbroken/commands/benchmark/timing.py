"""How everything here is timed: in turn, several times, with a median and a spread."""

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

from tqdm import tqdm  # type: ignore[import-untyped]
from unbroken.errors import UserError
from unbroken.tables import format_cell

K = TypeVar("K")
T = TypeVar("T")
LONGEST_REASON = 200


def alternate(table: str, variants: Mapping[K, Callable[[], T]], rounds: int) -> dict[K, list[T]]:
    """Results of every variant (name → one measurement), measured ``rounds`` times in turn."""
    results: dict[K, list[T]] = {name: [] for name in variants}
    order: list[K] = []
    for turn in range(rounds):
        names = list(variants)
        # Every other round goes backwards, so that a machine that grows slower or busier affects
        # all variants alike.
        order += names if turn % 2 == 0 else names[::-1]
    # The bar is on stderr. A log file gets none.
    bar = tqdm(order, desc=table, leave=False, disable=None)
    for name in bar:
        bar.set_postfix_str(format_cell(name))
        results[name].append(variants[name]())
    return results


def median_and_spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """The columns of a measured quantity.

    ``name``: the median; ``n``; ``spread_pct``: (largest − smallest) / median, 0 or more, left out
    for one value.
    """
    median = statistics.median(values)
    row: dict[str, float] = {name: median, "n": len(values)}
    if len(values) > 1:
        row["spread_pct"] = 100 * (max(values) - min(values)) / median
    return row


class Attempt(Generic[T]):
    """A measurement that a table chose itself. Where it fails, it is named once and left out.

    Such is a batch size that is too large for a GPU, or one that leaves a single sample to a
    network with BatchNorm. Calling it returns None then.
    """

    def __init__(self, name: str, measure: Callable[[], T]) -> None:
        self.name = name
        self.measure = measure
        self.has_failed = False

    def __call__(self) -> T | None:
        """Measure once."""
        if self.has_failed:
            return None
        try:
            return self.measure()
        except UserError:
            raise
        except Exception as error:
            self.has_failed = True
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:LONGEST_REASON]
            print(f"{self.name} is left out: {reason}", file=sys.stderr)
            return None
