"""``python -m project.benchmark``: this machine's tables. Nothing heavy is imported here."""

from typing import Any

# Table → the column that its chart shows, and what it says.
TABLES = {
    "devices": ("samples_per_sec", "devices × precisions: speed, speed-up over CPU float32, accuracy, peak memory"),
    "loaders": ("ms_per_batch", "this project's loader and a plain PyTorch loop's: milliseconds per batch"),
    "memory": ("peak_mib", "peak by precision, activation checkpointing, accumulation, batch size"),  # feature: memory
    "overhead": ("epoch_s", "what a run costs against loops written by hand"),
}
Row = dict[str, Any]  # of a table, by column
