"""What a benchmark shows while it measures: one line that is overwritten on a terminal, lines in a log file."""

from __future__ import annotations

import sys
import time
from typing import TextIO


class Steps:
    """Tells which of how many measurements is under way.

    Args:
        title: Name of the table.
        total: Number of measurements.
        stream: Where to write; stderr, so that the tables on stdout can be piped.
    """

    def __init__(self, title: str, total: int, stream: TextIO | None = None) -> None:
        self.title = title
        self.total = total
        self.done = 0
        self.stream = stream or sys.stderr
        self._began = time.perf_counter()

    def begin(self, what: str) -> None:
        """A measurement begins."""
        self.done += 1
        seconds = time.perf_counter() - self._began
        self._write(f"{self.title} {self.done}/{max(self.total, self.done)}  {seconds:.0f} s  {what}")

    def finish(self) -> None:
        """All are done: the line is cleared on a terminal."""
        if self.stream.isatty():
            self.stream.write("\r\x1b[K")
            self.stream.flush()

    def _write(self, text: str) -> None:
        self.stream.write(f"\r\x1b[K{text}" if self.stream.isatty() else f"{text}\n")
        self.stream.flush()
