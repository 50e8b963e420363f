"""README.md and docs/: their words, their links, and that every command and snippet works."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import unbroken
from unbroken.checkpoint.following import Best, Following
from unbroken.checkpoint.kept import KeptParts
from unbroken.cli.cli import configure
from unbroken.loading import RunLoaders

from project.fit import job

PACKAGE = job.package
ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")
# What people read → its text. The pages beside the README are for those who change the project.
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for folder in (ROOT, ROOT / "docs", ROOT / "unbroken")
    for path in sorted(folder.glob("*.md"))
}
SET_UP = (
    "python3 -m venv .venv && . .venv/bin/activate "
    "&& pip install --require-hashes -r requirements.lock "
    "&& pip install --no-deps --no-build-isolation -e ./unbroken "
    f"&& python -m {PACKAGE}.fit"
)
# Words of a command that needs a package beside the locked ones. test_examples.py installs it.
NEEDS_A_PACKAGE = {"text.yaml": "transformers", "stream.yaml": "litdata"}
# Commands that hand on the options of fit; their own stand in their help.
TAKE_FIT_OPTIONS = {"tune", "benchmark", "sweep", "runs", "verify"}
# Words of an advertisement, and a word that no reader can know.
UNWANTED = (
    r"courses?|blazing\w*|seamless\w*|effortless\w*|cutting[- ]edge|state[- ]of[- ]the[- ]art"
    r"|world[- ]class|powerful"
)


def blocks(text: str, language: str) -> list[str]:
    """The code blocks of a page that are in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def prose(text: str) -> str:
    """A page without its code blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def commands(text: str) -> list[str]:
    """The command lines of a page, without their comments, in its blocks and in its sentences."""
    lines = "\n".join(blocks(text, "bash")).replace("\\\n", " ").splitlines()
    spans = re.findall(r"`((?:python -m|torchrun|uv|docker) [^`\n]+)`", prose(text))
    return [re.split(r"\s+# ", line)[0].strip() for line in (*lines, *spans)]


def all_commands() -> list[str]:
    """The command lines of all pages, each once."""
    return sorted({line for text in PAGES.values() for line in commands(text)})


def snippet(page: str, language: str, containing: str) -> str:
    """The one code block of a page in a language that contains a text."""
    (found,) = [text for text in blocks(PAGES[page], language) if containing in text]
    return found


def words_of(line: str) -> tuple[str, list[str]]:
    """``fit`` and its arguments of a line that runs it; ``__main__`` for the package itself."""
    words = shlex.split(line)
    place = words.index("-m") + 1
    command = words[place].removeprefix(PACKAGE).lstrip(".") or "__main__"
    return command, [word for word in words[place + 1 :] if word != "--"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the files that the pages show and the configs, in which a user works."""
    page = "docs/make_it_yours.md"
    (tmp_path / "task.py").write_text(snippet(page, "python", "# task.py"))
    (tmp_path / "disk.py").write_text(snippet(page, "python", "# disk.py"))
    (tmp_path / "mine.py").write_text(snippet(page, "python", "# mine.py"))
    (tmp_path / "mine.yaml").write_text(snippet(page, "yaml", "# mine.yaml"))
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in ("mine", "task", "disk"):
        sys.modules.pop(name, None)


# What is there


def test_the_readme_is_one_page() -> None:
    assert len(README.splitlines()) <= 120


def test_the_two_commands_of_the_set_up_are_there() -> None:
    lines = commands(README)
    assert lines.count(SET_UP) == 1
    assert "python -m pytest" in lines


@pytest.mark.nightly
def test_the_tests_of_a_clone_pass_on_a_larger_machine() -> None:
    """Lightning warns there of what two cores without a GPU do not show, and a warning is an
    error.
    """
    words = ["-p", "tests.larger_machine", "--numprocesses", "0", "-q", "tests"]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *words], cwd=ROOT, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stdout[-3000:]


def test_the_readme_and_the_pages_of_docs_name_each_other() -> None:
    named = set(re.findall(r"\]\((docs/\w+\.md)", README))
    assert named == {page for page in PAGES if page.startswith("docs/")}


def anchors(page: str) -> set[str]:
    """What a link behind ``#`` may name in a page: its headings, as GitHub writes them."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", prose(PAGES[page]), re.MULTILINE):
        words = re.sub(r"[^\w\- ]", "", heading.lower())
        found.add(words.replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: str) -> None:
    missing = []
    for link in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]):
        if link.startswith("http"):
            continue
        if not leads_somewhere(page, link):
            missing.append(link)
    assert missing == []


def leads_somewhere(page: str, link: str) -> bool:
    """Whether a page's link names a file that is there, and a heading that is in it."""
    target, _, anchor = link.partition("#")
    path = (ROOT / page).parent / target if target else ROOT / page
    if not path.exists():
        return False
    return not anchor or anchor in anchors(path.resolve().relative_to(ROOT).as_posix())


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_is_named_is_there(page: str) -> None:
    named = re.findall(r"(?<![\w/])(?:configs/[\w/]+\.\w+|tests/\w+\.py|\.ci/\w+)", PAGES[page])
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_example_in_the_table_is_there() -> None:
    page = PAGES["docs/make_it_yours.md"]
    table = page.partition("`--config configs/examples/...`")[2].partition("\n\n")[0]
    named = re.findall(r"`(\w+\.yaml)`", table)
    assert named
    assert [name for name in named if not (ROOT / "configs" / "examples" / name).exists()] == []


