"""This template, a plain Lightning script and a plain PyTorch loop, side by side.

python docs/peers/compare.py --root data --network MLP --epochs 2 --n 7

All train the same network on the same MNIST, with the same batch size, learning rate, optimizer and
number of epochs; each validates after every epoch and tests once. They run in turn, each as a whole
command, and the table shows medians with the lowest and the highest value. With --busy another
process keeps a core busy meanwhile.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
CLONE = HERE.parent.parent
TEMPLATE = "this template"
PEERS = {
    "plain Lightning script": HERE / "plain_lightning.py",
    "plain PyTorch loop": HERE / "plain_pytorch.py",
}
COLUMNS = {
    "command_s": "whole command, s",
    "training_s": "training, s",
    "samples_per_sec": "training samples/s",
    "test_accuracy": "test accuracy",
    "peak_gib": "peak memory, GiB",
}
FIRST_SEED = 42
BUSY = [sys.executable, "-c", "while True: pass"]


def arguments() -> argparse.Namespace:
    """What is compared, and how often."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, required=True, help="folder of MNIST/raw")
    parser.add_argument("--network", choices=["MLP", "ConvNet"], default="MLP")
    parser.add_argument("--batch_size", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--samples", type=int, help="only the first N images, to try it")
    parser.add_argument("--n", type=int, default=7, help="runs of each")
    parser.add_argument("--busy", action="store_true", help="beside a process that computes")
    parser.add_argument("--output", type=Path, help="also write every run to FILE.json")
    return parser.parse_args()


def template_command(options: argparse.Namespace, folder: Path) -> list[str]:
    """The template's command, with all its features on, and the peers' settings."""
    flags = {
        "max_epochs": options.epochs,
        "seed_everything": options.seed,
        "model.network": options.network,
        "model.optimizer": "Adam",
        "model.lr": options.lr,
        "model.weight_decay": 0,
        "model.schedule": "constant",
        "model.label_smoothing": 0,
        "data.batch_size": options.batch_size,
        "data.shift_pixels": 0,
        "data.root": options.root.absolute(),
        "data.source": "mnist",
        "default_root_dir": folder,
        "run_name": "run",
    }
    if options.samples is not None:
        val_samples = round(options.samples / 12)
        flags["data.train_samples"] = options.samples - val_samples
        flags["data.val_samples"] = val_samples
        flags["data.test_samples"] = min(options.samples, 10_000)
    words = [f"--{name}={value}" for name, value in flags.items()]
    return [sys.executable, "-m", "project.fit", *words]


def peer_command(script: Path, options: argparse.Namespace, folder: Path) -> list[str]:
    """The command of a script beside this file."""
    words = [sys.executable, str(script), "--root", str(options.root), "--folder", str(folder)]
    for name in ("network", "batch_size", "epochs", "lr", "samples", "seed"):
        value = getattr(options, name)
        if value is not None:
            words += [f"--{name}", str(value)]
    return words


def run(command: list[str]) -> dict[str, float]:
    """Run a command; its seconds, and the peak memory of its largest process.

    Anything but success is an error that shows the end of what it printed.
    """
    environment = {**os.environ, "PYTHONPATH": str(CLONE), "WANDB_MODE": "offline"}
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        # It tells the memory of this one child and of those that it has waited for.
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            output.seek(0)
            sys.exit(f"{' '.join(command)}\n{output.read()[-2000:]}")
    return {"command_s": seconds, "peak_gib": in_gib(usage)}


def in_gib(usage: resource.struct_rusage) -> float:
    """The largest resident memory of a process: macOS counts bytes, Linux KiB."""
    unit = 1 if sys.platform == "darwin" else 1024
    return usage.ru_maxrss * unit / 1024**3


def run_template(options: argparse.Namespace) -> dict[str, float]:
    """One run of this template."""
    with tempfile.TemporaryDirectory() as folder:
        facts = run(template_command(options, Path(folder)))
        summary = json.loads((Path(folder) / "run" / "summary.json").read_text())
    seconds = summary["fit_seconds"]
    samples = summary["train_samples"] * options.epochs
    facts["training_s"] = seconds
    facts["samples_per_sec"] = samples / seconds
    facts["test_accuracy"] = summary["test/accuracy"]
    return facts


def run_peer(script: Path, options: argparse.Namespace) -> dict[str, float]:
    """One run of a peer."""
    with tempfile.TemporaryDirectory() as folder:
        facts = run(peer_command(script, options, Path(folder)))
        facts |= json.loads((Path(folder) / "measured.json").read_text())
    return facts


def in_turn(options: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """``n`` runs of each, one after the other, after one of each that warms the disk.

    Each round has a seed of its own.
    """
    runs: dict[str, list[dict[str, float]]] = {TEMPLATE: []}
    runs |= {name: [] for name in PEERS}
    for number in range(options.n + 1):
        options.seed = FIRST_SEED + number
        for name, taken in runs.items():
            print(f"round {number} of {options.n}: {name}", file=sys.stderr, flush=True)
            facts = run_peer(PEERS[name], options) if name in PEERS else run_template(options)
            if number > 0:
                taken.append(facts)
    return runs


def table(runs: dict[str, list[dict[str, float]]]) -> str:
    """Median (lowest to highest) of each column, in Markdown."""
    lines = ["| | " + " | ".join(COLUMNS.values()) + " |", "| --- " * (len(COLUMNS) + 1) + "|"]
    for name, taken in runs.items():
        cells = []
        for column in COLUMNS:
            values = [facts[column] for facts in taken]
            median = as_text(column, statistics.median(values))
            lowest = as_text(column, min(values))
            highest = as_text(column, max(values))
            cells.append(f"{median} ({lowest}–{highest})")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def as_text(column: str, value: float) -> str:
    """A value as its column shows it."""
    if column == "test_accuracy":
        return f"{value:.2%}"
    if column == "samples_per_sec":
        return f"{value:,.0f}"
    return f"{value:.1f}" if column == "command_s" else f"{value:.2f}"


def main() -> None:
    """Run all, and print the table."""
    options = arguments()
    busy = subprocess.Popen(BUSY) if options.busy else None
    try:
        runs = in_turn(options)
    finally:
        if busy is not None:
            busy.kill()
            busy.wait()
    print(table(runs))
    if options.output is not None:
        options.output.write_text(json.dumps(runs, indent=2))


if __name__ == "__main__":
    main()
