"""Values that are logged in steps are added up over all ranks, so that they do not depend on the
number of devices.
"""

from typing import Any

import torch
from lightning.pytorch import Trainer
from unbroken import lightning_internals
from unbroken.stopping.ranks import gather_from_ranks, say

STEPS = ("training_step", "validation_step", "test_step")


def share_sums(trainer: Trainer) -> None:
    """Add up over all ranks, weighted by samples, what ``self.log`` has summed in the steps of an
    epoch, or of a loader.

    Only the module's author could set ``sync_dist=True``, and Lightning then counts ranks of 17 and
    16 samples as 16 each. A mean that is the same on all ranks does not change.
    """
    if trainer.world_size == 1:
        return
    entries = {}
    sums = {}
    for key, logged in lightning_internals.current_results(trainer):
        if can_be_joined(logged):
            entries[key] = logged
            sums[key] = float(logged.value), samples_in(logged)
    ranks = gather_from_ranks(sums)
    for key, logged in entries.items():
        # A rank may have logged a value that others have not.
        pairs = [rank[key] for rank in ranks if key in rank]
        values = [value for value, _ in pairs]
        total = join_of(logged)(values)
        logged.value = torch.tensor(total, dtype=torch.float64).to(logged.value)
        if logged.meta.is_mean_reduction:
            samples = sum(count for _, count in pairs)
            logged.cumulated_batch_size = torch.tensor(samples, device=logged.value.device)


def can_be_joined(logged: Any) -> bool:
    """Whether a value was logged in a step, and Lightning does not join it in another way."""
    if not logged.is_tensor or not logged.meta.fx.startswith(STEPS):
        return False
    is_plain_mean = logged.meta.is_mean_reduction and logged.meta.sync.group is None
    return is_plain_mean or not logged.meta.sync.should


def samples_in(logged: Any) -> int:
    """The samples in a mean; 0 for a value of another kind."""
    if not logged.meta.is_mean_reduction:
        return 0
    return int(logged.cumulated_batch_size)


def join_of(logged: Any) -> Any:
    """The function that joins the values of all ranks.

    A mean is kept as a sum, so its parts are added.
    """
    if logged.meta.is_max_reduction:
        return max
    if logged.meta.is_min_reduction:
        return min
    return sum


class UnsharedValues:
    """Tells once of each value that an evaluation logged outside of its step, with another value on
    each rank.

    Nobody can tell how to join such values: Lightning shows rank zero's.
    """

    def __init__(self) -> None:
        self._told: set[str] = set()

    def tell(self, trainer: Trainer) -> None:
        """Print a line for the values of this evaluation that differ among the ranks."""
        if trainer.world_size == 1:
            return
        names = set(differing(trainer)) - self._told
        if names:
            self._told |= names
            what = f"{', '.join(sorted(names))}, logged outside of the step"
            advice = "log it in the step, with self.log or as a torchmetrics metric."
            say(f"{what}, is of rank 0's samples alone: {advice}")


def differing(trainer: Trainer) -> list[str]:
    """The names of values that were logged at an end, not joined, and not equal on all ranks."""
    own: dict[str, str] = {}
    for _, logged in lightning_internals.current_results(trainer):
        at_an_end = logged.is_tensor and logged.meta.fx.endswith("_end")
        # Of a value that is logged by the step alone, no sum is kept.
        is_kept = at_an_end and logged.meta.on_epoch
        if is_kept and not logged.meta.sync.should:
            value = float(logged.value)
            if logged.meta.is_mean_reduction:
                value /= float(logged.cumulated_batch_size)
            own[logged.meta.name] = f"{value:.5g}"
    ranks = gather_from_ranks(own)
    return [name for name in own if any(rank.get(name) != own[name] for rank in ranks)]
