"""Code and text that is marked as part of a feature, and a text without it.

The comment ``feature: NAME`` behind code marks the line; or the statement that begins or ends
there; or, inside of one, the argument or the entry of a list that begins or ends there. On a line
of its own it marks all lines down to ``end feature: NAME``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from pathlib import Path

MARK = re.compile(r"^(.*?)(?:#|<!--) (end )?feature: ([a-z_]+(?:, [a-z_]+)*)(?: -->.*)?$")


def without_marked(path: Path, text: str, gone: Collection[str]) -> str:
    """A text without the lines of features that are gone; a mark of several goes with the last."""
    removed = marked_lines(path, text, gone)
    lines = text.splitlines(keepends=True)
    kept = [line for number, line in enumerate(lines, start=1) if number not in removed]
    return "".join(kept)


def marked_lines(path: Path, text: str, gone: Collection[str]) -> set[int]:
    """The numbers of the lines, from 1, that go with features that are gone."""
    spans = Spans(text) if path.suffix == ".py" else None
    removed: set[int] = set()
    open_blocks = 0
    for number, line in enumerate(text.splitlines(), start=1):
        mark = MARK.match(line.rstrip())
        if mark is None or not set(mark[3].split(", ")) <= set(gone):
            if open_blocks:
                removed.add(number)
            continue
        code, is_end, _ = mark.groups()
        if code.strip():
            first, last = spans.around(number) if spans else (number, number)
            removed.update(range(first, last + 1))
            continue
        removed.add(number)
        open_blocks += -1 if is_end else 1
    return removed


class Spans:
    """From which line to which a piece of Python code reaches that begins or ends on a line."""

    def __init__(self, text: str) -> None:
        # Bytes, so that Python reads the encoding that the file names
        tree = ast.parse(text.encode(errors="surrogateescape"))
        lines = text.splitlines()
        # Line on which a statement begins → line on which it ends; the outermost one
        self.begin: dict[int, int] = {}
        # Line on which a statement ends → line on which it begins; the innermost one
        self.end: dict[int, int] = {}
        # Last line of the head of a function, class, loop → where the whole begins and ends
        self.head: dict[int, tuple[int, int]] = {}
        # The same two of arguments and entries of lists that are longer than a line
        self.part_begin: dict[int, int] = {}
        self.part_end: dict[int, int] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.stmt):
                self._add_statement(node, lines)
            for first, last in parts_of(node):
                self.part_begin[first] = max(last, self.part_begin.get(first, last))
                self.part_end[last] = min(first, self.part_end.get(last, first))

    def _add_statement(self, node: ast.stmt, lines: list[str]) -> None:
        first = node.lineno
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first = min([first, *(decorator.lineno for decorator in node.decorator_list)])
        last = node.end_lineno or first
        self.begin[first] = max(last, self.begin.get(first, last))
        self.end[last] = max(first, self.end.get(last, first))
        body = getattr(node, "body", None)
        if not body:
            return
        for number in range(node.lineno + 1, body[0].lineno):
            code = lines[number - 1].partition("#")[0].rstrip()
            if code.endswith(":"):
                self.head[number] = (first, last)

    def around(self, number: int) -> tuple[int, int]:
        """The first and last line of what a mark on this line means."""
        if number in self.begin:
            return number, self.begin[number]
        if number in self.head:
            return self.head[number]
        if number in self.end:
            return self.end[number], number
        if number in self.part_begin:
            return number, self.part_begin[number]
        if number in self.part_end:
            return self.part_end[number], number
        return number, number


def parts_of(node: ast.AST) -> Iterator[tuple[int, int]]:
    """First and last line of a node's arguments or entries that are longer than a line."""
    parts: list[tuple[ast.expr | ast.keyword, ast.expr | ast.keyword]] = []
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        parts += [(entry, entry) for entry in node.elts]
    elif isinstance(node, ast.Call):
        parts += [(argument, argument) for argument in node.args]
        parts += [(keyword, keyword) for keyword in node.keywords]
    elif isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            parts.append((key or value, value))
    for first, last in parts:
        end = last.end_lineno or last.lineno
        if end > first.lineno:
            yield first.lineno, end
