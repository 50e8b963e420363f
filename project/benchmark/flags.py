"""The options of the benchmark, and how much each table measures. Nothing heavy is imported here: --help is quick."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field

TABLES = {
    "devices": "every device and precision here: speed, speed-up over CPU float32, accuracy, peak memory",
    "loaders": "this project's loader and the course's variants: milliseconds per batch",
    "memory": "precision × activation checkpointing × accumulation × batch size: measured peak and what it is made of",
    "overhead": "what each feature of a run costs, against loops written by hand",
    "threads": "thread counts and wait policies, on an idle machine and beside a busy neighbour",
    "accuracy": "a configuration over several seeds: accuracy, time, time to a target",
}
# For --quick: seconds instead of minutes, and figures that say only that the command works.
QUICK = ["--data.source", "sample", "--data.train_samples", "1024", "--data.val_samples", "200"]
QUICK += ["--data.test_samples", "200"]


@dataclass
class Settings:
    """How much is measured. Every field but ``fit_flags`` and ``each_feature`` is an option of the same name.

    Args:
        n: Measurements behind every median; seeds, for ``accuracy``.
        quick: Tiny sizes.
        networks: Networks of ``devices``: ``chosen`` (``--model.network``) and ``ResNet18``.
        precisions: Precisions of ``devices`` and ``memory``.
        batch_sizes: Batch sizes of ``devices`` (besides the configured one) and ``memory``.
        workers: Worker counts of ``loaders``.
        target: Accuracy, 0-1, whose time ``accuracy`` reports.
        fit_flags: Flags of ``fit`` that say what is measured; filled in by :mod:`project.benchmark.measure`.
        baseline: Whether ``accuracy`` also times a plain loop to the target, which takes minutes.
        each_feature: Whether ``overhead`` also leaves out one feature after the other; not in a pass over all tables.
    """

    n: int = 5
    quick: bool = False
    networks: list[str] = field(default_factory=lambda: ["chosen", "ResNet18"])
    precisions: list[str] = field(default_factory=lambda: ["32-true", "tf32", "16-mixed", "bf16-mixed"])
    batch_sizes: list[int] = field(default_factory=list)
    workers: list[int] = field(default_factory=lambda: [0, 2, 4])
    target: float = 0.99
    fit_flags: list[str] = field(default_factory=list)
    baseline: bool = False
    each_feature: bool = True


def add_options(parser: argparse.ArgumentParser, table: str | None) -> None:
    """Add the options of one table, or where it is None those that all tables share."""
    add = parser.add_argument
    add("--output", metavar="FILE", help="also write what is printed, with the conditions: .json or .csv")
    add("--plot", metavar="FILE.png", help="chart (default: beside --output; none without it)")
    add("--quick", action="store_true", help="tiny sizes: tries the command out, measures nothing")
    in_whole_pass = "" if table else "; without a table mostly 3"
    add(
        "--n",
        type=int,
        metavar="N",
        help=f"measurements behind every median (accuracy: seeds; default: 5{in_whole_pass})",
    )
    if table == "devices":
        add("--networks", nargs="+", choices=["chosen", "ResNet18"], help="chosen is --model.network")
    if table in ("devices", "memory"):
        add("--precisions", nargs="+", choices=["32-true", "tf32", "16-mixed", "bf16-mixed"])
        add("--batch_sizes", nargs="+", type=int, metavar="B")
    if table == "loaders":
        add("--workers", nargs="+", type=int, metavar="W", help="worker counts to try (default: 0 2 4)")
    if table == "accuracy":
        add("--target", type=float, metavar="A", help="accuracy, 0-1, whose time is reported (default: 0.99)")
        add("--baseline", action="store_true", help="also time a plain loop (pytorch/examples' kind) to the target")
