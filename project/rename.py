"""Turn a fresh clone into your own package: folder, imports, commands, class paths, distribution name, image, README.

python -m project.rename digits
python -m project.rename digits --bare      # also without the bundled MNIST digits, their tests and result tables
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import keyword
import re
import subprocess
import sys
from pathlib import Path

from project.errors import UserError

PACKAGE = Path(__file__).parent.name
CLONE = Path(__file__).parents[1]


def main(argv: list[str]) -> int:
    """Rename as ``argv`` says; returns the exit code."""
    from project.engine.command import CommandParser

    parser = CommandParser(f"{PACKAGE}.rename", __doc__)
    parser.add_argument("name", metavar="NAME", help="the package's new name, such as digits")
    parser.add_argument("--bare", action="store_true", help="also remove what only the MNIST example needs")
    args = parser.parse_args(argv)
    check_name(args.name)
    files = tracked_files()
    if args.name == PACKAGE and not args.bare:
        print(f"the package is already called {PACKAGE}: nothing to do.")
        return 0
    told = remove_example(files) if args.bare else []
    told += rename(args.name, [path for path in files if (CLONE / path).exists()])
    print("\n".join(told))
    print("\nLook at it with git diff; git reset --hard undoes it. To keep it:")
    print(f"  git add --all && git commit -m 'Rename to {args.name}'")
    first = "devices" if args.bare else "fit"  # a bare clone has no digits to train on
    print(f"  pip install -e .   # where {PACKAGE} was installed\n  python -m {args.name}.{first}")
    return 0


def check_name(name: str) -> None:
    """Raise a UserError where ``name`` cannot be a package of this clone."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name) or keyword.issoftkeyword(name):
        raise UserError(
            f"NAME must be a lower-case Python identifier and no keyword (letters, digits, _), got '{name}'."
        )
    if name == PACKAGE:
        return
    if name in sys.stdlib_module_names:
        raise UserError(f"NAME must not hide a module of Python's standard library, got {name}.")
    if (CLONE / name).exists() or name in ("data", "checkpoints"):
        raise UserError(f"NAME must be free: {CLONE / name} is taken. Choose another.")
    if importlib.util.find_spec(name) is not None or name in importlib.metadata.packages_distributions():
        raise UserError(f"NAME must not hide an installed package, got {name}. Choose another.")


def tracked_files() -> list[Path]:
    """Files under git's control, relative to the clone.

    Raises:
        UserError: No git repository, or one with changes that a rename would be mixed up with.
    """
    changed = git("status", "--porcelain")
    if changed:
        first = changed.splitlines()[0][3:]
        raise UserError(
            f"the clone has uncommitted changes ({first}, ...), which a rename could not be told from. Commit or stash "
            "them first."
        )
    return [Path(name) for name in git("ls-files", "-z").split("\0") if name and not (CLONE / name).is_symlink()]


def rename(name: str, files: list[Path]) -> list[str]:
    """Rewrite the files, move the package's folder. Returns lines that tell what changed."""
    from project.renaming.words import rewrite

    told = []
    for path in files if name != PACKAGE else []:
        try:
            text = (CLONE / path).read_bytes().decode()
        except UnicodeDecodeError:
            continue  # pictures and digits hold no names
        changed = rewrite(path, text, PACKAGE, name)
        if changed != text:
            (CLONE / path).write_bytes(changed.encode())
            told.append(f"{count_changes(text, changed):4d} lines  {path}")
    if name != PACKAGE:
        git("mv", PACKAGE, name)
        told.append(f"moved {PACKAGE}/ to {name}/")
    return [*told, *tidy()]


def count_changes(before: str, after: str) -> int:
    """Lines that differ; a rename adds and removes none."""
    return sum(a != b for a, b in zip(before.splitlines(), after.splitlines(), strict=True))


def remove_example(files: list[Path]) -> list[str]:
    """Remove what only MNIST needs, and commit nothing. Returns lines that tell what is gone."""
    from project.renaming.bare import files_of_the_example, without_the_example

    gone = files_of_the_example(CLONE, PACKAGE)
    if gone:
        git("rm", "--quiet", *map(str, gone))
    told = [f"removed {path}" for path in gone]
    for path in (path for path in files if path not in gone and path.suffix in (".md", ".toml")):
        text = (CLONE / path).read_text()
        if (kept := without_the_example(path, text)) != text:
            (CLONE / path).write_text(kept)
            told.append(f"shortened {path}")
    return told


def tidy() -> list[str]:
    """Sort imports and wrap lines anew with ruff, where it is installed: another name has another place and length."""
    if importlib.util.find_spec("ruff") is None:
        return ["ruff is not installed: run `ruff check --fix` and `ruff format` before you push."]
    for arguments in (["check", "--select", "I", "--fix", "--quiet"], ["format", "--quiet"]):
        subprocess.run([sys.executable, "-m", "ruff", *arguments], cwd=CLONE, check=False)
    return []


def git(*arguments: str) -> str:
    """What a git command prints.

    Raises:
        UserError: There is no git, or the clone is no git repository.
    """
    try:
        return subprocess.run(["git", *arguments], cwd=CLONE, check=True, capture_output=True, text=True).stdout
    except FileNotFoundError:
        raise UserError("git is needed to rename safely and was not found. Install it.") from None
    except subprocess.CalledProcessError as error:
        raise UserError(
            f"git {arguments[0]} failed in {CLONE}: {error.stderr.strip()}. Rename inside a git clone (git init, "
            "git add --all and git commit make one)."
        ) from None


if __name__ == "__main__":
    from project.engine.command import run

    run(main)
