"""A clone of the template, or of a package made from it: its folder, files and features."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import yaml

from project.errors import UserError


@dataclass(frozen=True)
class Features:
    """What ``features.yaml`` says."""

    # Feature → patterns of git for its files
    files: dict[str, list[str]]
    # Feature → the feature that it takes along where it is left out
    along: dict[str, str]
    # Feature → what stands in tests, and in commands of a page, that need it
    needs: dict[str, str]
    # Feature → words that speak of it, and the words that stand there without it
    instead: dict[str, dict[str, str]]


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

    def features(self) -> Features:
        """The features that this version of the template knows."""
        text = (self.folder / self.package / "features.yaml").read_text(encoding="utf-8")
        documents = [each or {} for each in yaml.safe_load_all(text)]
        # An older template has fewer of them.
        documents += [{}] * (4 - len(documents))
        return Features(*documents)

    def features_here(self) -> set[str]:
        """The features that this clone still has: those with files of their first pattern."""
        files = self.features().files
        return {name for name, patterns in files.items() if self.git("ls-files", "--", patterns[0])}

    def texts(self) -> dict[Path, str]:
        """The text files under git's control, by their path; pictures and digits hold no names."""
        listed = self.git("grep", "-I", "--files-with-matches", "--null", "--no-color", "")
        found = {}
        for name in listed.split("\0")[:-1]:
            content = (self.folder / name).read_bytes()
            found[Path(name)] = content.decode(errors="surrogateescape")
        return found

    def rewrite(self, change: Callable[[Path, str], str]) -> None:
        """Replace every text by what ``change`` makes of its path and text."""
        for path, text in self.texts().items():
            changed = change(path, text)
            if changed != text:
                (self.folder / path).write_bytes(changed.encode(errors="surrogateescape"))

    def refuse_uncommitted(self) -> None:
        """A UserError where something is not committed: what is changed could not be undone."""
        changed = self.git("status", "--porcelain")
        if changed:
            first = changed.splitlines()[0][3:]
            raise UserError(f"uncommitted changes ({first}, ...): commit or stash them first.")
