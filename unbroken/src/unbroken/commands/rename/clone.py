"""A clone under git: its files before, its files after, and the one moment between."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout
from unbroken.commands.rename import swap
from unbroken.errors import UserError
from unbroken.storage.files import write_atomically


@dataclass(frozen=True)
class File:
    """What a file holds, and whether it is a program."""

    content: bytes
    is_executable: bool = False

    def text(self) -> str | None:
        """Its text; None for a picture or other binary data."""
        if b"\0" in self.content:
            return None
        return self.content.decode(errors="surrogateescape")

    def with_text(self, text: str) -> File:
        """The same file with another text."""
        return File(text.encode(errors="surrogateescape"), self.is_executable)


# Path below the clone's folder → file
Files = dict[str, File]


@dataclass(frozen=True)
class Clone:
    """A folder under git, and the name of the package in it."""

    folder: Path
    package: str

    def git(self, *arguments: str) -> str:
        """What a git command prints; a UserError without git or outside of a git repository."""
        command = ["git", *arguments]
        try:
            ended = subprocess.run(
                command, cwd=self.folder, check=True, capture_output=True, text=True
            )
        except FileNotFoundError:
            raise UserError(
                "git is needed to rename safely and was not found. Install it."
            ) from None
        except subprocess.CalledProcessError as error:
            raise UserError(
                f"git {arguments[0]} failed in {self.folder}: {error.stderr.strip()}. "
                "Rename inside a git clone (git init, git add --all and git commit make one)."
            ) from None
        return ended.stdout

    @property
    def workplace(self) -> Path:
        """Where the new files are made: git's own folder, which git does not look into."""
        return self.folder / self.git("rev-parse", "--git-path", "unbroken-rename").strip()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep a second rename out while this one is at work.

        Raises:
            UserError: Another one is at work.
        """
        lock = FileLock(self.workplace.with_suffix(".lock"))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise UserError(
                f"another rename is at work in {self.folder}: wait until it has ended."
            ) from None
        with lock:
            yield

    def refuse_uncommitted(self) -> None:
        """A UserError where something is not committed: what is changed could not be undone."""
        changed = self.git("status", "--porcelain")
        if changed:
            first = changed.splitlines()[0][3:]
            raise UserError(f"uncommitted changes ({first}, ...): commit or stash them first.")

    def ignores(self, folder: str) -> bool:
        """Whether git leaves out what would lie in a folder: a package there would not be in the
        repository.
        """
        command = ["git", "check-ignore", "--quiet", f"{folder}/__init__.py"]
        return subprocess.run(command, cwd=self.folder, capture_output=True).returncode == 0

    def files(self) -> Files:
        """Every file under git's control. Links are left alone."""
        found = {}
        for name in self.git("ls-files", "-z").split("\0")[:-1]:
            path = self.folder / name
            if path.is_file() and not path.is_symlink():
                found[name] = File(path.read_bytes(), os.access(path, os.X_OK))
        return found

    def finish_interrupted(self) -> bool:
        """Finish what another rename had begun to put in place; returns whether there was one.

        What was not begun is dropped: the clone is as it was, and may have been changed since.
        """
        with suppress(FileNotFoundError):
            os.replace(self.workplace / swap.PLAN, self.workplace / "dropped.json")
        if (self.workplace / swap.BEGUN).exists():
            self._swap()
            return True
        shutil.rmtree(self.workplace, ignore_errors=True)
        return False

    def replace(self, before: Files, after: Files) -> None:
        """Put the files ``after`` in the place of those ``before``.

        Everything is made beforehand. Then a process of its own puts it in place: it takes
        milliseconds, and neither Ctrl-C nor a kill of this command ends it. It has a list that it
        works off, so that after a power cut the next rename can finish it.
        """
        made = self.workplace / swap.NEW
        for name, file in after.items():
            write_file(made / name, file)
        tidy(made)
        put = []
        for name in after:
            path = made / name
            if name in before and path.read_bytes() == before[name].content:
                path.unlink()
            else:
                put.append(name)
        plan = {
            "folder": str(self.folder),
            "put": put,
            "gone": sorted(before.keys() - after.keys()),
        }
        write_atomically(json.dumps(plan), self.workplace / swap.PLAN)
        self._swap()

    def _swap(self) -> None:
        command = [sys.executable, "-I", swap.__file__, str(self.workplace)]
        # A session of its own gets no signal of this terminal, and outlives this process.
        ended = subprocess.run(command, start_new_session=True, capture_output=True, text=True)
        if ended.returncode:
            lines = ended.stderr.strip().splitlines() or ["it was ended"]
            raise UserError(
                f"the new files could not be put in place: {lines[-1]}. Mend that, and start the"
                " same command again: it finishes."
            )


def write_file(path: Path, file: File) -> None:
    """Write a file and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(file.content)
    if file.is_executable:
        path.chmod(0o755)


def tidy(folder: Path) -> None:
    """Sort imports and format: a new name has another place and another length."""
    for words in (["check", "--select", "I", "--fix", "--quiet"], ["format", "--quiet"]):
        command = [sys.executable, "-m", "ruff", *words, "--no-cache", "--no-respect-gitignore"]
        ended = subprocess.run([*command, "."], cwd=folder, capture_output=True, check=False)
        if b"No module named ruff" in ended.stderr:
            print(
                "ruff is not installed: run `ruff check --fix` and `ruff format` before you push."
            )
            return
