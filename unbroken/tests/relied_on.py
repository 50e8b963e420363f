"""What the library relies on in Lightning, torch, torchmetrics and jsonargparse, read from its
source.

Nothing here imports the library or one of them: with another version they may fail to import, and
then these lists are needed most.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

LIBRARY = Path(__file__).parents[1] / "src" / "unbroken"
FILES = sorted(LIBRARY.rglob("*.py"))
INTERNALS = LIBRARY / "lightning_internals.py"
PACKAGES = ("lightning", "lightning_utilities", "torch", "torchmetrics", "jsonargparse")
# With an underscore, and documented: in os, and of named tuples
PUBLIC = {"_exit", "_replace", "_asdict", "_fields"}
BY_NAME = {"getattr", "setattr", "hasattr", "delattr"}
# A variable of this name is a Trainer, or what Lightning keeps of one logged value.
ROOTS = ("trainer", "logged")
# What these lead to is the user's own, or of another kind in each run.
ENDS = {"callback_metrics", "checkpoint_io", "datamodule", "launcher", "lightning_module", "model"}
# These are no attributes of Lightning's: plain mappings of such a name, and a strategy of the
# library's own.
NOT_LIGHTNINGS = {"logged.items", "trainer.get", "trainer.strategy.whole_parameters"}
MATCHED_BY = {"search", "match", "fullmatch", "findall"}


def names_of(paths: Iterable[Path]) -> str:
    """Files of the library, as they are named in a message."""
    return ", ".join(sorted({path.relative_to(LIBRARY).as_posix() for path in paths}))


@functools.cache
def trees(word: str = "") -> list[tuple[Path, ast.Module]]:
    """The files that have a word, each read once."""
    texts = {path: path.read_text(encoding="utf-8") for path in FILES}
    if not word:
        return [(path, ast.parse(text)) for path, text in texts.items()]
    return [(path, tree) for path, tree in trees() if word in texts[path]]


def assigned(path: Path, name: str) -> Any:
    """The value of a constant that a file of the library assigns, without importing it."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and parts_of(node.targets[0]) == [name]:
            return ast.literal_eval(node.value)
    raise AssertionError(f"{path.name} has no {name}")


