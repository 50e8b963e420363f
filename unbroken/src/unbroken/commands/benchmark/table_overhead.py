"""The table ``overhead``: what a run costs against loops written by hand."""

import statistics
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from unbroken.cli.cli import Configuration
from unbroken.commands.benchmark import in_turn, loops_by_hand, timing
from unbroken.results.facts import network_of
from unbroken.tables import Row


def measure_overhead(config: Configuration, options: Namespace) -> Iterator[Row]:
    """One row per loop: seconds per epoch, and the median of its ratios to the floor.

    A ratio is that of two epochs of the same round. An epoch is training, validation and saving;
    the floor does not save, and the plain PyTorch loop only trains.
    """
    # This refuses other data before a process starts.
    loops_by_hand.loops_by_hand(config)
    network = type(network_of(config.module)).__name__
    loops = loops_by_hand.LOOPS
    measured = in_turn.epochs_in_turn(
        config.program.package, "overhead", loops, options.fit_flags, options.n
    )
    floors = measured[loops_by_hand.FLOOR]
    for name, epochs in measured.items():
        row: dict[str, Any] = {"loop": name, "network": network, "batch_size": options.batch_size}
        row |= timing.median_and_spread("epoch_s", [epoch.epoch_s for epoch in epochs])
        row["train_s"] = statistics.median(epoch.train_s for epoch in epochs)
        rounds = list(zip(epochs, floors, strict=True))
        train_ratios = [epoch.train_s / floor.train_s for epoch, floor in rounds]
        row["train_vs_floor"] = statistics.median(train_ratios)
        if name != loops_by_hand.PLAIN:
            ratios = [epoch.epoch_s / floor.epoch_s for epoch, floor in rounds]
            row["epoch_vs_floor"] = statistics.median(ratios)
            row["lowest"] = min(ratios)
            row["highest"] = max(ratios)
        yield row
