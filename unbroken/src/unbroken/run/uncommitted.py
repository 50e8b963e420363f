"""How the code of a run differs from its commit: ``uncommitted.diff``."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from unbroken.cli.program import DEFAULTS
from unbroken.results.facts import git, run_git
from unbroken.storage.files import write_atomically

UNCOMMITTED = "uncommitted.diff"
# New files whose contents a run needs to be rebuilt. Data and secrets have other names.
SUFFIXES = (".py", ".yaml", ".yml", ".toml")
MOST_BYTES = 200_000  # of one file
MOST_FILES = 200


def write_uncommitted(folder: Path, code: Path) -> None:
    """Write how the repository that has the package in ``code`` differs from its commit, if it
    does: the names of changed files, a diff of those that git knows, and one of new source files.

    ``git apply`` takes the file as it is. New are files that git neither knows nor ignores, in the
    package and in ``configs/``. Of all others, of hidden, large and binary ones, and of links the
    names alone are written.
    """
    names = git(code, "status", "--porcelain")
    if not names:
        return
    difference = git(code, "diff", "--no-ext-diff", "--no-color", "HEAD") or ""
    new = ""
    if any(line.startswith("??") for line in names.splitlines()):
        new = "".join(_new_files(code))
    # `git apply` and `patch` skip the first lines.
    write_atomically(f"{names}\n{difference}{new}", folder / UNCOMMITTED)


def _new_files(code: Path) -> Iterator[str]:
    """A diff for each new source file."""
    folders = (code.name, Path(DEFAULTS).parent.name)
    words = ("ls-files", "--others", "--exclude-standard", "-z", "--", *folders)
    listed = run_git(code.parent, *words) or ""
    # Somebody may have made thousands.
    names = list(islice(filter(_is_source, listed.split("\0")), MOST_FILES))
    if not names:
        return
    # The diff names files from the repository's top.
    prefix = (run_git(code.parent, "rev-parse", "--show-prefix") or "").rstrip("\n")
    for name in names:
        text = _text_of(code.parent / name)
        if text is not None:
            yield _as_new(prefix + name, text)


def _is_source(name: str) -> bool:
    """Whether a file has a source's name, is not hidden, and a diff can have its name as it is."""
    if not name.endswith(SUFFIXES):
        return False
    is_hidden = any(part.startswith(".") for part in name.split("/"))
    is_plain = name.isprintable() and not set(name) & set('"\\\ufffd')
    return is_plain and not is_hidden


def _text_of(path: Path) -> str | None:
    """The text of a file; None where it is no plain file, large, binary, or cannot be read."""
    try:
        found = os.lstat(path)
        if not stat.S_ISREG(found.st_mode) or found.st_size > MOST_BYTES:
            return None
        text = path.read_bytes().decode()
    except (OSError, UnicodeDecodeError):
        return None
    return None if "\0" in text else text


def _as_new(name: str, text: str) -> str:
    """The diff that makes a file."""
    header = f"diff --git a/{name} b/{name}\nnew file mode 100644\n"
    if not text:
        return header
    added = "+" + text.removesuffix("\n").replace("\n", "\n+") + "\n"
    count = added.count("\n")
    if not text.endswith("\n"):
        added += "\\ No newline at end of file\n"
    # A name with a space ends with a tab, as git writes it.
    end_of_name = "\t" if " " in name else ""
    return f"{header}--- /dev/null\n+++ b/{name}{end_of_name}\n@@ -0,0 +1,{count} @@\n{added}"
