"""Run folders, ``checkpoints/<run_name>/``: which one a start means, how it is made, locked and
left.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import shutil
import time
import uuid
from dataclasses import dataclass, field, replace
from pathlib import Path

from filelock import FileLock, Timeout
from unbroken.errors import UserError, nearest, require
from unbroken.mirror.manifest import RUN_ID as IS_RUN_ID
from unbroken.mirror.mirror import OWNER_FILE, Mirror
from unbroken.mirror.store import is_address
from unbroken.mirror.visiting import fetch_checkpoint
from unbroken.stopping.ranks import is_rank_zero, say
from unbroken.storage.checkpoint_files import read, read_or_reason
from unbroken.storage.contents import record_in
from unbroken.storage.files import write_atomically
from unbroken.storage.names import is_device_of_windows
from unbroken.storage.reading import UNREADABLE, read_json, read_text
from unbroken.storage.seals import fingerprint, is_own
from unbroken.storage.usable import checkpoint_to_resume
from unbroken.trust.links import refuse_links_that_leave, refuse_pipes

ROOT = Path("checkpoints")
# Stands in config.yaml for the folder of whichever run it is that the file is used for
RUN_FOLDER = "{run_folder}"
LATEST = "latest"
RUN_ID = "run-id.txt"
LOCK = ".lock"
# A script's run that has ended, which has no summary.json, has this empty file.
ENDED = ".ended"
# Written when a run starts to train, also when it goes on. Its time tells which run is the newest.
CONFIG = "config.yaml"
# What systems answer where a file system has no locks, such as some network drives
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)
# How write_atomically calls a file until it is whole
PART = re.compile(r"\..+\.\d+\.part")
RUN_NAME = re.compile(r"\w[\w.\-+=@ ]{0,99}")


@dataclass
class RunFolder:
    """A run's folder and how the run starts. Its fields can be sent to other ranks as JSON."""

    folder: Path
    # The run goes on from this file. None: it is new.
    checkpoint: Path | None = None
    # Whether nothing is left to do
    finished: bool = False
    # What the user should know, a line each
    notes: list[str] = field(default_factory=list)
    # Belongs to the folder, and tells its checkpoints from those of another run
    run_id: str = ""
    # How many folders above it the run makes. -1: those that are missing now.
    new_parents: int = -1
    # Whether the checkpoint is the user's own: by its seal, or because it is in the mirror that he
    # has typed
    is_own: bool = False
    # Of the contents of which ``is_own`` speaks: who reads the file again uses only these.
    fingerprint: str = ""
    # Settings that differ from those in the checkpoint, such as ``model.lr: 0.01 → 0.003``
    changes: list[str] = field(default_factory=list)
    # The limit, such as ``max_epochs``, that the checkpoint of a finished run has reached with the
    # settings of now. None: something is left to train.
    reached: str | None = None
    # What :func:`written` told before it was decided how the run goes on
    written_before: list[list[int]] = field(default_factory=list)
    # Where the run is copied to; used on rank zero alone
    mirror: Mirror | None = None
    _lock: FileLock | None = None
    # Whether this process made the folder
    _created: bool = False

    def __post_init__(self) -> None:
        # W&B writes later, when the working folder may be another one.
        self.folder = Path(self.folder).absolute()
        if self.checkpoint is not None:
            self.checkpoint = Path(self.checkpoint)
        if self.new_parents == -1:
            self.new_parents = sum(not os.path.exists(parent) for parent in self.folder.parents)
        if not self.run_id:
            self.run_id = read_run_id(self.folder) or uuid.uuid4().hex[:8]

    @property
    def name(self) -> str:
        return self.folder.name

    def elsewhere(self, folder: str) -> RunFolder:
        """The same run in another folder. The folder that was made for its name is removed."""
        with contextlib.suppress(OSError):
            self.folder.rmdir()
        other = Path(folder) / self.name
        return replace(self, folder=other, run_id="", new_parents=0, written_before=[])

    def create(self) -> None:
        """Make the folder, and lock it. A UserError where that fails, or another process writes
        there.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            is_new = not any(self.folder.iterdir())
            refuse_links_that_leave(self.folder)
            refuse_pipes(self.folder)
            self._acquire_lock()
        except Timeout:
            raise UserError(
                f"run {self.name} is written by another process. Wait, or change --run_name."
            ) from None
        except OSError as error:
            raise UserError(
                f"--default_root_dir: {self.folder} cannot be written: {error.strerror}."
            ) from None
        if self.written_before and written(self.folder) != self.written_before:
            # It may have finished since: to start as if it had not would undo what it has written.
            self.release()
            raise UserError(
                f"run {self.name} was written by another process while this one started. Type the"
                " same line again."
            )
        self._created = is_new
        write_atomically(self.run_id + "\n", self.folder / RUN_ID)
        for stale in self.folder.glob(".*.part"):
            # A name of another form is none of a file that a run writes.
            if PART.fullmatch(stale.name) and stale.is_file():
                stale.unlink(missing_ok=True)
        if self.mirror is not None:
            self.mirror.begin(self.run_id)

    def _acquire_lock(self) -> None:
        # One lock object a file and process: a second run in this process takes over the lock of
        # an earlier one that ended without giving it back. In a worker process that outlives this
        # one, filelock closes the inherited file, so that the worker does not hold the lock.
        # A lock of the soft kind would outlive a process that was killed on another machine.
        lock = FileLock(
            self.folder / LOCK, blocking=False, is_singleton=True, fallback_to_soft=False
        )
        try:
            lock.acquire()
        except (NotImplementedError, OSError) as error:
            if isinstance(error, Timeout):
                raise
            if isinstance(error, OSError) and error.errno not in NO_LOCKS:
                raise
            say(
                f"{self.folder} cannot be locked: do not start a second process of run {self.name}."
            )
            return
        self._lock = lock

    def release(self) -> None:
        """Let others write in the folder and in the mirror, also where this process goes on."""
        if self.mirror is not None:
            self.mirror.release()
        if self._lock is not None:
            self._lock.release(force=True)
            self._lock = None

    def discard(self) -> None:
        """Delete a new run's folder if the run failed before it saved a checkpoint."""
        if not self._created or not is_rank_zero() or any(self.folder.glob("*.ckpt")):
            return
        # Windows deletes no file that is open.
        self.release()
        shutil.rmtree(self.folder, ignore_errors=True)
        latest = self.folder.parent / LATEST
        if latest.is_symlink() and os.readlink(latest) == self.name:
            latest.unlink()
            other = newest_run(self.folder.parent)
            if other is not None:
                point_latest_at(other)
        # A parent that holds another run stays.
        with contextlib.suppress(OSError):
            for parent in list(self.folder.parents)[: self.new_parents]:
                parent.rmdir()


