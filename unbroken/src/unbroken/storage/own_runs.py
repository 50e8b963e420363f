"""Tells the checkpoints that this user's own runs wrote on this machine from those of strangers.

There is one secret key for each user and machine, 32 random bytes in a file that only the user can
read, outside of every clone and run folder. A run seals what its checkpoints say about classes and
paths with this key (HMAC-SHA256). A stranger does not have the key, so nothing that he writes into
a file gives it a valid seal, and a changed entry breaks the seal. A run that goes on from a file
without a valid seal puts none on its own files: what has a seal was typed by this user, from the
run's first start on.

Where the key cannot be written (a home that is read-only), or is not there any more (a fresh
container), files have no valid seal, and are checked as a stranger's. Nothing else is kept on the
machine; deleting the file forgets every run.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path
from typing import Any

from filelock import FileLock

KEY_NAME = "key"
KEY_BYTES = 32


def folder() -> Path:
    """The user's folder for what programs remember. It is the same for every clone, whatever its
    name.
    """
    if os.name == "nt":
        state = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    else:
        state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(os.path.expanduser(state)) / "exact-lightning-runs"


def seal(contents: Any) -> str | None:
    """The seal of plain contents. None: this machine keeps no key."""
    key = _key(make=True)
    return None if key is None else _seal(key, contents)


def is_sealed(contents: Any, found: object) -> bool:
    """Whether ``found`` is the seal that a run of this user put on ``contents``."""
    if not isinstance(found, str) or not found.isascii():
        return False
    key = _key(make=False)
    return key is not None and hmac.compare_digest(_seal(key, contents), found)


def _seal(key: bytes, contents: Any) -> str:
    # Of plain values, repr tells everything: kinds, order and every digit.
    text = repr(contents).encode(errors="backslashreplace")
    return hmac.new(key, text, hashlib.sha256).hexdigest()


def _key(make: bool) -> bytes | None:
    path = folder() / KEY_NAME
    if not path.is_absolute():
        # There is no home folder. The key must not lie where somebody happens to work.
        return None
    try:
        if make and not path.exists():
            _make_key(path)
        key = path.read_bytes()
    except (OSError, NotImplementedError):
        # The home cannot be written, or has no locks.
        return None
    return key if len(key) == KEY_BYTES else None


def _make_key(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    # Two runs may start at once on a new machine. The second must not replace the first one's key.
    with FileLock(path.with_suffix(".lock"), timeout=5):
        if path.exists():
            return
        beside = path.with_suffix(".part")
        beside.unlink(missing_ok=True)
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
        os.replace(beside, path)
