"""File systems of fsspec that are slow, or fail: ``slow://`` and ``failing://``, both in memory."""

from __future__ import annotations

import time
from typing import Any

import fsspec
from fsspec.implementations.memory import MemoryFileSystem


class SlowFileSystem(MemoryFileSystem):
    """Takes ``latency_s`` for every request, and writes ``bytes_per_sec``."""

    protocol = "slow"
    store: dict[str, Any] = {}
    pseudo_dirs = [""]
    latency_s = 0.0
    bytes_per_sec = float("inf")

    def _open(self, path: str, mode: str = "rb", **others: Any) -> Any:
        time.sleep(self.latency_s)
        file = super()._open(path, mode, **others)
        if mode == "wb":
            write = file.write

            def slow_write(data: bytes) -> int:
                time.sleep(len(data) / self.bytes_per_sec)
                return int(write(data))

            file.write = slow_write
        return file

    def info(self, path: str, **others: Any) -> dict[str, Any]:
        time.sleep(self.latency_s)
        return dict(super().info(path, **others))

    def ls(self, path: str, detail: bool = True, **others: Any) -> list[Any]:
        time.sleep(self.latency_s)
        return list(super().ls(path, detail, **others))


class FailingFileSystem(MemoryFileSystem):
    """Refuses to write contents while ``reason`` is set; what is small still works."""

    protocol = "failing"
    store: dict[str, Any] = {}
    pseudo_dirs = [""]
    reason: str | None = None

    def _open(self, path: str, mode: str = "rb", **others: Any) -> Any:
        if self.reason is not None and "/files/" in path and mode == "wb":
            raise PermissionError(self.reason)
        return super()._open(path, mode, **others)


fsspec.register_implementation("slow", SlowFileSystem, clobber=True)
fsspec.register_implementation("failing", FailingFileSystem, clobber=True)
