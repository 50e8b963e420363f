"""What a command prints, where nobody takes it: a full disk, a closed stream, a terminal that is
gone. It is not printed, and the command goes on.
"""

import errno
import io
import os
import sys
from contextlib import suppress
from typing import Any


class Printed:
    """What is known of the lines that this process prints to stdout."""

    # Whether they tell of work whose results are in files, as those of a training
    is_log = False
    # Why the first that is not printed is not
    lost: OSError | None = None


class Output(io.FileIO):
    """Stdout or stderr as a file or a pipe. What it does not take goes nowhere.

    Only a reader that has ended is an error: it ends a command that prints a table, and no run.
    """

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise
            self.lose(error)
        return memoryview(data).nbytes

    def lose(self, error: OSError) -> None:
        """Note that something is not printed. The disk may take the next line."""
        if self.fileno() == 1:
            Printed.lost = Printed.lost or error


class Terminal(Output):
    """A terminal that this process writes to. Once it is closed, what is written goes nowhere.

    A run that ignores SIGHUP goes on then, and one that does not has its last lines to print.
    """

    def lose(self, error: OSError) -> None:
        """Write to nowhere from now on."""
        if error.errno != errno.EIO:
            raise error
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())


def open_streams() -> None:
    """Make every print succeed. What is printed to a closed stream or a full disk goes nowhere."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            # Without this, the next file to be opened would get the number of the stream.
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
            stream = open(number, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - it lives as long as the process
            setattr(sys, name, stream)
        else:
            setattr(sys, name, _lossy(getattr(sys, name)))
        getattr(sys, name).reconfigure(errors="replace")  # characters that a terminal cannot show


def _lossy(stream: Any) -> Any:
    """A stream that writes to the same place, and loses what that does not take."""
    try:
        number = stream.fileno()
        stream.flush()
    except OSError:
        # It is no stream of the system.
        return stream
    is_terminal = stream.isatty()
    raw: Any = (Terminal if is_terminal else Output)(number, "w", closefd=False)
    # Python does not gather what it prints where it was told so by -u.
    buffer = raw if stream.write_through else io.BufferedWriter(raw)
    return io.TextIOWrapper(
        buffer,
        stream.encoding,
        stream.errors,
        line_buffering=is_terminal or stream.line_buffering,
        write_through=stream.write_through,
    )


def told_of_lost(code: int) -> int:
    """Say on stderr what stdout has not taken; returns the exit code, which is then an error's
    where the lines were what the command was asked for.
    """
    if Printed.lost is None:
        return code
    reason = f"stdout cannot be written: {Printed.lost.strerror}."
    line = f"error: {reason}"
    if Printed.is_log:
        line = f"warning: {reason} Lines of this run are missing there."
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)
    Printed.lost = None
    return code if Printed.is_log else code or 1
