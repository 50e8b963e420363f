"""The commands, one line each."""

import ast
import os
from pathlib import Path


def main() -> None:
    """Print every command with the first line of its docstring. Nothing is imported, so that it is there at once."""
    here = Path(__file__).parent
    commands = {}
    for path in sorted([*here.glob("*.py"), *here.glob("*/__main__.py")]):
        text = path.read_text(encoding="utf-8")
        if "\ndef main(" in text and path != Path(__file__):
            name = path.parent.name if path.name == "__main__.py" else path.stem
            commands[name] = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    width = max(map(len, commands))
    order = sorted(commands, key=lambda name: (name != "fit", name))  # the main job first
    lines = [f"python -m {here.name}.{name:{width}}  {commands[name]}" for name in order]
    try:
        print(*lines, "\nEach of them explains itself with --help.", sep="\n", flush=True)
    except BrokenPipeError:  # `... | head` is no error
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


if __name__ == "__main__":
    main()
