"""Which process may write a run in a mirror: two machines must not train one run.

The process that trains a run keeps ``lease.json`` beside the run's manifests, and writes it again
every ``BEAT_S`` seconds with a higher number. Clocks of machines differ, so no time stands in it.
Another process that finds a lease reads it again and again for ``PATIENCE_S`` seconds of its own
clock. If it changes in that time, its owner is alive, and the other process is refused. If it does
not, the owner is gone, and the lease is taken over.

Who was cut off from the store for longer than that, and finds another owner when it is back, copies
nothing any more.
"""

from __future__ import annotations

import contextlib
import json
import platform
import threading
import time
import uuid

from unbroken.errors import UserError, printable
from unbroken.mirror.store import Store
from unbroken.stopping.ranks import say

FILE = "lease.json"
# Seconds between two renewals
BEAT_S = 15.0
# Seconds without a renewal after which a lease has run out. They are those of four renewals, since
# a store may be slow.
PATIENCE_S = 60.0
# Seconds between two looks at another process' lease
LOOK_S = 5.0
# How often, and after how many seconds, a lease is read again that was just being written
READS = 5
READ_AGAIN_S = 0.2
# The leases of this process, by the address of the run's folder in the mirror
HELD: dict[str, Lease] = {}


class Lease:
    """This process' lease of one run.

    Args:
        store: The run's folder in the mirror.
        run_name: For messages.
    """

    def __init__(self, store: Store, run_name: str) -> None:
        self.store = store
        self.run_name = run_name
        self.owner = uuid.uuid4().hex
        self.is_lost = False
        self._beats = 0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def claim(self, dead_owner: str | None) -> None:
        """Take the lease, and renew it from now on.

        Args:
            dead_owner: A process of this machine that is known to be gone. Nobody needs to wait for
                its lease to run out.

        Raises:
            UserError: Another process trains the run.
        """
        earlier = HELD.pop(self.store.url, None)
        if earlier is not None:
            # An earlier run of this process ended without giving it back, as in a notebook.
            earlier.release()
        found = self.store.read(FILE)
        if found is not None and owner_in(found) not in (self.owner, dead_owner):
            self._wait_until_it_runs_out(found)
        self._write(self.store)
        self.check()
        self._thread = threading.Thread(target=self._renew, name="mirror-lease", daemon=True)
        self._thread.start()
        HELD[self.store.url] = self

    def check(self) -> None:
        """A UserError where another process has taken the lease at the same moment."""
        found = whole_lease(self.store)
        if owner_in(found) not in (self.owner, "", None):
            raise self._taken(found)

    def is_mine(self, store: Store | None = None) -> bool:
        """Whether nobody has taken it over. It asks the store, by another connection if given."""
        if not self.is_lost:
            found = whole_lease(store or self.store)
            # A lease that was removed by hand is written again by the next renewal.
            self.is_lost = owner_in(found) not in (self.owner, "", None)
        return not self.is_lost

    def release(self, seconds: float = 10.0) -> None:
        """Let others have the run at once. If the store does not answer in time, it runs out."""
        self._ended.set()
        if HELD.get(self.store.url) is self:
            del HELD[self.store.url]
        if self._thread is not None:
            self._thread.join(seconds)
            self._thread = None

    def _write(self, store: Store) -> None:
        self._beats += 1
        content = {"owner": self.owner, "machine": platform.node(), "renewed": self._beats}
        store.write(FILE, json.dumps(content).encode())

    def _renew(self) -> None:
        store: Store | None = None
        while not self._ended.wait(BEAT_S):
            try:
                # A connection of its own: a copy that takes long must not hold it up.
                store = store or Store(self.store.url)
                if not self.is_mine(store):
                    return
                self._write(store)
            except Exception:
                # A store that does not answer is told by whoever copies. Connect anew.
                store = None
        with contextlib.suppress(Exception):
            store = store or Store(self.store.url)
            if owner_in(whole_lease(store)) == self.owner:
                store.remove(FILE)

    def _wait_until_it_runs_out(self, found: bytes) -> None:
        machine = machine_in(found)
        say(
            f"run {self.run_name} has a lease of {machine} in {self.store.shown}: looking for"
            f" {PATIENCE_S:.0f} s whether it is renewed."
        )
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            time.sleep(LOOK_S)
            now = self.store.read(FILE)
            if now is None:
                return
            if now != found:
                raise self._taken(now)
        say(f"the lease of {machine} has run out: run {self.run_name} goes on here.")

    def _taken(self, found: bytes | None) -> UserError:
        return UserError(
            f"run {self.run_name} is trained by another process ({machine_in(found)}), which renews"
            f" its lease in {self.store.shown}. Wait until it has ended, or change --run_name."
        )


def whole_lease(store: Store) -> bytes | None:
    """The lease. In a folder it can be read while it is written: then it is read again."""
    found = store.read(FILE)
    for _ in range(READS):
        if owner_in(found) != "":
            break
        time.sleep(READ_AGAIN_S)
        found = store.read(FILE)
    return found


def is_there(store: Store) -> bool:
    """Whether there is a lease. Another file of that name is none: somebody else wrote it."""
    try:
        content = json.loads(whole_lease(store) or b"")
    except (ValueError, RecursionError):
        return False
    return isinstance(content, dict) and set(content) == {"owner", "machine", "renewed"}


def owner_in(data: bytes | None) -> str | None:
    """The owner that a lease names; an empty text where it names none; None without a lease."""
    if data is None:
        return None
    return _text_in(data, "owner")


def machine_in(data: bytes | None) -> str:
    """The machine that a lease names, in words."""
    name = _text_in(data or b"", "machine")
    return printable(name[:80]) or "an unknown machine"


def _text_in(data: bytes, key: str) -> str:
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        return ""
    found = content.get(key) if isinstance(content, dict) else None
    return found if isinstance(found, str) else ""
