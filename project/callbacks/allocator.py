"""What the device's memory allocator says, in bytes."""

from __future__ import annotations

from typing import Protocol

import torch


class Allocator(Protocol):
    """A device's memory as PyTorch hands it out."""

    total: int | None
    """Bytes the device has for this process, None where unknown."""

    def read(self) -> dict[str, int]:
        """``allocated`` (in tensors), ``reserved`` (held from the device), and where the allocator keeps them,
        ``peak_allocated`` and ``peak_reserved`` since the last :meth:`reset_peak`.
        """

    def reset_peak(self) -> None:
        """Begin to look for peaks anew."""


class CudaAllocator:
    """PyTorch's caching allocator of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.total: int | None = torch.cuda.get_device_properties(device).total_memory

    def read(self) -> dict[str, int]:
        stats = torch.cuda.memory_stats(self.device)
        return {
            "allocated": stats.get("allocated_bytes.all.current", 0),
            "reserved": stats.get("reserved_bytes.all.current", 0),
            "peak_allocated": stats.get("allocated_bytes.all.peak", 0),
            "peak_reserved": stats.get("reserved_bytes.all.peak", 0),
        }

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)


class MpsAllocator:
    """Apple's GPU. It keeps no peaks, so there are none."""

    def __init__(self) -> None:
        self.total: int | None = torch.mps.recommended_max_memory()

    def read(self) -> dict[str, int]:
        return {"allocated": torch.mps.current_allocated_memory(), "reserved": torch.mps.driver_allocated_memory()}

    def reset_peak(self) -> None:
        """Nothing to reset."""


def allocator_of(device: torch.device) -> Allocator | None:
    """The allocator of a device, None for the CPU, which has none to ask."""
    if device.type == "cuda":
        return CudaAllocator(device)
    if device.type == "mps":
        return MpsAllocator()
    return None
