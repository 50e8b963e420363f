"""Trains a task of another package, kills it twice, resumes it and compares.

``python -m tests.third_party.trial NAME SEED`` runs in an environment that has the packages, and
prints what it found as JSON.
"""

from __future__ import annotations

import importlib
import json
import random
import re
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.commands import checkpoint, command, differences_in_training, rows, start

FLAGS = ["--max_epochs", "3", "--log_every_n_steps", "2", "--seed_everything", "5"]
FLAGS += ["--monitors", "none"]
FLAGS += ["--report", "false"]
HERE = "tests.third_party."
KILLED = -signal.SIGKILL
# Lines of a run that begin with these words say what is not exact.
NOT_EXACT = re.compile(r"[^\n]*(?:not exact|resumed run|training data come from)[^\n]*")


@dataclass
class Case:
    """One task.

    Args:
        model: Its module, as a path below this folder.
        data: Its data module, in the same way.
        workers: How many processes its loader has.
        steps: Optimizer steps of an epoch.
        says: What a run says about its resume. Empty: that it is exact, without a word.
        is_exact: Whether a killed run ends as the undisturbed one does.
    """

    model: str
    data: str
    workers: int
    steps: int = 15
    says: str = ""
    is_exact: bool = True


REGRESSION = "regression.Regression"
AT_EPOCHS_END = "a resumed run goes on from the last epoch's end"
TORCHDATA = "torchdata_loader."
LITDATA = "litdata_stream."
DATASETS = "huggingface_datasets."
WEBDATASET = "webdataset_shards."
CHEMPROP = "chemprop_molecules."


# Of pytorch-forecasting's own entries of a checkpoint, which hold objects
LEFT_OUT = "left out of checkpoints, which hold plain values only: dataset_parameters['"


def exact(data: str, workers: int, says: str = "") -> Case:
    """A killed run ends as the undisturbed one does."""
    return Case(REGRESSION, data, workers, says=says)


def not_exact(data: str, workers: int, name: str) -> Case:
    """A killed run ends in another way, and says so."""
    says = f"a resume is not exact: {name} gives other samples when it is begun anew"
    return Case(REGRESSION, data, workers, says=says, is_exact=False)


CASES = {
    "torchdata": exact(TORCHDATA + "Shuffled", 0),
    "torchdata_workers": exact(TORCHDATA + "Shuffled", 2),
    "torchdata_noisy": exact(TORCHDATA + "Noisy", 0),
    # Its state lacks the generators of the workers.
    "torchdata_noisy_workers": exact(TORCHDATA + "Noisy", 2, AT_EPOCHS_END),
    "litdata": exact(LITDATA + "OwnLoader", 0),
    "litdata_workers": exact(LITDATA + "OwnLoader", 2),
    "litdata_plain": exact(LITDATA + "PlainLoader", 0, AT_EPOCHS_END),
    "litdata_plain_workers": exact(LITDATA + "PlainLoader", 2, AT_EPOCHS_END),
    "datasets": exact(DATASETS + "MapStyle", 0),
    "datasets_workers": exact(DATASETS + "MapStyle", 2),
    "datasets_stream": exact(DATASETS + "Stream", 0),
    "datasets_stream_workers": exact(DATASETS + "Stream", 2, AT_EPOCHS_END),
    "datasets_shuffled": exact(DATASETS + "ShuffledStream", 0, AT_EPOCHS_END),
    "datasets_shuffled_workers": exact(DATASETS + "ShuffledStream", 2, AT_EPOCHS_END),
    "webdataset": exact(WEBDATASET + "Unshuffled", 0, AT_EPOCHS_END),
    "webdataset_workers": exact(WEBDATASET + "Unshuffled", 2, AT_EPOCHS_END),
    "webdataset_shuffled": not_exact(WEBDATASET + "Shuffled", 0, "WebDataset"),
    "webdataset_shuffled_workers": not_exact(WEBDATASET + "Shuffled", 2, "WebDataset"),
    "webdataset_seeded": exact(WEBDATASET + "ShuffledBySeed", 0, AT_EPOCHS_END),
    "webdataset_seeded_workers": exact(WEBDATASET + "ShuffledBySeed", 2, AT_EPOCHS_END),
    "webdataset_by_epoch": not_exact(WEBDATASET + "ShuffledByEpoch", 0, "WebDataset"),
    # Each epoch has new workers, which count from the first one.
    "webdataset_by_epoch_workers": exact(WEBDATASET + "ShuffledByEpoch", 2, AT_EPOCHS_END),
    "webdataset_own_loader": not_exact(WEBDATASET + "OwnLoader", 2, "WebLoader"),
    "chemprop": Case(CHEMPROP + "network", CHEMPROP + "Molecules", 0, 12),
    "chemprop_workers": Case(CHEMPROP + "network", CHEMPROP + "Molecules", 2, 12),
    "forecasting_transformer": Case(
        "forecasting.transformer", "forecasting.Series", 0, 11, says=LEFT_OUT
    ),
    "forecasting_nbeats": Case("forecasting.nbeats", "forecasting.Series", 0, 11, says=LEFT_OUT),
    "forecasting_workers": Case(
        "forecasting.transformer", "forecasting.Series", 2, 11, says=LEFT_OUT
    ),
    "graphs": Case("graphs.GraphNetwork", "graphs.data", 0, 12),
    "graphs_workers": Case("graphs.GraphNetwork", "graphs.data", 2, 12),
}


