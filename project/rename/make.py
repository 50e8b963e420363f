"""Makes somebody's own package of a clone, and writes down what it was made from."""

import importlib.util
import re
import subprocess
import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from project.errors import UserError
from project.rename.clone import Clone
from project.rename.leave_out import leave_out
from project.rename.names import renamed

ORIGIN = ".template.yaml"
HEADING = "# What this package was made from. NAME.rename --update reads it.\n"


@dataclass(frozen=True)
class Origin:
    """What a package was made from.

    Attributes:
        commit: Of the template.
        package: The name of the template's package.
        name: The name of the package that was made of it.
        without: The features that were left out.
    """

    commit: str
    package: str
    name: str
    without: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, folder: Path) -> "Origin | None":
        """What the file in a clone says; None in the template itself."""
        path = folder / ORIGIN
        if not path.exists():
            return None
        try:
            return cls(**yaml.safe_load(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, yaml.YAMLError):
            raise UserError(
                f"{ORIGIN} must hold commit, package, name and without, as rename wrote it. "
                f"git log -- {ORIGIN} shows what it was."
            ) from None

    def write(self, folder: Path) -> None:
        """Write the file."""
        text = yaml.safe_dump(vars(self), sort_keys=False)
        (folder / ORIGIN).write_text(HEADING + text, encoding="utf-8")


def make(clone: Clone, name: str, gone: Collection[str], origin: Origin) -> None:
    """Leave features out of a clone, rename its package, and write down its origin."""
    if gone:
        leave_out(clone, gone)
    if name != clone.package:
        rename_package(clone, name)
    if "rename" not in gone:
        origin.write(clone.folder)
    clone.git("add", "--all")
    tidy(clone)


def rename_package(clone: Clone, name: str) -> None:
    """Give the package another name, in every text and as a folder."""
    texts = "".join(clone.texts().values())
    found = re.search(r'(?m)^DEFAULT_PROJECT = "(.+)"', texts)
    wandb_project = found[1] if found else None
    clone.rewrite(lambda path, text: renamed(path, text, clone.package, name, wandb_project))
    clone.git("mv", clone.package, name)


def tidy(clone: Clone) -> None:
    """Drop unused imports, sort and format: a new name has another place and another length."""
    if importlib.util.find_spec("ruff") is None:
        print("ruff is not installed: run `ruff check --fix` and `ruff format` before you push.")
        return
    for words in (["check", "--select", "I,F401", "--fix", "--quiet"], ["format", "--quiet"]):
        command = [sys.executable, "-m", "ruff", *words, "--no-cache"]
        subprocess.run(command, cwd=clone.folder, check=False)
    clone.git("add", "--all")
