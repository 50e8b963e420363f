"""The thread that writes checkpoints while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable


class WritingThread:
    """Writes one checkpoint at a time, in a thread that lives as long as the write."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a write is under way."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self, write: Callable[[], None]) -> None:
        """Let ``write`` run while the caller goes on. A write before it is waited for."""
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(write,), name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Wait for the write that is under way. What it has raised is raised here."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def check(self) -> None:
        """Raise what a write has raised, once. Nothing is waited for."""
        error = self._error
        if error is not None:
            # Only after it was seen: the thread may set it at any moment, and to clear it first
            # could lose it.
            self._error = None
            raise error

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:
            self._error = error
