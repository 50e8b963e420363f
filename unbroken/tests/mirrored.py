"""``fit`` with a mirror whose lease runs out soon: python -m tests.mirrored ARGUMENT...

Environment:
    KILL_IN: ``upload 3`` or ``download 3``: SIGKILL when half of the third file has passed.
    SLOW_LATENCY_S, SLOW_BYTES_PER_SEC: What ``slow://`` stores do.
    STORE_REFUSES: Why ``failing://`` stores take no contents.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import IO


def kill_in_upload(number: int) -> None:
    """End this process by force when half of the ``number``-th file is in the store."""
    from unbroken.mirror.store import Store

    put = Store.put
    left = [number]

    def put_half(
        self: Store, source: IO[bytes], size: int, name: str, moved: Callable[[int], None]
    ) -> None:
        left[0] -= 1
        if left[0] == 0:
            self.write(name, source.read(size // 2))
            os.kill(os.getpid(), signal.SIGKILL)
        put(self, source, size, name, moved)

    Store.put = put_half  # type: ignore[method-assign]


def kill_in_download(number: int) -> None:
    """End this process by force when half of the ``number``-th file has been read."""
    from unbroken.mirror.store import Store

    get = Store.get
    left = [number]

    def get_half(self: Store, name: str, path: Path) -> None:
        get(self, name, path)
        left[0] -= 1
        if left[0] == 0:
            os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    Store.get = get_half  # type: ignore[method-assign]


def main() -> None:
    from numerals.fit import job as fit
    from unbroken.cli import start as command
    from unbroken.mirror import copying, lease

    from tests.slow_stores import FailingFileSystem, SlowFileSystem

    lease.BEAT_S = 0.2
    lease.LOOK_S = 0.3
    lease.PATIENCE_S = 2.0
    copying.FIRST_PAUSE_S = 0.5
    SlowFileSystem.latency_s = float(os.environ.get("SLOW_LATENCY_S", "0"))
    SlowFileSystem.bytes_per_sec = float(os.environ.get("SLOW_BYTES_PER_SEC", "inf"))
    FailingFileSystem.reason = os.environ.get("STORE_REFUSES")
    if FailingFileSystem.reason is not None:
        copying.STALLED_S = 5.0
    kind, _, number = os.environ.get("KILL_IN", "").partition(" ")
    if kind == "upload":
        kill_in_upload(int(number))
    if kind == "download":
        kill_in_download(int(number))
    command.run(fit.main)


if __name__ == "__main__":
    main()
