from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TRY = """
source configs/completion.bash
for line in "$@"; do
  read -ra COMP_WORDS <<< "$line"; COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _project_complete; echo "${COMPREPLY[@]}"
done
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_commands_and_their_options() -> None:
    lines = [
        "python -m project.tes",
        "python -m project.test --ckpt",
        "python -m project.fit --data.train",
        "python x --d",
    ]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    told = subprocess.run(
        ["bash", "-c", TRY, "bash", *lines], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert told.stdout.splitlines() == ["project.test", "--ckpt_path", "--data.train_samples", ""]
