"""Private names of Lightning and PyTorch: what each buys, and which public way is missing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.profilers import Profiler
from torch import nn


def profiled_module(profiler: Profiler) -> LightningModule:
    """The module that is trained, as the Trainer tells its profiler before ``setup``.

    Buys regions around the network in the step profiler. A Profiler has no public way to its Trainer or module.
    """
    module: LightningModule = profiler._lightning_module  # type: ignore[attr-defined]
    return module


def tell_profiled_module(profiler: Profiler, inner: Profiler) -> None:
    """Tell a profiler that stands behind another one what the Trainer told the first: see :func:`profiled_module`."""
    inner._lightning_module = profiler._lightning_module  # type: ignore[attr-defined]


def surround_compiled_call(
    network: nn.Module, before: Callable[[], Any], after: Callable[[], Any]
) -> Callable[[], None] | None:
    """Call ``before`` and ``after`` around a compiled network; returns what undoes it, None if it is not compiled.

    Buys the time of a compiled network's forward pass: hooks would be compiled into it. ``nn.Module.compile`` has no
    public way to ask for, or to wrap, what it made.
    """
    compiled = network._compiled_call_impl
    if compiled is None:
        return None

    def surrounded(*args: Any, **kwargs: Any) -> Any:
        before()
        outputs = compiled(*args, **kwargs)
        after()
        return outputs

    network._compiled_call_impl = surrounded
    return lambda: setattr(network, "_compiled_call_impl", compiled)


def record_memory_history(max_entries: int | None) -> None:
    """Record CUDA allocations and frees with their stacks, the newest ``max_entries``; None ends it.

    Buys ``--memory_snapshot``. PyTorch documents this underscored name, and has no other.
    """
    if max_entries is None:
        torch.cuda.memory._record_memory_history(enabled=None)
    else:
        torch.cuda.memory._record_memory_history(max_entries=max_entries, stacks="python")


def write_memory_snapshot(path: Path) -> None:
    """Write what :func:`record_memory_history` has recorded, for PyTorch's memory viewer."""
    torch.cuda.memory._dump_snapshot(str(path))
