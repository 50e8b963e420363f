"""How busy the GPU is, asked of the driver (NVML) by a thread of its own: never on the training's path."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

# NVML averages over 1/6 to 1 s itself; asking more often tells nothing new.
INTERVAL_SECONDS = 0.5


class GpuUtilization:
    """Samples the share of time in which the GPU ran a kernel.

    Args:
        read: Returns the utilization in percent (0-100), or raises where it cannot be had (MIG, no driver access).
        interval_seconds: Time between two samples.
    """

    def __init__(self, read: Callable[[], float], interval_seconds: float = INTERVAL_SECONDS) -> None:
        self._read = read
        self._interval = interval_seconds
        self._samples: list[float] = []
        self.paused = False  # what the GPU does now is not to be counted
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu-utilization", daemon=True)

    @classmethod
    def of(cls, device: torch.device) -> GpuUtilization | None:
        """A running sampler for a CUDA device, None for any other device."""
        if device.type != "cuda":
            return None
        sampler = cls(lambda: torch.cuda.utilization(device))
        sampler.start()
        return sampler

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread; returns when it has."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def take_mean(self) -> float | None:
        """Mean of the samples (percent) since the last call, None where there were none."""
        with self._lock:
            samples, self._samples = self._samples, []
        return sum(samples) / len(samples) if samples else None

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            try:
                sample = float(self._read())
            except Exception:  # whatever the driver's library raises: the metric is left out
                return
            if not self.paused:
                with self._lock:
                    self._samples.append(sample)
