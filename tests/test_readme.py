"""The README: its length, its words, its links, and that every command and every snippet in it
works.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import project
from project.command_line.cli import configure

PACKAGE = project.__name__
ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```bash\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
LINES = [
    re.split(r"\s+# ", line)[0].strip()
    for text in BLOCKS
    for line in text.replace("\\\n", " ").splitlines()
]
PROSE = re.sub(r"^```.*?^```", "", README, flags=re.DOTALL | re.MULTILINE)
LINES += [span for span in re.findall(r"`([^`\n]+)`", PROSE) if span.startswith("python -m")]
COMMANDS = sorted({line for line in LINES if f"-m {PACKAGE}" in line and "pip install" not in line})
HAS_MNIST = (
    importlib.util.find_spec(f"{PACKAGE}.data.mnist") is not None
)  # a clone may have left the example out
EXAMPLE = ["--config", "configs/examples/autoencoder.yaml"]
EXAMPLE = ["--config", "configs/examples/tabular.yaml"]  # feature: supervised
EXAMPLE = ["--config", "mine.yaml"]  # feature: images
# Commands that hand on the options of fit; their own stand in their help.
TAKE_FIT_OPTIONS = {"tune", "benchmark", "sweep"}
# Words of an advertisement, and a word that no reader can know.
UNWANTED = r"courses?|blazing\w*|seamless\w*|effortless\w*|cutting[- ]edge|state[- ]of[- ]the[- ]art|world[- ]class|powerful"


def snippet(language: str, containing: str) -> str:
    """The one code block in ``language`` that contains a text."""
    (found,) = [
        text
        for text in re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.M)
        if containing in text
    ]
    return found


def words_of(line: str) -> tuple[str, list[str]]:
    """``fit`` and its arguments of a line that runs it; ``__main__`` for the package itself."""
    words = shlex.split(line)
    place = words.index("-m") + 1
    return words[place].removeprefix(PACKAGE).lstrip(".") or "__main__", words[place + 1 :]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the README's mine.py and mine.yaml and the configs, in which a user works."""
    (tmp_path / "mine.py").write_text(snippet("python", "# mine.py"))  # feature: images
    (tmp_path / "mine.yaml").write_text(snippet("yaml", "# mine.yaml"))  # feature: images
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("mine", None)


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 250


def test_the_two_commands_of_the_set_up_are_there() -> None:
    assert sum("pip install --require-hashes -r requirements.lock" in line for line in LINES) == 1
    assert "python -m pytest" in LINES


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_is_there_and_knows_its_options(
    line: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, arguments = words_of(line)
    if name in ("fit", "test"):
        words = [word for word in arguments if word != "--print_config"]
        names_a_model = any(
            word.startswith(("mine.yaml", "configs/examples", "--model.class_path"))
            for word in words
        )
        if not HAS_MNIST and not names_a_model:
            words = [*EXAMPLE, *words]
        with pytest.raises(SystemExit) if "-h" in words else nullcontext():
            configure(words, f"{PACKAGE}.{name}")
        return
    found = importlib.util.find_spec(f"{PACKAGE}.{name}")
    assert found is not None, f"there is no command {name}"
    if name == "__main__":
        return
    module = (
        f"{PACKAGE}.{name}.__main__" if found.submodule_search_locations else f"{PACKAGE}.{name}"
    )
    table = [
        word for word in arguments[:1] if name in ("tune", "benchmark") and not word.startswith("-")
    ]
    with pytest.raises(SystemExit) as end:
        importlib.import_module(module).main([*table, "--help"])
    assert not end.value.code
    known = set(re.findall(r"--[\w.]+", capsys.readouterr().out))
    unknown = []
    for place, word in enumerate(arguments):
        if word.startswith("--") and word not in known:
            unknown += arguments[place : place + 2]
    assert not unknown or name in TAKE_FIT_OPTIONS, f"{name} does not know {unknown[0]}"
    configure([*([] if HAS_MNIST else EXAMPLE), *unknown], f"{PACKAGE}.{name}")


def test_links_and_named_files_are_there() -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", README)
    targets += re.findall(r"configs/[\w/]+\.\w+|tests/\w+\.py", README)
    missing = [
        target
        for target in targets
        if not target.startswith("http") and not (ROOT / target).exists()
    ]
    assert not missing
    named = re.findall(
        r"`(\w+\.yaml)`",
        README.partition("`--config configs/examples/...`")[2].partition("\n\n")[0],
    )
    assert named
    assert not [name for name in named if not (ROOT / "configs" / "examples" / name).exists()]


def test_the_parts_of_features_begin_and_end() -> None:
    marks = re.findall(r"^<!-- (end )?feature: (\w+) -->$", README, re.MULTILINE)
    assert [name for end, name in marks if not end] == [name for end, name in marks if end]
    assert [bool(end) for end, _ in marks] == [False, True] * (len(marks) // 2)


# feature: images
def test_the_snippet_for_newcomers_passes_the_checks_of_this_repository() -> None:
    here = ["--stdin-filename", "mine.py", "-"]  # as a file beside the package
    for words in (["check", *here], ["format", "--check", *here]):
        ended = subprocess.run(
            [sys.executable, "-m", "ruff", *words],
            cwd=ROOT,
            input=snippet("python", "# mine.py"),
            capture_output=True,
            text=True,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr


def test_the_library_snippet_gives_the_same_logits_for_both_kinds_of_images(folder: Path) -> None:
    from project import fit

    limits = [
        "--max_epochs",
        "1",
        "--limit_train_batches",
        "2",
        "--accelerator",
        "cpu",
        "--enable_progress_bar",
        "false",
    ]
    assert fit.main(["--config", "mine.yaml", *limits]) == 0
    names: dict[str, object] = {}
    exec(snippet("python", "engine.restore import load"), names)
    logits, module, images = names["logits"], names["loaded"].module, names["images"]  # type: ignore[attr-defined]
    assert tuple(logits.shape) == (8, 3)  # type: ignore[attr-defined]
    whole = (images * 255).round().byte()  # type: ignore[operator]
    torch.testing.assert_close(module(whole), module(whole / 255))


# end feature: images


def test_words_that_no_reader_should_meet() -> None:
    paths = [
        ROOT / "README.md",
        ROOT / "Dockerfile",
        *(ROOT / "configs").rglob("*.*"),
        *(ROOT / PACKAGE).rglob("*.py"),
    ]
    found = [
        f"{path.relative_to(ROOT)}: {word}"
        for path in paths
        if path.suffix != ".pyc"
        for word in re.findall(rf"(?i)\b({UNWANTED})\b", path.read_text(encoding="utf-8"))
    ]
    assert not found
