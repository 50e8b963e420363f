"""The README's page for newcomers, done as it is written: its Python file, its config file, its command."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.promises import ROOT

PAGE = (ROOT / "README.md").read_text().partition("## Make it yours")[2].partition("\n## ")[0]


def block(language: str, containing: str) -> str:
    blocks = re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    (found,) = [text for text in blocks if containing in text]
    return found


@pytest.mark.skipif(not PAGE, reason="the README has no such page")
def test_the_readmes_page_for_newcomers_works_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python, config, command = block("python", "# mine.py"), block("yaml", "# mine.yaml"), block("bash", "mine.yaml")
    assert len(python.splitlines()) <= 40
    (tmp_path / "mine.py").write_text(python)
    (tmp_path / "mine.yaml").write_text(config)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    words = [sys.executable, *shlex.split(command)[1:], "--run_name", "mine", "--accelerator", "cpu"]
    ended = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
    assert json.loads((tmp_path / "checkpoints" / "mine" / "summary.json").read_text())["test/accuracy"] > 0.6
    # its own arguments are flags of a resumed run, too, without the config file
    width = words[words.index("--model.network.width") + 1]
    again = ["--run_name", "mine", "--ckpt_path", "auto", "--max_epochs", "3", "--model.network.width", width]
    resumed = subprocess.run([*words[:3], *again], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert resumed.returncode == 0, resumed.stderr
