"""Where a word means the package, and the same text with another name there."""

import ast
import re
from collections.abc import Iterator
from pathlib import PurePosixPath

# Names the authors of the template
LEFT_ALONE = "LICENSE"
LIBRARY = "unbroken"


def renamed(path: PurePosixPath, text: str, old: str, new: str) -> str:
    """A file's text with ``old`` called ``new`` where it means the package.

    It means the package where it is dotted, a folder, imported, run by ``-m``, or handed to the
    library in Python code. The word in a sentence, ``project:`` keys, ``project=`` and
    ``[project]`` tables stay.
    """
    if path.name == LEFT_ALONE:
        return text
    rules = [
        # old.fit and old.{module}, but not data.old.x and [old.urls]
        (rf"(?<![\w.\-/\[]){old}(?=\.[\w{{*])", new),
        # old/data and ./old/data, but not entity/old/run
        (rf"(?<![\w.\-/])((?:\.{{1,2}}/)*){old}(?=/)", rf"\1{new}"),
        (rf"(?<=\bfrom ){old}(?= import\b)", new),
        (rf"(?<=\bimport ){old}(?![\w\-])", new),
        (rf"(?<=-m ){old}(?![\w\-])", new),
        # A command as a list of words
        (rf"((?P<quote>[\"'])-m(?P=quote), (?P=quote)){old}(?=(?P=quote))", rf"\1{new}"),
        # Names of a shell script, such as _old_complete
        (rf"\b_{old}_(?=\w)", f"_{new}_"),
    ]
    if path.name == "pyproject.toml":
        # Quoted, alone or with extras
        rules.append((rf"([\"'@]){old}(?=[\"'\[])", rf"\1{new}"))
    if path.name == "Dockerfile" or path.suffix == ".md":
        # The image in a docker command, and both words of COPY: hence twice
        before = "#.*docker |#   -v |docker |COPY "
        image = (rf"(?m)^({before})(.*[ ])?{old}(?=[ ]|$)", rf"\1\2{new}")
        rules += [image, image]
        # The title, and a word of code
        rules.append((rf"(\A# |`){old}(?=`|\n)", rf"\1{new}"))
    if path.suffix == ".py":
        text = with_arguments_renamed(text, old, new)
    for pattern, instead in rules:
        text = re.sub(pattern, instead, text)
    return text


def with_arguments_renamed(text: str, old: str, new: str) -> str:
    """Python code in which the library is handed ``new``: in ``Job("old")`` the word alone does not
    say what it means, and in ``wandb.init(project="old")`` it means another thing.
    """
    lines = text.encode().splitlines(keepends=True)
    # From the end, so that the places before stay right
    for argument in sorted(arguments_of_library(text, old), reverse=True):
        line, column = argument
        before, after = lines[line - 1][:column], lines[line - 1][column:]
        lines[line - 1] = before + after.replace(old.encode(), new.encode(), 1)
    return b"".join(lines).decode()


def arguments_of_library(text: str, word: str) -> Iterator[tuple[int, int]]:
    """Line and byte of each argument that is this text alone, in a call of something that the
    library has given.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    given = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == LIBRARY:
            given |= {alias.asname or alias.name for alias in node.names}
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            continue
        for argument in node.args if node.func.id in given else []:
            if isinstance(argument, ast.Constant) and argument.value == word:
                yield argument.lineno, argument.col_offset


def without_dead_links(path: PurePosixPath, text: str, there: set[str]) -> str:
    """A page's text in which a link to a file that is not there is its words, and such a picture
    is nothing.

    Args:
        path: The page.
        text: Its text.
        there: Every file and folder of the clone.
    """

    def kept(link: re.Match[str]) -> str:
        target = link["target"].partition("#")[0]
        if "://" in target or not target or resolved(path.parent / target) in there:
            return link[0]
        return "" if link["picture"] else link["words"]

    link = r"(?P<picture>!?)\[(?P<words>[^\]\n]*)\]\((?P<target>[^)\s]+)\)"
    return re.sub(link, kept, text)


def resolved(path: PurePosixPath) -> str:
    """``docs/../README.md`` → ``README.md``."""
    parts: list[str] = []
    for part in path.parts:
        if part == ".." and parts:
            parts.pop()
        else:
            parts.append(part)
    return "/".join(parts)
