"""The same training twice undisturbed and once killed and resumed, and what came out of each."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from lightning.pytorch import Callback
from unbroken.verifying import kills
from unbroken.verifying.kills import Kill, Killer
from unbroken.verifying.operations import first_difference, read_operations
from unbroken.verifying.outcome import outcome_of
from unbroken.verifying.processes import Ended, become, run_apart
from unbroken.verifying.recorder import Recorder
from unbroken.verifying.recordings import Recording, Row, raw_rows, read_recording

# It names a file that says which start of which run a process is. Lightning starts the ranks of a
# run by the command of rank zero.
START_VARIABLE = "UNBROKEN_VERIFY_START"
# How a process ends that a Killer has ended; the second number is that of Windows.
KILLED = (-9, 15)
# Optimizer steps between two saves: a resume then repeats a step at times.
SAVE_EVERY = "2"
# A resumed start that takes so many times as long as the whole undisturbed run, and this many
# seconds more, hangs.
TIMES = 5
FURTHER_SECONDS = 120


@dataclass(frozen=True)
class Start:
    """One start of a run.

    Attributes:
        folder: What it may write into: a recorder's files lie there, and its ``run`` is the run's.
        number: How often the run was started before.
        kill: Where it is killed. None: nowhere.
        watched: Epoch and batch of the training step whose operations are noted. None: of none.
    """

    folder: Path
    number: int = 0
    kill: Kill | None = None
    watched: tuple[int, int] | None = None

    @property
    def run_folder(self) -> Path:
        """The folder of the run itself."""
        return self.folder / "run"

    def callbacks(self, checkpoint: Path) -> list[Callback]:
        """What takes part in the run beside the user's own; ``checkpoint``: its last.ckpt."""
        # Windows has no groups of processes.
        group = os.getpgrp() if hasattr(os, "getpgrp") else 0
        return [
            Recorder(self.folder, self.number, self.watched),
            Killer(self.kill, group, checkpoint),
        ]


def describe(start: Start) -> Path:
    """Write a start into a file, for the processes that take part in it; returns the file."""
    path = start.folder / f"start{start.number}.json"
    content = {
        "folder": str(start.folder),
        "number": start.number,
        "kill": start.kill,
        "watched": start.watched,
    }
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def described_start(path: Path) -> Start:
    """The start that a file describes."""
    content = json.loads(path.read_text(encoding="utf-8"))
    kill = None if content["kill"] is None else Kill(*content["kill"])
    watched = None if content["watched"] is None else tuple(content["watched"])
    return Start(Path(content["folder"]), content["number"], kill, watched)


@dataclass
class Tried:
    """A run and what came of it."""

    recording: Recording = field(default_factory=Recording)
    # Of its last start
    ended: Ended | None = None
    # Kills that came
    kills: list[Kill] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return self.ended is not None and self.ended.code == 0


# Trains as a start says, in the process in which it is called; returns the exit code.
Train = Callable[[Start], int]


@dataclass
class Trial:
    """Three runs of one training.

    Args:
        train: The training.
        folder: An empty folder.
        count: How often the third run is killed.
        seed: Chooses where.
        fresh: The command that trains in a fresh interpreter, where there is one. The second run
            takes it: a fork shares with its parent how texts are hashed, and a resumed run does
            not.
    """

    train: Train
    folder: Path
    count: int
    seed: int = 0
    fresh: list[str] | None = None
    first: Tried = field(default_factory=Tried)
    second: Tried = field(default_factory=Tried)
    killed: Tried = field(default_factory=Tried)

    def run(self) -> None:
        """Train. Where a run fails, those after it do not begin."""
        self.first = self._undisturbed("first")
        if self.first.is_done:
            self.second = self._undisturbed("second", self.fresh)
        if self.second.is_done:
            self._kill_and_resume()

    def look_closer(self, epoch: int, batch: int, is_killed: bool) -> str | None:
        """Which operation of a training step differs first: in two undisturbed runs, or in one and
        the killed one. All are run once more. None: none does, or it was not found.
        """
        watched = (epoch, batch)
        self._undisturbed("closer", watched=watched)
        if is_killed:
            folder = self._made("closer-other")
            for number, kill in enumerate([*self.killed.kills, None]):
                self._start(Start(folder, number, kill, watched), FURTHER_SECONDS + self._longest)
        else:
            self._undisturbed("closer-other", self.fresh, watched)
        of_both = [
            read_operations(self.folder / name / "rank0-operations.json")
            for name in ("closer", "closer-other")
        ]
        return first_difference(*of_both) if all(of_both) else None

    @property
    def _longest(self) -> float:
        assert self.first.ended is not None
        return TIMES * self.first.ended.seconds

    def _undisturbed(
        self,
        name: str,
        fresh: list[str] | None = None,
        watched: tuple[int, int] | None = None,
    ) -> Tried:
        start = Start(self._made(name), watched=watched)
        train: Callable[[], int] = partial(self.train, start)
        if fresh is not None:
            train = partial(become, fresh, {START_VARIABLE: str(describe(start))})
        ended = run_apart(train, start.folder / "output0.txt", math.inf)
        return Tried(self._read(start.folder), ended)

    def _kill_and_resume(self) -> None:
        patience = FURTHER_SECONDS + self._longest
        chosen = kills.choose(
            raw_rows(self.folder / "first" / "rank0-start0.jsonl"), self.count, self.seed
        )
        folder = self._made("killed")
        for number, kill in enumerate([*chosen, None]):
            ended = self._start(Start(folder, number, kill), patience)
            if kill is None or ended.code not in KILLED:
                break
            self.killed.kills.append(kill)
        self.killed.ended = ended
        self.killed.recording = self._read(folder)

    def _made(self, name: str) -> Path:
        folder = self.folder / name
        folder.mkdir(parents=True)
        return folder

    def _start(self, start: Start, patience: float) -> Ended:
        output = start.folder / f"output{start.number}.txt"
        return run_apart(partial(self.train, start), output, patience)

    def _read(self, folder: Path) -> Recording:
        recording = read_recording(folder)
        last = max((row.step for row in recording.rows.values()), default=0)
        values = outcome_of(folder / "run")
        recording.rows[0, "files"] = Row(last, values, 0)
        return recording
