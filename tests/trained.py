"""A run trained once for all tests that need a checkpoint, on the bundled digits."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

EPOCHS = 3


@functools.cache
def trained_checkpoint() -> Path:
    """``best.ckpt`` of the default network after a few epochs. Other files of the run lie beside it. Read only."""
    root = Path(tempfile.mkdtemp(prefix="trained-"))
    flags = ["--data.source", "sample", "--max_epochs", str(EPOCHS), "--data.batch_size", "64", "--accelerator", "cpu"]
    command = [sys.executable, "-m", "project.fit", *flags, "--default_root_dir", str(root), "--run_name", "trained"]
    # a process of its own, for the thread settings that must come before torch
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "WANDB_MODE": "disabled"})
    return root / "trained" / "best.ckpt"
