"""``fit`` with FSDP on the CPU, for tests: run_ranks("tests.sharded", ARGUMENT...).

PyTorch's FSDP asks for an accelerator, but does the same with gloo on the CPU if it is told that
this is the device. Lightning's mixed precision for it is autocast on CUDA, whatever the device is;
here it is the CPU's.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch


def main() -> None:
    from lightning.pytorch.plugins import FSDPPrecision
    from lightning.pytorch.strategies import StrategyRegistry
    from numerals.fit import job as fit
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
    from unbroken.checkpoint import sharding
    from unbroken.cli import start as command
    from unbroken.storage import checkpoint_files, run_files

    given = FSDP.__init__

    def on_the_cpu(self: Any, *args: Any, **kwargs: Any) -> None:
        given(self, *args, **{**kwargs, "device_id": torch.device("cpu")})

    forward_context = FSDPPrecision.forward_context

    def autocast_on_the_cpu(self: FSDPPrecision) -> Any:
        return (
            torch.autocast("cpu", torch.bfloat16)
            if self.precision == "bf16-mixed"
            else forward_context(self)
        )

    FSDP.__init__ = on_the_cpu  # type: ignore[method-assign]
    FSDPPrecision.forward_context = autocast_on_the_cpu  # type: ignore[method-assign]
    StrategyRegistry.register("fsdp_on_cpu", sharding.ShardedStrategy)
    sharding.LARGE = 1000  # so that a small network is cut, too
    # Saves are written while training goes on, and some steps late.
    run_files.WRITTEN_AT_ONCE = 0
    write = checkpoint_files.save_to

    def write_late(contents: dict[str, Any], path: Path) -> None:
        time.sleep(0.05)
        write(contents, path)

    checkpoint_files.save_to = write_late
    sys.argv += ["--strategy", "fsdp_on_cpu"]  # the last one counts
    command.run(fit.main)


if __name__ == "__main__":
    main()
