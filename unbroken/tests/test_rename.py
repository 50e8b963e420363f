from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from unbroken.cli import start as entry
from unbroken.errors import UserError
from unbroken.commands.rename import command as rename
from unbroken.commands.rename.clone import Clone
from unbroken.commands.rename.leave_out import shortened
from unbroken.commands.rename.make import Origin, make
from unbroken.commands.rename.marks import MARK, without_marked
from unbroken.commands.rename.names import renamed
from unbroken.commands.rename.update import update
from tests.commands import complete

HERE = rename.HERE
CLONE, PACKAGE = HERE.folder, HERE.package
FEATURES, ALONG = HERE.features().files, HERE.features().along

NAME, LONGER = "digits", "handwriting"
MADE_UP = [
    "--config",
    "configs/examples/autoencoder.yaml",
    "--max_epochs",
    "2",
]  # an example that brings its data


def git(clone: Path, *arguments: str) -> str:
    who = [
        "-c",
        "user.name=Somebody",
        "-c",
        "user.email=somebody@example.org",
        "-c",
        "commit.gpgsign=false",
    ]
    return subprocess.run(
        ["git", *who, *arguments], cwd=clone, check=True, capture_output=True, text=True
    ).stdout


def python(clone: Path, *arguments: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    environment = {
        key: value
        for key, value in os.environ.items()
        if key not in ("PYTEST_ADDOPTS", "PYTHONPATH")
    }
    environment |= {
        "PYTHONPATH": str(clone),
        "WANDB_MODE": "disabled",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=clone,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A fresh clone of this repository: what is committed, and what is changed in files that git
    knows.
    """
    return make_clone(tmp_path)


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """What is mentioned and not there in a clone that keeps everything."""
    return {*dangling(make_clone(tmp_path_factory.mktemp("whole")), PACKAGE)}


def make_clone(folder: Path) -> Path:
    if subprocess.run(["git", "rev-parse", "HEAD"], cwd=CLONE, capture_output=True).returncode:
        pytest.skip("not a git clone")
    state = git(CLONE, "stash", "create").strip() or git(CLONE, "rev-parse", "HEAD").strip()
    git(folder, "clone", "--quiet", "--shared", "--no-checkout", str(CLONE), "clone")
    git(folder / "clone", "checkout", "--quiet", state)
    return folder / "clone"


@pytest.mark.parametrize(
    ("path", "before", "after"),
    [
        (
            "a.py",
            "from P.data import x\nimport P.fit as f\n",
            "from N.data import x\nimport N.fit as f\n",
        ),
        (
            "a.py",
            "import P\nP.fit.main([])\nself.P.fit\n",
            "import N\nN.fit.main([])\nself.P.fit\n",
        ),
        ("a.py", 'wandb.init(P="a", b={"P": 1}["P"])\n', 'wandb.init(P="a", b={"P": 1}["P"])\n'),
        (
            "a.py",
            '"P.model.ConvNet", f"python -m P.fit {y}"\n',
            '"N.model.ConvNet", f"python -m N.fit {y}"\n',
        ),
        (
            "a.py",
            '"""This P: see :mod:`P.fit`."""  # a P\n',
            '"""This P: see :mod:`N.fit`."""  # a P\n',
        ),
        (
            "a.py",
            '"import P.fit; me/P/runs, wandb.ai/me/P"\n',
            '"import N.fit; me/P/runs, wandb.ai/me/P"\n',
        ),
        (
            "a.py",
            'f"P.{x}", f"-m P.{x}", f"from P. {x}"\n',
            'f"N.{x}", f"-m N.{x}", f"from P. {x}"\n',
        ),
        (
            "a.py",
            'os.environ["P_KILLS"], WANDB_P_KILLS\n',
            'os.environ["N_KILLS"], WANDB_P_KILLS\n',
        ),
        ("a.py", 'DEFAULT_PROJECT = "w-b"  # a w-b\n', 'DEFAULT_PROJECT = "thing"  # a w-b\n'),
        (
            "a.yaml",
            "P: mnist\nclass_path: P.model.MLP # this P\n",
            "P: mnist\nclass_path: N.model.MLP # this P\n",
        ),
        ("a.yaml", "P: w-b\nwandb --P w-b\n", "P: thing\nwandb --P thing\n"),
        ("a.yaml", "command: [python, -m, P.fit]\n", "command: [python, -m, N.fit]\n"),
        ("README.md", "# P\nA P in P/data, `P`.\n", "# N\nA P in N/data, `N`.\n"),
        (
            "README.md",
            "```\ndocker run P --x\nP: a\nwandb --P b\n",
            "```\ndocker run N --x\nP: a\nwandb --P b\n",
        ),
        ("docs/a.md", "docker build -t P .\n", "docker build -t N .\n"),
        ("pyproject.toml", '[P]\nname = "P"\n[P.urls]\n', '[P]\nname = "N"\n[P.urls]\n'),
        (
            "pyproject.toml",
            'all = ["P[dev]"]\npath = "P/a.py" # P\n',
            'all = ["N[dev]"]\npath = "N/a.py" # P\n',
        ),
        (
            "Dockerfile",
            '# docker build -t P .\nCOPY P P\n["P.fit"]\n',
            '# docker build -t N .\nCOPY N N\n["N.fit"]\n',
        ),
        (".dockerignore", "!P/\n", "!N/\n"),
        (
            "run",
            "#!/bin/sh\n# a P\n[[ $m == P.* ]] && ls P/*.py\n",
            "#!/bin/sh\n# a P\n[[ $m == N.* ]] && ls N/*.py\n",
        ),
        ("LICENSE", "The P maintainers, P/data\n", "The P maintainers, P/data\n"),
    ],
)
def test_only_what_means_the_package_is_renamed(path: str, before: str, after: str) -> None:
    old = "pro" + "ject"  # this file is renamed as well
    for letter, word in (("P", old), ("N", "thing")):
        before, after = (re.sub(rf"\b{letter}\b", word, text) for text in (before, after))
        before, after = (
            text.replace(f"{letter}_KILLS", f"{word.upper()}_KILLS") for text in (before, after)
        )
    assert renamed(Path(path), before, old, "thing", "w-b") == after


MARKED = {
    "a.py": "a\nb  # feature: XX\n# feature: XX\nc\nd  # feature: tune\n# end feature: XX\nif g:\n"
    "    # feature: tune\n    e\n    # end feature: tune\n"
    "# feature: XX, tune\nf\n# end feature: XX, tune\n"
    "@h  # feature: XX\ndef i(k,\n  l):\n    j\n",
    "a.md": "a\n\n<!-- feature: XX -->\nb\n<!-- end feature: XX -->\n\nc\n"
    "| d | <!-- feature: XX --> |\n"
    f"python -m {PACKAGE}.XX lr\n| `{PACKAGE}.XX` | e |\ntext {PACKAGE}.XX\n",
}


@pytest.mark.parametrize(
    ("name", "gone", "left"),
    [
        ("a.py", {"sweep"}, "a b c d if g: e f @h def i(k, l): j"),
        ("a.py", {"report"}, "a if g: e f"),
        ("a.py", {"tune"}, "a b c if g: f @h def i(k, l): j"),
        ("a.py", {"report", "tune"}, "a if g:"),
        ("a.md", {"report"}, f"a c text {PACKAGE}.report"),
    ],
)
def test_marked_lines_statements_blocks_and_commands_go_with_the_last_feature_that_is_named(
    name: str, gone: set[str], left: str
) -> None:
    text = shortened(HERE, Path(name), MARKED[name].replace("XX", "report"), gone, {})
    lines = [re.split(r"\s*(#|<!--)", line)[0].strip() for line in text.splitlines()]
    kept = " ".join(line for line in lines if line)
    assert kept == left


FORMATTED = """
def head(
    a: int,  # feature: report
    b: int,
) -> int:
    return b


def whole(
    c: int,
) -> int:  # feature: report
    return c


@decorated(
    with_what
)
class Kept:
    both = [
        one(1)
        if 1
        else None,  # feature: report
        two(  # feature: report
            2
        ),
        three,
    ]
    table = {
        "a": b(
            c
        ),  # feature: report
        "d": e,
    }


COLOURS = (
    "red",
    "blue",
)  # feature: report
if COLOURS:
    pass
print(
    1,
    end=("a"
    "b"),  # feature: report
)
"""


def test_a_mark_that_the_formatter_moved_to_the_last_line_means_the_same() -> None:
    left = without_marked(Path("a.py"), FORMATTED, {"report"})
    ast.parse(left)
    assert "".join(left.split()) == (
        "defhead(b:int,)->int:returnb@decorated(with_what)classKept:both=[three,]"
        'table={"d":e,}ifCOLOURS:passprint(1,)'
    )
    for word in ("whole", "red", "one", "two", "else", "end", '"a"'):
        assert word not in left, word
    for word in ("head", "b: int", "Kept", "three", '"d": e', "print(", "1,"):
        assert word in left, word


def problems_of_marks() -> list[str]:
    """Python files that are no Python any more where a feature is left out, or all of them are."""
    found = []
    for path, text in HERE.texts().items():
        if path.suffix != ".py" or path.name == "test_rename.py":
            continue
        marked = {
            name
            for names in re.findall(r"feature: ([a-z_, ]+)", text)
            for name in names.split(", ")
        }
        for gone in [*({name} for name in sorted(marked & {*FEATURES})), {*FEATURES}]:
            try:
                ast.parse(without_marked(path, text, gone))
            except SyntaxError as error:
                found.append(f"{path} without {', '.join(sorted(gone))[:40]}: {error}")
    return found


@pytest.mark.nightly
def test_what_is_left_of_every_marked_file_is_python() -> None:
    assert problems_of_marks() == []


def test_every_mark_names_features_and_ends_and_every_pattern_finds_a_file() -> None:
    for path, text in HERE.texts().items():
        if path.name == "test_rename.py":
            continue
        open_marks: list[str] = []
        for line in text.splitlines():
            if mark := MARK.match(line):
                assert {*mark[3].split(", ")} <= {*FEATURES}, f"{path}: {line}"
                if not mark[1].strip():
                    assert not mark[2] or open_marks.pop() == mark[3], f"{path}: {line}"
                    open_marks += [] if mark[2] else [mark[3]]
        assert not open_marks, f"{path}: {open_marks} does not end"
    if HERE.features_here() == {*FEATURES}:
        for pattern in [pattern for patterns in FEATURES.values() for pattern in patterns]:
            assert git(CLONE, "ls-files", "--", pattern), pattern


def test_a_text_in_any_encoding_is_renamed_and_a_picture_is_not(tmp_path: Path) -> None:
    latin, picture = b"caf\xe9 %s.fit\n", b"\x89PNG\0 %s.fit\n"
    code = b"# -*- coding: latin-1 -*-\nname = 'caf\xe9'\nreport = 1  # feature: report\n"
    (tmp_path / "c.py").write_bytes(code)
    for name, content in (("a.txt", latin), ("b.png", picture)):
        (tmp_path / name).write_bytes(content % PACKAGE.encode())
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "--all")
    clone = Clone(tmp_path, PACKAGE)
    clone.rewrite(lambda path, text: renamed(path, text, PACKAGE, NAME))
    clone.rewrite(lambda path, text: without_marked(path, text, {"report"}))
    assert (tmp_path / "c.py").read_bytes() == code[: code.index(b"report")]
    assert (tmp_path / "a.txt").read_bytes() == latin % NAME.encode()
    assert (tmp_path / "b.png").read_bytes() == picture % PACKAGE.encode()


@pytest.mark.nightly
def test_a_renamed_clone_works_under_its_new_name_and_twice(clone: Path, before: set[str]) -> None:
    told = python(clone, "-m", f"{PACKAGE}.rename", LONGER)
    assert told.returncode == 0, told.stderr
    assert f"moved {PACKAGE}/ to {LONGER}/" in told.stdout
    assert not (clone / PACKAGE).exists()
    assert leftovers(clone, PACKAGE) == []
    assert {*dangling(clone, LONGER)} == before

    refused = python(clone, "-m", f"{LONGER}.rename", "numerals")
    assert refused.returncode == 2
    assert "uncommitted changes" in refused.stderr
    git(clone, "add", "--all")
    git(clone, "commit", "--quiet", "-m", "Rename")

    imports = f"from {LONGER} import fit; from {LONGER}.command_line import start"
    script = f"{imports}; start.run(fit.main)"
    environment = {**os.environ, "PYTHONPATH": str(clone)}
    shown = complete([sys.executable, "-c", script, "--print_config"], cwd=clone, env=environment)
    assert shown.returncode == 0, shown.stderr
    assert f"class_path: {LONGER}." in shown.stdout  # feature: mnist

    again = python(
        clone, "-m", f"{LONGER}.rename", "numerals", "--without", "report", "--without", "sweep"
    )
    assert again.returncode == 0, again.stderr
    assert leftovers(clone, LONGER) == []
    assert {*dangling(clone, "numerals")} <= before


@pytest.mark.nightly
def test_a_renamed_clone_passes_its_own_tests(clone: Path) -> None:
    told = python(clone, "-m", f"{PACKAGE}.rename", LONGER)
    assert told.returncode == 0, told.stderr
    files = ["tests/test_packaging.py", "tests/test_tables.py"]
    tests = python(clone, "-m", "pytest", "-q", "-n", "0", *files, "-k", "not install")
    assert tests.returncode == 0, tests.stdout


def test_everything_that_is_mentioned_is_there(before: set[str]) -> None:
    assert before == set()


LARGEST = {"all"}  # the others' clones are many


@pytest.mark.parametrize(
    "feature",
    [
        pytest.param(feature, marks=() if feature in LARGEST else pytest.mark.nightly)
        for feature in (*sorted(HERE.features_here()), "all")
    ],
)
def test_each_feature_lifts_out(clone: Path, before: set[str], feature: str) -> None:
    lift_out(clone, feature)
    assert [line for line in problems(clone, NAME) if line not in before] == []
    if feature in LARGEST:
        assert_does_not_call_itself_after_digits(clone)


def assert_does_not_call_itself_after_digits(clone: Path) -> None:
    """A clone without the digits has another name and another first sentence."""
    first_words = {
        "README.md": (clone / "README.md").read_text().partition("\n```")[0],
        "pyproject.toml": (clone / "pyproject.toml").read_text().partition("dependencies")[0],
        "__init__.py": (clone / NAME / "__init__.py").read_text(),
    }
    assert {name: text for name, text in first_words.items() if "mnist" in text.lower()} == {}


def lift_out(clone: Path, features: str) -> None:
    told = python(clone, "-m", f"{PACKAGE}.rename", NAME, "--without", features)
    assert told.returncode == 0, told.stderr
    gone = HERE.features_here() if features == "all" else {*features.split(",")}
    for feature, further in ALONG.items():
        gone |= {further} if feature in gone else set()
    assert f"left out: {', '.join(sorted(gone))}\n" in told.stdout
    kept = {pattern for feature in HERE.features_here() - gone for pattern in FEATURES[feature]}
    for pattern in [pattern for feature in gone for pattern in FEATURES[feature]]:
        found = git(clone, "ls-files", "--", pattern.replace(f"{PACKAGE}/", f"{NAME}/"))
        assert bool(found) == (pattern in kept), pattern
    marks = re.compile(rf"feature: ({'|'.join(gone)})( -->.*)?$", re.MULTILINE)
    assert [path for path, text in files(clone).items() if marks.search(text)] == []


@pytest.mark.nightly
def test_the_core_without_any_feature_trains_and_passes_its_types_and_its_tests(
    clone: Path,
) -> None:
    lift_out(clone, "all")
    assert_imports_and_trains(clone)
    types = python(clone, "-m", "mypy", "--cache-dir", str(CLONE / ".mypy_cache"))
    assert types.returncode == 0, types.stdout
    code = {
        path: text
        for path, text in files(clone).items()
        if path.parts[0] == NAME and path.suffix == ".py"
    }
    print(f"the core: {sum(map(count_lines, code.values()))} lines in {len(code)} files")
    tests = python(clone, "-m", "pytest", "-q", "tests")
    assert tests.returncode == 0, tests.stdout[-4000:]


@pytest.mark.nightly
@pytest.mark.parametrize("features", ["throughput,memory,optimizer,report,dashboard", "mnist"])
def test_what_remains_imports_trains_and_collects_its_tests(clone: Path, features: str) -> None:
    lift_out(clone, features)
    assert_imports_and_trains(clone)
    collected = python(clone, "-m", "pytest", "-q", "-n", "0", "--collect-only", "tests")
    assert collected.returncode == 0, collected.stdout


def assert_imports_and_trains(clone: Path) -> None:
    """Every module in one process, then a short run in another."""
    modules = [
        f"import {'.'.join(path.with_suffix('').parts)}"
        for path in files(clone)
        if path.match(f"{NAME}/**/*.py")
    ]
    imported = python(clone, "-c", "\n".join(modules))
    assert imported.returncode == 0, imported.stderr
    trained = python(
        clone, "-m", f"{NAME}.fit", *MADE_UP, "--accelerator", "cpu", "--run_name", "short"
    )
    assert trained.returncode == 0, trained.stderr
    assert (clone / "checkpoints" / "short" / "summary.json").exists()


def files(clone: Path) -> dict[Path, str]:
    """The text files of a clone that git knows, by their path in it."""
    git(clone, "add", "--all")
    found = {}
    for name in git(clone, "ls-files", "-z").split("\0")[:-1]:
        content = (clone / name).read_bytes()
        if b"\0" not in content:
            found[Path(name)] = content.decode()
    return found


def leftovers(clone: Path, name: str) -> list[str]:
    """Lines of tracked files where a name still looks like a package's: dotted, a folder, imported,
    a variable's.
    """
    git(clone, "add", "--all")
    before = "(^|[^][A-Za-z0-9_./-])"
    dotted = rf"{name}\.([a-z_]+\b|\{{)"
    pattern = rf"{before}({dotted}|{name}/|(from|import|-m) {name}\b|{name.upper()}_[A-Z])"
    found = subprocess.run(
        ["git", "grep", "-nE", pattern], cwd=clone, capture_output=True, text=True
    ).stdout
    return [
        line for line in found.splitlines() if not line.startswith(("requirements.lock", "LICENSE"))
    ]


def problems(clone: Path, package: str) -> list[str]:
    """What is wrong with the files of a clone: ruff's findings, imports and mentions of what is not
    there.
    """
    found = []
    # A line of another length is no problem: a name may be longer.
    for arguments in (
        ["check", "--quiet", "--extend-ignore", "E501"],
        ["format", "--check", "--quiet"],
    ):
        ended = python(clone, "-m", "ruff", *arguments, "--no-cache")
        found += [ended.stdout] if ended.returncode else []
    return [*found, *dangling(clone, package)]


def dangling(clone: Path, package: str) -> list[str]:
    """Names of modules, and of what is in them, that a clone's files import or mention and that are
    not there.

    README and comments are read as well: a sentence that sends its reader to a command that is gone
    is a mistake.
    """
    code = files(clone)
    defined = {}
    for path, text in code.items():
        if path.suffix == ".py":
            parts = path.with_suffix("").parts
            defined[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = names_in(text)
    for module in [*defined]:
        parent, _, name = module.rpartition(".")
        defined.setdefault(parent, set()).add(name)
    found = []
    for path, text in code.items():
        # They speak of what may be gone, or of halves.
        speaks_of_others = ("features.yaml", "test_rename.py", "test_completion.py")
        if path.name in speaks_of_others or path.parent.name == "rename":
            continue
        mentions = re.findall(rf"(?<![\w./\[-]){package}\.[a-z]\w*(?:\.[a-zA-Z]\w*)*", text)
        mentions += [
            name.replace("/", ".")
            for name in re.findall(rf"(?<![\w./-]){package}(?:/\w+)+(?=\.py\b)", text)
        ]
        for node in ast.walk(ast.parse(text if path.suffix == ".py" else "")):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in (
                package,
                "tests",
            ):
                mentions += [f"{node.module}.{alias.name}" for alias in node.names]
        found += [f"{path}: {name}" for name in sorted({*mentions}) if not is_there(name, defined)]
    return [re.sub(rf"\b{package}(?=[./])", NAME, line) for line in found]


def is_there(mention: str, defined: dict[str, set[str]]) -> bool:
    """Whether a dotted name is that of a module, or of something in one."""
    module, rest = mention.removesuffix(".__init__"), ""
    while module and module not in defined:
        module, _, rest = module.rpartition(".")
    return bool(module) and (not rest or rest in defined[module])


def names_in(text: str) -> set[str]:
    """What a Python file defines or imports at its top."""
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def count_lines(text: str) -> int:
    return len(text.splitlines())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["My-Digits"], "lower-case Python identifier"),
        (["2digits"], "lower-case Python identifier"),
        (["class"], "no keyword"),
        (["json"], "standard library"),
        (["torch"], "an installed package"),
        (["tests"], "is taken"),
        (["digits", "--without", "report,reprt"], "got reprt. Did you mean report?"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_touched(
    words: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rename, "make", None)  # whatever happens, this clone stays what it is
    assert entry.exit_code(rename.main, words) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error


def test_renaming_to_the_present_name_does_nothing(clone: Path) -> None:
    told = python(clone, "-m", f"{PACKAGE}.rename", PACKAGE)
    assert told.returncode == 0
    assert "nothing to do" in told.stdout
    assert git(clone, "status", "--porcelain") == ""


# Taking later changes of the template


def make_template(folder: Path) -> Path:
    """A template of a few files of this one, under git, with one commit."""
    template = folder / "template"
    package = template / PACKAGE
    package.mkdir(parents=True)
    (package / "features.yaml").write_text(
        f"report: [{PACKAGE}/report.py]\nrename: [{PACKAGE}/rename]\n---\n{{}}\n---\n{{}}\n"
    )
    (package / "fit.py").write_text(
        f"import {PACKAGE}.report  # feature: report\n\nRATE = 1\n\nSTEPS = 2\n\nLAST = 3\n"
    )
    (package / "report.py").write_text("PAGE = 1\n")
    (package / "other.py").write_text(f"from {PACKAGE} import fit\n")
    (template / "README.md").write_text(f"# {PACKAGE}\n\npython -m {PACKAGE}.fit\n")
    git(template, "init", "--quiet")
    commit(template, "First")
    return template


def commit(folder: Path, message: str) -> str:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--allow-empty", "-m", message)
    return git(folder, "rev-parse", "HEAD").strip()


def made_from(template: Path, folder: Path, without: list[str]) -> Clone:
    """Somebody's package, made from a template as rename does it."""
    git(folder, "clone", "--quiet", str(template), "mine")
    clone = Clone(folder / "mine", PACKAGE)
    head = clone.git("rev-parse", "HEAD").strip()
    make(clone, NAME, without, Origin(head, PACKAGE, NAME, without))
    commit(clone.folder, "Mine")
    return Clone(clone.folder, NAME)


def test_a_package_takes_later_changes_of_the_template_and_keeps_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = make_template(tmp_path)
    mine = made_from(template, tmp_path, ["report"])
    fit = mine.folder / NAME / "fit.py"
    fit.write_text(fit.read_text().replace("RATE = 1", "RATE = 10"))
    (mine.folder / NAME / "mine.py").write_text("MINE = 1\n")
    commit(mine.folder, "My own changes")

    theirs = template / PACKAGE / "fit.py"
    theirs.write_text(theirs.read_text().replace("LAST = 3", "LAST = 30"))
    (template / PACKAGE / "report.py").write_text("PAGE = 2\n")
    (template / PACKAGE / "new.py").write_text(f"from {PACKAGE} import fit\n\nprint(fit)\n")
    (template / PACKAGE / "other.py").unlink()
    newest = commit(template, "Second")

    assert update(mine, str(template)) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("  git add --all && git commit -m")
    # What both have is there, in the package's own name and without what was left out.
    assert fit.read_text() == "RATE = 10\n\nSTEPS = 2\n\nLAST = 30\n"
    assert (mine.folder / NAME / "new.py").read_text() == f"from {NAME} import fit\n\nprint(fit)\n"
    assert not (mine.folder / NAME / "other.py").exists()
    assert not (mine.folder / NAME / "report.py").exists()
    assert (mine.folder / NAME / "mine.py").exists()
    assert not (mine.folder / PACKAGE).exists()
    assert Origin.of(mine.folder) == Origin(newest, PACKAGE, NAME, ["report"])
    commit(mine.folder, "Update")
    assert update(mine, str(template)) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert mine.git("status", "--porcelain") == ""


def test_a_line_that_both_have_changed_is_marked_as_git_marks_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = make_template(tmp_path)
    mine = made_from(template, tmp_path, [])
    fit = mine.folder / NAME / "fit.py"
    fit.write_text(fit.read_text().replace("STEPS = 2", "STEPS = 20"))
    commit(mine.folder, "My own changes")
    theirs = template / PACKAGE / "fit.py"
    theirs.write_text(theirs.read_text().replace("STEPS = 2", "STEPS = 200"))
    commit(template, "Second")

    assert update(mine, str(template)) == 1
    told = capsys.readouterr().out
    assert f"1 of them need you, for both sides changed the same lines:\n  {NAME}/fit.py" in told
    text = fit.read_text()
    assert re.search(r"<<<<<<< HEAD\nSTEPS = 20\n=======\nSTEPS = 200\n>>>>>>> ", text)
    assert mine.git("diff", "--name-only", "--diff-filter=U") == f"{NAME}/fit.py\n"
    mine.git("reset", "--hard", "--quiet")
    assert "STEPS = 20\n" in fit.read_text()


def test_an_update_that_cannot_be_is_refused_and_touches_nothing(tmp_path: Path) -> None:
    template = make_template(tmp_path)
    with pytest.raises(UserError, match=r"--update needs \.template\.yaml"):
        update(Clone(template, PACKAGE), str(template))
    mine = made_from(template, tmp_path, [])
    with pytest.raises(UserError, match="--update must be the template's folder or address"):
        update(mine, str(tmp_path / "nowhere"))
    (tmp_path / "other").mkdir()
    other = make_template(tmp_path / "other")
    commit(other, "Another history")
    Origin("0" * 40, PACKAGE, NAME).write(mine.folder)
    commit(mine.folder, "Another origin")
    with pytest.raises(UserError, match="which lacks commit 0000000000"):
        update(mine, str(other))
    (mine.folder / "draft.txt").touch()
    with pytest.raises(UserError, match="uncommitted changes"):
        update(mine, str(template))
    assert mine.git("log", "--format=%s").splitlines()[0] == "Another origin"
    assert mine.git("status", "--porcelain") == "?? draft.txt\n"


@pytest.mark.nightly
def test_a_package_that_is_renamed_again_still_knows_its_template(clone: Path) -> None:
    head = git(clone, "rev-parse", "HEAD").strip()
    assert python(clone, "-m", f"{PACKAGE}.rename", LONGER, "--without", "sweep").returncode == 0
    assert Origin.of(clone) == Origin(head, PACKAGE, LONGER, ["sweep"])
    commit(clone, "Rename")
    told = python(clone, "-m", f"{LONGER}.rename", NAME, "--without", "report")
    assert told.returncode == 0, told.stderr
    assert Origin.of(clone) == Origin(head, PACKAGE, NAME, ["report", "sweep"])
    lines = told.stdout.splitlines()
    assert len(lines) < 10, "the useful lines are not lost below a list of files"
    assert [line.split()[0] for line in lines[-3:]] == ["git", "pip", "python"]
