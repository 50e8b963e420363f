"""``python -m project.benchmark``: this machine's tables, one file per table. Nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

TABLES = {
    "devices": "every device and precision here: speed, speed-up over CPU float32, accuracy, peak memory",
    "loaders": "this project's loader and a plain PyTorch loop's: milliseconds per batch",
    "memory": "peak per precision, activation checkpointing, accumulation, batch size; its parts",  # feature: memory
    "overhead": "what each feature of a run costs, against plain PyTorch loops",
    "accuracy": "a configuration over several seeds: accuracy, time, time to a target",
}
Row = dict[str, Any]  # of a table, by column


@dataclass(frozen=True)
class Settings:
    """How much is measured. All but the last three are options of the same name."""

    n: int = 5  # measurements behind every median; seeds, for accuracy
    quick: bool = False  # tiny sizes
    networks: Sequence[str] = ("chosen", "ResNet18")  # of devices; chosen is --model.network
    precisions: Sequence[str] = ("32-true", "tf32", "16-mixed", "bf16-mixed")  # of devices and memory
    batch_sizes: Sequence[int] = ()  # of devices (besides the configured one) and memory; none: their own choice
    workers: Sequence[int] = (0, 2, 4)  # of loaders
    target: float = 0.99  # accuracy, 0-1, whose time accuracy reports
    baseline: bool = False  # whether accuracy also times a plain PyTorch loop to the target, which takes minutes
    fit_flags: Sequence[str] = ()  # flags of fit that say what is measured
    batch_size: int = 0  # that these flags set; 0 where the data module has none
    each_feature: bool = True  # whether overhead also leaves out one feature after the other
