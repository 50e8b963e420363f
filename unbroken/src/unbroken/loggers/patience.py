"""Work that may hang, such as a wait for a server, and for which a command waits only so long."""

import threading
from collections.abc import Callable
from typing import Any


def failure_within(seconds: float | None, work: Callable[[], Any]) -> BaseException | None:
    """Do ``work`` in a thread, and leave the thread behind after ``seconds``. None: wait until it
    is done.

    Returns what went wrong: an error of the work, or a TimeoutError. None: nothing.
    """
    outcome: list[BaseException | None] = [TimeoutError(f"not done after {seconds} s")]

    def target() -> None:
        try:
            work()
        # Not only an Exception: wandb.teardown raises SystemExit where W&B's process has failed.
        except BaseException as error:
            outcome[0] = error
        else:
            outcome[0] = None

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    thread.join(seconds)
    return outcome[0]
