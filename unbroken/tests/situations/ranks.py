"""Two processes that train together."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from tests.situations.hooks import ForwardMean, OwnState, Rate
from tests.situations.loaders import Noisy, StreamWithState, reads
from tests.situations.logged import LogsEveryWay, Wrapped
from tests.situations.optimizers import Accumulates
from tests.situations.situation import Task, add, table

add("two_ranks", Task, ranks=2)
add(
    "two_ranks_accumulate_and_validate_inside_epochs",
    Task,
    ranks=2,
    val_check_interval=2,
    accumulate_grad_batches=2,
)
add("two_ranks_lower_rates", Rate, ranks=2)
add("two_ranks_running_mean", ForwardMean, ranks=2)
add("two_ranks_save_what_they_count", OwnState, ranks=2)
add("two_ranks_log_every_way", LogsEveryWay, ranks=2)
add(
    "two_ranks_random_transforms",
    reads(lambda: DataLoader(Noisy(table(52)), 8, shuffle=True, num_workers=1)),
    ranks=2,
)
add("two_ranks_manual_accumulation", Accumulates, ranks=2)
add("two_ranks_metrics_around_metrics", Wrapped, ranks=2)


class LongerOnRankZero(IterableDataset[Any]):
    """A stream of seven batches of eight on rank 0, and of five on rank 1."""

    def __iter__(self) -> Iterator[Any]:
        count = 40 if os.environ.get("RANK") == "1" else 56
        return iter(table(count, int(os.environ.get("RANK", "0"))))


class PartOfRank(StreamWithState):
    """A stream with a state, which is at its end earlier on rank 1."""

    def __iter__(self) -> Iterator[Any]:
        rows = table(50)
        count = 30 if os.environ.get("RANK") == "1" else 50
        while self.next < count:
            self.next += 1
            yield rows[self.next - 1]
        self.next = 0


EARLY = "ended after 5 batches, before those of another rank: the epoch ends there for all ranks."
add(
    "two_ranks_streams_of_unequal_length",
    reads(lambda: DataLoader(LongerOnRankZero(), 8), lambda: DataLoader(LongerOnRankZero(), 8)),
    ranks=2,
    says=EARLY,
)
add(
    "two_ranks_accumulate_streams_of_unequal_length",
    reads(lambda: DataLoader(LongerOnRankZero(), 8)),
    ranks=2,
    accumulate_grad_batches=2,
    val_check_interval=2,
    says=EARLY,
)
add(
    "two_ranks_streams_with_state_of_unequal_length",
    reads(lambda: DataLoader(PartOfRank(), 8)),
    ranks=2,
    says="before those of another rank: the epoch ends there for all ranks.",
)
