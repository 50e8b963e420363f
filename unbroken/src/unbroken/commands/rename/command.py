"""Make a clone your own: your package's name, and the library as a locked wheel or as source.

python -m NAME.rename digits
python -m NAME.rename digits --library source
python -m NAME.rename --library ../unbroken-1.2.3-py3-none-any.whl

The second keeps the library's source and tests in the clone. The third takes another version of it.
"""

import argparse
import builtins
import importlib.util
import keyword
import re
import sys
from pathlib import Path, PurePosixPath

from unbroken.cli.parser import CommandParser
from unbroken.cli.program import folder_of
from unbroken.commands.rename import library
from unbroken.commands.rename.clone import Clone, Files
from unbroken.commands.rename.names import renamed, without_dead_links
from unbroken.commands.rename.template import (
    NAME_WORD,
    WHEEL_WORD,
    Template,
    folders_and_files,
    with_texts,
    with_words,
)
from unbroken.errors import UserError, require
from unbroken.storage.names import is_device_of_windows

INSTALL = f"pip install --require-hashes -r {library.LOCK}"
INSTALL_SOURCE = f"pip install --no-deps --no-build-isolation -e ./{library.NAME}"

# Letters of a name. Windows takes paths of 260, with those of the folders above.
LONGEST_NAME = 60
# What a reader takes for something else, though Python does not
PYTHON = ("self", "cls")
YAML = ("true", "false", "null", "yes", "no", "on", "off", "y", "n")
# Folders that runs, trackers and builds make beside the package
USED = (
    *("checkpoints", "lightning_logs", "mlruns", "wandb", "outputs", "multirun"),
    *("build", "dist", "wheels", "data"),
)


def main(package: str, argv: list[str]) -> int:
    """Rename the package as ``argv`` says, or take another version of the library."""
    return rename(Clone(folder_of(package).parent, package), argv)


def rename(clone: Clone, argv: list[str]) -> int:
    """Change a clone as ``argv`` says, whole or not at all; returns the exit code."""
    parser = CommandParser(clone.package, "rename", __doc__)
    parser.add_argument("name", nargs="?", metavar="NAME", help="the package's new name")
    parser.add_argument(
        "--library",
        metavar="wheel|source|PATH",
        help="what becomes of the library (default for a fresh clone: wheel); or the wheel or "
        "checkout of a version to take",
    )
    args = parser.parse_args(argv)
    with clone.locked():
        if clone.finish_interrupted():
            print("finished what an interrupted rename had begun. Look at it with git status.")
            return 0
        clone.refuse_uncommitted()
        return change(clone, args)


def change(clone: Clone, args: argparse.Namespace) -> int:
    """Make the new files, put them in place, and say what is next."""
    files = clone.files()
    template = Template.of(files)
    if args.name is None and args.library is None:
        raise UserError("NAME is missing, as in `rename digits`; --library PATH needs none.")
    if args.name is not None:
        check_name(args.name, files)
        must = "be no folder that git ignores (git check-ignore -v NAME/ says by which pattern)"
        require(not clone.ignores(args.name), "NAME", must, args.name)
    if template is None and args.library in ("wheel", "source"):
        raise UserError(
            f"--library {args.library} is chosen once, for a fresh clone. Here it takes the path of"
            " another version."
        )
    if template is not None and args.name is None:
        raise UserError("--library PATH is for a renamed clone. Name the package: rename NAME.")

    lines: list[str] = []
    if template is None:
        after = files
        if args.library is not None:
            after, lines = with_other_library(clone, files, Path(args.library))
        if args.name is not None:
            after = with_other_name(after, clone.package, args.name)
    else:
        after, lines = first_time(clone, files, template, args)
    clone.replace(files, after)
    if args.name is not None:
        print(f"moved {clone.package}/ to {args.name}/.")
    for line in lines:
        print(line)
    print("Nothing is committed: look at it with git status, and undo it with git reset --hard.")
    return 0


