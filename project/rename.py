"""Turn a fresh clone into your own package, and leave out what you do not need.

python -m project.rename digits
python -m project.rename digits --without report,sweep      # code, tests, configs, pages and packages go together
python -m project.rename digits --without mnist             # without the bundled digits, for data of your own
python -m project.rename digits --without supervised        # for a LightningModule and data module of your own
python -m project.rename digits --without all               # the same, and the core alone: fit, test, engine
"""

import ast
import importlib.metadata
import importlib.util
import keyword
import re
import subprocess
import sys
from collections.abc import Callable, Collection
from pathlib import Path

import yaml

from project.engine.command import CommandParser, run
from project.errors import UserError, nearest, require

PACKAGE = Path(__file__).parent.name
CLONE = Path(__file__).parents[1]

# Feature → its files; → the feature that it takes along; → what stands in tests and commands that need it
FEATURES: dict[str, list[str]]
FEATURES, ALONG, NEEDS = yaml.safe_load_all(
    Path(__file__).with_name("features.yaml").read_text(encoding="utf-8")
)
MARK = re.compile(r"^(.*?)(?:#|<!--) (end )?feature: ([a-z_]+(?:, [a-z_]+)*)(?: -->.*)?$")
COMMAND = re.compile(rf"^(?:\||[\w./]*python|torchrun|docker).*\b{PACKAGE}\.(\w+)")  # in Markdown
IMPORT = re.compile(
    rf"^\s*(?:from|import) ((?:{PACKAGE}|tests)[\w.]*)(?: import (\w+))?", re.MULTILINE
)
# W&B's default project follows these, in loggers/wandb.py, a sweep's file and commands.
WANDB_PROJECT = r"(?<=DEFAULT_PROJECT = \")|(?<=project: )|(?<=--project )"


def main(argv: list[str]) -> int:
    """Rename and shorten as ``argv`` says; returns the exit code."""
    parser = CommandParser(f"{PACKAGE}.rename", __doc__)
    parser.add_argument("name", metavar="NAME", help="the package's new name, such as digits")
    leave = f"leave features out: any of {','.join(FEATURES)}; or all"
    parser.add_argument("--without", default=[], action="append", metavar="LIST", help=leave)
    args = parser.parse_args(argv)
    new = args.name
    fits = re.fullmatch(r"[a-z][a-z0-9_]*", new) and new not in (
        *keyword.kwlist,
        *keyword.softkwlist,
    )
    require(
        fits,
        "NAME",
        "be a lower-case Python identifier and no keyword (letters, digits, _)",
        f"'{new}'",
    )
    hidden = {
        "a module of Python's standard library": new in sys.stdlib_module_names,
        f"{CLONE / new}, which is taken": (CLONE / new).exists() or new in ("data", "checkpoints"),
        "an installed package": importlib.util.find_spec(new)
        or new in importlib.metadata.packages_distributions(),
    }
    for what, is_hidden in hidden.items():
        require(
            new == PACKAGE or not is_hidden, "NAME", f"not hide {what}", new, " Choose another."
        )
    chosen = {name.strip() for name in ",".join(args.without).split(",")} - {""}
    for name in chosen - {*FEATURES, "all"}:
        raise UserError(
            f"--without must be any of {', '.join(FEATURES)}, or all, got {name}.{nearest(name, FEATURES)}"
        )
    for name, further in ALONG.items():
        chosen |= {further} if name in chosen else set()
    here = features_here()
    kept = set() if "all" in chosen else here - chosen
    if changed := git("status", "--porcelain"):
        raise UserError(
            f"uncommitted changes ({changed.splitlines()[0][3:]}, ...): commit or stash them first."
        )
    if new == PACKAGE and kept == here:
        print(f"the package is already called {PACKAGE}: nothing to do.")
        return 0
    if kept != here:
        remove({*FEATURES} - kept)
        print(f"left out: {', '.join(sorted(here - kept))}")
    if new != PACKAGE:
        found = re.search(r'(?m)^DEFAULT_PROJECT = "(.+)"', "".join(texts().values()))
        rewrite(lambda path, text: renamed(path, text, PACKAGE, new, found[1] if found else None))
        git("mv", PACKAGE, new)
        print(f"moved {PACKAGE}/ to {new}/")
    if importlib.util.find_spec("ruff") is None:
        print("ruff is not installed: run `ruff check --fix` and `ruff format` before you push.")
    else:  # drop unused imports, sort and format: a new name has another place and length
        for words in (["check", "--select", "I,F401", "--fix", "--quiet"], ["format", "--quiet"]):
            subprocess.run([sys.executable, "-m", "ruff", *words], cwd=CLONE, check=False)
    print(f"""{git("status", "--short")}
Look at it with git diff HEAD; git reset --hard undoes it. To keep it:
  git add --all && git commit -m 'Rename to {new}'
  pip install -e .   # where {PACKAGE} was installed
  python -m {new}.fit {example({*FEATURES} - kept)}""")
    return 0


