"""The commands, one line each."""

import ast
import os
from contextlib import suppress
from pathlib import Path

HERE = Path(__file__).parent


def described_commands() -> dict[str, str]:
    """Command → the first line of its docstring; the main job first, then by name.

    No command is imported, so that the list is there at once.
    """
    commands = {}
    for path in sorted([*HERE.glob("*.py"), *HERE.glob("*/__main__.py")]):
        text = path.read_text(encoding="utf-8")
        if "\ndef main(" in text:
            name = path.parent.name if path.name == "__main__.py" else path.stem
            doc = ast.get_docstring(ast.parse(text)) or ""
            commands[name] = doc.partition("\n")[0]
    order = sorted(commands, key=lambda name: (name != "fit", name))
    return {name: commands[name] for name in order}


def print_commands() -> None:
    """Print the list."""
    commands = described_commands()
    width = max(len(name) for name in commands)
    lines = []
    for name, description in commands.items():
        lines.append(f"python -m {HERE.name}.{name:{width}}  {description}\n")
    lines.append("\nEach of them explains itself with --help.\n")
    with suppress(BrokenPipeError):  # `... | head` is no error
        os.write(1, "".join(lines).encode())


if __name__ == "__main__":
    print_commands()
