"""What a template says about its own renaming, in ``.template/rename.yaml``."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import PurePosixPath

import yaml
from unbroken.commands.rename.clone import Files
from unbroken.errors import UserError

FOLDER = ".template/"
README = f"{FOLDER}README.md"
SAID = f"{FOLDER}rename.yaml"
# These stand for the new name, and for the path of the library's wheel.
NAME_WORD = "NAME"
WHEEL_WORD = "WHEEL"

# File → pairs of the words that stand there once, and those that come in their place
Texts = dict[str, list[list[str]]]


@dataclass(frozen=True)
class Template:
    """What a clone leaves behind, and the words that it changes besides its package's name.

    Attributes:
        left_behind: Files, and folders that end in a slash.
        words: Words → words, in every file.
        texts: Of every clone.
        library_as_wheel: Of a clone whose library becomes a wheel.
        library_as_source: Of a clone that keeps the library's source.
    """

    left_behind: list[str] = field(default_factory=list)
    words: dict[str, str] = field(default_factory=dict)
    texts: Texts = field(default_factory=dict)
    library_as_wheel: Texts = field(default_factory=dict)
    library_as_source: Texts = field(default_factory=dict)

    @classmethod
    def of(cls, files: Files) -> Template | None:
        """What the file says; None in a clone that was renamed already."""
        if SAID not in files:
            return None
        return cls(**yaml.safe_load(files[SAID].content))

    def without_left_behind(self, files: Files) -> Files:
        """The files that a clone takes along, with the README that it begins with."""
        gone = [FOLDER, *self.left_behind]
        folders = tuple(each for each in gone if each.endswith("/"))
        kept = {
            name: file
            for name, file in files.items()
            if name not in gone and not name.startswith(folders)
        }
        if README in files:
            kept["README.md"] = files[README]
        return kept


def with_texts(files: Files, texts: Texts, meanings: dict[str, str]) -> Files:
    """The files with other texts in them.

    Args:
        files: All files.
        texts: What stands where, and what comes in its place.
        meanings: Words that stand for others in the new texts.

    Raises:
        UserError: A text is not there, or twice: somebody has changed the file.
    """
    after = dict(files)
    for name, pairs in texts.items():
        for old, new in pairs:
            text = after[name].text() if name in after else None
            if text is None or text.count(old) != 1:
                line = old.strip().splitlines()[0]
                raise UserError(
                    f"{name} must hold '{line}' once, as in the template. Rename a fresh clone, and"
                    " make your changes afterwards."
                )
            after[name] = after[name].with_text(text.replace(old, meant(new, meanings)))
    return after


def meant(text: str, meanings: dict[str, str]) -> str:
    """A text with what its words stand for."""
    for word, meaning in meanings.items():
        text = text.replace(word, meaning)
    return text


def with_words(files: Files, words: dict[str, str], meanings: dict[str, str], kept: str) -> Files:
    """The files with the template's own words replaced, but for those below the folder ``kept``."""
    after = dict(files)
    for path, file in files.items():
        text = file.text()
        if text is None or path.startswith(kept):
            continue
        for old, new in words.items():
            text = text.replace(old, meant(new, meanings))
        after[path] = file.with_text(text)
    return after


def folders_and_files(files: Files) -> set[str]:
    """Every path that a link may lead to."""
    there = set(files)
    for name in files:
        there |= {str(folder) for folder in PurePosixPath(name).parents}
    return there