def read_run_id(folder: Path) -> str:
    """The id that a run's folder holds; an empty text where it holds none that a run writes."""
    try:
        found = read_text(folder / RUN_ID).strip()
    except UNREADABLE:
        return ""
    return found if IS_RUN_ID.fullmatch(found) else ""


def last_owner(folder: Path) -> str | None:
    """The process that trained the run in this folder with a mirror, if it is known to be gone."""
    try:
        owner = read_text(folder / OWNER_FILE)
        with FileLock(folder / LOCK, blocking=False, fallback_to_soft=False):
            return owner
    except (*UNREADABLE, NotImplementedError):
        # It goes on, or there is none. A Timeout is an OSError.
        return None


def refuse_files_of_others(folder: Path) -> None:
    """A UserError if a folder holds files and is no run's: a run that starts afresh there would
    replace those that have the names of its own.

    A whole checkpoint makes it a run's folder, too: somebody has copied it.
    """
    names = sorted(path.name for path in folder.glob("[!.]*"))
    if not names or read_run_id(folder):
        return
    if checkpoint_to_resume(folder / "last.ckpt", folder / "best.ckpt")[0] is None:
        raise UserError(
            f"--run_name {folder.name}: {folder} is no run's folder: it holds {names[0]}, and no"
            f" {RUN_ID}. Name the run otherwise."
        )


def refuse_checkpoints_of_others(folder: Path) -> None:
    """A UserError if ``last.ckpt`` or ``best.ckpt`` in a folder that is no run's was saved by
    another program: a run there would replace it.
    """
    if read_run_id(folder):
        return
    for path in (folder / "last.ckpt", folder / "best.ckpt"):
        if path.exists():
            checkpoint, reason = read_or_reason(path)
            if reason is not None or not record_in(checkpoint):
                raise UserError(
                    f"{path} was not saved by a run of this folder, and would be replaced. Move it"
                    " away, or name another folder."
                )


