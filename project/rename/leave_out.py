"""Takes features out of a clone: files, marked code, and the tests and commands that need them."""

import re
from collections.abc import Collection
from pathlib import Path

from project.rename.clone import Clone
from project.rename.marks import without_marked


def leave_out(clone: Clone, gone: Collection[str]) -> None:
    """Remove the files of features, marked lines, then tests that import or need what is gone."""
    features = clone.features()
    files = features.files
    needs = {name: words for name, words in features.needs.items() if name in gone}
    going = {pattern for name in gone for pattern in files[name]}
    # A file of several features goes with the last of them.
    staying = {pattern for name in files if name not in gone for pattern in files[name]}
    clone.git("rm", "-r", "--ignore-unmatch", "--", *sorted(going - staying))
    clone.rewrite(lambda path, text: shortened(clone, path, text, gone, needs))
    words: dict[str, str] = {}
    for name in gone:
        words |= features.instead.get(name, {})
    clone.rewrite(lambda path, text: with_other_words(path, text, words))
    remove_stale_tests(clone, needs)


def shortened(
    clone: Clone, path: Path, text: str, gone: Collection[str], needs: dict[str, str]
) -> str:
    """A file's text without marked code, and in a page without the commands that are gone."""
    kept = without_marked(path, text, gone)
    if path.suffix == ".md":
        kept = without_commands(clone, kept, gone, needs)
        if kept != text:
            kept = re.sub(r"\n{3,}", "\n\n", kept)
    if "mnist" in gone:
        # The digits had a licence of their own.
        kept = re.sub(r'(?m)^license = "MIT AND .*$', 'license = "MIT"', kept)
        # Without them, an example is what can be trained.
        fit = rf"(?m)( && python -m {clone.package}\.fit)$"
        kept = re.sub(fit, rf"\1 {example(gone)}", kept)
    return kept


def with_other_words(path: Path, text: str, words: dict[str, str]) -> str:
    """A text whose sentences speak of no feature that is gone."""
    if path.name == "features.yaml":
        return text
    for before, instead in words.items():
        text = text.replace(before, instead)
    return text


def without_commands(clone: Clone, text: str, gone: Collection[str], needs: dict[str, str]) -> str:
    """A page without lines of code and rows of tables that run, or need, what is gone."""
    command = re.compile(rf"^(?:\||[\w./]*python|torchrun|docker).*\b{clone.package}\.(\w+)")
    kept = []
    for line in text.splitlines(keepends=True):
        named = command.match(line)
        if named is None or not (named[1] in gone or is_needed_by(line, needs)):
            kept.append(line)
    return "".join(kept)


def is_needed_by(text: str, needs: dict[str, str]) -> bool:
    """Whether a test, or a command in a page, needs something that is gone."""
    return any(re.search(words, text) for words in needs.values())


def example(gone: Collection[str]) -> str:
    """What trains on data that need no files, where features are gone; nothing with the digits."""
    if "mnist" not in gone:
        return ""
    name = "autoencoder" if "supervised" in gone else "tabular"
    return f"--config configs/examples/{name}.yaml"


def remove_stale_tests(clone: Clone, needs: dict[str, str]) -> None:
    """Remove tests that need what is gone, then those that import them, and so on."""
    tests = {path: text for path, text in clone.texts().items() if path.match("tests/*.py")}
    while True:
        stale = [path for path in tests if is_stale(clone, path, tests, needs)]
        if not stale:
            return
        clone.git("rm", "--force", "--", *(str(path) for path in stale))
        for path in stale:
            del tests[path]


def is_stale(clone: Clone, path: Path, tests: dict[Path, str], needs: dict[str, str]) -> bool:
    """Whether a file of tests/ imports or needs what is gone, or only helped tests that are."""
    if is_needed_by(tests[path], needs) or imports_what_is_gone(clone, tests[path]):
        return True
    if path.name.startswith(("test_", "conftest")):
        return False
    others = [text for other, text in tests.items() if other != path]
    return not any(re.search(rf"\b{path.stem}\b", text) for text in others)


def imports_what_is_gone(clone: Clone, text: str) -> bool:
    """Whether a test imports a module of the clone that is not there."""
    package = clone.package
    imports = rf"(?m)^\s*(?:from|import) ((?:{package}|tests)[\w.]*)(?: import (\w+))?"
    for module, name in re.findall(imports, text):
        if name and module in (package, "tests"):
            module = f"{module}.{name}"
        found = clone.folder / module.replace(".", "/")
        if not found.with_suffix(".py").is_file() and not any(found.glob("*.py")):
            return True
    return False
