"""``fit``, which sends itself a signal after an optimizer step: python -m tests.interrupted STEP
SIGNAL ARGUMENT...

Under torchrun only its last rank does, and only the first time it is started.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer


class Slow(Callback):
    """Waits ``SLOW_SECONDS`` after every step, so that there is time to interrupt."""

    def on_train_batch_end(self, *_: Any) -> None:
        time.sleep(float(os.environ.get("SLOW_SECONDS", "0")))


class Interrupt(Callback):
    """Sends this process a signal after a step that every other callback has seen."""

    def __init__(self, step: int, number: int) -> None:
        rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.chosen = (
            rank == world_size - 1 and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        )
        self.step, self.number = step, number

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        done = (
            trainer.global_step
            if pl_module.automatic_optimization
            else trainer.fit_loop.total_batch_idx + 1
        )
        if self.chosen and done == self.step:
            self.chosen = False
            os.kill(os.getpid(), self.number)


def main() -> None:
    from numerals.fit import job as fit
    from unbroken.cli import start as command
    from unbroken.run import Job

    from tests.commands import build_with

    step, number = int(sys.argv[1]), signal.Signals[sys.argv[2]]
    del sys.argv[1:3]
    Job.build = build_with(Interrupt(step, number))  # type: ignore[method-assign]
    command.run(fit.main)


if __name__ == "__main__":
    main()
