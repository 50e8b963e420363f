"""The CUDA allocator's history in a file, for PyTorch's memory viewer."""

from __future__ import annotations

from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from project.callbacks.log_steps import skip_idle_hooks
from project.errors import UserError

# Allocations and frees kept, the newest: enough for a few hundred steps in a file of some ten megabytes.
MAX_ENTRIES = 100_000
VIEWER = "https://pytorch.org/memory_viz"


class MemorySnapshot(Callback):
    """Records every allocation and free with its stack, and writes them when training ends or fails.

    The last 100,000 events are kept, so that after an out-of-memory error the file shows what led to it.

    Args:
        path: The file; every further rank adds its number to the name.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self._recording = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        skip_idle_hooks(self)
        device = trainer.strategy.root_device.type
        if stage == "fit" and device != "cuda":
            raise UserError(
                f"--memory_snapshot needs a CUDA device, got {device}. Leave it away or add --accelerator gpu."
            )
        if stage == "fit" and not self.path.parent.is_dir():
            raise UserError(f"--memory_snapshot {self.path}: there is no folder {self.path.parent}. Make it first.")

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        torch.cuda.memory._record_memory_history(max_entries=MAX_ENTRIES, stacks="python")
        self._recording = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._write(trainer)

    def _write(self, trainer: Trainer) -> None:
        if not self._recording:
            return
        self._recording = False
        rank = trainer.global_rank
        path = self.path if rank == 0 else self.path.with_stem(f"{self.path.stem}.rank{rank}")
        torch.cuda.memory._dump_snapshot(str(path))
        torch.cuda.memory._record_memory_history(enabled=None)
        if rank == 0:
            print(f"memory snapshot: {path} (open it at {VIEWER}; the file stays in your browser)", flush=True)
