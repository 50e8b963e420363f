"""How every command starts and ends: threads before torch, signals, errors as one line, exit codes.

Exit codes: 0 done, 2 bad input, 130 interrupted (Ctrl-C), 143 terminated (SIGTERM), 1 anything else.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
import warnings
from collections.abc import Callable

from project import signals, threads
from project.errors import UserError

# What the user can mend, and how: no space, no quota, no permission, read-only; and names that cannot be a file's.
ADVICE = {
    **dict.fromkeys(
        (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS),
        "Free space or choose a folder you may write to.",
    ),
    **dict.fromkeys((errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR), "Name another file."),
}


def run(main: Callable[[list[str]], int | None]) -> None:
    """Run a command's ``main(argv)`` and leave the process with the exit code that its end calls for."""
    signals.install()
    threads.configure()
    # A dashboard's or an editor's PYTHONWARNINGS wins; otherwise third-party deprecation notes are not for our users.
    if not sys.warnoptions:
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
    sys.exit(exit_code(main, sys.argv[1:]))


def exit_code(main: Callable[[list[str]], int | None], argv: list[str]) -> int:
    """Exit code of ``main(argv)``; whatever goes wrong is told on stderr."""
    try:
        return main(argv) or 0
    except UserError as error:
        say_error(str(error))
        return 2
    except signals.Stopped as stop:
        return stop.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # `... | head` is no error
        return 0
    except SystemExit as end:
        # Lightning turns a Ctrl-C that reaches it into sys.exit(1)
        asked = signals.requested()
        return signals.Stopped(asked).exit_code if asked else (end.code if isinstance(end.code, int) else 1)
    except OSError as error:
        if error.errno in ADVICE:
            say_error(f"{error.filename or 'a file'}: {error.strerror}. {ADVICE[error.errno]}")
            return 2
        traceback.print_exc()
        return 1
    except Exception:
        traceback.print_exc()
        return 1


def say_error(message: str) -> None:
    """Print ``error: message`` on stderr as one line."""
    print("error: " + " ".join(message.split()), file=sys.stderr, flush=True)
