"""The files that a command line means."""

import glob
import os
from collections.abc import Iterable
from pathlib import Path

from unbroken.errors import UserError, require
from unbroken.pictures import image_endings
from unbroken.tables import printable


def find_files(arguments: Iterable[str], only_images: bool = False) -> tuple[list[Path], list[str]]:
    """Files that are meant by files, folders (with all below that is not hidden) and globs.

    A file that was named is returned in any case, even a missing one, to be reported with others
    that cannot be read. With ``only_images``, files of a folder need an image's ending.

    Returns:
        The files, each once, and the folders that hold none or are left out, in words for the
        user.

    Raises:
        UserError: where a pattern matches nothing, or there is no file at all.
    """
    endings = image_endings() if only_images else set()
    found: list[Path] = []
    empty: list[str] = []
    for argument in arguments:
        require(argument, "IMAGE", "be a file, a folder or a pattern", "nothing")
        for path in expand(argument):
            files = files_below(path, endings) if path.is_dir() else [path]
            found += files
            if not files:
                empty.append(describe_empty(path, endings))
            empty += linked_folders_below(path)
    if not found:
        raise UserError(f"IMAGE {empty[0]}. Check the folder, or name the files.")
    return list(dict.fromkeys(found)), empty


def expand(argument: str) -> list[Path]:
    """The paths that a word of the command line stands for; a UserError where a pattern has
    none.
    """
    # Path.expanduser() raises where there is no such user.
    word = os.path.expanduser(argument)
    if os.path.exists(word) or not glob.has_magic(word):
        return [Path(word)]
    paths = sorted(glob.glob(word, recursive=True))
    if not paths:
        raise UserError(
            f"IMAGE {printable(argument)} matches no file. Check the folder, or name the files."
        )
    return [Path(path) for path in paths]


def files_below(folder: Path, endings: set[str]) -> list[Path]:
    """The files of a folder and its folders, without hidden files and folders; with ``endings``,
    only those.
    """
    files = []
    for path in sorted(folder.rglob("*")):
        # The folder itself was named, and may be hidden.
        is_hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.is_file() and not is_hidden:
            files.append(path)
    if not endings:
        return files
    return [file for file in files if file.suffix.lower() in endings]


def linked_folders_below(folder: Path) -> list[str]:
    """What is said of the links to folders in a folder: a link may lead round in a circle."""
    told = []
    for path in sorted(folder.rglob("*")) if folder.is_dir() else []:
        is_hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.is_symlink() and path.is_dir() and not is_hidden:
            shown = printable(str(path))
            told.append(f"{shown} is a link to a folder: name it, or {shown}/*")
    return told


def describe_empty(folder: Path, endings: set[str]) -> str:
    """What is said of a folder without files."""
    kind = f"with an image's ending ({' '.join(sorted(endings))})" if endings else "in it"
    return f"{printable(str(folder))} is a folder without files {kind}"
