"""Promises 2 and 4 over combinations of flags: a run that random signals hit at random moments, and
that is started again by the same line until it has finished, ends as an undisturbed one does.

``RANDOM_KILLS=200 python -m pytest -n 0 -s -m nightly tests/test_random_kills.py`` sends 200
signals; without the variable it is 12. ``RANDOM_SEED`` chooses other flags, signals and moments.
The seed of each run is printed: as ``RANDOM_SEED`` it makes this run the first one.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.commands import (
    CONVNET,
    CPU2,
    SMALL,
    TORCHRUN,
    Process,
    assert_same_run,
    checkpoint,
    command,
    kill_group,
    start,
    start_ranks,
    summary,
)
from tests.test_start_up_signals import handles_signals, in_session

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
# Ten seconds are promised. On a busy machine they are longer.
PATIENCE_S = 60.0
KILLS_OF_A_RUN = 4
KILLED = Path("checkpoints/killed")
REFERENCE = Path("checkpoints/reference")
ELASTIC = [*TORCHRUN, "--max_restarts", "3", "--monitor_interval", "0.2"]

AVERAGES = {
    "ema": "{class_path: lightning.pytorch.callbacks.EMAWeightAveraging, init_args: {decay: 0.9}}",
    "swa": "{class_path: lightning.pytorch.callbacks.StochasticWeightAveraging,"
    " init_args: {swa_lrs: 0.01, swa_epoch_start: 1}}",
}
CHOICES: list[list[list[str]]] = [
    [["--data.num_workers", "0"], ["--data.num_workers", "0"], ["--data.num_workers", "2"]],
    [[], [], ["--precision", "bf16-mixed"]],
    [[], ["--accumulate_grad_batches", "2"], ["--accumulate_grad_batches", "3"]],
    [[], ["--val_check_interval", "0.4"], ["--val_check_interval", "4"]],
    [[], ["--limit_train_batches", "9"], ["--limit_val_batches", "1"]],
    [[], [], ["--reload_dataloaders_every_n_epochs", "1"]],
    [[], [], ["--config", "ema.yaml"], ["--config", "swa.yaml"]],
    [[], [], ["--max_steps", "17"]],
    [[], ["--gradient_clip_val", "0.5"]],
    [[], ["--logger", "false"]],
    [["--checkpoint_every", "3"], ["--checkpoint_every", "1s"], []],
    [["--model.network.dropout", "0.2"], [*CONVNET]],
    [[], ["--data.rotate_degrees", "10"]],
]
# Batches are counted together, at a save at the latest. In how many calls depends on the clock.
COUNTED_BY_TIME = ("train_metrics.accuracy._update_count",)
LAUNCHERS = [*["one"] * 4, "two ranks", "two ranks", "lightning", "torchrun"]


@dataclass
class Tally:
    """What happened to all runs."""

    sent: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    slow: int = 0

    @property
    def kills(self) -> int:
        return sum(self.sent.values())


@dataclass
class Started:
    """The processes of one start, and who of them may get a signal."""

    processes: list[Process]
    # Finds the process ids: the ranks, and what starts them.
    targets: Callable[[], list[int]]
    # The ranks meet there.
    store: Any = None
    # Who might have got a signal, at every one that was sent.
    seen: set[int] = field(default_factory=set)

    def ended(self) -> bool:
        """Whether it has ended. As torchrun does, the first rank that fails ends the others."""
        codes = [process.poll() for process in self.processes]
        if any(codes):
            for process in self.processes:
                process.terminate()
        return None not in codes

    def left(self) -> list[int]:
        """Processes that have outlived it."""
        found = [pid for process in self.processes for pid in in_session(process.pid)]
        # Torchrun's ranks have sessions of their own.
        return found + [pid for rank in self.seen for pid in in_session(rank)]

    def end(self) -> None:
        for process in self.processes:
            kill_group(process)
        for pid in self.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def begin(launcher: str, flags: list[str], log: Path) -> Started:
    """Start a run, and wait until it handles signals."""
    if launcher == "two ranks":
        with open(log, "ab") as file:
            ranks, store = start_ranks("fit", *flags, files=(file, file))
        started = Started(ranks, lambda: [rank.pid for rank in ranks], store)
    else:
        words = command("fit", *flags)
        if launcher == "torchrun":
            words = [sys.executable, *ELASTIC, "-m", "numerals.fit", *flags, *CPU2]
        if launcher == "lightning":
            words += CPU2
        process = start(words, log)
        # A loader's worker handles signals, too, until it is prepared.
        has_ranks = launcher != "one"
        started = Started([process], lambda: members(process.pid) if has_ranks else [process.pid])
    end = time.monotonic() + 120
    while not all(handles_signals(process.pid) for process in started.processes):
        if started.ended():
            break
        assert time.monotonic() < end, log.read_text()[-3000:]
        time.sleep(0.01)
    return started


def members(pid: int) -> list[int]:
    """A process and its descendants, those that handle signals as a command does: the ranks."""
    found = [pid]
    with contextlib.suppress(psutil.NoSuchProcess):
        found += [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return [each for each in found if handles_signals(each)] or [pid]


def wait(started: Started, seconds: float) -> bool:
    """Wait so long, or until the start has ended; returns whether it has."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if started.ended():
            return True
        time.sleep(0.02)
    return started.ended()


def run_to_end(launcher: str, flags: list[str], log: Path) -> tuple[int, float]:
    """The exit code of an undisturbed start, and its seconds."""
    started = begin(launcher, flags, log)
    began = time.monotonic()
    try:
        if not wait(started, 240):
            return 99, 240.0
        code = next((p.returncode for p in started.processes if p.returncode), 0)
        return int(code or 0), time.monotonic() - began
    finally:
        started.end()