def test_the_page_names_every_part_of_a_checkpoint() -> None:
    table = PAGES["docs/how_it_works.md"].partition("| part |")[2].partition("\n\n")[0]
    named = re.findall(r"`([A-Z]\w+)`", table)
    kept = KeptParts(RunLoaders(), Following(Best()), [], undeclared=True)
    parts = [type(part).__name__ for part in kept.all]
    assert sorted(named) == sorted([*parts, "MetricRows"])


@pytest.mark.parametrize("page", PAGES)
def test_no_block_of_code_is_empty(page: str) -> None:
    assert re.findall(r"^```\w+\n\s*```$", PAGES[page], re.MULTILINE) == []


# Commands


def commands_of_the_project() -> list[Any]:
    """Those of the README run with every change, those of the other pages nightly."""
    quick = {*commands(README)}
    found = []
    for line in all_commands():
        if f"-m {PACKAGE}" in line and " install " not in line:
            marks = [] if line in quick else [pytest.mark.nightly]
            found.append(pytest.param(line, marks=marks))
    return found


@pytest.mark.parametrize("line", commands_of_the_project())
def test_every_command_is_there_and_knows_its_options(
    line: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, package in NEEDS_A_PACKAGE.items():
        if words in line:
            pytest.importorskip(package)
    name, arguments = words_of(line)
    if name in ("fit", "test"):
        assert_options_of_fit(name, arguments)
        return
    assert importlib.util.find_spec(f"{PACKAGE}.{name}") is not None, f"there is no command {name}"
    if name == "__main__":
        return
    table = []
    if name in ("tune", "benchmark") and arguments and not arguments[0].startswith("-"):
        table = arguments[:1]
    command = importlib.import_module(f"unbroken.commands.{name}")
    with pytest.raises(SystemExit) as end:
        command.main(PACKAGE, [*table, "--help"])
    assert not end.value.code
    known = set(re.findall(r"--[\w.]+", capsys.readouterr().out))
    unknown = []
    for place, word in enumerate(arguments):
        if word.startswith("--") and word not in known:
            unknown += arguments[place : place + 2]
    assert not unknown or name in TAKE_FIT_OPTIONS, f"{name} does not know {unknown[0]}"
    assert_options_of_fit(name, unknown)


def assert_options_of_fit(name: str, arguments: list[str]) -> None:
    """Parse arguments as ``fit`` does, and make the module and the data module that they name."""
    words = [word for word in arguments if word != "--print_config"]
    shows_help = "-h" in words or "--help" in words
    with pytest.raises(SystemExit) if shows_help else nullcontext():
        configure(job, name, words)


@pytest.mark.parametrize(
    "line", [line for line in all_commands() if line.startswith(("docker run", "sbatch"))]
)
def test_what_starts_fit_elsewhere_hands_it_options_that_it_knows(line: str, folder: Path) -> None:
    words = shlex.split(line)
    program = "configs/slurm.sh" if words[0] == "sbatch" else PACKAGE
    assert_options_of_fit("fit", words[words.index(program) + 1 :])


def test_what_pip_is_told_to_install_is_there() -> None:
    installs = [line for line in all_commands() if " install " in line]
    assert installs
    for line in installs:
        for folder, extra in re.findall(r"(\.[\w/]*)\[([\w-]+)\]", line):
            settings = (ROOT / folder / "pyproject.toml").read_text(encoding="utf-8")
            assert re.search(rf"(?m)^{extra} = \[", settings), line
        for name in re.findall(r"-r (\S+)", line):
            assert (ROOT / name).exists(), line
        for version in re.findall(r"unbroken-([\d.]+)-py3", line):
            assert version == unbroken.__version__, line


@pytest.mark.parametrize("page", PAGES)
def test_no_page_installs_the_library_by_its_name(page: str) -> None:
    """The name is not ours in package registries: whoever takes it first would be installed."""
    by_name = r"(?:install|add)[^\n`]* [\"']?unbroken(?![\w/-])"
    assert re.findall(by_name, PAGES[page]) == []


# Snippets


def snippets_to_run() -> list[str]:
    """The Python code of all pages that is no file of its own, needs no run, is no test of the
    reader's own code and has no test below, each once.
    """
    found = {text for page in PAGES.values() for text in blocks(page, "python")}
    is_a_file = re.compile(r"^(# \w+\.py$|.*# \w+\.py$)", re.MULTILINE)
    needs_more = re.compile(r"best\.ckpt|^def test_|^trainer\.fit", re.MULTILINE)
    return sorted(
        text for text in found if not is_a_file.search(text) and not needs_more.search(text)
    )


@pytest.mark.parametrize("code", snippets_to_run())
def test_every_snippet_runs(code: str, folder: Path) -> None:
    from configs.examples.autoencoder import LitAutoEncoder, Waves

    names: dict[str, object] = {"module": LitAutoEncoder(), "datamodule": Waves()}
    exec(code, names)
    assert names.get("code", 0) == 0


@pytest.mark.filterwarnings("ignore:The number of training batches")
def test_the_script_with_one_more_callback_resumes_when_it_is_run_again(folder: Path) -> None:
    from task import Line

    code = snippet("unbroken/README.md", "python", "ExactCheckpoint")
    code = code.replace("val_loss", "train_loss")
    first: dict[str, object] = {"module": Line(), "datamodule": None}
    exec(code.replace("max_epochs=10", "max_epochs=2"), first)
    again: dict[str, object] = {"module": Line(), "datamodule": None}
    exec(code.replace("max_epochs=10", "max_epochs=3"), again)
    assert first["trainer"].global_step == 2 * 20  # type: ignore[attr-defined]
    assert again["trainer"].global_step == 3 * 20  # type: ignore[attr-defined]
    restored = again["keep"].resume_from  # type: ignore[attr-defined]
    assert Path(restored) == folder / "checkpoints" / "mine" / "last.ckpt"
    # Only the third epoch was trained by the second script.
    assert again["trainer"].fit_loop.epoch_progress.current.completed == 3  # type: ignore[attr-defined]


def test_the_callback_of_ones_own_adds_its_number_to_the_summary(folder: Path) -> None:
    example = ["--config", "configs/examples/autoencoder.yaml", "--config", "configs/debug.yaml"]
    words = [*example, "--trainer.callbacks+=disk.FreeDisk", "--run_name", "disk"]
    assert job.main([*words, "--accelerator", "cpu"]) == 0
    summary = json.loads((folder / "checkpoints" / "disk" / "summary.json").read_text())
    assert 0 < summary["host/free_disk_gib"] < 1e9


def test_a_function_may_stand_in_the_place_of_a_class(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = "from lightning.pytorch import LightningModule\nfrom task import Line\n\n\n"
    made += "def line(rate: float) -> LightningModule:\n    return Line(rate)\n"
    (folder / "made.py").write_text(made)
    words = ["--model", "made.line", "--data", "null", "--model.rate", "0.25"]
    config = configure(job, "fit", words)
    monkeypatch.delitem(sys.modules, "made")
    assert type(config.module).__name__ == "Line"
    assert config.module.lr == 0.25


def test_the_page_for_newcomers_passes_the_checks_of_this_repository() -> None:
    code = snippet("docs/make_it_yours.md", "python", "# mine.py")
    here = ["--stdin-filename", "mine.py", "-"]  # as a file beside the package
    for words in (["check", *here], ["format", "--check", *here]):
        ended = subprocess.run(
            [sys.executable, "-m", "ruff", *words],
            cwd=ROOT,
            input=code,
            capture_output=True,
            text=True,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.nightly
def test_the_library_snippet_gives_the_same_logits_for_both_kinds_of_images(folder: Path) -> None:
    limits = ["--max_epochs", "1", "--limit_train_batches", "2", "--accelerator", "cpu"]
    assert job.main(["--config", "mine.yaml", "--enable_progress_bar", "false", *limits]) == 0
    names: dict[str, object] = {}
    exec(snippet("docs/make_it_yours.md", "python", "best.ckpt"), names)
    logits, module, images = names["logits"], names["loaded"].module, names["images"]  # type: ignore[attr-defined]
    assert tuple(logits.shape) == (8, 3)  # type: ignore[attr-defined]
    whole = (images * 255).round().byte()  # type: ignore[operator]
    torch.testing.assert_close(module(whole), module(whole / 255))


# Words


def test_words_that_no_reader_should_meet() -> None:
    paths = [
        *(ROOT / page for page in PAGES),
        ROOT / "Dockerfile",
        *(ROOT / "configs").rglob("*.*"),
        *(ROOT / PACKAGE).rglob("*.py"),
    ]
    found = {}
    for path in paths:
        if path.suffix == ".pyc":
            continue
        words = re.findall(rf"(?i)\b({UNWANTED})\b", path.read_text(encoding="utf-8"))
        if words:
            found[path.relative_to(ROOT)] = words
    assert found == {}
