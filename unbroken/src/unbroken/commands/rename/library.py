"""The library that a clone takes along: as a locked wheel, or as the folder of its source."""

from __future__ import annotations

import hashlib
import io
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path

from packaging.requirements import Requirement
from unbroken.commands.rename.clone import File, Files
from unbroken.errors import UserError

NAME = "unbroken"
FOLDER = f"{NAME}/"
WHEELS = "wheels/"
LOCK = "requirements.lock"
CHANGELOG = "CHANGELOG.md"
WHEEL_NAME = re.compile(rf"{NAME}-(\d[\w.]*)-py3-none-any\.whl")
# What building and Python leave beside the source
NO_SOURCE = {"__pycache__", "dist", "build", ".pytest_cache", ".ruff_cache", ".mypy_cache"}


@dataclass(frozen=True)
class Wheel:
    """A built version of the library: the name of its file, and what the file holds."""

    name: str
    content: bytes

    @classmethod
    def read(cls, path: Path) -> Wheel:
        """The wheel at a path; a UserError where it is none of this library."""
        if not WHEEL_NAME.fullmatch(path.name) or not zipfile.is_zipfile(path):
            raise UserError(
                f"--library must be a wheel such as {NAME}-1.2.3-py3-none-any.whl, or a checkout"
                f" of its source, got {path}."
            )
        return cls(path.name, path.read_bytes())

    @classmethod
    def built_from(cls, source: Path) -> Wheel:
        """The wheel of the source in a folder. The same source gives the same bytes."""
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel"]
            command += ["--directory", folder]
            ended = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
            if ended.returncode:
                lines = ended.stderr.strip().splitlines() or ["it does not say why"]
                raise UserError(
                    f"the wheel of {source} could not be built: {lines[-1]}."
                    " It takes the package hatchling, which requirements.lock brings."
                )
            (path,) = Path(folder).glob("*.whl")
            return cls.read(path)

    @property
    def version(self) -> str:
        """Such as ``1.2.3``."""
        found = WHEEL_NAME.fullmatch(self.name)
        assert found is not None
        return found[1]

    @property
    def path(self) -> str:
        """Where it lies in a clone."""
        return WHEELS + self.name

    @property
    def locked(self) -> str:
        """Its lines in the lock file."""
        return f"{self.path} \\\n    --hash=sha256:{hashlib.sha256(self.content).hexdigest()}\n"

    def member(self, ending: str) -> str:
        """The text of one of its files; empty where it has none of this name."""
        with zipfile.ZipFile(io.BytesIO(self.content)) as packed:
            for name in packed.namelist():
                if name.endswith(ending):
                    return packed.read(name).decode()
        return ""

    def requirements(self) -> list[Requirement]:
        """What it needs, extras included."""
        needs = Parser().parsestr(self.member(".dist-info/METADATA")).get_all("Requires-Dist")
        return [Requirement(line) for line in needs or []]


def source_at(path: Path) -> Path:
    """The folder of the library's source: ``path``, or the one in a checkout of the template.

    Raises:
        UserError: There is none.
    """
    for folder in (path, path / NAME):
        declared = folder / "pyproject.toml"
        if declared.is_file():
            table = tomllib.loads(declared.read_text(encoding="utf-8")).get("project", {})
            if table.get("name") == NAME:
                return folder.resolve()
    raise UserError(
        f"--library must be wheel, source, the wheel of a version, or a folder with the source of"
        f" {NAME}, got {path}."
    )


def wheel_at(path: Path) -> Wheel:
    """The wheel at a path, or of the source that lies there."""
    return Wheel.built_from(source_at(path)) if path.is_dir() else Wheel.read(path)


def source_files(path: Path) -> Files:
    """Every file of the library's source, below ``unbroken/``."""
    if not path.is_dir():
        raise UserError(
            f"--library must be a folder with the source of {NAME}, because this clone holds its"
            f" source in {FOLDER}, got {path}."
        )
    top = source_at(path)
    found = {}
    for file in sorted(top.rglob("*")):
        name = file.relative_to(top)
        if file.is_file() and not NO_SOURCE & {*name.parts}:
            executable = bool(file.stat().st_mode & 0o100)
            found[FOLDER + name.as_posix()] = File(file.read_bytes(), executable)
    return found


def wheel_in(files: Files) -> Wheel | None:
    """The wheel that a clone holds; None where it holds the source, or nothing."""
    for name, file in files.items():
        if name.startswith(WHEELS) and WHEEL_NAME.fullmatch(name.removeprefix(WHEELS)):
            return Wheel(name.removeprefix(WHEELS), file.content)
    return None


def with_wheel(files: Files, wheel: Wheel, before: Wheel | None) -> Files:
    """The files of a clone with the wheel in the place of the one before, or of the source."""
    after = {name: file for name, file in files.items() if not name.startswith(FOLDER)}
    lock = after[LOCK].content.decode()
    if before is not None:
        del after[before.path]
        entry = rf"(\./)?{re.escape(before.path)} \\\n(    --hash=\S+( \\)?\n)+"
        lock = re.sub(entry, "", lock)
        # The wheel's path stands in pyproject.toml, and in the line of a page that installs it.
        for name, file in after.items():
            text = file.text()
            if text is not None and before.path in text:
                after[name] = file.with_text(text.replace(before.path, wheel.path))
    after[LOCK] = after[LOCK].with_text(lock + wheel.locked)
    after[wheel.path] = File(wheel.content)
    return after


def news(changelog: str, before: str, after: str) -> str:
    """The parts of a changelog about the versions later than ``before``, up to ``after``."""
    parts = re.split(r"(?m)^(?=## )", changelog)
    told = []
    for part in parts[1:]:
        version = part.split()[1]
        if order(before) < order(version) <= order(after):
            told.append(part.strip())
    return "\n\n".join(told)


def order(version: str) -> list[int]:
    """A version as numbers that can be compared; of ``Unreleased`` none."""
    return [int(number) for number in re.findall(r"\d+", version)]


def not_locked(lock: str, before: list[Requirement], after: list[Requirement]) -> Iterator[str]:
    """What a version needs that a lock file lacks, or holds at a version that does not fit.

    What the version before needed as well and the lock lacked was left out on purpose, such as the
    packages of a store.
    """
    locked = dict(re.findall(r"(?m)^([\w.\-]+)==([^\s;]+)", lock))
    known = {requirement.name for requirement in before}
    for requirement in after:
        version = locked.get(requirement.name)
        if requirement.name == NAME or (version is None and requirement.name in known):
            continue
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            yield f"{requirement.name}{requirement.specifier}"
