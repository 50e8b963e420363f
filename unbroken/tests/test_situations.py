"""Each situation is killed at random moments, resumed to its end, and compared bit for bit."""

from __future__ import annotations

import importlib
import os
import pkgutil
import random
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import tests.situations
from tests.commands import (
    checkpoint,
    differences,
    differences_in_training,
    exit_code,
    kill_group,
    start,
    start_ranks,
)
from tests.situations.situation import SITUATIONS, Situation

for module in pkgutil.iter_modules(tests.situations.__path__):
    if module.name != "run":
        importlib.import_module(f"tests.situations.{module.name}")

# More than 1 tries each situation with so many seeds, beginning with the first.
SEEDS = int(os.environ.get("SITUATION_SEEDS", "1"))
FIRST_SEED = int(os.environ.get("SITUATION_FIRST_SEED", "0"))
# These run with every change, the others nightly.
QUICK = (
    "plain",
    "queue_that_is_not_persistent",
    "module_counts_in_a_buffer_at_on_validation_epoch_end",
)
KILLED = -signal.SIGKILL
STOPPED = 143


def train(
    name: str, folder: Path, every: str, log: Path, event: str = "", number: str = ""
) -> set[int]:
    """Train a situation until its end or the event; returns the exit codes of its processes."""
    folder.mkdir(exist_ok=True)
    words = [name, str(folder), every, event, number]
    if SITUATIONS[name].ranks == 1:
        process = start([sys.executable, "-m", "tests.situations.run", *words], log)
        return {exit_code(process, log)}
    with open(log, "ab") as file:
        ranks, store = start_ranks("tests.situations.run", *words, files=(file, file))
        while all(rank.poll() is None for rank in ranks):
            os.sched_yield()
        if any(rank.poll() == KILLED for rank in ranks):
            for rank in ranks:
                kill_group(rank)
        codes = {exit_code(rank, log) for rank in ranks}
        del store
        return codes


def chosen_events(
    events: list[str], chance: random.Random, is_longer: bool
) -> list[tuple[str, str]]:
    """Three moments, one of them in the second half of the run, and the signal for each.

    A run that has ended and is given more has its first half behind it.
    """
    begun = next((i for i, event in enumerate(events) if event.endswith("training_step")), 0)
    end = next((i for i, event in enumerate(events) if event.endswith("on_train_end")), len(events))
    middle = (begun + end) // 2
    if is_longer:
        moments = [chance.randrange(middle, end), chance.randrange(middle, end)]
    else:
        moments = [chance.randrange(begun, middle), chance.randrange(begun, end)]
    signals = ["SIGKILL", "SIGKILL", "SIGTERM"]
    inside_validations = [i for i in range(middle, end) if "/-/" not in events[i]]
    if inside_validations and chance.random() < 0.5:
        moments.append(chance.choice(inside_validations))
    else:
        moments.append(chance.randrange(middle, end))
        chance.shuffle(signals)
    return [(events[i], number) for i, number in sorted(zip(moments, signals, strict=True))]


def found_differences(one: Path, other: Path, situation: Situation) -> list[str]:
    """Where two folders of finished runs differ."""
    found = []
    for rank in range(situation.ranks):
        a = torch.load(one / f"end-{rank}.pt", weights_only=False)
        b = torch.load(other / f"end-{rank}.pt", weights_only=False)
        found += differences(a, b, f"end-{rank}")
    for name in ("last.ckpt", "best.ckpt"):
        a = checkpoint(one / name)
        b = checkpoint(other / name)
        found += differences_in_training(a, b, name)
        found += differences(a["callbacks"], b["callbacks"], f"{name}:callbacks")
        for state in (a["run"]["state"], b["run"]["state"]):
            # A hash of all the rest, and of the order in which values were logged.
            del state["outline"]
            # Only attributes that a process has changed are kept, and which objects these hold.
            # The values are compared at the end.
            for mine in state["ranks"]:
                del mine["objects"]["attributes"]
                del mine["objects"]["objects"]
                # What a start has found, in data that grow
                del mine["data_sets"]["begun"]
                del mine["validation_samples"]["begun"]
        found += differences(a["run"]["state"], b["run"]["state"], f"{name}:state")
    ignores = situation.ignores
    if (other / "over").exists():
        ignores += situation.ignores_when_over
    found = [line for line in found if not any(name in line for name in ignores)]
    rows = [(path / "rows.txt").read_text().splitlines() for path in (one, other)]
    for number, (a, b) in enumerate(zip(*rows, strict=False)):
        if a != b:
            found.append(f"row {number}: {a} != {b}")
            break
    if len(rows[0]) != len(rows[1]):
        found.append(f"rows: {len(rows[0])} != {len(rows[1])}")
    return found


def nightly(name: str) -> Any:
    return pytest.param(name, marks=() if name in QUICK else pytest.mark.nightly)


@pytest.mark.daily(1)
@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + SEEDS))
@pytest.mark.parametrize("name", [nightly(name) for name in SITUATIONS])
def test_a_situation_that_is_killed_at_random_moments_ends_as_if_it_were_not(
    name: str, seed: int, workplace: Path
) -> None:
    situation = SITUATIONS[name]
    chance = random.Random(f"{name}{seed}")
    every = chance.choice(["1", "2", "3", "5"])
    undisturbed = workplace / "undisturbed"
    log = workplace / "log.txt"
    assert train(name, undisturbed, every, log) == {0}, log.read_text()[-3000:]
    events = (undisturbed / "events.txt").read_text().splitlines()

    killed = workplace / "killed"
    moments = chosen_events(events, chance, bool(situation.shorter))
    is_asked = False
    if situation.shorter:
        assert train(name, killed, every, log, "shorter") == {0}, log.read_text()[-3000:]
        # The earlier events are over.
        is_asked = True
    for event, number in moments:
        codes = train(name, killed, every, log, event, number)
        is_asked = is_asked or number == "SIGTERM"
        if is_asked and codes == {0}:
            # A stop comes at the end of its step, or of the run: this event was before.
            break
        expected = KILLED if number == "SIGKILL" else STOPPED
        assert expected in codes, (event, codes, log.read_text()[-3000:])
    assert train(name, killed, every, log, "none") == {0}, log.read_text()[-3000:]

    printed = " ".join(log.read_text().split())
    assert situation.says in printed, printed[-3000:]
    if not situation.says:
        assert "not exact" not in printed, printed
    if situation.is_exact:
        found = found_differences(undisturbed, killed, situation)
        assert found == [], (every, moments, found[:12], printed[-1500:])
