"""Tells the user's own checkpoints from those of strangers.

A checkpoint is one's own if a run sealed it with one's key and no entry was changed since. The seal
(HMAC-SHA256) is over what the file says about classes, settings and paths. A stranger does not have
the key, so nothing that he writes into a file gives it a valid seal.

The key is 32 random bytes that each user has on each machine, in a file that only he can read
(``~/.local/state/exact-lightning-runs/key``; Windows: ``%LOCALAPPDATA%``). It is made at the first
save. Two machines of one person, a container or a team share a key in one of two ways:

* ``UNBROKEN_KEY`` in the environment, any secret text of at least 32 characters (``openssl rand
  -hex 32``). Runs seal with it, and what either key has sealed is one's own.
* A copy of the key's file in the same place of the other machine.

Whoever has the key is trusted with everything that a checkpoint can name. Where the key cannot be
written (a home that is read-only), or is not there any more (a fresh container without the
variable), files have no valid seal, and are a stranger's. Deleting the file forgets every run.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path

from filelock import FileLock
from unbroken.errors import require

KEY_VARIABLE = "UNBROKEN_KEY"
SHORTEST_KEY = 32
KEY_NAME = "key"
KEY_BYTES = 32
# Parts of a text that are sealed in one step
AT_ONCE = 1000


def folder() -> Path:
    """The user's folder for what programs remember. It is the same for every clone, whatever its
    name.
    """
    if os.name == "nt":
        state = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    else:
        state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(os.path.expanduser(state)) / "exact-lightning-runs"


def seal(parts: Iterable[str]) -> str | None:
    """The seal of the text that ``parts`` make together. None: this machine keeps no key."""
    key = _shared_key() or _key_of_machine(make=True)
    return None if key is None else _seal(key, parts)


def is_sealed(parts: Callable[[], Iterable[str]], found: object) -> bool:
    """Whether ``found`` is the seal that one of this user's keys put on the text that ``parts``
    makes.
    """
    if not isinstance(found, str) or not found.isascii():
        return False
    keys = [_shared_key(), _key_of_machine(make=False)]
    return any(key and hmac.compare_digest(_seal(key, parts()), found) for key in keys)


def _seal(key: bytes, parts: Iterable[str]) -> str:
    found = hmac.new(key, digestmod=hashlib.sha256)
    waiting = iter(parts)
    while some := list(islice(waiting, AT_ONCE)):
        found.update("".join(some).encode(errors="backslashreplace"))
    return found.hexdigest()


def check_shared_key() -> None:
    """Check ``UNBROKEN_KEY`` before there is anything to seal.

    Raises:
        UserError: It is no secret.
    """
    _shared_key()


def _shared_key() -> bytes | None:
    text = os.environ.get(KEY_VARIABLE)
    if text is None:
        return None
    must = f"be a secret of at least {SHORTEST_KEY} characters"
    require(len(text) >= SHORTEST_KEY, KEY_VARIABLE, must, f"{len(text)}")
    return hashlib.sha256(text.encode()).digest()


def _key_of_machine(make: bool) -> bytes | None:
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