def point_latest_at(folder: Path) -> None:
    """Make ``checkpoints/latest`` a link to this run, in one step. It is for people; no command
    reads it. What lies there and is no link to a run stays.
    """
    latest = folder.parent / LATEST
    if os.path.lexists(latest) and not (latest.is_symlink() and is_name(os.readlink(latest))):
        return
    link = folder.parent / f".{LATEST}.{os.getpid()}"
    # A file system without symbolic links has no such link; the newest run is found by its files.
    with contextlib.suppress(OSError, NotImplementedError):
        link.symlink_to(folder.name)
        try:
            os.replace(link, latest)
        except OSError:
            link.unlink()


def is_name(target: str) -> bool:
    """Whether a link's target is a name in the same folder, as that of a run is."""
    return os.path.basename(target) == target


def newest_run(root: Path) -> Path | None:
    """The folder of the run that was started last, also where that was a resume. None: no run has
    trained yet.
    """
    newest: tuple[int, str] | None = None
    for config in root.glob(f"*/{CONFIG}"):
        name = config.parent.name
        # Where links cannot be copied, a copy of ``latest`` is a folder, or a run twice.
        if name == LATEST:
            continue
        with contextlib.suppress(OSError):
            started = (config.stat().st_mtime_ns, name)
            if newest is None or started > newest:
                newest = started
    return None if newest is None else root / newest[1]


def choose(
    root: Path, run_name: str | None, ckpt_path: str | None, mirror: Mirror | None = None
) -> RunFolder:
    """The run that ``--run_name`` and ``--ckpt_path`` mean, or a UserError. Writes nothing but a
    new run's folder, and with a mirror the lease of the run and what is brought from there.
    """
    run = _choose(root, run_name, ckpt_path, mirror)
    if run.checkpoint is not None:
        # What is wrong with the file is told by who uses it.
        with contextlib.suppress(UserError):
            contents = read(run.checkpoint)
            run.is_own = (mirror is not None and mirror.holds_run) or is_own(contents)
            run.fingerprint = fingerprint(contents)
    return run


def written(folder: Path) -> list[list[int]]:
    """Of the files that tell how a run starts, those that are there: their inode, size and time."""
    found = []
    for name in ("last.ckpt", "best.ckpt", "summary.json"):
        with contextlib.suppress(OSError):
            facts = (folder / name).stat()
            found.append([facts.st_ino, facts.st_size, facts.st_mtime_ns])
    return found


def _choose(
    root: Path, run_name: str | None, ckpt_path: str | None, mirror: Mirror | None
) -> RunFolder:
    _check_names(root, run_name)
    if ckpt_path == "auto" and run_name is not None:
        refuse_files_of_others(root / run_name)
    if mirror is None:
        run = _choose_here(root, run_name, ckpt_path)
        goes_on = run.checkpoint is not None and not run.finished
        if goes_on and (run.folder / OWNER_FILE).is_file():
            run.notes.append(
                f"{run.name} has a mirror, which gets nothing of this start: add --mirror again."
            )
        return run
    if ckpt_path == "auto" and run_name is not None:
        folder = (root / run_name).absolute()
        mirror.claim(folder, last_owner(folder))
        notes = mirror.bring(read_run_id(folder))
        run = _choose_here(root, run_name, ckpt_path)
        run.notes[:0] = notes
        return run
    run = _choose_here(root, run_name, ckpt_path)
    try:
        mirror.claim(run.folder, last_owner(run.folder))
        mirror.refuse_another(run.run_id)
    except UserError:
        run.discard()
        raise
    return run


def _check_names(root: Path, run_name: str | None) -> None:
    require(
        "\0" not in str(root), "--default_root_dir", "be a folder you may write in", repr(str(root))
    )
    if run_name is not None:
        require(
            RUN_NAME.fullmatch(run_name) and run_name != LATEST,
            "--run_name",
            "be 1 to 100 letters, digits or .-_+=@, starting with a letter or digit,"
            f" not '{LATEST}'",
            f"'{run_name}'",
        )
        # One that is there already goes on.
        fits = not is_device_of_windows(run_name) or (root / run_name).is_dir()
        require(fits, "--run_name", "be no name of a device of Windows", f"'{run_name}'")


