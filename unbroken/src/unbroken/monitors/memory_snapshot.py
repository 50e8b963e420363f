"""A recording of a GPU's memory, allocation by allocation, for PyTorch's memory viewer:
``--memory_snapshot FILE``.
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from unbroken.errors import UserError
from unbroken.lightning_internals import memory_history
from unbroken.stopping.ranks import say
from unbroken.tables import check_output

MOST_ENTRIES = 100_000


class MemorySnapshot(Callback):
    """Records the last 100,000 allocations and frees with their stacks.

    It writes them to ``path`` when training ends or fails, as after an out-of-memory error. A
    further rank adds its number to the name. Without a path it does nothing.
    """

    def __init__(self, path: str | None) -> None:
        self.path = None if path is None else Path(path)
        self._recording = ExitStack()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.path is None:
            return
        device = trainer.strategy.root_device.type
        if device != "cuda":
            raise UserError(f"--memory_snapshot needs a CUDA device, got {device}. Leave it away.")
        self.path = check_output(self.path, (self.path.suffix.lower(),), "--memory_snapshot")
        self._recording.callback(
            say,
            f"memory snapshot: {self.path} "
            "(open it at https://pytorch.org/memory_viz; the file stays in your browser)",
        )
        path = self.path
        if trainer.global_rank > 0:
            path = path.with_stem(f"{path.stem}.rank{trainer.global_rank}")
        self._recording.enter_context(memory_history(path, MOST_ENTRIES))

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._recording.close()

    on_exception = on_train_end
