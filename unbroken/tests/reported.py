"""What W&B has written of a run, and the finished run that most tests read."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.commands import finished_run as reported_run

__all__ = ["MONITORED", "of_type", "reported_run", "wandb_folders", "wandb_records"]

# What a CPU's monitors log
MONITORED = {
    *("optimizer/lr", "optimizer/grad_norm"),
    *(f"throughput/{rate}_per_sec" for rate in ("samples", "device_samples", "batches")),
    *("throughput/step_ms", "throughput/data_wait_pct"),
    "memory/rss_gib",
}


def wandb_folders(folder: Path) -> list[Path]:
    """The offline W&B folders of a run, in the order they were made."""
    return sorted((folder / "wandb").glob("offline-run-*"))


@functools.cache
def wandb_records(folder: Path) -> list[dict[str, Any]]:
    """What one offline W&B folder holds, by W&B's own reader: a record per entry, its content under
    its type.
    """
    reader = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(folder)]
    text = subprocess.run(reader, capture_output=True, text=True, check=True, timeout=60).stdout
    return [json.loads(line) for line in text.splitlines()]


def of_type(records: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """The contents of all records of a type, such as ``history`` or ``metric``."""
    return [record[kind] for record in records if record["type"] == kind]
