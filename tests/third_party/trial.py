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

from tests.commands import SAME, checkpoint, command, differences, rows, start

FLAGS = ["--max_epochs", "3", "--log_every_n_steps", "2", "--seed_everything", "5"]
FLAGS += ["--monitors", "none"]
FLAGS += ["--report", "false"]  # feature: report
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
CASES = {
    "torchdata": Case(REGRESSION, "torchdata_loader.Shuffled", 0),
    "torchdata_workers": Case(REGRESSION, "torchdata_loader.Shuffled", 2),
    "litdata": Case(REGRESSION, "litdata_stream.OwnLoader", 0),
    "litdata_workers": Case(REGRESSION, "litdata_stream.OwnLoader", 2),
    "litdata_plain": Case(REGRESSION, "litdata_stream.PlainLoader", 0, says=AT_EPOCHS_END),
    "litdata_plain_workers": Case(REGRESSION, "litdata_stream.PlainLoader", 2, says=AT_EPOCHS_END),
    "datasets": Case(REGRESSION, "huggingface_datasets.MapStyle", 0),
    "datasets_workers": Case(REGRESSION, "huggingface_datasets.MapStyle", 2),
    "datasets_stream": Case(REGRESSION, "huggingface_datasets.Stream", 0),
    "datasets_stream_workers": Case(
        REGRESSION, "huggingface_datasets.Stream", 2, says=AT_EPOCHS_END
    ),
    "datasets_shuffled": Case(
        REGRESSION, "huggingface_datasets.ShuffledStream", 0, says=AT_EPOCHS_END
    ),
    "datasets_shuffled_workers": Case(
        REGRESSION, "huggingface_datasets.ShuffledStream", 2, says=AT_EPOCHS_END
    ),
    "webdataset": Case(REGRESSION, "webdataset_shards.Unshuffled", 0, says=AT_EPOCHS_END),
    "webdataset_workers": Case(REGRESSION, "webdataset_shards.Unshuffled", 2, says=AT_EPOCHS_END),
    "webdataset_shuffled": Case(
        REGRESSION, "webdataset_shards.Shuffled", 0, says="not exact", is_exact=False
    ),
    "webdataset_shuffled_workers": Case(
        REGRESSION, "webdataset_shards.Shuffled", 2, says="not exact", is_exact=False
    ),
    "webdataset_seeded": Case(REGRESSION, "webdataset_shards.ShuffledBySeed", 0),
    "webdataset_seeded_workers": Case(REGRESSION, "webdataset_shards.ShuffledBySeed", 2),
    "webdataset_by_epoch": Case(REGRESSION, "webdataset_shards.ShuffledByEpoch", 0),
    "webdataset_by_epoch_workers": Case(REGRESSION, "webdataset_shards.ShuffledByEpoch", 2),
    "webdataset_own_loader": Case(REGRESSION, "webdataset_shards.OwnLoader", 2),
    "chemprop": Case("chemprop_molecules.network", "chemprop_molecules.Molecules", 0, 12),
    "chemprop_workers": Case("chemprop_molecules.network", "chemprop_molecules.Molecules", 2, 12),
    "forecasting_transformer": Case("forecasting.transformer", "forecasting.Series", 0, 11),
    "forecasting_nbeats": Case("forecasting.nbeats", "forecasting.Series", 0, 11),
    "forecasting_workers": Case("forecasting.transformer", "forecasting.Series", 2, 11),
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
        ours = checkpoint(one / name)
        theirs = checkpoint(other / name)
        for key in SAME:
            found += differences(ours[key], theirs[key], f"{name}:{key}")
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
