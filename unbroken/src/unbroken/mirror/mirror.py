"""A run's second place, in a store that outlives the machine: ``--mirror URL``.

    keep = ExactCheckpoint("checkpoints/mine", mirror="s3://bucket/runs")

What lies where stands in manifest.py; which process may write, in lease.py; the thread that copies,
in copying.py.
"""

from __future__ import annotations

import atexit
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from unbroken.errors import UserError, require
from unbroken.mirror.copying import Copying
from unbroken.mirror.lease import Lease
from unbroken.mirror.manifest import CHECKPOINTS, MIRRORED, Manifest
from unbroken.mirror.place import refuse_a_place_of_others
from unbroken.mirror.reading import Damaged, is_mirrored, newest_files, saves_in
from unbroken.mirror.save import Save
from unbroken.mirror.store import Store, is_address, without_password
from unbroken.stopping import signals
from unbroken.stopping.ranks import say
from unbroken.storage.checkpoint_files import read
from unbroken.storage.contents import record_in
from unbroken.storage.files import write_atomically
from unbroken.storage.run_files import RunFiles
from unbroken.storage.seals import is_own

# Which process trained the run that lies in a local folder
OWNER_FILE = ".mirror-owner"
# Seconds that a store has to give the lease back when a run has ended
RELEASE_S = 10.0
REPORT = "report.html"
SUMMARY = "summary.json"
# How the line begins that says what a mirror lacks
NOT_COMPLETE = "the mirror is not complete"


