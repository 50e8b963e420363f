"""What a mirror holds of a run at one moment: a list of files with sizes and digests.

Layout of a run in a mirror::

    files/<SHA-256>.ckpt            contents; a name is never used for other contents
    begun-00000012-<owner>.json     what save 12 will be; written before its contents
    manifest-00000012-<owner>.json  which of them make up save 12; written when all are there
    lease.json                      which process trains the run now, see lease.py

So best.ckpt is copied again only when it changes, and last.ckpt not at all where it is the best. A
manifest is a new file as well, and holds a digest of itself: one that was cut off is none. The
newest two are kept, so that there is a whole save behind each one that turns out to be damaged.

A run removes what a manifest of its own names, and nothing else: the folder may hold files of the
user's. So contents are named before they are written, and a manifest goes after what it names. What
a copy leaves that was broken off is named by its ``begun-`` file, which goes with the next save.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import IO, Any, TypeGuard

# What is mirrored of a run's folder
CHECKPOINTS = ("best.ckpt", "last.ckpt")
SMALL_FILES = (
    "run-id.txt",
    # The run's names in trackers
    "trackers.json",
    "config.yaml",
    "metrics.csv",
    "digests.csv",
    "summary.json",
    "report.html",
)
MIRRORED = (*SMALL_FILES, *CHECKPOINTS)
FOLDER = "files"
NAME = re.compile(r"manifest-(\d{8,12})-([0-9a-f]{8})\.json")
BEGUN = re.compile(r"begun-(\d{8,12})-([0-9a-f]{8})\.json")
RUN_ID = re.compile(r"\w[\w.\-]{0,63}")
DIGEST = re.compile(r"[0-9a-f]{64}")
# A manifest has about 1,500 bytes, and a lease 100. What is longer is none of ours.
LONGEST = 100_000
# A file of a later time cannot be made everywhere.
LAST_TIME = 2.0**32
READ_AT_ONCE = 2**20


@dataclass(frozen=True)
class Entry:
    """A file's contents: size in bytes, and SHA-256 in hexadecimal digits."""

    size: int
    sha256: str

    def place(self, name: str) -> str:
        """Where the contents lie, below the run's folder in the mirror."""
        return f"{FOLDER}/{self.sha256}{PurePosixPath(name).suffix}"


@dataclass(frozen=True)
class Manifest:
    """The files of one save."""

    # Counts the copies of a run to this mirror, with those that were broken off
    number: int
    # The optimizer step of the checkpoint that a resume would take
    step: int
    # Tells the run from another one of the same name
    run_id: str
    # The process that wrote it
    owner: str
    # When, in seconds since 1970 by the clock of its machine. People see it; nothing depends on it.
    written: float
    # By their names in the run's folder
    files: dict[str, Entry]

    @property
    def name(self) -> str:
        """Its own name in the mirror."""
        return f"manifest-{self.number:08d}-{self.owner[:8]}.json"

    @property
    def begun_name(self) -> str:
        """Its name in the mirror until its contents are there."""
        return f"begun-{self.number:08d}-{self.owner[:8]}.json"

    @property
    def places(self) -> set[str]:
        """Where its files lie."""
        return {entry.place(name) for name, entry in self.files.items()}

    def to_bytes(self) -> bytes:
        """The file's contents."""
        files = {
            name: {"size": entry.size, "sha256": entry.sha256} for name, entry in self.files.items()
        }
        content: dict[str, Any] = {
            "format": 1,
            "number": self.number,
            "step": self.step,
            "run_id": self.run_id,
            "owner": self.owner,
            "written": self.written,
            "files": files,
        }
        content["digest"] = digest_of_content(content)
        return json.dumps(content, indent=1).encode()


def digest_of_content(content: dict[str, Any]) -> str:
    """The SHA-256 of a manifest's content without its digest."""
    rest = {name: value for name, value in content.items() if name != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def parse(data: bytes | None) -> Manifest | None:
    """A manifest; None where the data are cut off, changed, or of another kind.

    Every value is checked: a mirror may be a stranger's. No name of a file comes from it that is
    not one of ``MIRRORED``, and no place.
    """
    if data is None or len(data) > LONGEST:
        return None
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(content, dict) or content.get("format") != 1:
        return None
    if content.get("digest") != digest_of_content(content):
        return None
    number = content.get("number")
    step = content.get("step")
    run_id = content.get("run_id")
    owner = content.get("owner")
    written = content.get("written")
    files = content.get("files")
    if not (is_count(number) and is_count(step) and isinstance(files, dict)):
        return None
    if not (isinstance(written, float) and 0 <= written < LAST_TIME):
        return None
    if not (isinstance(run_id, str) and RUN_ID.fullmatch(run_id) and isinstance(owner, str)):
        return None
    entries = {}
    for name, found in files.items():
        entry = parse_entry(found)
        if name not in MIRRORED or entry is None:
            return None
        entries[name] = entry
    return Manifest(number, step, run_id, owner, written, entries)


def parse_entry(found: object) -> Entry | None:
    """A file of a manifest; None where it is not one."""
    if not isinstance(found, dict):
        return None
    size = found.get("size")
    sha256 = found.get("sha256")
    if not is_count(size) or not isinstance(sha256, str) or not DIGEST.fullmatch(sha256):
        return None
    return Entry(size, sha256)


def is_count(value: Any) -> TypeGuard[int]:
    """Whether a value is a whole number from 0."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**60


def digest_of(file: IO[bytes], size: int) -> str:
    """The SHA-256 of the first ``size`` bytes of an open file, which is read from its begin."""
    file.seek(0)
    found = hashlib.sha256()
    left = size
    while left:
        data = file.read(min(READ_AT_ONCE, left))
        if not data:
            break
        found.update(data)
        left -= len(data)
    file.seek(0)
    return found.hexdigest()