def train(words: list[str], log: Path) -> int:
    """Run a command to its end; returns its exit code."""
    return start(words, log).wait(timeout=250)


def found_differences(one: Path, other: Path) -> list[str]:
    """Where the checkpoints and the rows of metrics of two runs differ."""
    found = []
    for name in ("last.ckpt", "best.ckpt"):
        found += differences_in_training(checkpoint(one / name), checkpoint(other / name), name)
    pairs = zip(rows(one), rows(other), strict=False)
    found += [f"{ours} != {theirs}" for ours, theirs in pairs if ours != theirs][:1]
    if len(rows(one)) != len(rows(other)):
        found.append("rows")
    return found[:20]


def tried(name: str, seed: int) -> dict[str, object]:
    """Train the case undisturbed and killed, in the current folder; returns what was found."""
    case = CASES[name]
    chance = random.Random(f"{name}{seed}")
    flags = ["--model.class_path", HERE + case.model, "--data.class_path", HERE + case.data]
    flags += ["--data.workers", str(case.workers), *FLAGS]
    flags += ["--checkpoint_every", str(chance.choice([1, 2, 3, 4]))]
    # One moment lies in the second epoch, the other before or behind it.
    kills = [chance.randrange(case.steps + 1, 2 * case.steps)]
    others = [step for step in range(2, 3 * case.steps) if step not in kills]
    kills = sorted([*kills, chance.choice(others)])
    began = time.monotonic()
    # The run that writes the files draws random numbers for it.
    module = importlib.import_module(HERE + case.data.rpartition(".")[0])
    if hasattr(module, "make_files"):
        module.make_files()
    log = Path("undisturbed.txt")
    codes = [train(command("fit", *flags, "--run_name", "undisturbed"), log)]
    log = Path("killed.txt")
    again = [*flags, "--run_name", "killed", "--ckpt_path", "auto"]
    for step in kills:
        words = [sys.executable, "-m", "tests.interrupted", str(step), "SIGKILL", *again]
        codes.append(train(words, log))
    codes.append(train(command("fit", *again), log))

    runs = Path("checkpoints")
    return {
        "codes": codes,
        "kills": kills,
        "differences": found_differences(runs / "undisturbed", runs / "killed"),
        "lines": sorted(set(NOT_EXACT.findall(log.read_text()))),
        "seconds": round(time.monotonic() - began, 1),
        "end of the output": log.read_text()[-3000:],
    }


if __name__ == "__main__":
    print(json.dumps(tried(sys.argv[1], int(sys.argv[2]))))
