"""What every test of the template has: a folder of its own, and no W&B."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

# Threads that wait for each other take longer than small tensors do. torch reads the variable as it
# is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current folder, in which a run leaves its files."""
    monkeypatch.chdir(tmp_path)
    # Variables that a run sets for its process end with the test.
    with patch.dict(os.environ, WANDB_MODE="disabled"):
        yield tmp_path
