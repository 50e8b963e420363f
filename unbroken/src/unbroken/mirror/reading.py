"""How files of a mirrored run are read: each is whole, by size and digest, or it is not taken."""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from unbroken.mirror.copying import find_manifests
from unbroken.mirror.manifest import NAME, Entry, Manifest, digest_of
from unbroken.mirror.store import Store
from unbroken.storage.files import flush_folder

# A run may replace a save while it is read. Then a newer one is there.
TRIES = 3


class Damaged(Exception):
    """A save lacks a file, or has another one in its place. The message names it."""

    def __init__(self, reason: str, place: str) -> None:
        super().__init__(reason)
        self.place = place


def is_mirrored(store: Store) -> bool:
    """Whether a folder is that of a run in a mirror, of which a save was once complete."""
    return any(NAME.fullmatch(name) for name in store.names())


def saves_in(store: Store) -> list[Manifest]:
    """The saves of a run whose manifests are whole, the newest first."""
    found = find_manifests(store)
    return [manifest for manifest in found.values() if manifest is not None][::-1]


def newest_files(
    store: Store,
    names: Sequence[str],
    folder: Path,
    ahead_of: int = -1,
    most: Mapping[str, int] = {},
) -> tuple[Manifest, list[str]]:
    """Read files of the newest save that has them whole into a folder.

    Args:
        store: The run's folder in the mirror.
        names: Those of them that a save lacks are left out.
        folder: It is there already. A file of the same name in it is replaced.
        ahead_of: Only saves of a later step are taken.
        most: Bytes, by name. Files that are larger are left out as well.

    Returns:
        The save, and why newer ones were passed over, a line each.

    Raises:
        Damaged: No save is whole.
    """
    failed: Damaged | None = None
    for attempt in range(TRIES):
        saves = [each for each in saves_in(store) if each.step > ahead_of]
        lines = []
        for manifest in saves:
            try:
                read_files(store, manifest, fitting(manifest, names, most), folder)
            except Damaged as error:
                failed = error
                lines.append(
                    f"save {manifest.number} (step {manifest.step:,}) is passed over: {error}."
                )
            else:
                return manifest, lines
        if saves == [each for each in saves_in(store) if each.step > ahead_of]:
            break
        time.sleep(attempt)
    raise failed or Damaged("no save in it is whole", "")


def fitting(manifest: Manifest, names: Sequence[str], most: Mapping[str, int]) -> list[str]:
    """Those of the names whose files in a save have no more bytes than they may."""
    sizes = {name: entry.size for name, entry in manifest.files.items()}
    return [name for name in names if sizes.get(name, 0) <= most.get(name, math.inf)]


def read_files(store: Store, manifest: Manifest, names: Sequence[str], folder: Path) -> None:
    """Read files of one save into a folder: all of them, or none.

    Raises:
        Damaged: One of them is not there, or not what it should be.
    """
    parts: dict[str, Path] = {}
    try:
        for name in names:
            entry = manifest.files.get(name)
            if entry is not None:
                part = folder / f".{name}.{os.getpid()}.part"
                parts[name] = part
                same = twin_of(name, manifest, parts)
                if same is None:
                    read_file(store, entry, name, part)
                else:
                    shutil.copyfile(same, part)
        # In the order of the names: what a run goes on from comes last.
        for name, part in parts.items():
            os.replace(part, folder / name)
        flush_folder(folder)
    finally:
        for part in parts.values():
            part.unlink(missing_ok=True)


def twin_of(name: str, manifest: Manifest, parts: dict[str, Path]) -> Path | None:
    """A file with the same contents that was read already: the best may be the last."""
    for other, part in parts.items():
        if other != name and manifest.files[other] == manifest.files[name]:
            return part
    return None


def read_file(store: Store, entry: Entry, name: str, path: Path) -> None:
    """Read one file; Damaged where it is not what its entry says."""
    place = entry.place(name)
    size = store.size(place)
    if size is None:
        raise Damaged(f"its {name} is missing", place)
    if size != entry.size:
        raise Damaged(f"its {name} has {size:,} bytes in place of {entry.size:,}", place)
    try:
        store.get(place, path)
    except FileNotFoundError:
        raise Damaged(f"its {name} is missing", place) from None
    with open(path, "rb") as file:
        arrived = path.stat().st_size
        if arrived != entry.size or digest_of(file, entry.size) != entry.sha256:
            raise Damaged(f"its {name} has other contents than were saved", place)
        os.fsync(file.fileno())
