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
    is_terminal = hasattr(stream, "isatty") and stream.isatty()
    if is_terminal:
        columns = shutil.get_terminal_size().columns
        text = "\n".join(_broken(line, columns) for line in text.split("\n"))
    # A bar of whichever package is one of tqdm's. A forked process knows the bars of the one that
    # made it, and cannot take them away.
    may_show_a_bar = "tqdm" in sys.modules and multiprocessing.parent_process() is None
    if is_terminal and may_show_a_bar:
        sys.modules["tqdm"].tqdm.write(text, file=stream)
        stream.flush()
    else:
        print(text, file=stream, flush=True)


def _broken(line: str, columns: int) -> str:
    if len(line) <= columns or line.startswith(" "):
        return line
    return textwrap.fill(line, columns, break_long_words=False, break_on_hyphens=False)
