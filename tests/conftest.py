"""What every test of the template has: a folder of its own, and no W&B."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Threads that wait for each other take longer than small tensors do. torch reads the variable as it
# is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, in which a run leaves its files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setenv("PL_GLOBAL_SEED", "")
    monkeypatch.delenv("PL_GLOBAL_SEED")
    return tmp_path