class Mirror:
    """One run's mirror, as rank zero uses it. Other ranks never open it.

    The order of the calls: :meth:`claim`, :meth:`bring`, :meth:`begin`, :meth:`take` after each
    save, :meth:`finish`, :meth:`release`.

    Args:
        url: Where runs are mirrored: an address (``s3://bucket/runs``) or a folder. A run is in a
            folder of its name there.

    """

    def __init__(self, url: str) -> None:
        # An unset variable of a shell would make the working folder the mirror.
        require(url, "--mirror", "be a folder, or an address such as s3://bucket/runs", "nothing")
        # The working folder may be another one later.
        self.url = url if is_address(url) else str(Path(url).absolute())
        self.shown = without_password(self.url)
        # Why the mirror does not hold the newest state; None where it does.
        self.lack: str | None = None
        self._store: Store | None = None
        self._lease: Lease | None = None
        self._copying: Copying | None = None
        self._damaged: set[str] = set()
        # The step of a local checkpoint that is ahead of the mirror
        self._step_ahead: int | None = None
        self._step = 0
        self._folder = Path()
        # Whether the local folder has what the mirror has
        self.was_asked = False
        # Whether the run of the local folder is the one that the mirror has
        self.holds_run = False

    # The start

    def claim(self, folder: Path, dead_owner: str | None = None) -> None:
        """Take the lease of the run that has this local folder.

        Args:
            folder: The run has its name.
            dead_owner: What ``.mirror-owner`` in that folder says, if no process has its lock.

        Raises:
            UserError: Another process trains the run; or what lies at its place is no mirror; or
                the address is of no known kind, its package is not installed, or the store does
                not answer as it should.
        """
        if self._lease is not None:
            return
        root = Store(self.url)
        place = root.local_folder
        if place is not None:
            runs = folder.parent.resolve()
            if place.resolve() == runs or place.resolve().is_relative_to(runs / folder.name):
                raise UserError(
                    f"--mirror must be another folder than the runs', got {self.shown}: a mirror"
                    " there would be lost with them."
                )
        self._folder = folder
        self._store = root.below(folder.name)
        try:
            refuse_a_place_of_others(root, folder.name)
        except UserError:
            raise
        except Exception as error:
            raise root.unusable(error) from error
        self._lease = Lease(self._store, folder.name)
        # Where a start fails before training, whoever comes next need not wait.
        atexit.register(self.release)
        with self._errors_at_the_start(self._store):
            self._lease.claim(dead_owner)

    def bring(self, run_id: str) -> list[str]:
        """Put the newest whole save into the local folder, if it is ahead of what lies there.

        Args:
            run_id: The id of the run in the local folder; empty where there is none.

        Returns:
            What was done, a line each.

        Raises:
            UserError: It holds another run of this name, or no save of it is whole and there is no
                local one either.
        """
        store = self._open_store()
        self.was_asked = True
        with self._errors_at_the_start(store):
            return self._bring(store, run_id)

    def _bring(self, store: Store, run_id: str) -> list[str]:
        saves = saves_in(store)
        self.holds_run = bool(saves)
        if not saves and not is_mirrored(store):
            return []
        if run_id:
            # Its files would be replaced, also where it has no whole checkpoint.
            self._refuse_another(saves, run_id)
        here = RunFiles(self._folder).checkpoint_to_resume() if self._folder.is_dir() else None
        step = -1
        if here is not None:
            checkpoint = read(here)
            self._refuse_another(saves, record_in(checkpoint).get("run_id"))
            step = int(checkpoint.get("global_step", 0))
            newest = saves[0].step if saves else -1
            if step >= newest:
                self._step_ahead = step
                return [f"{store.shown} is not ahead of {self._folder}: the run goes on from here."]
        begun = time.monotonic()
        new = not self._folder.exists()
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            names = [name for name in MIRRORED if name != REPORT]
            save, lines = newest_files(store, names, self._folder, ahead_of=step)
        except Damaged as error:
            self._damaged.add(error.place)
            if here is not None:
                self._step_ahead = step
                return [f"{store.shown}: {error}; the run goes on from {self._folder}."]
            if new:
                self._folder.rmdir()
            raise UserError(
                f"--mirror: {store.shown} has no whole save ({error}). Remove it to start afresh."
            ) from None
        for newer in saves:
            if newer.number > save.number:
                self._damaged |= newer.places - save.places
        # What is copied before the first save of this process is of this step.
        self._step = save.step
        self._bring_report(store, save)
        size = sum(entry.size for entry in save.files.values()) / 1e6
        seconds = time.monotonic() - begun
        lines = [f"{store.shown}: {line}" for line in lines]
        brought = f"brought from {store.shown}: step {save.step:,}, {size:,.1f} MB"
        return [*lines, f"{brought} in {seconds:.1f} s."]

    def _bring_report(self, store: Store, save: Manifest) -> None:
        """Bring the report of a finished run, if this user's own key says that it is his.

        A page in a stranger's mirror may hold anything. A run that goes on writes its own.
        """
        if SUMMARY in save.files and REPORT in save.files:
            checkpoints = [self._folder / name for name in CHECKPOINTS if name in save.files]
            if checkpoints and all(is_own(read(path)) for path in checkpoints):
                newest_files(store, [REPORT], self._folder)

    def refuse_another(self, run_id: str) -> None:
        """A UserError where the mirror holds another run of the same name."""
        store = self._open_store()
        with self._errors_at_the_start(store):
            self._refuse_another(saves_in(store), run_id)

    def _refuse_another(self, saves: list[Manifest], run_id: str | None) -> None:
        if any(save.run_id != run_id for save in saves):
            raise UserError(
                f"--mirror: {self._open_store().shown} holds another run of this name. Name this"
                " one otherwise (--run_name), or go on with that one in an empty folder"
                " (--ckpt_path auto)."
            )

    def begin(self, run_id: str) -> None:
        """Copy from now on. The local folder is there, and locked.

        Raises:
            UserError: Another process has claimed the run at the same moment.
        """
        store = self._open_store()
        assert self._lease is not None
        with self._errors_at_the_start(store):
            self._lease.check()
        write_atomically(self._lease.owner, self._folder / OWNER_FILE)
        self._copying = Copying(store, self._lease, run_id, self._damaged)
        if self._step_ahead is not None:
            self.take(self._step_ahead)

    # While the run goes on

    def take(self, step: int | None = None) -> None:
        """The local files are whole: copy them as they are now. It returns at once.

        Args:
            step: The optimizer step of ``last.ckpt``. None: as before.
        """
        if self._copying is None:
            return
        if step is not None:
            self._step = step
        try:
            save = Save.of(self._folder, self._step)
        except OSError as error:
            # Somebody deletes the folder, for example.
            say(f"mirror: this save is not copied: {error.strerror}.")
            return
        if save.files:
            self._copying.take(save)

    # The end

    def finish(self, seconds: float | None = None) -> list[str]:
        """Bring the newest state over, and say how far that came.

        Args:
            seconds: At most so long. None: as long as something arrives in the store.

        Returns:
            A line, or none where nothing was ever saved.
        """
        copying = self._copying
        if copying is None or copying.given_step is None:
            return []
        store = self._open_store()
        is_complete = copying.wait(seconds)
        if is_complete:
            self.lack = None
            return [f"mirror: step {copying.copied_step:,} is in {store.shown}."]
        held = "nothing of this run's"
        if copying.copied_step is not None:
            held = f"step {copying.copied_step:,}"
        elif copying.known_step is not None:
            held = f"step {copying.known_step:,}"
        self.lack = (
            f"{NOT_COMPLETE}: {store.shown} holds {held}, and the run is at step"
            f" {copying.given_step:,}; of the last copy {copying.progress()}."
        )
        return [self.lack]

    def release(self) -> None:
        """Copy nothing any more, and let another machine have the run."""
        if self._copying is not None:
            self._copying.end()
            self._copying = None
        if self._lease is not None:
            # The process may have to end soon.
            asked = signals.state.requested
            seconds = max(1.0, signals.seconds_left()) if asked else RELEASE_S
            self._lease.release(seconds)
            self._lease = None
            atexit.unregister(self.release)

    @contextlib.contextmanager
    def _errors_at_the_start(self, store: Store) -> Iterator[None]:
        """What a store raises becomes one line, and the lease is given back."""
        try:
            yield
        except Exception as error:
            self.release()
            if isinstance(error, UserError):
                raise
            raise store.unusable(error) from error

    def _open_store(self) -> Store:
        assert self._store is not None, "claim comes first"
        return self._store
