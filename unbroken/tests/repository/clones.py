"""Clones of what is committed here, and of what is changed in files that git knows."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    command = ["git", *who, *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


def fresh_clone(folder: Path) -> Path:
    """Clone this repository into ``folder/clone``; skips the test where it is none."""
    if subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True).returncode:
        pytest.skip("not a git clone")
    state = git(ROOT, "stash", "create").strip() or git(ROOT, "rev-parse", "HEAD").strip()
    clone = folder / "clone"
    git(folder, "clone", "--quiet", "--shared", "--no-checkout", str(ROOT), str(clone))
    git(clone, "checkout", "--quiet", state)
    return clone


def commit(clone: Path) -> None:
    git(clone, "add", "--all")
    git(clone, "commit", "--quiet", "--message", "Changed")
