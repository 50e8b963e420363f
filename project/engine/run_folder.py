"""Run folders, ``checkpoints/<run_name>/``: which run is meant, who may write there, where it resumes."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import re
import shutil
import time
import uuid
import weakref
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from project.engine.checkpoint_files import damage, read
from project.errors import UserError, nearest

ROOT = Path("checkpoints")
LATEST = "latest"
RUN_ID = "run-id.txt"
# auto takes the first of these that is whole
RESUMABLE = ("last.ckpt", "best.ckpt")


@dataclass
class Run:
    """A run's folder and how the run starts."""

    folder: Path
    checkpoint: Path | None = None  # the run resumes from it
    finished: bool = False  # nothing is left to do
    fork: bool = False  # a new run that starts from another run's checkpoint
    notes: list[str] = field(default_factory=list)  # what the user should know, a line each
    run_id: str = ""  # belongs to the folder; tells its checkpoints from another run's
    new_parents: int = 0  # folders above it that it makes
    changes: list[str] = field(default_factory=list)  # settings that differ from the resumed checkpoint's
    _lock: Any = None
    _created: bool = False  # this process made the folder

    def __post_init__(self) -> None:
        self.folder = Path(self.folder).absolute()  # W&B writes later, when the working folder may be another
        self.checkpoint = self.checkpoint and Path(self.checkpoint)
        if not self.run_id:
            with contextlib.suppress(OSError, UnicodeDecodeError):
                self.run_id = (self.folder / RUN_ID).read_text().strip()
        self.run_id = self.run_id or uuid.uuid4().hex[:8]

    @property
    def name(self) -> str:
        return self.folder.name

    def to_plain(self) -> dict[str, Any]:
        """The arguments that make this run again, as plain values for the other ranks."""
        plain = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return plain | {"folder": str(self.folder), "checkpoint": self.checkpoint and str(self.checkpoint)}

    def elsewhere(self, folder: str) -> Run:
        """The same run in another folder. The folder made for its name is removed."""
        with contextlib.suppress(OSError):
            self.folder.rmdir()
        return replace(self, folder=Path(folder) / self.name, run_id="", new_parents=0)

    def discard(self) -> None:
        """Delete a new run's folder if the run failed before it saved a checkpoint."""
        if (self.checkpoint is None or self.fork) and self._created and not any(self.folder.glob("*.ckpt")):
            shutil.rmtree(self.folder, ignore_errors=True)
            latest = self.folder.parent / LATEST
            if latest.is_symlink() and not latest.exists():  # it was this run
                latest.unlink()
                if others := sorted(self.folder.parent.glob("*/last.ckpt"), key=lambda path: path.stat().st_mtime):
                    point_latest_at(others[-1].parent)
            with contextlib.suppress(OSError):  # another run is there
                for parent in list(self.folder.parents)[: self.new_parents]:
                    parent.rmdir()

    def release(self) -> None:
        """Let others write in the folder, also where this process goes on."""
        if self._lock is not None:
            self._lock.close()

    def create(self) -> None:
        """Make the folder of a new run, and lock it; a UserError where that fails, or another process writes there."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            is_new = not any(self.folder.iterdir())
            handle = open(self.folder / ".lock", "a+")  # noqa: SIM115 - held until the process ends
        except OSError as error:
            raise UserError(
                f"the run's folder {self.folder} cannot be written: {error.strerror}. Change --default_root_dir."
            ) from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(
                f"run {self.name} is being written by another process. Wait for it or choose another --run_name."
            ) from None
        # a loader's worker that outlives this process must not hold the run
        os.register_at_fork(after_in_child=partial(_close, weakref.ref(handle)))
        self._lock, self._created = handle, is_new
        (self.folder / RUN_ID).write_text(self.run_id + "\n")
        for stale in self.folder.glob(".*.part"):
            stale.unlink(missing_ok=True)


def _close(handle: weakref.ref[Any]) -> None:
    if (file := handle()) is not None:
        file.close()


def point_latest_at(folder: Path) -> None:
    """Make ``checkpoints/latest`` a link to this run, in one step."""
    link = folder.parent / f".{LATEST}.{os.getpid()}"
    with contextlib.suppress(OSError):  # file systems without symbolic links still train
        link.symlink_to(folder.name)
        os.replace(link, folder.parent / LATEST)


def choose(root: Path, run_name: str | None, ckpt_path: str | None) -> Run:
    """The run that ``--run_name`` (default: the time) and ``--ckpt_path`` (default: a new run) mean.

    Writes nothing except a new run's folder. A UserError where the name is bad or taken, or the checkpoint unusable.
    """
    if run_name is not None:
        _check_name(run_name)
    if ckpt_path is None:
        return _new(root, run_name)
    if ckpt_path == "auto":
        return _automatic(root, run_name)
    checkpoint = find_checkpoint(ckpt_path, root, run_name)
    folder = root / run_name if run_name else checkpoint.resolve().parent
    # a checkpoint of another run, or of no run: a new run starts from it
    if checkpoint.resolve().parent != folder.resolve() or not (folder / "config.yaml").exists():
        return Run(_new(root, run_name).folder, checkpoint, fork=True)
    return Run(folder, checkpoint, finished=_is_finished(checkpoint))


def find_checkpoint(ckpt_path: str | None = None, root: Path = ROOT, run_name: str | None = None) -> Path:
    """The file that ``--ckpt_path`` means: a path, or ``best`` (default) or ``last`` of a run (default: the newest).

    A UserError where there is no such run or file.
    """
    kind = ckpt_path or "best"
    if kind not in ("best", "last"):
        path = Path(kind)
        if not path.is_file():
            hint = " A folder was given: add /best.ckpt or /last.ckpt." if path.is_dir() else ""
            allowed = "best, last, or a file (fit: also auto)"
            raise UserError(f"--ckpt_path: there is no checkpoint {kind}.{hint} Allowed: {allowed}.")
        return path
    folder = root / (run_name or LATEST)
    if not folder.is_dir():
        known = [entry.name for entry in root.glob("*") if entry.is_dir()]
        if run_name:
            raise UserError(f"--run_name {run_name}: there is no such run in {root}.{nearest(run_name, known)}")
        raise UserError(f"--ckpt_path {kind}: there is no run in {root} yet. Train one: python -m project.fit")
    path = folder.resolve() / f"{kind}.ckpt"
    if not path.is_file():
        raise UserError(f"--ckpt_path {kind}: run {folder.resolve().name} has no {path.name} yet.")
    return root / path.parent.name / path.name


def _new(root: Path, run_name: str | None) -> Run:
    new_parents = sum(not os.path.exists(path) for path in (root, *root.parents))
    if run_name is not None:
        folder = root / run_name
        if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
            raise UserError(
                f"--run_name {run_name}: {folder} already exists. Choose another name, or go on: --ckpt_path auto."
            )
        return Run(folder, new_parents=new_parents)
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    try:
        root.mkdir(parents=True, exist_ok=True)  # else, as a link to nowhere, it would be tried for ever
        for attempt in itertools.count(1):
            folder = root / (stamp if attempt == 1 else f"{stamp}_{attempt}")
            with contextlib.suppress(FileExistsError):  # of two launches in the same second one gets the next number
                folder.mkdir()
                break
    except OSError as error:
        raise UserError(
            f"--default_root_dir must be a folder you may write in, got {root}: {error.strerror}."
        ) from None
    return Run(folder, new_parents=new_parents)


def _automatic(root: Path, run_name: str | None) -> Run:
    if run_name is None:
        run = _new(root, None)
        run.notes.append(f"--ckpt_path auto without --run_name: a new run starts, {run.name}.")
        return run
    folder = root / run_name
    notes = []
    for path in (folder / name for name in RESUMABLE if (folder / name).exists()):
        if reason := damage(path):
            notes.append(f"skipped: {reason}")
            continue
        return Run(folder, path, finished=_is_finished(path), notes=notes)
    if folder.exists():
        notes.append(f"run {run_name} has no whole checkpoint: it starts afresh.")
    return Run(folder, notes=notes)


def _is_finished(checkpoint: Path) -> bool:
    """Whether this is the last.ckpt of a finished run: its step is the one that summary.json holds."""
    if checkpoint.name != "last.ckpt":
        return False
    with contextlib.suppress(OSError, ValueError, AttributeError):  # AttributeError: it holds no mapping
        summary = json.loads((checkpoint.parent / "summary.json").read_text())
        return bool(summary.get("finished")) and summary.get("steps") == read(checkpoint).get("global_step")
    return False


def _check_name(name: str) -> None:
    if not re.fullmatch(r"[\w][\w.\-+=@ ]{0,99}", name) or name == LATEST:
        raise UserError(
            f"--run_name must be 1 to 100 letters, digits or .-_+=@, starting with a letter or digit, not "
            f"'{LATEST}', got '{name}'."
        )