def called(call: ast.Call) -> str:
    """The last part of what is called."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


# Names


def is_private(name: str) -> bool:
    return (
        name.startswith("_")
        and not name.endswith("__")
        and name.strip("_") != ""
        and name not in PUBLIC
    )


def private_names(text: str) -> Iterator[str]:
    """Uses of private names that are not this file's own, as ``line: name``.

    Own is ``self._name`` that a class of the file defines, and a plain name. What another object
    keeps for itself is not, be it of this package or of another.
    """
    tree = ast.parse(text)
    own = set(names_of_classes(tree))
    for node in ast.walk(tree):
        found: list[str] = []
        if isinstance(node, ast.Attribute):
            found = [] if is_self(node.value) and node.attr in own else [node.attr]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            found = [part for name in names for part in name.split(".")]
        elif isinstance(node, ast.Call) and called(node) in BY_NAME and len(node.args) > 1:
            found = [node.args[1].value] if isinstance(node.args[1], ast.Constant) else []
        elif (
            isinstance(node, ast.Call)
            and called(node) == "import_module"
            and isinstance(node.args[0], ast.Constant)
        ):
            found = str(node.args[0].value).split(".")
        yield from (f"{node.lineno}: {name}" for name in found if is_private(str(name)))  # type: ignore[attr-defined]


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def names_of_classes(tree: ast.AST) -> Iterator[str]:
    """What the classes of a file define: methods, fields, attributes of ``self``."""
    for kind in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for node in ast.walk(kind):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node.name
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and is_self(node.value)
            ):
                yield node.attr


def imported() -> dict[tuple[str, str], set[Path]]:
    """Module and name of each import from one of the packages, and the files that have it.

    The name is empty where the module itself is imported.
    """
    found: dict[tuple[str, str], set[Path]] = {}
    for path, tree in trees():
        for node in ast.walk(tree):
            names: list[tuple[str, str]] = []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [(node.module, alias.name) for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [(alias.name, "") for alias in node.names]
            for module, name in names:
                if module.partition(".")[0] in PACKAGES:
                    found.setdefault((module, name), set()).add(path)
    return found


# Attributes of live objects


def attributes(roots: Iterable[str] = ROOTS) -> dict[str, set[Path]]:
    """Each chain of attributes that the library reads or sets on an object of such a name, such as
    ``trainer.fit_loop.epoch_loop._results``, and the files that have it.

    A variable that stands for such a chain inside of a function is followed.
    """
    found: dict[str, set[Path]] = {}
    for path, tree in trees():
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef):
                for chain in chains_in(function, set(roots)):
                    found.setdefault(chain, set()).add(path)
    return {chain: found[chain] for chain in sorted(found.keys() - NOT_LIGHTNINGS)}


def chains_in(function: ast.FunctionDef, roots: set[str]) -> Iterator[str]:
    stands_for: dict[str, list[list[str]]] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            chain = parts_of(node.value)
            if isinstance(target, ast.Name) and chain and chain[0] != target.id:
                stands_for.setdefault(target.id, []).append(chain)
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute):
            for parts in from_root(parts_of(node), stands_for, roots):
                if len(parts) > 1:
                    yield ".".join(parts)


def from_root(
    parts: list[str], stands_for: dict[str, list[list[str]]], roots: set[str]
) -> Iterator[list[str]]:
    """A chain as it begins at its root, up to what is the user's own."""
    if not parts:
        return
    if parts[0] == "self" and len(parts) > 1:
        parts = [parts[1].lstrip("_"), *parts[2:]]
    if parts[0] not in roots:
        for begin in stands_for.get(parts[0], []):
            # A variable that stands for itself would be followed for ever.
            others = {name: value for name, value in stands_for.items() if name != parts[0]}
            yield from from_root([*begin, *parts[1:]], others, roots)
        return
    for number, part in enumerate(parts):
        if part in ENDS:
            parts = parts[: number + 1]
            break
    yield parts


