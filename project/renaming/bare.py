"""What only the MNIST example needs: bundled digits, what is tested on them, and the README's results."""

from __future__ import annotations

import re
from pathlib import Path

# What a test says that trains on, or compares with, the bundled digits.
NEEDS_DIGITS = re.compile(r"""["']sample["']|digit_files|trained_checkpoint|data\.bundled""")
MADE_DATA = "made_data"  # a test file that brings its own data stays
README_SECTION = re.compile(r"^<!-- mnist -->\n.*?^<!-- /mnist -->\n\n?", re.MULTILINE | re.DOTALL)

# The README's first command: without the digits there is nothing to train on yet.
README_START = (
    (re.compile(r"trains on digits that ship\s+inside\s+the\s+package \([^)]*\)"), "tells what this machine has"),
    (re.compile(r"(requirements\.lock && python -m \w+)\.fit\b"), r"\1.devices"),
)


def files_of_the_example(clone: Path, package: str) -> list[Path]:
    """Paths, relative to the clone, that a user without MNIST has no use for."""
    digits = sorted((clone / package / "data" / "bundled").glob("*"))
    found = [path for path in digits if path.is_file()]
    tests = {path: path.read_text() for path in sorted((clone / "tests").glob("*.py"))}
    gone = {path for path, text in tests.items() if NEEDS_DIGITS.search(text) and MADE_DATA not in text}
    while more := {path for path in tests.keys() - gone if _imports(tests[path], gone)}:
        gone |= more
    # what only those tests imported
    gone |= {
        path
        for path in tests.keys() - gone
        if not path.stem.startswith(("test_", "conftest"))
        and any(_imports(tests[other], {path}) for other in gone)
        and not any(_imports(text, {path}) for other, text in tests.items() if other not in gone)
    }
    pictures = sorted((clone / "tests").rglob("*.png"))
    return [path.relative_to(clone) for path in [*found, *sorted(gone), *pictures]]


def without_the_example(path: Path, text: str) -> str:
    """A kept file's text without what speaks of the bundled digits: the README's results, the digits' licence."""
    if path.name == "README.md":
        text = README_SECTION.sub("", text)
        for pattern, instead in README_START:
            text = pattern.sub(instead, text)
        return text
    if path.name == "pyproject.toml":
        return re.sub(r'^license = "MIT AND CC-BY-SA-3\.0".*$', 'license = "MIT"', text, flags=re.MULTILINE)
    return text


def _imports(text: str, modules: set[Path]) -> bool:
    written = (rf"^\s*((from|import) (tests\.)?{path.stem}|from tests import {path.stem})\b" for path in modules)
    return any(re.search(pattern, text, flags=re.MULTILINE) for pattern in written)
