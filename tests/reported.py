"""A small run in a process of its own, with W&B offline, made once for all tests that look at what it leaves behind."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.commands import SMALL, run


@functools.cache
def reported_run() -> Path:
    """The folder of a finished run. Read only."""
    root = Path(tempfile.mkdtemp(prefix="reported-"))
    environ = {**os.environ, "WANDB_MODE": "offline", "PYTHONPATH": str(Path(__file__).parent.parent)}
    environ.pop("WANDB_API_KEY", None)
    done = run("fit", *SMALL, "--run_name", "small", cwd=root, env=environ)
    assert done.returncode == 0, done.stderr
    (root / "output.txt").write_text(done.stdout + done.stderr)
    return root / "checkpoints" / "small"


def wandb_folders(folder: Path) -> list[Path]:
    """The offline W&B folders of a run, in the order they were made."""
    return sorted((folder / "wandb").glob("offline-run-*"))


def wandb_records(folder: Path) -> list[dict[str, Any]]:
    """What one offline W&B folder holds, by W&B's own reader: a record per entry, its content under its type."""
    reader = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(folder)]
    text = subprocess.run(reader, capture_output=True, text=True, check=True, timeout=60).stdout
    return [json.loads(line) for line in text.splitlines()]


def of_type(records: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """The contents of all records of a type, such as ``history`` or ``metric``."""
    return [record[kind] for record in records if record["type"] == kind]