def parts_of(node: ast.expr | None) -> list[str]:
    """``a.b.c`` as its parts; empty for anything that is no such chain."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return []
    return [node.id, *reversed(parts)]


# Texts


def texts_waited_for() -> dict[str, set[Path]]:
    """How each warning begins that the library filters, and what an error's text has that it tells
    in its own words. Each is a regular expression without alternatives.
    """
    found: dict[str, set[Path]] = {}
    for path, texts in (*filtered(), *recognised()):
        for text in texts:
            found.setdefault(text, set()).add(path)
    return found


def filtered() -> Iterator[tuple[Path, list[str]]]:
    advice = LIBRARY / "cli" / "unfounded_advice.txt"
    lines = advice.read_text(encoding="utf-8").splitlines()
    yield advice, [line.partition("  #")[0] for line in lines]
    for path, tree in trees("filterwarnings"):
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef):
                yield path, list(filtered_in(function))


def filtered_in(function: ast.FunctionDef) -> Iterator[str]:
    """The texts of ``warnings.filterwarnings("ignore", text)``, written there or in a variable."""
    values = values_in(function)
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and called(node) == "filterwarnings":
            text = node.args[1]
            if isinstance(text, ast.Name):
                text = values.get(text.id, text)
            # What is read from the file of advice is no constant.
            if isinstance(text, ast.Constant):
                yield str(text.value)


def recognised() -> Iterator[tuple[Path, list[str]]]:
    refusals = LIBRARY / "cli" / "refusals.py"
    for node in ast.walk(ast.parse(refusals.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and called(node) == "Refusal":
            texts = [each.value for each in node.keywords if each.arg == "text"]
            for text in texts:
                yield refusals, alternatives(ast.literal_eval(text))
    start = LIBRARY / "cli" / "start.py"
    for name in ("NO_MEMORY", "ENDED_RANK"):
        yield start, alternatives(assigned(start, name))


def values_in(function: ast.FunctionDef) -> dict[str, ast.expr]:
    """Variable → what a function assigns to it."""
    return {
        node.targets[0].id: node.value
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }


def alternatives(pattern: str) -> list[str]:
    """``a|b(c|d)`` as ``a`` and ``b(c|d)``."""
    found = [""]
    depth = 0
    is_escaped = False
    for character in pattern:
        if not is_escaped:
            depth += {"(": 1, ")": -1}.get(character, 0)
        if character == "|" and depth == 0:
            found.append("")
        else:
            found[-1] += character
        is_escaped = character == "\\" and not is_escaped
    return found


def sentences() -> dict[str, set[Path]]:
    """What the library looks for in an error of jsonargparse or argparse: regular expressions
    without alternatives.
    """
    found: dict[str, set[Path]] = {}
    explain = LIBRARY / "cli" / "explain.py"
    words = LIBRARY / "cli" / "tracker_words.py"
    for function in ast.parse(explain.read_text(encoding="utf-8")).body:
        # That function reads the library's own sentence.
        if isinstance(function, ast.FunctionDef) and function.name != "with_choices":
            for text in looked_for(function):
                found.setdefault(text, set()).add(explain)
    for text in alternatives(assigned(words, "NO_SUCH_CLASS")):
        found.setdefault(text, set()).add(words)
    return found


def looked_for(function: ast.FunctionDef) -> Iterator[str]:
    """The regular expressions of a function, and the plain texts that it looks for."""
    values = values_in(function)
    for node in ast.walk(function):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        argument = node.args[0]
        if isinstance(argument, ast.Name):
            argument = values.get(argument.id, argument)
        if called(node) in MATCHED_BY:
            for text in texts_of(argument):
                yield from alternatives(text)
        elif called(node) in ("startswith", "partition"):
            yield from map(re.escape, texts_of(argument))


def texts_of(node: ast.expr) -> Iterator[str]:
    """A text, the first piece of one that is put together, or those of a tuple."""
    if isinstance(node, ast.JoinedStr):
        node = node.values[0]
    pieces = node.elts if isinstance(node, ast.Tuple) else [node]
    for piece in pieces:
        text = str(piece.value) if isinstance(piece, ast.Constant) else ""
        # Shorter ones are punctuation, and this sentence is the library's own.
        if len(text) > 3 and not text.startswith("unknown option"):
            yield text


# Methods that are replaced


def tree_of(name: str) -> ast.Module:
    """A file of the library, parsed."""
    return ast.parse((LIBRARY / name).read_text(encoding="utf-8"))


def homes_of_imports(tree: ast.Module) -> dict[str, tuple[str, str]]:
    """Where each name that a file imports is from: the module, and what stands before a name in
    it.
    """
    homes: dict[str, tuple[str, str]] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                homes[alias.asname or alias.name] = (str(node.module), f"{alias.name}.")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                homes[alias.asname or alias.name] = (alias.name, "")
    return homes


def seams() -> list[tuple[str, str]]:
    """Module and name of each method in :data:`unbroken.seams.SEAMS`."""
    tree = tree_of("seams.py")
    homes = homes_of_imports(tree)
    # A class that another file of ours has imported
    homes |= homes_of_imports(tree_of("lightning_internals.py"))
    found: list[tuple[str, str]] = []
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.List):
            for pair in node.value.elts:
                if isinstance(pair, ast.Tuple):
                    owner, name = pair.elts
                    assert isinstance(owner, ast.Name)
                    assert isinstance(name, ast.Constant)
                    module, prefix = homes[owner.id]
                    found.append((module, prefix + name.value))
    return found
