"""Measures how long a step waits for a save: python -m tests.save_wait FILE.json [--quick].

On a GPU the state is one of 1.6 GB: 134 million weights and the two moments of Adam. It is saved
each 30 steps. Beside it stands what one copy of as many bytes to pinned memory takes.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from unbroken import ExactCheckpoint

LAYERS = 8
STEPS = 150
SAVE_EVERY = 30
# The first steps choose algorithms.
WARM_UP = 5


class Batches(Dataset[Tensor]):
    """The same few batches, again and again."""

    def __init__(self, samples: int, width: int) -> None:
        self.batches = torch.randn(8, samples, width)

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> Tensor:
        return self.batches[index % len(self.batches)]


class Wide(LightningModule):
    """Linear layers of equal width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(width, width) for _ in range(LAYERS)])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.layers(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-5, fused=True)


class Clock(Callback):
    """Milliseconds from the start of one step to that of the next."""

    def __init__(self) -> None:
        self.starts: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.starts.append(1000 * time.perf_counter())

    def steps(self) -> list[float]:
        pairs = zip(self.starts, self.starts[1:], strict=False)
        return [after - before for before, after in pairs][WARM_UP:]


def step_ms(width: int, samples: int, folder: Path, *callbacks: Callback) -> list[float]:
    """Train, and return what each step took."""
    clock = Clock()
    trainer = Trainer(
        max_epochs=1,
        devices=1,
        precision="bf16-mixed",
        callbacks=[clock, *callbacks],
        default_root_dir=folder,
        enable_checkpointing=bool(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    batches = Batches(samples, width)
    loader = DataLoader(batches, batch_size=None, pin_memory=torch.cuda.is_available())
    trainer.fit(Wide(width), loader)
    return clock.steps()


def copy_ms(size: int) -> float:
    """The median of three copies of so many bytes from the GPU to pinned memory."""
    there = torch.ones(size, dtype=torch.uint8, device="cuda")
    here = torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def copy() -> None:
        here.copy_(there, non_blocking=True)
        torch.cuda.synchronize()

    return statistics.median(ms_of(copy) for _ in range(3))


def ms_of(function: Callable[[], None]) -> float:
    began = time.perf_counter()
    function()
    return 1000 * (time.perf_counter() - began)


def main(output: str, *options: str) -> None:
    is_small = "--quick" in options or not torch.cuda.is_available()
    width, samples = (256, 64) if is_small else (4096, 4096)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        alone = step_ms(width, samples, folder)
        keep = ExactCheckpoint(folder / "kept", every=str(SAVE_EVERY))
        saving = step_ms(width, samples, folder, keep)
        size = Path(keep.last_model_path).stat().st_size
    found = {
        "bytes": size,
        "step_ms": statistics.median(alone),
        "step_ms_beside_a_save": statistics.median(saving),
        "slowest_steps_ms": sorted(saving)[-(STEPS // SAVE_EVERY) :],
        "copy_ms": copy_ms(size) if torch.cuda.is_available() else None,
    }
    Path(output).write_text(json.dumps(found, indent=2))
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main(*sys.argv[1:])
