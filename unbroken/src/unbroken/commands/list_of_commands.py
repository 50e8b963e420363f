"""The list of a program's commands, one line each."""

import ast
import os
from contextlib import suppress
from pathlib import Path


def described_commands(code: Path) -> dict[str, str]:
    """Command → the first line of its docstring; the main job first, then by name.

    No command is imported, so that the list is there at once.

    Args:
        code: The folder of the program's package.
    """
    commands = {}
    for path in sorted(code.glob("*.py")):
        text = path.read_text(encoding="utf-8")
        if not path.stem.startswith("_") and 'if __name__ == "__main__":' in text:
            doc = ast.get_docstring(ast.parse(text)) or ""
            commands[path.stem] = doc.partition("\n")[0]
    order = sorted(commands, key=lambda name: (name != "fit", name))
    return {name: commands[name] for name in order}


def print_commands(code: Path) -> None:
    """Print the list."""
    commands = described_commands(code)
    width = max(len(name) for name in commands)
    lines = []
    for name, description in commands.items():
        lines.append(f"python -m {code.name}.{name:{width}}  {description}\n")
    lines.append("\nEach of them explains itself with --help.\n")
    with suppress(BrokenPipeError):  # `... | head` is no error
        os.write(1, "".join(lines).encode())
