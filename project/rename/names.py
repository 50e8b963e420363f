"""Where a word means the package, and the same text with another name there."""

import re
from pathlib import Path

# W&B's default project follows these, in loggers/wandb.py, a sweep's file and commands.
WANDB_PROJECT = r"(?<=DEFAULT_PROJECT = \")|(?<=project: )|(?<=--project )"
# These name the template and its authors, and hashes that would no longer fit.
LEFT_ALONE = ("requirements.lock", "LICENSE")


def renamed(path: Path, text: str, old: str, new: str, wandb_project: str | None = None) -> str:
    """A file's text with ``old`` called ``new`` where it means the package, as well as W&B's
    default project.

    It means the package where it is dotted, a folder, imported, or run by ``-m``. The word in a
    sentence, ``project:`` keys, ``project=`` and ``[project]`` tables stay.
    """
    if path.name in LEFT_ALONE:
        return text
    rules = [
        # old.fit and old.{module}, but not data.old.x and [old.urls]
        (rf"(?<![\w.\-/\[]){old}(?=\.[\w{{*])", new),
        # old/data and ./old/data, but not entity/old/run
        (rf"(?<![\w.\-/])((?:\.{{1,2}}/)*){old}(?=/)", rf"\1{new}"),
        (rf"(?<=\bfrom ){old}(?= import\b)", new),
        (rf"(?<=\bimport ){old}(?![\w\-])", new),
        (rf"(?<=-m ){old}(?![\w\-])", new),
        # Environment variables
        (rf"\b{old.upper()}_(?=[A-Z])", f"{new.upper()}_"),
    ]
    if path.name == "pyproject.toml":
        # Quoted, alone or with extras
        rules.append((rf"([\"'@]){old}(?=[\"'\[])", rf"\1{new}"))
    if path.name == "Dockerfile" or path.suffix == ".md":
        # The image in a docker command, and both words of COPY: hence twice
        image = (rf"(?m)^(#.*docker |docker |COPY )(.*[ ])?{old}(?=[ ]|$)", rf"\1\2{new}")
        rules += [image, image]
        # The title, and a word of code
        rules.append((rf"(\A# |`){old}(?=`|\n)", rf"\1{new}"))
    if wandb_project is not None:
        rules.append((rf"({WANDB_PROJECT}){re.escape(wandb_project)}\b", new))
    for pattern, instead in rules:
        text = re.sub(pattern, instead, text)
    return text
