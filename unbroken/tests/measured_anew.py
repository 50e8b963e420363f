"""``fit`` on a machine that measures something else on each rank: python -m tests.measured_anew
ARGUMENT...

``COSTS``, such as ``6.0,0.5``, is what rank 0 and rank 1 measure for half precision. Every rank
writes the precision and the number of threads that it trains with into ``rank-RANK.txt``.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer


class WriteChoices(Callback):
    """Writes what this rank trains with."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        file = Path(f"rank-{trainer.global_rank}.txt")
        file.write_text(f"{trainer.precision} {torch.get_num_threads()}")


def main() -> None:
    from numerals.fit import job as fit
    from unbroken.cli import start as command
    from unbroken.machine import hardware
    from unbroken.run import Job

    from tests.commands import build_with

    rank = int(os.environ.get("LOCAL_RANK", "0"))
    cost = float(os.environ["COSTS"].split(",")[rank])
    hardware.cpu_computes = lambda _: True
    hardware.cost_on_cpu = lambda _: cost
    Job.build = build_with(WriteChoices())  # type: ignore[method-assign]
    command.run(fit.main)


if __name__ == "__main__":
    main()
