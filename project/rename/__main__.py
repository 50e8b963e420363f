"""Turn a fresh clone into your own package, and leave out what you do not need.

python -m project.rename digits
python -m project.rename digits --without report,sweep      # code, tests, configs, pages, packages
python -m project.rename digits --without mnist             # for data of your own
python -m project.rename digits --without supervised        # for a module and data of your own
python -m project.rename digits --without all               # the core alone: fit, test, engine
python -m project.rename --update SOURCE                    # later changes of the template

What a feature needs goes along with it. --update takes the folder or address of the template, and
applies what has changed there since as git applies a commit: conflicts are marked, your own changes
stay.
"""

import importlib.metadata
import importlib.util
import keyword
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from project.command_line.parser import CommandParser
from project.command_line.start import run
from project.errors import UserError, nearest, require
from project.rename.clone import Clone
from project.rename.leave_out import example
from project.rename.make import Origin, make
from project.rename.update import update

HERE = Clone(Path(__file__).parents[2], Path(__file__).parents[1].name)
# Folders that are no packages of the clone, but would be taken for them
TAKEN = ("data", "checkpoints")


def main(argv: list[str]) -> int:
    """Rename and shorten as ``argv`` says; returns the exit code."""
    package = HERE.package
    features = HERE.features()
    parser = CommandParser(f"{package}.rename", __doc__)
    parser.add_argument(
        "name", metavar="NAME", nargs="?", help="the package's new name, such as digits"
    )
    parser.add_argument(
        "--without",
        default=[],
        action="append",
        metavar="LIST",
        help=f"leave features out: any of {','.join(features.files)}; or all",
    )
    parser.add_argument(
        "--update", metavar="SOURCE", help="the template, whose later changes are brought here"
    )
    args = parser.parse_args(argv)
    if args.update:
        if args.name or args.without:
            raise UserError("--update stands alone: name and features stay what they are.")
        return update(HERE, args.update)
    require(args.name, "NAME", "be the package's new name", "nothing", " Such as: digits")
    check_name(args.name)
    chosen = features_of(args.without)
    here = HERE.features_here()
    gone = here if "all" in chosen else here & chosen
    HERE.refuse_uncommitted()
    if args.name == package and not gone:
        print(f"the package is already called {package}: nothing to do.")
        return 0
    make(HERE, args.name, gone, origin_of(args.name, gone))
    report(args.name, gone, example({*features.files} - (here - gone)))
    return 0


def check_name(name: str) -> None:
    """A UserError for what cannot be a package's name, or would hide another module."""
    is_word = re.fullmatch(r"[a-z][a-z0-9_]*", name) is not None
    is_keyword = name in (*keyword.kwlist, *keyword.softkwlist)
    require(
        is_word and not is_keyword,
        "NAME",
        "be a lower-case Python identifier and no keyword (letters, digits, _)",
        f"'{name}'",
    )
    if name == HERE.package:
        return
    place = HERE.folder / name
    is_installed = (
        importlib.util.find_spec(name) is not None
        or name in importlib.metadata.packages_distributions()
    )
    hidden = None
    if name in sys.stdlib_module_names:
        hidden = "a module of Python's standard library"
    elif place.exists() or name in TAKEN:
        hidden = f"{place}, which is taken"
    elif is_installed:
        hidden = "an installed package"
    require(hidden is None, "NAME", f"not hide {hidden}", name, " Choose another.")


def features_of(lists: Sequence[str]) -> set[str]:
    """The features in lists with commas, and those that they take along; maybe ``all``."""
    features = HERE.features()
    chosen = {name.strip() for name in ",".join(lists).split(",")} - {""}
    for name in sorted(chosen - {*features.files, "all"}):
        raise UserError(
            f"--without must be any of {', '.join(features.files)}, or all, got {name}."
            f"{nearest(name, features.files)}"
        )
    for name, further in features.along.items():
        if name in chosen:
            chosen.add(further)
    return chosen


def origin_of(name: str, gone: set[str]) -> Origin:
    """What the new package is made from: this commit, or what this one was made from itself."""
    before = Origin.of(HERE.folder)
    if before is None:
        commit = HERE.git("rev-parse", "HEAD").strip()
        return Origin(commit, HERE.package, name, sorted(gone))
    return Origin(before.commit, before.package, name, sorted({*before.without, *gone}))


def report(name: str, gone: set[str], arguments: str) -> None:
    """Say what was done, and how to go on: the commands come last.

    ``arguments``: of fit, for something that can be trained at once.
    """
    changed = HERE.git("status", "--short").splitlines()
    if gone:
        print(f"left out: {', '.join(sorted(gone))}")
    if name != HERE.package:
        print(f"moved {HERE.package}/ to {name}/")
    print(f"{len(changed)} files changed: git diff HEAD shows them, git reset --hard undoes it.")
    print("To keep it:")
    print(f"  git add --all && git commit -m 'Rename to {name}'")
    print(f"  pip install -e .   # where {HERE.package} was installed")
    print(f"  python -m {name}.fit {arguments}".rstrip())


if __name__ == "__main__":
    run(main)
