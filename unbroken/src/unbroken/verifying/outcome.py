"""What a run has left in its folder: checkpoints, metrics.csv, the test's result."""

from __future__ import annotations

import csv
import json
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from unbroken.verifying.digests import Entry, of_plain, of_tensor
from unbroken.verifying.recorder import BEST, LOGGED, MEASURED, TEST

# Columns of metrics.csv and entries of summary.json that measure time, by parts of their names.
SECONDS = ("seconds", "_sec", "_ms")


def is_measured(name: str) -> bool:
    """Whether a value measures the machine, and not the training."""
    return name.startswith(MEASURED) or any(each in name for each in SECONDS)


def outcome_of(folder: Path) -> dict[str, Entry]:
    """The entries of a run's files, wherever in the folder they are."""
    found: dict[str, Entry] = {}
    for path in sorted(folder.rglob("best.ckpt")):
        found |= _checkpoint(path)
    for path in sorted(folder.rglob("summary.json")):
        summary = json.loads(path.read_text(encoding="utf-8"))
        for name, value in summary.items():
            if name.startswith("test") and isinstance(value, int | float):
                found[f"{TEST}:{name}"] = of_plain(value)
            elif name in ("best_epoch", "monitor", "mode", "epochs", "steps"):
                found[f"{BEST}:{name}"] = of_plain(value)
    for path in sorted(folder.rglob("metrics.csv")):
        found |= _metrics(path)
    return found


def _checkpoint(path: Path) -> dict[str, Entry]:
    with warnings.catch_warnings():
        # That sparse tensors are checked takes time, and is no fault.
        warnings.simplefilter("ignore", UserWarning)
        content: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
    found = {f"{BEST}:step": of_plain(content.get("global_step"))}
    for name, value in content["state_dict"].items():
        entry = of_tensor(value) if isinstance(value, Tensor) else of_plain(value)
        found[f"{BEST}:{name}"] = entry
    return found


def _metrics(path: Path) -> dict[str, Entry]:
    columns: dict[str, list[str]] = {}
    with open(path, newline="", encoding="utf-8") as file:
        for number, row in enumerate(csv.DictReader(file)):
            for name, cell in row.items():
                if cell and not is_measured(name):
                    columns.setdefault(name, []).append(f"{number} {cell}")
    return {
        f"{LOGGED}:metrics.csv {name}": Entry(
            of_plain(cells).digest, f"{len(cells)} rows, last {cells[-1].partition(' ')[2]}"
        )
        for name, cells in columns.items()
    }
