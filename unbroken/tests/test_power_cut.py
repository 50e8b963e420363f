"""Promise 19 at every boundary of a save: what a power cut leaves there is one whole state."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from unbroken.storage import files
from unbroken.storage.checkpoint_files import AtomicCheckpointIO
from unbroken.storage.files import copy_atomically
from unbroken.storage.usable import checkpoint_to_resume

from tests.commands import checkpoint, differences_in_training, exit_code, kill_group, start
from tests.power_cut import WORLDS, PowerCut

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
# WRITE_KILLS=100 sends more, and WRITE_KILLS_SEED others.
KILLS = int(os.environ.get("WRITE_KILLS", "12"))
SEED = int(os.environ.get("WRITE_KILLS_SEED", "0"))
KILLS_OF_A_RUN = 4


def state(step: int) -> dict[str, Any]:
    """A checkpoint whose weights tell its step."""
    return {
        "state_dict": {"weight": torch.full((1000,), float(step))},
        "loops": {},
        "global_step": step,
        "epoch": 0,
        "pytorch-lightning_version": "2.6.6",
    }


def save(folder: Path, step: int) -> None:
    """Save as a new best: two files with the same bytes."""
    AtomicCheckpointIO().write(state(step), folder / "best.ckpt")
    copy_atomically(folder / "best.ckpt", folder / "last.ckpt")


def steps_left(folder: Path) -> list[tuple[str, str, int]]:
    """What could be left at each boundary of a save of step 2, where step 1 was saved before."""
    place = folder / "run"
    place.mkdir()
    save(place, 1)
    after = folder / "after"
    found = []

    def look(cut: PowerCut) -> None:
        for world in WORLDS:
            after.mkdir()
            for name, data in cut.left(world).items():
                (after / name).write_bytes(data)
            path, _ = checkpoint_to_resume(after / "last.ckpt", after / "best.ckpt")
            contents = {} if path is None else checkpoint(path)
            step = contents.get("global_step", 0)
            assert path is None or contents["state_dict"]["weight"].eq(step).all(), "mixed"
            found.append((cut.boundaries[-1], world, step))
            shutil.rmtree(after)

    with pytest.MonkeyPatch.context() as patch:
        PowerCut(place, look).watch(patch)
        save(place, 2)
    return found


def test_at_each_boundary_of_a_save_the_state_before_or_the_new_one_is_whole(
    tmp_path: Path,
) -> None:
    found = steps_left(tmp_path)
    boundaries = [boundary for boundary, world, _ in found if world == WORLDS[0]]
    assert boundaries.count("inside a write") > 2
    assert boundaries[-8:] == [
        "after the folder is flushed",
        "inside a copy",
        "before a file is flushed",
        "after a file is flushed",
        "before replace",
        "after replace",
        "before the folder is flushed",
        "after the folder is flushed",
    ]
    assert {step for _, _, step in found} == {1, 2}
    assert [step for _, _, step in found[-3:]] == [2, 2, 2]


# Bytes that nobody flushed are lost under their new name; the new name itself is lost for ever.
@pytest.mark.parametrize(("left_out", "step"), [("flush", 0), ("flush_folder", 1)])
def test_a_power_cut_tells_a_flush_that_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left_out: str, step: int
) -> None:
    monkeypatch.setattr(files, left_out, lambda path: None)
    _, world, found = steps_left(tmp_path)[-2]
    assert (world, found) == ("all that is not flushed", step)


def run(folder: Path, notes: Path, *words: str) -> int:
    """Train in a process of its own; its exit code."""
    log = notes.with_suffix(".log")
    command = [sys.executable, "-m", "tests.power_cut_script", str(folder), str(notes), *words]
    return exit_code(start(command, log), log)


def kill_in_a_run(folder: Path, notes: Path, chance: random.Random) -> bool | None:
    """Train, and kill the process: inside a write, or at any moment.

    Returns whether a file was being written. None: the run has ended before.
    """
    command = [sys.executable, "-m", "tests.power_cut_script", str(folder), str(notes), "0", "no"]
    process = start(command, notes.with_suffix(".log"))
    in_a_write = chance.random() < 0.6
    begun = time.monotonic()
    seconds = chance.uniform(0.0, 1.5)
    while process.poll() is None and time.monotonic() - begun < 60:
        has_passed = not in_a_write and time.monotonic() - begun > seconds
        if has_passed or (in_a_write and any(folder.glob(".*.ckpt.*.part"))):
            break
    kill_group(process)
    if process.wait(timeout=60) != -signal.SIGKILL:
        return None
    # What the killed process was writing lies there for ever.
    return any(folder.glob(".*.ckpt.*.part"))


@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_a_training_that_is_killed_while_files_are_written_resumes_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FROZEN_MIB", "64")
    assert run(tmp_path / "undisturbed", tmp_path / "notes", "0", "no") == 0
    chance = random.Random(SEED)
    found: list[bool] = []
    number = 0
    while len(found) < KILLS:
        number += 1
        folder, notes = tmp_path / f"run{number}", tmp_path / f"notes{number}"
        for _ in range(KILLS_OF_A_RUN):
            was_in_a_write = kill_in_a_run(folder, notes, chance)
            if was_in_a_write is None:
                break
            found.append(was_in_a_write)
        assert run(folder, notes, "0", "no") == 0, notes.with_suffix(".log").read_text()[-3000:]
        assert_same_end(tmp_path / "undisturbed", folder)
        saved = [int(step) for step in noted(notes, "saved") if step != "None"]
        begun = [int(step) for step in noted(notes, "begun")]
        assert begun == sorted(begun), f"a save was lost: {begun}"
        assert len(saved) > 0
        shutil.rmtree(folder)
    print(f"{len(found)} kills, {sum(found)} of them inside a write; {number} runs")
    assert sum(found) >= KILLS // 3


def noted(notes: Path, kind: str) -> list[str]:
    """What a training has noted of one kind."""
    lines = notes.read_text().splitlines()
    return [line.partition(" ")[2] for line in lines if line.startswith(f"{kind} ")]


def assert_same_end(one: Path, other: Path) -> None:
    for name in ("last.ckpt", "best.ckpt"):
        mine, theirs = checkpoint(one / name), checkpoint(other / name)
        assert differences_in_training(mine, theirs, name) == []


def ends_as_undisturbed(tmp_path: Path, number: int, world: str, mirror: str | None) -> bool:
    """Kill a training at a boundary, resume it, and compare its end. False: it has ended before."""
    folder, notes = tmp_path / f"run{number}", tmp_path / f"notes{number}"
    store = [] if mirror is None else [str(tmp_path / f"{mirror}{number}")]
    code = run(folder, notes, str(number), world, *store)
    if code == 0 and len(noted(notes, "boundary")) < number:
        return False
    assert code == -signal.SIGKILL, notes.with_suffix(".log").read_text()[-3000:]
    assert len(noted(notes, "boundary")) == number
    saved = [int(step) for step in noted(notes, "saved") if step != "None"]
    if mirror is not None:
        # The machine is lost.
        shutil.rmtree(folder)
    again = tmp_path / f"again{number}"
    code = run(folder, again, "0", world, *store)
    assert code == 0, again.with_suffix(".log").read_text()[-3000:]
    if mirror is None and saved:
        assert int(noted(again, "begun")[0]) >= saved[-1], "a save was lost"
    assert_same_end(tmp_path / "undisturbed", folder)
    shutil.rmtree(folder)
    return True


@pytest.mark.nightly
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("world", WORLDS)
def test_a_training_that_a_power_cut_ends_at_any_boundary_resumes_exactly(
    tmp_path: Path, world: str
) -> None:
    notes = tmp_path / "notes"
    assert run(tmp_path / "undisturbed", notes, "0", world) == 0
    count = len(noted(notes, "boundary"))
    assert count > 50
    for number in range(1, count + 1):
        assert ends_as_undisturbed(tmp_path, number, world, None)


@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_a_training_that_ends_at_any_boundary_of_its_mirror_resumes_exactly_elsewhere(
    tmp_path: Path,
) -> None:
    notes = tmp_path / "notes"
    assert run(tmp_path / "undisturbed", notes, "0", "nothing", str(tmp_path / "store0")) == 0
    count = len(noted(notes, "boundary"))
    assert count > 20
    # A mirror that is busy leaves out what a newer save replaces, so a run may have fewer of them.
    numbers = range(1, count + 1)
    assert sum(ends_as_undisturbed(tmp_path, each, "nothing", "store") for each in numbers) > 20
