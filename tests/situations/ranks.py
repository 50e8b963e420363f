"""Two processes that train together."""

from __future__ import annotations

from torch.utils.data import DataLoader

from tests.situations.hooks import ForwardMean, OwnState, Rate
from tests.situations.loaders import Noisy, reads
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
