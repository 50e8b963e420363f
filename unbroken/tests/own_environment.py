"""The environment of a test: nothing of the caller's, and where processes find these files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
# Where the processes that tests start find these files, and the program that they run
SEARCHED = [REPOSITORY / "unbroken" / "tests", REPOSITORY / "unbroken", REPOSITORY]
# Variables that tell a process its place among others. A test must not inherit them.
FOREIGN = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "PL_GLOBAL_SEED",
    "UNBROKEN_RANK_ZERO_DECISION",
    "UNBROKEN_RANK_ZERO_PID",
)


def no_surprises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a test an environment that neither the caller nor an earlier test has changed."""
    for name in FOREIGN:
        # It is set first, so that monkeypatch also removes what the test itself leaves behind.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    # To import W&B is most of a short run's time. test_wandb.py has it offline.
    monkeypatch.setenv("WANDB_MODE", "disabled")
    for folder in reversed(SEARCHED):
        monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
