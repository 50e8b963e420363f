"""What uncommitted.diff holds: enough to rebuild the code, and nothing that is none of a run's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from unbroken.run.uncommitted import MOST_BYTES, MOST_FILES, write_uncommitted

NEW = {
    "mine/model.py": "class Model:\n    pass\n",
    "mine/parts/__init__.py": "",
    "mine/parts/two words.py": "a = 1\n\n\x0cb = 2",
    "mine/parts/größe.py": "a = 'ä'\r\n",
    "configs/mine.yaml": "model: {lr: 0.1}\n",
}
NAMES_ALONE = {
    "mine/.secret.py": "hidden",
    "mine/.keys/key.py": "hidden folder",
    "configs/notes.txt": "no source",
    "mine/large.py": "#" * (MOST_BYTES + 1),
    "mine/binary.py": "a\0b",
    "mine/ignored.py": "ignored",
    "elsewhere/new.py": "beside",
    "new.py": "above",
}


def git(folder: Path, *words: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text.encode())


@pytest.fixture(params=["", "work/clone"], ids=["top", "below"])
def clone(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The folder above the package, which is the repository's top or lies below it."""
    top = tmp_path / "top"
    clone = top / request.param
    write(clone, {"mine/fit.py": "before\n", ".gitignore": "ignored.py\n"})
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        git(top, *words)
    return clone


def written(clone: Path, tmp_path: Path) -> str:
    write_uncommitted(tmp_path, clone / "mine")
    return (tmp_path / "uncommitted.diff").read_text(encoding="utf-8")


def test_the_code_of_a_run_is_rebuilt_from_its_commit_and_the_file(
    clone: Path, tmp_path: Path
) -> None:
    write(clone, {"mine/fit.py": "after\n", **NEW})
    written(clone, tmp_path)
    top = Path(git(clone, "rev-parse", "--show-toplevel").strip())
    again = tmp_path / "again"
    git(tmp_path, "clone", "-q", str(top), str(again))
    git(again, "apply", str(tmp_path / "uncommitted.diff"))
    for name, text in {"mine/fit.py": "after\n", **NEW}.items():
        found = again / clone.relative_to(tmp_path / "top") / name
        assert found.read_bytes().decode() == text, name


def test_other_files_stay_names(clone: Path, tmp_path: Path) -> None:
    write(clone, {**NAMES_ALONE, "mine/model.py": "shown"})
    if sys.platform != "win32":
        write(tmp_path, {"secret": "behind a link"})
        (clone / "mine" / "link.py").symlink_to(tmp_path / "secret")
        (clone / "mine" / 'quo"te.py').write_text("quoted")
        # Whoever opened it would wait for ever.
        os.mkfifo(clone / "mine" / "pipe.py")
    text = written(clone, tmp_path)
    made = [line for line in text.splitlines() if line.startswith("diff --git")]
    assert len(made) == 1
    assert "+shown" in text


def test_of_a_huge_number_of_new_files_some_are_shown(clone: Path, tmp_path: Path) -> None:
    write(clone, {f"mine/made/{number}.py": "a = 1\n" for number in range(MOST_FILES + 50)})
    text = written(clone, tmp_path)
    assert text.count("diff --git") == MOST_FILES


def test_a_repository_above_that_does_not_know_the_package_is_not_read(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    write(tmp_path, {"copy/mine/fit.py": "new\n"})
    write_uncommitted(tmp_path, tmp_path / "copy" / "mine")
    assert not (tmp_path / "uncommitted.diff").exists()