def features_here() -> set[str]:
    """The features that this clone still has."""
    return {name for name, patterns in FEATURES.items() if git("ls-files", "--", patterns[0])}


def example(gone: Collection[str]) -> str:
    """What trains on data that need no files, where features are gone."""
    name = "autoencoder" if "supervised" in gone else "tabular"
    return f"--config configs/examples/{name}.yaml" if "mnist" in gone else ""


def needs(text: str, gone: Collection[str]) -> bool:
    """Whether a test, or a command in Markdown, needs a feature that is gone."""
    return any(
        name in gone and re.search(pattern, text) is not None for name, pattern in NEEDS.items()
    )


def texts() -> dict[Path, str]:
    """The text files under git's control, by their path in the clone; pictures and digits hold no names."""
    names = git("grep", "-I", "--files-with-matches", "--null", "--no-color", "").split("\0")[:-1]
    return {
        Path(name): (CLONE / name).read_bytes().decode(errors="surrogateescape") for name in names
    }


def rewrite(change: Callable[[Path, str], str]) -> None:
    """Replace every text by what ``change`` makes of its path and text."""
    for path, text in texts().items():
        if (changed := change(path, text)) != text:
            (CLONE / path).write_bytes(changed.encode(errors="surrogateescape"))


def remove(gone: Collection[str]) -> None:
    """Remove features: their files, marked lines, then tests that import or need what is gone."""
    kept, going = (
        {file for name in names for file in FEATURES[name]}
        for names in ({*FEATURES} - {*gone}, gone)
    )
    git("rm", "-r", "--ignore-unmatch", "--", *going - kept)
    rewrite(lambda path, text: without_marked(path, text, gone))
    tests = {path: text for path, text in texts().items() if path.match("tests/*.py")}
    while stale := [path for path in tests if is_stale(path, tests, gone)]:
        git("rm", "--force", "--", *map(str, stale))
        tests = {path: text for path, text in tests.items() if path not in stale}


def without_marked(path: Path, text: str, gone: Collection[str]) -> str:
    """A file's text without the lines, blocks and commands of features that are gone."""
    ends: dict[
        int, int
    ] = {}  # line on which a statement, or its first decorator, begins → line on which it ends
    for node in (
        ast.walk(ast.parse(text.encode(errors="surrogateescape"))) if path.suffix == ".py" else ()
    ):
        if isinstance(node, ast.stmt):
            ends[min(n.lineno for n in [node, *getattr(node, "decorator_list", [])])] = (
                node.end_lineno or 0
            )
    kept, depth, end = [], 0, 0
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        mark = MARK.match(line.rstrip())
        if mark is not None and {*mark[3].split(", ")} <= {*gone}:
            if mark[1].strip():
                end = max(end, ends.get(number, number))
            else:
                depth += -1 if mark[2] else 1
        elif number > end and not depth:
            named = COMMAND.match(line) if path.suffix == ".md" else None
            kept += [] if named and (named[1] in gone or needs(line, gone)) else [line]
    shortened = "".join(kept)
    if (
        "mnist" in gone
    ):  # the digits had a licence of their own; what is left to train on is an example
        shortened = re.sub(r'(?m)^license = "MIT AND .*$', 'license = "MIT"', shortened)
        shortened = re.sub(
            rf"(?m)( && python -m {PACKAGE}\.fit)$", rf"\1 {example(gone)}", shortened
        )
    return (
        re.sub(r"\n{3,}", "\n\n", shortened)
        if path.suffix == ".md" and shortened != text
        else shortened
    )


