"""Where a package's name stands for the package: a rule for each kind of file; prose and other tools' keys stay.

``python -m NAME.fit``, ``NAME.model.ConvNet``, ``NAME/data/``, ``from NAME import ...`` mean the package. The word in a
sentence, W&B's ``project:`` key, ``project=`` argument and ``pyproject.toml``'s ``[project]`` table do not.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Callable
from pathlib import Path

# A call of one of these with the bare name as its text means the package.
LOOKUPS = {"import_module", "find_spec", "files", "version", "distribution", "metadata", "iter_modules", "which"}
PATH_CALLS = {"Path", "PurePath", "joinpath"}
LEFT_ALONE = {"requirements.lock", "LICENSE"}


def rewrite(path: Path, text: str, old: str, new: str) -> str:
    """The text of a file of the clone, with the package called ``new`` instead of ``old``.

    Args:
        path: Relative to the clone; its name tells the kind of file.
        text: What the file holds.
        old: The package's name now.
        new: The package's name to be.
    """
    if path.name in LEFT_ALONE:
        return text
    rules: dict[str, Callable[[str, str, str], str]] = {".py": python, ".md": markdown, ".toml": toml}
    if path.suffix in rules:
        return rules[path.suffix](text, old, new)
    if path.name in ("Dockerfile", ".dockerignore", ".gitignore", ".coveragerc"):
        return words(text, old, new)
    is_script = text.startswith("#!") or path.suffix in (".sh", ".bash")
    return shell(text, old, new) if is_script else phrases(text, old, new)


def phrases(text: str, old: str, new: str) -> str:
    """What means the package anywhere, also in a comment or sentence: dotted, as a folder, or imported."""
    name = re.escape(old)
    text = re.sub(rf"(?<![\w.\-/]){name}(?=\.[A-Za-z_{{])", new, text)  # NAME.fit, NAME.{module}, not data.NAME.x
    text = re.sub(rf"(?<![\w.\-/])((?:\.{{1,2}}/)*){name}(?=/)", rf"\g<1>{new}", text)  # NAME/data, not entity/NAME/run
    return re.sub(rf"(?<!\w)(from|import|-m)(\s+){name}(?![\w\-])", rf"\g<1>\g<2>{new}", text)


def words(text: str, old: str, new: str) -> str:
    """Every whole word that is not another tool's key or option (``project:``, ``project =``, ``--project``)."""
    text = phrases(text, old, new)
    return re.sub(rf"(?<![\w.\-/\[]){re.escape(old)}(?!\w|-|:\s|\s?=|\.\w)", new, text)


def shell(text: str, old: str, new: str) -> str:
    """A script: words outside comments, phrases in them."""
    return "".join(
        (phrases if line.lstrip().startswith("#") else words)(line, old, new) for line in text.splitlines(keepends=True)
    )


def markdown(text: str, old: str, new: str) -> str:
    """Whole words in code blocks, code spans and the title; phrases in prose."""
    pieces = re.split(r"(^```.*?^```|`[^`\n]+`|\A# [^\n]*)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join((words if index % 2 else phrases)(piece, old, new) for index, piece in enumerate(pieces))


def toml(text: str, old: str, new: str) -> str:
    """Quoted values that are the name, alone or with extras; phrases elsewhere, but not in a table's heading."""
    text = re.sub(rf'(["\']){re.escape(old)}(?=\1|\[)', rf"\g<1>{new}", text)
    lines = text.splitlines(keepends=True)
    return "".join(line if line.startswith("[") else phrases(line, old, new) for line in lines)


def python(text: str, old: str, new: str) -> str:
    """Imports, uses of the imported package, paths and lookups by name; phrases in strings and comments."""
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    imported = re.search(rf"^\s*import {re.escape(old)}(\.|\s|$|,)", text, flags=re.MULTILINE) is not None
    pieces, done = [], 0
    for index, token in enumerate(tokens):
        changed = _python_token(tokens, index, old, new, imported)
        if changed != token.string:
            start = starts[token.start[0] - 1] + token.start[1]
            pieces += [text[done:start], changed]
            done = starts[token.end[0] - 1] + token.end[1]
    return "".join([*pieces, text[done:]])


def _python_token(tokens: list[tokenize.TokenInfo], index: int, old: str, new: str, imported: bool) -> str:
    token = tokens[index]
    before, after = (tokens[i].string if 0 <= i < len(tokens) else "" for i in (index - 1, index + 1))
    if token.type == tokenize.NAME and token.string == old:
        in_import = before in ("from", "import") and token.line.lstrip().startswith(("from ", "import "))
        return new if in_import or (imported and after == "." and before != ".") else old
    if token.type == tokenize.STRING or tokenize.tok_name[token.type].startswith("FSTRING_M"):
        if token.string.strip("rbfu'\"") == old and token.type == tokenize.STRING:
            caller = tokens[index - 2].string if before == "(" and index >= 2 else ""
            means_package = "/" in (before, after) or caller in LOOKUPS | PATH_CALLS
            return token.string.replace(old, new) if means_package else token.string
        if token.string.strip("rbfu'\"") == f"{old}.":  # what dotted names begin with
            return token.string.replace(old, new)
        # from Python 3.12 on, an f-string's text ends where its braces begin
        brace = "{" if after == "{" and token.type != tokenize.STRING else ""
        return phrases(token.string + brace, old, new).removesuffix(brace)
    return phrases(token.string, old, new) if token.type == tokenize.COMMENT else token.string
