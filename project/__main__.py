"""The commands, one line each."""

import ast
import os
from contextlib import suppress
from pathlib import Path

if __name__ == "__main__":
    here, commands = Path(__file__).parent, dict[str, str]()
    for path in sorted([*here.glob("*.py"), *here.glob("*/__main__.py")]):
        text = path.read_text(encoding="utf-8")
        if "\ndef main(" in text:  # not imported, so that the list is there at once
            name = path.parent.name if path.name == "__main__.py" else path.stem
            commands[name] = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    order = sorted(commands, key=lambda name: (name != "fit", name))  # the main job first
    lines = [
        f"python -m {here.name}.{name:{max(map(len, commands))}}  {commands[name]}\n"
        for name in order
    ]
    with suppress(BrokenPipeError):  # `... | head` is no error
        os.write(1, "".join([*lines, "\nEach of them explains itself with --help.\n"]).encode())
