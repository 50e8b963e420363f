"""What saves cost a training: ExactCheckpoint, Lightning's own ways, and no saves at all.

python docs/peers/saves.py --gib 0.1 0.4 1.6 4 --every 20 --steps 60 --n 5

A small network trains beside frozen weights of the given size, as a fine-tuned backbone has them.
The ways to save run in turn, n times; each size has a process of its own. The table shows medians
with the lowest and the highest value:

- training: the first step to the last one, with all that happens between them;
- waited: what of it is more than the same steps take without saves. Steps that are slower because
  a file is written beside them count;
- ten steps: the time of the ten steps after a save, beside that of ten steps without saves;
- end: from the last step to the end of fit, with the wait for the last file;
- memory: the peak above that of the run without saves, in sizes of the state.

Lightning's ways leave the bytes with the system, which writes them later. ExactCheckpoint flushes
them to the disk.
"""

import argparse
import ctypes
import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import nn
from torch.utils.data import DataLoader, Dataset
from unbroken import ExactCheckpoint

WAYS = ("no saves", "ExactCheckpoint", "ModelCheckpoint", "AsyncCheckpointIO")
COLUMNS = {
    "training_s": "training, s",
    "waited_pct": "waited, %",
    "ten_steps": "ten steps, ratio",
    "end_s": "end, s",
    "memory": "memory, states",
    "saves": "saves",
}
GIB = 2**30
WIDTH = 1024
BATCH = 512
# The frozen weights are so many tensors.
PIECES = 20


def arguments() -> argparse.Namespace:
    """What is measured, and how often."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, nargs="+", default=[0.1, 0.4, 1.6, 4.0])
    parser.add_argument("--every", default="20", help="steps (20) or seconds (60s) between saves")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--n", type=int, default=5, help="runs of each")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--folder", type=Path, help="on the disk that is measured")
    parser.add_argument("--output", type=Path, help="also write every run to FILE.json")
    parser.add_argument("--of_one_size", type=float, help=argparse.SUPPRESS)
    return parser.parse_args()


def runs_of_one_size(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Train in each way, n times, in turn."""
    found = []
    for number in range(options.n + 1):
        # Another way begins each time. The first round warms up, and is not counted.
        turned = options.ways[number % len(options.ways) :] + options.ways
        for way in turned[: len(options.ways)]:
            found.append({"round": number, "way": way, **one_run(options, way)})
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    return [run for run in found if run["round"] > 0]


class Noise(Dataset):
    """Batches that differ, each made in no time."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((BATCH, WIDTH), index / self.steps)


class FineTuned(LightningModule):
    """Two layers that learn, beside frozen weights of the given size."""

    def __init__(self, gib: float) -> None:
        super().__init__()
        size = int(gib * GIB / 4 / PIECES)
        frozen = [nn.Parameter(torch.ones(size), requires_grad=False) for _ in range(PIECES)]
        self.frozen = nn.ParameterList(frozen)
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.layers(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.layers.parameters(), lr=0.01)


class Clock(Callback):
    """Notes when the first step begins, and when each one ends."""

    def __init__(self) -> None:
        self.begun = 0.0
        self.ends: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.begun = self.begun or time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        self.ends.append(time.perf_counter())


def saver(way: str, folder: Path, every: str) -> list[Callback]:
    """The callback that saves."""
    if way == "no saves":
        return []
    if way == "ExactCheckpoint":
        return [ExactCheckpoint(folder, every=every)]
    return [ModelCheckpoint(folder, every_n_train_steps=int(every))]


def one_run(options: argparse.Namespace, way: str) -> dict[str, Any]:
    """Train once; the times of the steps, and the peak of memory."""
    clock = Clock()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        module = FineTuned(options.of_one_size)
        trainer = Trainer(
            max_epochs=1,
            accelerator="cpu",
            callbacks=[clock, *saver(way, Path(name), options.every)],
            plugins=[AsyncCheckpointIO()] if way == "AsyncCheckpointIO" else [],
            logger=False,
            enable_checkpointing=way != "no saves",
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        data = DataLoader(Noise(options.steps), batch_size=None)
        # What earlier runs have left for the disk is not this run's.
        os.sync()
        before = forget_peak()
        trainer.fit(module, data)
        ended = time.perf_counter()
    return {
        "step_ends": [end - clock.begun for end in clock.ends],
        "training_s": clock.ends[-1] - clock.begun,
        "end_s": ended - clock.ends[-1],
        "memory": (memory("VmHWM") - before) / (options.of_one_size * GIB),
        "save_steps": saved_steps(clock.ends, options),
    }


def forget_peak() -> int:
    """Begin to note the process's peak of memory anew; the bytes that it has now.

    What an earlier run has let go of goes back to the system first.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def memory(name: str) -> int:
    """Bytes, as the system counts them for this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith(name))
    return int(line.split()[1]) * 1024


def saved_steps(ends: list[float], options: argparse.Namespace) -> list[int]:
    """The steps after which a save was due."""
    if options.every.endswith("s"):
        every = float(options.every[:-1])
        times = [end - ends[0] for end in ends]
        pairs = enumerate(itertools.pairwise(times))
        return [i + 1 for i, (old, new) in pairs if old // every < new // every]
    return list(range(int(options.every), options.steps, int(options.every)))


def with_figures(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compare each run with the one without saves of the same round."""
    without = {run["round"]: dict(run) for run in runs if run["way"] == "no saves"}
    for run in runs:
        plain = without[run["round"]]
        run["waited_pct"] = 100 * (1 - plain["training_s"] / run["training_s"])
        run["memory"] -= plain["memory"]
        run["saves"] = len(run["save_steps"]) if run["way"] != "no saves" else 0
        # The save itself lies in the first of the ten steps.
        ratios = [
            (span(run, step, step + 10) / span(plain, step, step + 10))
            for step in run["save_steps"]
            if step + 10 < len(run["step_ends"])
        ]
        run["ten_steps"] = statistics.median(ratios) if ratios else 1.0
    return runs


def span(run: dict[str, Any], first: int, last: int) -> float:
    """Seconds from the end of one step to the end of another."""
    ends = run["step_ends"]
    seconds: float = ends[last - 1] - ends[first - 1]
    return seconds


def table(gib: float, runs: list[dict[str, Any]]) -> str:
    """Medians, with the lowest and the highest value."""
    lines = [f"{gib:g} GiB"]
    for way in dict.fromkeys(run["way"] for run in runs):
        values = [run for run in runs if run["way"] == way]
        cells = []
        for key, title in COLUMNS.items():
            numbers = [run[key] for run in values]
            low, high = min(numbers), max(numbers)
            cells.append(f"{title} {statistics.median(numbers):.2f} ({low:.2f}–{high:.2f})")
        lines.append(f"  {way:18} " + " · ".join(cells))
    return "\n".join(lines)


def main() -> None:
    """Measure, and show what was measured."""
    options = arguments()
    if options.of_one_size is not None:
        print(json.dumps(runs_of_one_size(options)))
        return
    found = {}
    for gib in options.gib:
        command = [sys.executable, __file__, *sys.argv[1:], "--of_one_size", str(gib)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        runs = json.loads(done.stdout.splitlines()[-1])
        found[gib] = with_figures(runs)
        print(table(gib, found[gib]), flush=True)
    if options.output is not None:
        options.output.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
