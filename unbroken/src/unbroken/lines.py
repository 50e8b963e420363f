"""Lines for a terminal: above a progress bar where one is shown, and broken between words."""

import multiprocessing
import shutil
import sys
import textwrap
from typing import Any, TextIO


def write_lines(text: str, file: TextIO | None = None) -> None:
    """Write lines to ``file``, or to stdout.

    A bar that is shown is taken away, and drawn again below them. Where a terminal is too narrow
    for a sentence, it is broken between words. A line that begins with a space is a command to be
    copied, and stays whole; so does every line in a file, which may be searched.
    """
    # A script may have put something of its own there, or nothing.
    stream: Any = sys.stdout if file is None else file
    if hasattr(stream, "isatty") and stream.isatty():
        columns = shutil.get_terminal_size().columns
        text = "\n".join(_broken(line, columns) for line in text.split("\n"))
    if _shows_a_bar():
        # tqdm was imported for the bar.
        sys.modules["tqdm"].tqdm.write(text, file=stream)
        stream.flush()
    else:
        print(text, file=stream, flush=True)


def _broken(line: str, columns: int) -> str:
    if len(line) <= columns or line.startswith(" "):
        return line
    return textwrap.fill(line, columns, break_long_words=False, break_on_hyphens=False)


def _shows_a_bar() -> bool:
    """Whether this process shows a bar of tqdm's, of whichever package.

    A forked process knows the bars of the one that made it, and cannot take them away.
    """
    tqdm: Any = sys.modules.get("tqdm")
    if tqdm is None or multiprocessing.parent_process() is not None:
        return False
    # The name is private. Without it lines are written as if there were no bar.
    bars = getattr(tqdm.tqdm, "_instances", ())
    return any(not bar.disable for bar in list(bars))
