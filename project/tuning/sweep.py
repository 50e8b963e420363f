"""The whole batch-size search: the largest that fits, then every size timed at full speed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from project import hardware
from project.cli import ProjectCLI
from project.errors import UserError
from project.tuning.batch_sizes import Advice, advise, sizes_to_sweep
from project.tuning.largest_batch import Search, find_largest
from project.tuning.training_steps import Measured, TrainingSteps

# Of the free host memory: what an operation needs only inside itself is not counted, and others live here, too.
CPU_SHARE = 0.6
NOTHING_FITS = "not even one sample fits into the device's memory. Choose a smaller network or --precision."


def find_and_sweep(
    cli: ProjectCLI,
    flags: dict[str, Any],
    max_batch_size: int | None,
    memory_limit_gib: float | None,
    max_step_seconds: float,
    tell: Callable[[str], None],
) -> tuple[Search, list[Measured], Advice]:
    """Find the largest batch that fits and time all sizes up to it.

    Args:
        cli: The command line, with its classes instantiated.
        flags: The Trainer's arguments, for one device.
        max_batch_size: Try no larger one.
        memory_limit_gib: Pretend that the device has no more memory than this.
        max_step_seconds: Try no size that takes much longer.
        tell: Is told of progress.

    Raises:
        UserError: Not even one sample fits.
    """
    limit = None if memory_limit_gib is None else int(memory_limit_gib * hardware.GIB)
    on_cpu = flags["accelerator"] == "cpu" or not torch.accelerator.is_available()
    if on_cpu:
        safe = int(CPU_SHARE * hardware.memory()["available_gib"] * hardware.GIB)
        limit = safe if limit is None else min(limit, safe)
    steps = TrainingSteps(cli, flags, limit)
    ceilings = {steps.training_samples: "the training set has no more images"}
    if max_batch_size is not None:
        ceilings.setdefault(max_batch_size, "--max_batch_size allows no larger one")
    ceiling = min(ceilings)
    search = find_largest(steps.one_try, ceiling, ceilings[ceiling], max_step_seconds, tell)
    if search.largest == 0:
        raise UserError(NOTHING_FITS)
    peaks = {row.batch_size: row.peak_bytes for row in search.tries}
    measured: list[Measured] = []
    sizes = sizes_to_sweep(search.largest)
    for number, size in enumerate(sizes, start=1):
        tell(f"timing batch size {size:,} ({number} of {len(sizes)})")
        try:
            row = steps.timed(size)
        except torch.OutOfMemoryError:  # two steps fitted, but the allocator's gaps grew over more of them
            tell(f"batch size {size:,}: out of memory after a while")
            continue
        row.peak_bytes = peaks.get(size, row.peak_bytes)
        measured.append(row)
    if not measured:
        raise UserError(NOTHING_FITS)
    if measured[-1].batch_size < search.largest:
        search.smallest_failed, search.largest = search.largest, measured[-1].batch_size
        search.limited_by = "memory"
    tell("")
    return search, measured, advise(measured)
