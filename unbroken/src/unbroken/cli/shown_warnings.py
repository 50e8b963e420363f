"""Which warnings a user sees, and how."""

import logging
import re
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from unbroken.lines import write_lines

PACKAGE = Path(__file__).parents[1]
SHOWN: set[str] = set()  # warnings of this process that were printed
UNFOUNDED = Path(__file__).with_name("unfounded_advice.txt")


def silence_unfounded_advice() -> None:
    """Hide Lightning's notes, and advice of Lightning and W&B that is wrong here; show every other
    warning.
    """
    # Lightning sets INFO when it is imported. Our own lines say what matters.
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # What was asked for by a flag is shown.
    for name in ("callbacks.model_summary", "profilers.profiler"):
        logging.getLogger(f"lightning.pytorch.{name}").setLevel(logging.INFO)
    # A line of the file says how a warning begins, as a regular expression, and behind it why it is
    # hidden.
    for line in UNFOUNDED.read_text(encoding="utf-8").splitlines():
        warnings.filterwarnings("ignore", line.partition("  #")[0])


def show_in_one_line() -> None:
    """Print a warning as one line, without the place in a source file that has raised it.

    Who asks for Python's own form, by PYTHONWARNINGS or -W, gets it.
    """
    if not sys.warnoptions:
        warnings.showwarning = _show


def _show(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    text = re.sub(r"\(Triggered internally at [^)]*\)", "", str(message)).strip()
    is_ours = Path(filename).is_relative_to(PACKAGE)
    if not is_ours:  # our own may have several lines, so that nobody misses them
        text = " ".join(text.split())
    if text in SHOWN:
        return  # libraries warn again for each loader, epoch and place in their files
    SHOWN.add(text)
    with suppress(OSError):
        write_lines(f"warning: {text}", file or sys.stderr)
