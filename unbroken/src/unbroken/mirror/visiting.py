"""What commands that only read take from a mirror: a checkpoint, or what a list of runs shows."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

from unbroken.errors import UserError
from unbroken.mirror.lease import FILE as LEASE
from unbroken.mirror.manifest import CHECKPOINTS, SMALL_FILES
from unbroken.mirror.reading import Damaged, is_mirrored, newest_files, saves_in
from unbroken.mirror.store import Store
from unbroken.stopping.ranks import say
from unbroken.storage.reading import MOST_CSV, MOST_JSON, MOST_TEXT, MOST_YAML

# A page in a mirror may hold anything, and a list of runs shows none.
LISTED = [name for name in SMALL_FILES if name != "report.html"]
# Bytes of each that a list of runs reads. A larger one is not fetched.
MOST = dict.fromkeys(LISTED, MOST_TEXT) | {
    "metrics.csv": MOST_CSV,
    "digests.csv": MOST_CSV,
    "summary.json": MOST_JSON,
    "trackers.json": MOST_JSON,
    "config.yaml": MOST_YAML,
}


def scratch_folder() -> Path:
    """A folder that goes with this process."""
    folder = Path(tempfile.mkdtemp(prefix="mirror-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def fetch_checkpoint(url: str, option: str = "--ckpt_path") -> Path:
    """The checkpoint at an address, as a local file that goes with this process.

    Args:
        url: The address of a run in a mirror (its ``best.ckpt``, else its ``last.ckpt``), of a file
            of such a run (``s3://bucket/runs/mine/last.ckpt``), or of any other file.
        option: Who gave it, for errors.

    Raises:
        UserError: There is no whole checkpoint, or the store does not answer as it should.
    """
    store = Store(url, option)
    parent, _, name = url.rstrip("/").rpartition("/")
    folder = scratch_folder()
    try:
        if is_mirrored(store):
            return from_run(store, list(CHECKPOINTS), folder)
        beside = Store(parent, option)
        if name in CHECKPOINTS and is_mirrored(beside):
            return from_run(beside, [name], folder)
        if beside.is_file(name):
            beside.get(name, folder / "checkpoint.ckpt")
            return folder / "checkpoint.ckpt"
        runs = mirrored_runs(store)
    except UserError:
        raise
    except Damaged as error:
        raise UserError(f"{option}: {store.shown} has no whole checkpoint ({error}).") from None
    except Exception as error:
        raise store.unusable(error) from error
    if not runs:
        raise UserError(f"{option}: there is no checkpoint and no mirrored run at {store.shown}.")
    shown = ", ".join(runs[:10])
    raise UserError(f"{option}: {store.shown} holds several runs; add one's name: {shown}.")


def from_run(store: Store, names: list[str], folder: Path) -> Path:
    """The first of these files of a run's newest whole save."""
    saves = saves_in(store)
    there = [name for name in names if saves and name in saves[0].files]
    save, lines = newest_files(store, there[:1], folder)
    say(*(f"{store.shown}: {line}" for line in lines))
    say(f"read from {store.shown}: {there[0]} of step {save.step:,}.")
    return folder / there[0]


def mirrored_runs(root: Store) -> list[str]:
    """The names of the runs in a mirror."""
    return [name for name in root.names() if is_mirrored(root.below(name))]


def fetch_runs(url: str, option: str = "--root") -> Path:
    """A local folder with the small files of every run in a mirror, as far as they are whole.

    Raises:
        UserError: The store does not answer as it should.
    """
    root = Store(url, option)
    place = scratch_folder()
    try:
        for name in mirrored_runs(root):
            fetch_listed(root.below(name), place / name)
    except UserError:
        raise
    except Exception as error:
        raise root.unusable(error) from error
    return place


def fetch_listed(store: Store, folder: Path) -> None:
    """What a list of runs shows of one of them."""
    folder.mkdir()
    try:
        save, _ = newest_files(store, LISTED, folder, most=MOST)
    except Damaged as error:
        say(f"{store.shown} is left out: {error}.")
        return
    for name in LISTED:
        if name in save.files and save.files[name].size > MOST[name]:
            say(f"{store.shown}: its {name} is left out: it has more than {MOST[name]:,} bytes.")
    for path in folder.iterdir():
        os.utime(path, (save.written, save.written))
    lease = store.read(LEASE)
    if lease is not None:
        (folder / LEASE).write_bytes(lease)
