"""``.ci/gpu``: three parts, each short enough for a lease of a GPU, tried out here without one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.own_environment import REPOSITORY

# and a result of each
PARTS = {
    "tests": "training.log",
    "accuracy": "runs/default-1/summary.json",
    "tables": "overhead-64.json",
}


def gpu_script(
    *arguments: str, cwd: Path = REPOSITORY, **variables: str
) -> subprocess.CompletedProcess[str]:
    words = ["bash", str(REPOSITORY / ".ci" / "gpu"), *arguments]
    return subprocess.run(
        words, cwd=cwd, env={**os.environ, **variables}, capture_output=True, text=True, timeout=280
    )


def test_the_help_names_every_step_and_no_part_may_take_nine_minutes() -> None:
    told = gpu_script("--help")
    assert told.returncode == 0, told.stderr
    _, *parts = re.split(r"\n(?=\w+:\n)", told.stdout)
    assert [part.split(":")[0] for part in parts] == list(PARTS)
    for part in parts:
        steps = re.findall(r"about +([\d.]+) min, at most +(\d+) s", part)
        assert sum(int(limit) for _, limit in steps) < 540
        assert sum(60 * float(minutes) for minutes, _ in steps) < sum(
            int(limit) for _, limit in steps
        )


@pytest.mark.nightly
def test_without_a_gpu_a_part_says_so_and_ends(tmp_path: Path) -> None:
    ended = gpu_script(
        "tables", str(tmp_path), str(tmp_path), PYTHON=sys.executable, CUDA_VISIBLE_DEVICES=""
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "error: tables needs a GPU" in ended.stderr
    assert gpu_script("table").returncode == 2


@pytest.mark.nightly
@pytest.mark.parametrize("part", PARTS)
def test_a_part_can_be_tried_out_on_a_cpu(tmp_path: Path, part: str) -> None:
    ended = gpu_script(
        part,
        "out",
        ".",
        "--quick",
        cwd=tmp_path,
        PYTHON=sys.executable,
        GIT_COMMIT="abc",
        GIT_DIR="/nowhere",
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    with tarfile.open(tmp_path / "out" / f"{part}.tar.gz") as archive:
        names = {name.removeprefix(f"{part}/") for name in archive.getnames()}
    assert {"steps.csv", "hardware.txt", PARTS[part]} <= names
    assert "commit abc" in (tmp_path / "out" / part / "hardware.txt").read_text()
    if part != "tests":
        assert (
            json.loads((tmp_path / "out" / part / PARTS[part]).read_text())["git_commit"] == "abc"
        )
