"""The thread that copies saves into the mirror, while training goes on."""

from __future__ import annotations

import re
import threading
import time

from unbroken.mirror.lease import Lease
from unbroken.mirror.manifest import BEGUN, NAME, Entry, Manifest, digest_of, parse
from unbroken.mirror.save import Save
from unbroken.mirror.store import Store, one_line
from unbroken.stopping import signals
from unbroken.stopping.ranks import say

# Seconds until a copy that failed is tried again: the first time, and at most
FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 60.0
# The same where the end of a run waits for it
HURRIED_PAUSE_S = 1.0
# How many saves are kept
KEPT = 2
# Seconds between two lines about a copy that the end of a run waits for
PROGRESS_S = 10.0
# Seconds in which not a byte has arrived, after which the end of a run waits no longer
STALLED_S = 60.0


class LeaseLost(Exception):
    """Another machine has the run's lease now."""


class Copying:
    """Copies the newest save, never two at once.

    A save that comes while another one is copied waits, and takes the place of one that waits
    already. Nothing here raises in the thread that trains.

    Args:
        store: The run's folder in the mirror.
        lease: It is asked before a save counts.
        run_id: The run's id.
        damaged: Where contents lie that are known to be damaged, though they may have the right
            size.
    """

    def __init__(self, store: Store, lease: Lease, run_id: str, damaged: set[str]) -> None:
        self.store = store
        self.lease = lease
        self.run_id = run_id
        # Why the last try failed. None: it did not.
        self.failure: str | None = None
        # Steps of the newest save that was given, and of the newest one that the mirror holds.
        self.given_step: int | None = None
        self.copied_step: int | None = None
        # Bytes of the save that is copied now
        self.moved = 0
        self.total = 0
        self._damaged = damaged
        self._newest: Save | None = None
        self._waiting: Save | None = None
        self._is_complete = True
        self._is_hurried = False
        self._has_ended = False
        # Saves in the mirror, the newest last; None until the store was asked
        self._kept: list[Manifest] | None = None
        self._number = 0
        # What copies have left that were broken off, to be removed after the next save
        self._leftovers: list[str] = []
        self._last_move = time.monotonic()
        self._says_that_old_ones_stay = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)
        self._thread.start()

    # What the thread that trains calls

    def take(self, save: Save) -> None:
        """Copy this save next."""
        with self._changed:
            self.given_step = save.step
            self._is_complete = False
            if self._has_ended:
                save.close()
                return
            if self._waiting is not None:
                self._waiting.close()
            self._waiting = save
            self._newest = save
            self._changed.notify_all()

    def wait(self, seconds: float | None) -> bool:
        """Wait until the mirror holds the newest save; returns whether it does.

        Args:
            seconds: At most so long. None: as long as something arrives in the store; lines tell
                how far it is.
        """
        begun = time.monotonic()
        told = begun
        with self._changed:
            # A copy that waits to be tried again is tried now.
            self._is_hurried = True
            self._changed.notify_all()
            while not self._is_complete and not self._has_ended:
                now = time.monotonic()
                if seconds is None and signals.state.requested:
                    # The run was asked to stop while it waits.
                    seconds = now - begun + signals.seconds_left()
                if seconds is not None and now - begun >= seconds:
                    break
                if seconds is None and now - max(begun, self._last_move) >= STALLED_S:
                    break
                if seconds is None and now - told >= PROGRESS_S:
                    told = now
                    say(f"mirror: waiting for the last copy, {self.progress()}.")
                left = 1.0 if seconds is None else min(1.0, begun + seconds - now)
                self._changed.wait(max(left, 0.01))
            self._is_hurried = False
            return self._is_complete

    def end(self) -> None:
        """Copy nothing any more. A copy that is under way ends with its next part."""
        with self._changed:
            self._has_ended = True
            if self._waiting is not None:
                self._waiting.close()
                self._waiting = None
            self._changed.notify_all()

    @property
    def known_step(self) -> int | None:
        """The step of the newest save that was in the mirror before; None where that is unknown."""
        return self._kept[-1].step if self._kept else None

    def progress(self) -> str:
        """How much of a save has arrived, in words."""
        arrived = f"{self.moved / 1e6:,.1f} of {self.total / 1e6:,.1f} MB have arrived"
        return f"{arrived} ({self.failure})" if self.failure else arrived

    # What happens in the thread of its own

    def _run(self) -> None:
        pause = FIRST_PAUSE_S
        while True:
            save = self._next()
            if save is None:
                return
            try:
                self._copy(save)
            except LeaseLost:
                save.close()
                self.failure = "another machine has taken over the run"
                say(
                    "mirror: another machine has taken over this run in"
                    f" {self.store.shown}: nothing more is copied. Training goes on."
                )
                self.end()
            except Exception as error:
                if self._has_ended:
                    save.close()
                    return
                self._tell_failure(one_line(error))
                self._try_again(save, pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)
            else:
                self._tell_success(save)
                pause = FIRST_PAUSE_S

    def _next(self) -> Save | None:
        """Wait for a save. None: there will be none."""
        with self._changed:
            while self._waiting is None and not self._has_ended:
                self._changed.wait()
            save = self._waiting
            self._waiting = None
            return save

    def _tell_failure(self, reason: str) -> None:
        if self.failure is None:
            say(
                f"mirror: {self.store.shown} takes no copies ({reason}). Training goes on;"
                " copying is tried again."
            )
        self.failure = reason

    def _tell_success(self, save: Save) -> None:
        save.close()
        if self.failure is not None:
            say(f"mirror: {self.store.shown} takes copies again; it holds step {save.step:,}.")
        with self._changed:
            self.failure = None
            self.copied_step = save.step
            self._is_complete = save is self._newest
            self._changed.notify_all()

    def _try_again(self, save: Save, pause: float) -> None:
        """Wait, then put the save back, unless a newer one has come."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended or self._is_hurried, timeout=pause)
            if self._is_hurried and not self._has_ended:
                self._changed.wait(HURRIED_PAUSE_S)
            if self._waiting is None and not self._has_ended:
                self._waiting = save
                return
        save.close()

    def _copy(self, save: Save) -> None:
        """Bring a save over: contents that are not there yet, then the manifest."""
        if self.failure is not None:
            self.store.reopen()
        if not self.lease.is_mine(self.store):
            raise LeaseLost
        kept = self._known_saves()
        entries = {}
        for name, held in save.files.items():
            entries[name] = Entry(held.size, digest_of(held.file, held.size))
        if kept and kept[-1].files == entries and kept[-1].step == save.step:
            return
        there = set().union(*(manifest.places for manifest in kept))
        new = {}
        for name, entry in entries.items():
            place = entry.place(name)
            if place not in there and place not in new:
                new[place] = save.files[name]
        self._number += 1
        owner = self.lease.owner
        manifest = Manifest(self._number, save.step, self.run_id, owner, time.time(), entries)
        self._name_before_copying(manifest, set(new))
        self.moved = 0
        self.total = sum(held.size for held in new.values())
        for place, held in new.items():
            self.store.put(held.file, held.size, place, self._note_part)
            self._note_part(0)
        if not self.lease.is_mine(self.store):
            raise LeaseLost
        self.store.write(manifest.name, manifest.to_bytes())
        self._damaged -= new.keys()
        self._remove_old([*kept, manifest])

    def _name_before_copying(self, manifest: Manifest, new: set[str]) -> None:
        """Say in the store which contents come, so that they can be told from files of others if
        the copy is broken off.
        """
        # A copy that is tried again has said so.
        if not new <= set(self._leftovers):
            self.store.write(manifest.begun_name, manifest.to_bytes())
            self._leftovers += [*sorted(new), manifest.begun_name]

    def _note_part(self, count: int) -> None:
        self.moved += count
        self._last_move = time.monotonic()
        if self._has_ended:
            raise InterruptedError("the run has ended")

    def _known_saves(self) -> list[Manifest]:
        """The whole saves that the mirror holds, the oldest first."""
        if self._kept is None:
            own = self._own_manifests(find_manifests(self.store))
            begun = self._own_manifests(find_begun(self.store))
            self._number = max([manifest.number for manifest in (*own, *begun)], default=0)
            self._kept = [each for each in own if self._is_there(each)][-KEPT:]
            # What copies that were broken off have left, and damaged or older saves
            for manifest in (*own, *begun):
                if manifest not in self._kept:
                    self._leftovers += [*sorted(manifest.places), manifest.name]
            self._leftovers += [manifest.begun_name for manifest in begun]
        return self._kept

    def _own_manifests(self, found: dict[str, Manifest | None]) -> list[Manifest]:
        """Those that are whole, and of this run."""
        return [each for each in found.values() if each is not None and each.run_id == self.run_id]

    def _is_there(self, manifest: Manifest) -> bool:
        """Whether a save's contents are there, by their sizes."""
        if manifest.places & self._damaged:
            return False
        return all(
            self.store.size(entry.place(name)) == entry.size
            for name, entry in manifest.files.items()
        )

    def _remove_old(self, saves: list[Manifest]) -> None:
        """Keep the newest saves. What they have in common with older ones stays."""
        self._kept = saves[-KEPT:]
        needed = set().union(*(manifest.places for manifest in self._kept))
        # Only now: the store may have answered wrongly when it was asked for what it holds.
        self._remove([name for name in self._leftovers if name not in needed])
        self._leftovers = []
        for manifest in saves[:-KEPT]:
            # What names the others goes last.
            self._remove([*(manifest.places - needed), manifest.name])

    def _remove(self, names: list[str]) -> None:
        """Remove files. A store that allows no removal still takes copies."""
        try:
            for name in names:
                self.store.remove(name)
        except Exception as error:
            if not self._says_that_old_ones_stay:
                say(
                    f"mirror: older saves cannot be removed from {self.store.shown}"
                    f" ({one_line(error)}): they stay."
                )
            self._says_that_old_ones_stay = True


def find_manifests(store: Store) -> dict[str, Manifest | None]:
    """The manifests in a run's mirror by their names, the oldest first; None for one that is not
    whole.
    """
    return _find(store, NAME)


def find_begun(store: Store) -> dict[str, Manifest | None]:
    """The same of saves that were begun to be copied, and perhaps never ended."""
    return _find(store, BEGUN)


def _find(store: Store, pattern: re.Pattern[str]) -> dict[str, Manifest | None]:
    names = sorted(name for name in store.names() if pattern.fullmatch(name))
    found = {}
    for name in names:
        manifest = parse(store.read(name))
        if manifest is not None and name not in (manifest.name, manifest.begun_name):
            # Somebody has put it in another one's place.
            manifest = None
        found[name] = manifest
    return found
