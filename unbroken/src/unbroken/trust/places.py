"""Where a text leads: whether it is a place in the file system, and whether that is inside another.

Both speak of places of this machine after everything that can be expanded is expanded: the home
folder, variables, links. Whatever has a scheme, such as ``file://`` or ``http://``, is outside of
every folder: the libraries that open it do not agree what it means.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

# Words of names under which settings hold places
NAMES_OF_PLACES = {
    *("dir", "dirs", "dirpath", "directory", "rootdir", "workdir"),
    *("path", "paths", "filepath", "filepaths", "root", "folder", "folders"),
    *("file", "files", "filename", "filenames", "logfile", "url", "uri"),
}
SCHEME = re.compile(r"\s*[A-Za-z][A-Za-z0-9+.-]*:")
# From the root or the home, by a variable, or through the folder above
LEADS_AWAY = re.compile(r"^\s*[/\\~]|[$%]\w|[$%]\{|(^|[/\\])\.\.([/\\]|$)|\0")


def is_place(name: str, text: str) -> bool:
    """Whether a setting is a place: by its name, by its look, or because it is there.

    A text of several parts, such as a metric's name ``val/loss``, is one only if it is there.
    """
    if NAMES_OF_PLACES.intersection(re.findall("[a-z]+", name.lower())):
        return True
    if LEADS_AWAY.search(text) or SCHEME.match(text):
        return True
    return bool(re.search(r"[/\\.]", text)) and os.path.lexists(text)


def is_inside(text: str | os.PathLike[str], folder: Path) -> bool:
    """Whether a place lies in a folder, after all links."""
    name = os.fspath(text)
    is_drive = os.name == "nt" and re.match(r"[A-Za-z]:", name)
    if "\0" in name or (SCHEME.match(name) and not is_drive):
        return False
    expanded = os.path.expandvars(os.path.expanduser(name))
    return Path(os.path.realpath(expanded)).is_relative_to(folder.resolve())