def check_name(name: str, files: Files) -> None:
    """A UserError unless a package may have this name here."""
    fits = re.fullmatch(r"[a-z][a-z0-9_]*", name) and not keyword.iskeyword(name)
    must = "be lower-case letters, digits and underscores, and begin with a letter"
    require(fits, "NAME", must, name)
    must = f"have at most {LONGEST_NAME} letters"
    require(len(name) <= LONGEST_NAME, "NAME", must, f"{name[:LONGEST_NAME]}...")
    taken = name in {PurePosixPath(path).parts[0] for path in files}
    taken = taken or name in sys.stdlib_module_names or importlib.util.find_spec(name) is not None
    require(not taken, "NAME", "be the name of nothing else here", name)
    for meaning, is_taken in (
        (
            "word of Python",
            keyword.issoftkeyword(name) or name in PYTHON or hasattr(builtins, name),
        ),
        ("word of YAML, which config files are written in", name in YAML),
        ("name of a device of Windows", is_device_of_windows(name)),
        ("folder that runs or builds use", name in USED),
    ):
        require(not is_taken, "NAME", f"be no {meaning}", name)


def first_time(
    clone: Clone, files: Files, template: Template, args: argparse.Namespace
) -> tuple[Files, list[str]]:
    """The files of a clone of its own, and lines that say what is next."""
    name = args.name
    words = {NAME_WORD: name}
    after = template.without_left_behind(files)
    after = with_words(after, template.words, words, library.FOLDER)
    after = with_texts(after, template.texts, words)
    if args.library == "source":
        after = with_texts(after, template.library_as_source, words)
        lines = [f"the library's source stays in {library.FOLDER}."]
        lines.append(f"Next: python -m {name}.fit, and python -m pytest")
    else:
        place = clone.folder if args.library in (None, "wheel") else Path(args.library)
        wheel = library.wheel_at(place)
        after = with_texts(after, template.library_as_wheel, words | {WHEEL_WORD: wheel.path})
        after = library.with_wheel(after, wheel, before=None)
        lines = [f"the library is {wheel.path}, locked by its hash."]
        lines.append(f"Next: {INSTALL} && python -m {name}.fit, and python -m pytest")
    after = with_other_name(after, clone.package, name)
    there = folders_and_files(after)
    for path, file in after.items():
        text = file.text()
        if path.endswith(".md") and not path.startswith(library.FOLDER) and text is not None:
            after[path] = file.with_text(without_dead_links(PurePosixPath(path), text, there))
    return after, lines


def with_other_name(files: Files, old: str, new: str) -> Files:
    """The files with another package's name, in every text and as a folder; not in the library,
    which knows no package of a user.
    """
    after = {}
    for name, file in files.items():
        text = file.text()
        if name.startswith((library.FOLDER, library.WHEELS, library.LOCK)) or text is None:
            changed = file
        else:
            changed = file.with_text(renamed(PurePosixPath(name), text, old, new))
        path = f"{new}/{name.removeprefix(f'{old}/')}" if name.startswith(f"{old}/") else name
        after[path] = changed
    return after


def with_other_library(clone: Clone, files: Files, path: Path) -> tuple[Files, list[str]]:
    """The files with another version of the library, and lines that say what has changed."""
    lock = files[library.LOCK].content.decode()
    before = library.wheel_in(files)
    if before is None:
        source = library.source_files(path)
        after = {name: each for name, each in files.items() if not name.startswith(library.FOLDER)}
        after |= source
        changelog = source[f"{library.FOLDER}{library.CHANGELOG}"].content.decode()
        old = library.wheel_at(clone.folder)
        new = library.wheel_at(path)
        lines = [f"the library is {new.version} in {library.FOLDER}, it was {old.version}."]
        install = INSTALL_SOURCE
    else:
        old = before
        new = library.wheel_at(path)
        after = library.with_wheel(files, new, before)
        changelog = new.member(f"{library.NAME}/{library.CHANGELOG}")
        lines = [f"the library is {new.path}, locked by its hash. It was {old.version}."]
        install = INSTALL
    told = library.news(changelog, old.version, new.version)
    if told:
        lines += ["", told, ""]
    missing = sorted({*library.not_locked(lock, old.requirements(), new.requirements())})
    if missing:
        lines.append(
            f"{library.LOCK} does not hold what this version needs: {', '.join(missing)}. Renew it"
            " by the command in its first lines."
        )
    lines.append(f"Next: {install}")
    return after, lines
