from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TRY = """
source configs/completion.bash
for line in "$@"; do
  read -ra COMP_WORDS <<< "$line"
  COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
  _project_complete
  echo "${COMPREPLY[@]}"
done
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(
    "completed",
    [
        {
            "python -m project.tes": "project.test",
            "python -m project.rename --li": "--library",
            "python x --d": "",
        },
        pytest.param(  # each asks for help three times, and imports torch for it
            {
                "python -m project.test --ckpt": "--ckpt_path",
                "python -m project.fit --data.train": "--data.train_samples",
            },
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_bash_completes_commands_and_their_options(completed: dict[str, str]) -> None:
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'unbroken' / 'tests'}",
    }
    told = subprocess.run(
        ["bash", "-c", TRY, "bash", *completed],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.splitlines() == list(completed.values())
