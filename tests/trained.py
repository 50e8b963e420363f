"""A run trained once for all tests that need a checkpoint, on the bundled digits."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

from filelock import FileLock

EPOCHS = 3


@functools.cache
def trained_checkpoint() -> Path:
    """``best.ckpt`` of the default network after a few epochs. Other files of the run lie beside it. Read only."""
    root = Path(os.environ["TESTS_SHARED_FOLDER"]) / "runs"
    flags = ["--data.source", "sample", "--max_epochs", str(EPOCHS), "--data.batch_size", "64", "--accelerator", "cpu"]
    command = [sys.executable, "-m", "project.fit", *flags, "--default_root_dir", str(root), "--run_name", "trained"]
    with FileLock(f"{root}.lock"):
        if not (root / "trained" / "summary.json").exists():  # another worker's tests may have been first
            # a process of its own, for the thread settings that must come before torch
            subprocess.run(command, check=True, capture_output=True, env={**os.environ, "WANDB_MODE": "disabled"})
    return root / "trained" / "best.ckpt"
