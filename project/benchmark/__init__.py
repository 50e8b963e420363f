"""``python -m project.benchmark``: this machine's tables. Nothing heavy is imported here."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Table → the column that its chart shows, and what it says.
TABLES = {
    "devices": ("samples_per_sec", "devices × precisions: speed, speed-up over CPU float32, accuracy, peak memory"),
    "loaders": ("ms_per_batch", "this project's loader and a plain PyTorch loop's: milliseconds per batch"),
    "memory": ("peak_mib", "peak by precision, activation checkpointing, accumulation, batch size"),  # feature: memory
    "overhead": ("epoch_s", "what a run costs against loops written by hand"),
}
Row = dict[str, Any]  # of a table, by column


@dataclass
class Settings:
    """What is asked for. All but the last two are options of the same name."""

    n: int  # measurements behind every median
    output: Path | None = None  # .json or .csv
    plot: Path | None = None  # .png
    quick: bool = False  # tiny sizes
    networks: Sequence[str] = ("chosen", "ResNet18")  # of devices; chosen is --model.network
    precisions: Sequence[str] = ("32-true", "tf32", "16-mixed", "bf16-mixed")  # of devices and memory
    batch_sizes: Sequence[int] = ()  # of devices (besides the configured one) and memory; none: their own choice
    workers: Sequence[int] = (0, 2, 4)  # of loaders
    fit_flags: Sequence[str] = ()  # flags of fit that say what is measured
    batch_size: int = 0  # that these flags set; 0 where the data module has none
