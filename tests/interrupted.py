"""``fit``, which sends itself a signal after an optimizer step: python -m tests.interrupted STEP SIGNAL ARGUMENT...

Under torchrun only its last rank does, and only the first time it is started.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from lightning.pytorch import Callback


class Slow(Callback):
    """Waits ``SLOW_SECONDS`` after every step, so that there is time to interrupt."""

    def on_train_batch_end(self, *_: Any) -> None:
        time.sleep(float(os.environ.get("SLOW_SECONDS", "0")))


def main() -> None:
    from project import fit
    from project.engine import command as entry
    from project.model.classifier import ImageClassifier

    step, number = int(sys.argv[1]), signal.Signals[sys.argv[2]]
    del sys.argv[1:3]
    on_train_batch_end = ImageClassifier.on_train_batch_end

    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    chosen = rank == world_size - 1 and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"

    def and_signal(self: ImageClassifier, *args: Any) -> None:
        on_train_batch_end(self, *args)
        if chosen and self.trainer.global_step == step:
            os.kill(os.getpid(), number)

    ImageClassifier.on_train_batch_end = and_signal  # type: ignore[method-assign]
    entry.run(fit.main)


if __name__ == "__main__":
    main()