def is_stale(path: Path, tests: dict[Path, str], gone: Collection[str]) -> bool:
    """Whether a file of tests/ imports or needs what is gone, or only helped tests that are gone."""
    if needs(tests[path], gone):
        return True
    for module, name in IMPORT.findall(tests[path]):
        found = CLONE / (
            f"{module}.{name}" if name and module in (PACKAGE, "tests") else module
        ).replace(".", "/")
        if not found.with_suffix(".py").is_file() and not any(found.glob("*.py")):
            return True
    helps = not path.name.startswith(("test_", "conftest"))
    return helps and not any(
        re.search(rf"\b{path.stem}\b", text) for other, text in tests.items() if other != path
    )


def renamed(path: Path, text: str, old: str, new: str, wandb_project: str | None = None) -> str:
    """A file's text with ``old`` called ``new`` where it is dotted, a folder, imported, or run by ``-m``, as well as
    W&B's default project. The word in a sentence, ``project:`` keys, ``project=`` and ``[project]`` tables stay.
    """
    if path.name in ("requirements.lock", "LICENSE"):
        return text
    rules = [
        (
            rf"(?<![\w.\-/\[]){old}(?=\.[\w{{*])",
            new,
        ),  # old.fit, old.{module}; not data.old.x, [old.urls]
        (
            rf"(?<![\w.\-/])((?:\.{{1,2}}/)*){old}(?=/)",
            rf"\1{new}",
        ),  # old/data, ./old/data; not entity/old/run
        (
            rf"(?<=\bfrom ){old}(?= import\b)|(?<=\bimport ){old}(?![\w\-])|(?<=-m ){old}(?![\w\-])",
            new,
        ),
        (rf"\b{old.upper()}_(?=[A-Z])", f"{new.upper()}_"),  # environment variables
    ]
    if path.name == "pyproject.toml":
        rules.append((rf"([\"'@]){old}(?=[\"'\[])", rf"\1{new}"))  # quoted, alone or with extras
    if path.name in ("Dockerfile", "README.md"):  # the image; COPY; the title; a word of code
        rules += [(rf"(?m)^(#.*docker |docker |COPY )(.*[ ])?{old}(?=[ ]|$)", rf"\1\2{new}")] * 2
        rules += [(rf"(\A# |`){old}(?=`|\n)", rf"\1{new}")]
    if wandb_project is not None:
        rules.append((rf"({WANDB_PROJECT}){re.escape(wandb_project)}\b", new))
    for pattern, instead in rules:
        text = re.sub(pattern, instead, text)
    return text


def git(*arguments: str) -> str:
    """What a git command prints; a UserError without git or outside a git repository."""
    try:
        return subprocess.run(
            ["git", *arguments], cwd=CLONE, check=True, capture_output=True, text=True
        ).stdout
    except FileNotFoundError:
        raise UserError("git is needed to rename safely and was not found. Install it.") from None
    except subprocess.CalledProcessError as error:
        needs = "Rename inside a git clone (git init, git add --all and git commit make one)."
        raise UserError(
            f"git {arguments[0]} failed in {CLONE}: {error.stderr.strip()}. {needs}"
        ) from None


if __name__ == "__main__":
    run(main)