def hit(launcher: str, started: Started, chance: random.Random, tally: Tally) -> str:
    """Send one random signal to one of the processes, or to all; returns what was sent."""
    number = chance.choice(SIGNALS)
    targets = started.targets()
    started.seen.update(targets)
    chosen = targets if chance.random() < 0.3 else [chance.choice(targets)]
    for pid in chosen:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue
    tally.sent[f"{launcher} {number.name}"] += 1
    return f"{number.name} to {len(chosen)} of {len(targets)}"


def check_end(launcher: str, started: Started, what: str, log: Path, tally: Tally) -> None:
    """Wait for the end after a signal; note what is not as promised."""
    began = time.monotonic()
    # Torchrun starts ranks that have ended again, and then the whole run is waited for.
    patience = 240.0 if launcher == "torchrun" else PATIENCE_S
    if not wait(started, patience):
        tally.wrong.append(f"{what}: HUNG: {log.read_text()[-2500:]}")
        return
    took = time.monotonic() - began
    if took > 10 and launcher != "torchrun":
        tally.slow += 1
    while started.left() and time.monotonic() - began < patience:
        time.sleep(0.05)
    if started.left():
        tally.wrong.append(f"{what}: processes are left")
    codes = [process.returncode for process in started.processes]
    tally.codes[f"{launcher} {what.split()[0]}: {codes}"] += 1
    number = signal.Signals[what.split()[0]]
    expected = {0, -9} if number == signal.SIGKILL else {0, 128 + number}
    if launcher == "one" and not set(codes) <= expected:
        tally.wrong.append(f"{what}: exit codes {codes}: {log.read_text()[-2500:]}")


def steps_saved() -> int:
    """Optimizer steps in last.ckpt, which must be whole; -1 where there is none."""
    last = KILLED / "last.ckpt"
    return int(checkpoint(last)["global_step"]) if last.exists() else -1


def disturb(
    launcher: str, flags: list[str], longest: float, chance: random.Random, tally: Tally, log: Path
) -> None:
    """Hit a run until it has had its signals, then let it finish."""
    saved = -1
    hits: list[str] = []
    for _ in range(KILLS_OF_A_RUN):
        log.write_bytes(b"")
        started = begin(launcher, flags, log)
        try:
            moment = chance.uniform(0, longest)
            if wait(started, moment):
                continue
            what = f"{hit(launcher, started, chance, tally)} after {moment:.2f} s"
            check_end(launcher, started, what, log, tally)
            hits.append(what)
        finally:
            started.end()
        before = saved
        saved = steps_saved()
        hits.append(f"{saved} steps")
        if saved < before:
            tally.wrong.append(f"{what}: LOST: {before} steps were saved, and now {saved}")
    log.write_bytes(b"")
    code, _ = run_to_end(launcher, flags, log)
    if code:
        tally.wrong.append(f"the last start ended with {code}: {log.read_text()[-2500:]}")
        return
    try:
        assert_same_run(REFERENCE, KILLED, COUNTED_BY_TIME)
        assert summary(REFERENCE)["test/loss"] == summary(KILLED)["test/loss"]
        assert not list(Path().rglob("*.part"))
    except (AssertionError, KeyError, FileNotFoundError) as error:
        said = log.read_text()[-2500:]
        tally.wrong.append(f"INEXACT: {hits}: {str(error)[:1500]}\nThe last start said: {said}")


@pytest.mark.nightly
@pytest.mark.timeout(36_000)
def test_runs_that_are_hit_at_random_end_as_undisturbed_ones(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    seed = int(os.environ.get("RANDOM_SEED", "0"))
    kills = int(os.environ.get("RANDOM_KILLS", "12"))
    for name, callback in AVERAGES.items():
        Path(f"{name}.yaml").write_text(f"trainer:\n  callbacks: {callback}\n")
    log = workplace / "log.txt"
    tally = Tally()
    runs = 0
    while tally.kills < kills:
        # Each run has a seed of its own, so that it can be tried alone.
        chance = random.Random(seed + runs)
        runs += 1
        launcher = chance.choice(LAUNCHERS)
        flags = [*SMALL, "--data.train_samples", "960", "--max_epochs", "3"]
        for choices in CHOICES:
            flags += chance.choice(choices)
        shutil.rmtree("checkpoints", ignore_errors=True)
        log.write_bytes(b"")
        code, longest = run_to_end(launcher, ["--run_name", "reference", *flags], log)
        mine = " ".join(flags[len(SMALL) :])
        print(f"seed {seed + runs - 1}: {launcher}: {mine}: {longest:.1f} s", flush=True)
        if code == 2 or "exitcode  : 2 " in log.read_text():
            print(f"  refused: {log.read_text().splitlines()[0]}", flush=True)
            continue
        known = len(tally.wrong)
        if code:
            tally.wrong.append(f"undisturbed: {code}: {log.read_text()[-2500:]}")
        else:
            again = ["--run_name", "killed", "--ckpt_path", "auto", *flags]
            disturb(launcher, again, longest, chance, tally, log)
        for number, line in enumerate(tally.wrong[known:], known):
            tally.wrong[number] = f"seed {seed + runs - 1}, {launcher}, {mine}: {line}"
            print(tally.wrong[number], flush=True)
    print(f"seed {seed}: {runs} runs, {tally.kills} kills: {dict(tally.sent)}")
    print(f"ends: {dict(tally.codes)}; {tally.slow} took longer than 10 s")
    assert not tally.wrong, f"{len(tally.wrong)} wrong:\n" + "\n".join(tally.wrong)
