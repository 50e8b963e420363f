"""Memory that grows by much the same amount every epoch: what a leak looks like from outside."""

from __future__ import annotations

from itertools import pairwise

MIB = 1024**2
# Epochs in a row that must have grown. The first epoch's end is the baseline: before it, caches and workers fill up.
EPOCHS = 4


class MemoryGrowth:
    """Watches one kind of memory at epoch ends.

    Args:
        place: Named in the report, such as ``host``.
        least_mib: Growth per epoch below which nothing is reported; allocators and loggers grow a little, too.
    """

    def __init__(self, place: str, least_mib: float) -> None:
        self.place = place
        self.least_mib = least_mib
        self.mib: list[float] = []

    def note(self, used_bytes: int) -> str | None:
        """Add an epoch's end. Returns the report, with numbers, while the growth looks like a leak.

        That is: each of the last four epochs added at least ``least_mib``, and the least of them at least a third of
        the most (a cache that fills up adds less and less).
        """
        self.mib.append(used_bytes / MIB)
        recent = self.mib[-EPOCHS - 1 :]
        if len(recent) <= EPOCHS:
            return None
        added = [after - before for before, after in pairwise(recent)]
        if min(added) < self.least_mib or min(added) < max(added) / 3:
            return None
        return (
            f"{self.place} memory looks like it leaks: {sum(added) / EPOCHS:.1f} MiB more after each of the last "
            f"{EPOCHS} epochs ({recent[0]:.0f} MiB → {recent[-1]:.0f} MiB). Something keeps tensors alive from step to "
            "step: keep loss.item() or loss.detach(), never the loss or outputs with their graph."
        )