def _choose_here(root: Path, run_name: str | None, ckpt_path: str | None) -> RunFolder:
    """The run as this machine's folders tell it."""
    if ckpt_path == "auto" and run_name is not None:
        return _newest_whole_checkpoint(root / run_name)
    if ckpt_path is None or ckpt_path == "auto":
        run = _new(root, run_name)
        if ckpt_path == "auto":
            run.notes.append(f"--ckpt_path auto without --run_name: a new run starts, {run.name}.")
        return run
    checkpoint = find_checkpoint(ckpt_path, root, run_name)
    home = checkpoint.resolve().parent
    folder = root / run_name if run_name else home
    if home == folder.resolve() and (folder / CONFIG).exists() and read_run_id(folder):
        before = written(folder)
        finished = _is_finished(checkpoint)
        return RunFolder(folder, checkpoint, finished, written_before=before)
    # The checkpoint is of another run, or of no run: a new run starts from it.
    return replace(_new(root, run_name), checkpoint=checkpoint)


def _newest_whole_checkpoint(folder: Path) -> RunFolder:
    """A run that goes on from its last.ckpt, else from its best.ckpt, else starts afresh."""
    run = RunFolder(folder, written_before=written(folder))
    path, skipped = checkpoint_to_resume(folder / "last.ckpt", folder / "best.ckpt")
    run.notes += skipped
    if path is not None:
        return replace(run, checkpoint=path, finished=_is_finished(path))
    if run.folder.exists():
        run.notes.append(f"run {run.name} has no whole checkpoint: it starts afresh.")
    return run


def find_checkpoint(
    ckpt_path: str | None = None,
    root: Path = ROOT,
    run_name: str | None = None,
    option: str = "--ckpt_path",
) -> Path:
    """The file that ``--ckpt_path`` means: a path, an address in a mirror, or ``best`` (default) or
    ``last`` of a run (default: the newest).
    """
    # An empty text after the option is a mistake, and not the default.
    kind = "best" if ckpt_path is None else ckpt_path
    if kind not in ("best", "last"):
        return _named_file(kind, option)
    folder = root / run_name if run_name else newest_run(root)
    if folder is None:
        raise UserError(f"{option} {kind}: there is no run in {root} yet. Train one first.")
    if not folder.is_dir():
        known = [entry.name for entry in root.glob("*") if entry.is_dir()]
        raise UserError(
            f"--run_name {run_name}: there is no such run in {root}.{nearest(str(run_name), known)}"
        )
    path = folder / f"{kind}.ckpt"
    if not path.is_file():
        raise UserError(f"{option} {kind}: run {folder.name} has no {path.name} yet.")
    return path


def _named_file(name: str, option: str) -> Path:
    if is_address(name):
        return fetch_checkpoint(name, option)
    path = Path(name)
    if path.is_file():
        return path
    hint = ""
    if name and path.is_dir():
        hint = " A folder was given: add /best.ckpt or /last.ckpt."
    allowed = "best, last, or a file"
    if option == "--ckpt_path":
        allowed += " (fit: also auto)"
    shown = name or repr(name)
    raise UserError(f"{option}: there is no checkpoint {shown}.{hint} Allowed: {allowed}.")


def _new(root: Path, run_name: str | None) -> RunFolder:
    """A new run: of this name, or of a time stamp, whose folder is made at once so that no other
    run takes it.
    """
    if run_name is not None:
        folder = root / run_name
        is_taken = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
        if folder.is_symlink() or is_taken:
            raise UserError(
                f"--run_name {run_name}: {folder} already exists."
                " To go on with it: --ckpt_path auto."
            )
        return RunFolder(folder)
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    # It counts which folders are missing before they are made.
    run = RunFolder(root / stamp)
    try:
        # A link to nowhere would let the loop below try for ever.
        root.mkdir(parents=True, exist_ok=True)
        for attempt in itertools.count(2):
            try:
                run.folder.mkdir()
                break
            except FileExistsError:
                # Of two launches in the same second, one gets the next number.
                run = replace(run, folder=root / f"{stamp}_{attempt}", run_id="")
    except OSError as error:
        raise UserError(
            f"--default_root_dir must be writable, got {root}: {error.strerror}."
        ) from None
    return replace(run, _created=True)


def _is_finished(checkpoint: Path) -> bool:
    """Whether this is the last.ckpt of a finished run, whose step summary.json holds."""
    if checkpoint.name != "last.ckpt":
        return False
    try:
        summary = read_json(checkpoint.parent / "summary.json")
    except UNREADABLE:
        return False
    if not summary.get("finished"):
        return False
    return bool(summary.get("steps") == read(checkpoint).get("global_step"))
