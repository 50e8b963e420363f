"""Promise 13: threads that wait spin while the cores are free, and sleep while other processes use
them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from unbroken.cli import trainer_flags as engine_trainer
from unbroken.cli.trainer_flags import build_trainer
from unbroken.machine import threads
from unbroken.machine import waiting as module
from unbroken.machine.waiting import Shares, Waiting, waiting
from unbroken.run.progress import RunTimer, closing_lines

from tests.commands import SMALL, checkpoint, command, facts_of_a_short_run, run, start, summary


@pytest.fixture(autouse=True)
def _nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", threads.OURS):
        monkeypatch.setenv(name, "")  # so that what configure() sets is taken away again
        monkeypatch.delenv(name)


class ChangeWaiting(Callback):
    """Threads sleep and spin in turn, a few steps each."""

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        assert waiting.openmp is not None, "GNU's OpenMP was not found"
        [waiting.sleep, waiting.spin][batch_idx // 4 % 2]()


def test_threads_sleep_while_others_use_the_cores_and_try_again_ever_more_seldom() -> None:
    waiting, done = Waiting(), []
    waiting.sleep, waiting.spin = lambda: done.append("sleep"), lambda: done.append("spin")  # type: ignore[method-assign]
    changes = []
    for quarter in range(1, 81):  # twenty seconds beside another process
        waiting.look(quarter / 4, Shares(1.0))
        changes += [quarter / 4] if len(done) > len(changes) else []
    assert done[:4] == ["sleep", "spin", "sleep", "spin"]
    # seen at the next look; then a quarter, a half, one second of sleep
    assert changes[:6] == [0.25, 0.5, 0.75, 1.25, 1.5, 2.5]
    now = 20.0
    assert waiting.slept > 10
    while waiting.sleeping_since is not None:  # the other process has ended
        now += 0.25
        waiting.look(now, Shares(0.01))
    waiting.look(now + 0.25, Shares(0.01))
    assert done[-1] == "spin"
    assert (
        waiting.patience == 0.25
    )  # a short burst costs little: a run's own W&B starts beside its first second


def test_two_threads_leave_a_core_to_others_until_it_is_free() -> None:
    waiting = Waiting()
    done: list[Any] = []

    def move_to(core: int | None) -> None:
        done.append(core)
        waiting.core = core

    waiting.cores = {0, 1}
    waiting.sleep = lambda: done.append("sleep")  # type: ignore[method-assign]
    waiting.spin = lambda: done.append("spin")  # type: ignore[method-assign]
    waiting._move_to = move_to  # type: ignore[method-assign]
    waiting.look(0.25, Shares(1.0))
    waiting.core = 0
    # The other process is on the other core: nothing is tried in vain.
    for quarter in range(2, 400):
        waiting.look(quarter / 4, Shares(1.0, here=0.02, elsewhere=1.0))
    assert done == ["sleep"]
    now = 100.0
    # Another run has moved to the same core. Both look, one goes.
    while waiting.core == 0:
        now += 0.25
        waiting.look(now, Shares(1.0, here=0.5, elsewhere=0.0))
    assert done == ["sleep", 1]
    waiting.look(now + 0.25, Shares(1.0, here=0.0, elsewhere=1.0))
    assert done == ["sleep", 1]
    # It has ended.
    waiting.look(now + 0.5, Shares(1.0, here=0.05, elsewhere=0.1))
    assert done == ["sleep", 1, "spin"]
    assert waiting.seconds_slept() == pytest.approx(now + 0.25)


@pytest.mark.parametrize(
    ("told", "cores", "workers", "moves"),
    [
        ({0: 1.0, 1: 1.0}, {0, 1}, [], True),
        ({}, {0, 1}, [], False),  # nobody could tell when the other core is free again
        ({0: 1.0, 1: 1.0, 2: 1.0}, {0, 1, 2}, [], False),
        ({0: 1.0, 1: 1.0}, {0, 1}, ["a loader's"], False),  # it is what the cores are busy with
    ],
)
def test_threads_share_a_core_only_where_that_helps(
    monkeypatch: pytest.MonkeyPatch,
    told: dict[int, float],
    cores: set[int],
    workers: list[str],
    moves: bool,
) -> None:
    waiting, moved = Waiting(), []
    waiting.cores, waiting._move_to, waiting._idle_team = cores, moved.append, lambda: None  # type: ignore[method-assign, assignment]
    monkeypatch.setattr(module, "time_used", lambda: told)
    monkeypatch.setattr(module.multiprocessing, "active_children", lambda: workers)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    waiting.sleep()
    assert bool(moved) is moves
    assert {*moved} <= cores


TWO_ON_ONE = """
import multiprocessing, os, torch
from unbroken.machine.waiting import Waiting

def told(pipe):
    pipe.send(len(os.sched_getaffinity(0)))

torch.set_num_threads(2)
torch.ones(1 << 17).add_(1)
waiting = Waiting()
waiting.find_openmp()
waiting._watch = lambda: None
waiting.start()
cores = lambda: {len(os.sched_getaffinity(int(thread))) for thread in os.listdir("/proc/self/task")}
waiting.sleep()
asleep, (mine, its) = cores(), multiprocessing.get_context("fork").Pipe()
worker = multiprocessing.get_context("fork").Process(target=told, args=(its,))
worker.start()
waiting.spin()
print(asleep, mine.recv(), cores())
worker.join()
"""


@pytest.mark.nightly
@pytest.mark.skipif(
    not sys.platform.startswith("linux") or len(os.sched_getaffinity(0)) < 2,
    reason="two cores under Linux",
)
def test_on_two_cores_all_threads_move_to_one_and_back_and_workers_have_both() -> None:
    two = f"import os; os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[:2]})\n"
    told = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", two + TWO_ON_ONE], capture_output=True, text=True
    )
    assert told.stdout.split("\n")[0] == "{1} 2 {2}", told.stderr


@pytest.mark.nightly
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_what_others_use_of_a_core_is_seen() -> None:
    """Beside a process that never rests on the same core: half of the core is its, as this one
    never rests either.
    """
    core = min(os.sched_getaffinity(0))
    one_core = f"import os; os.sched_setaffinity(0, {{{core}}})\n"
    other = subprocess.Popen([sys.executable, "-c", f"{one_core}while True: pass"])
    code = "import time; from unbroken.machine.waiting import Reading\n"
    code += "began = time.monotonic(); before = Reading()\n"
    code += "while time.monotonic() - began < 2: pass\n"
    code += f"print(*Reading().shares_since(before, {{{core}}}, {core}))"
    try:
        told = subprocess.run(
            [sys.executable, "-c", one_core + code], capture_output=True, text=True, check=True
        )
    finally:
        other.kill()
        other.wait()
    waited, here, elsewhere = map(float, told.stdout.split())
    assert waited > 0.25
    assert here > 0.25
    assert elsewhere == 0


def test_what_others_took_before_the_training_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waiting = Waiting()
    monkeypatch.setattr(time, "monotonic", lambda: 30.0)
    waiting.slept = 5.0
    waiting.sleeping_since = 28.0
    assert waiting.seconds_slept() == 7
    waiting.count_anew()
    assert waiting.seconds_slept() == 0
    monkeypatch.setattr(time, "monotonic", lambda: 31.0)
    assert waiting.seconds_slept() == 1
    waiting._end_sleep(33.0)
    assert waiting.seconds_slept() == 3


def test_a_run_says_how_long_others_took_its_cores(tmp_path: Path) -> None:
    facts = facts_of_a_short_run("r")
    assert "other processes" not in closing_lines(facts, tmp_path)
    facts.busy_seconds = 0.3  # would be 0 s
    assert "other processes" not in closing_lines(facts, tmp_path)
    facts.busy_seconds = 3.2
    assert "trained 5.0 s; for 3 s other processes took cores" in closing_lines(facts, tmp_path)
    assert facts.to_plain()["busy_seconds"] == 3.2


def test_what_others_took_is_added_up_over_the_parts_of_a_resumed_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept = {"seconds_slept": lambda: 2.0, "count_anew": lambda: None}
    monkeypatch.setattr("unbroken.run.progress.waiting", SimpleNamespace(**slept))
    trainer: Any = SimpleNamespace()
    saved = {"seconds": 1.0}
    for taken in (2.0, 4.0):
        timer = RunTimer()
        timer.load_state_dict(saved)
        monkeypatch.setattr("unbroken.run.progress._first_line", lambda *_: [])
        timer.on_train_start(trainer, trainer)
        timer.on_train_end(trainer, trainer)
        saved = timer.state_dict()
        assert saved["busy_seconds"] == taken


@pytest.mark.daily(2)
@pytest.mark.parametrize(
    ("chosen", "watched"),
    [
        ({}, True),
        ({"GOMP_SPINCOUNT": "1000"}, False),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, False),
        ({"OMP_NUM_THREADS": "1"}, False),
    ],
)
def test_the_users_own_waiting_stays(
    monkeypatch: pytest.MonkeyPatch, chosen: dict[str, str], watched: bool
) -> None:
    waiting, began = Waiting(), threading.Event()
    monkeypatch.setattr(waiting, "_watch", began.set)
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    waiting.start()
    assert began.wait(0.5) == (watched and sys.platform.startswith("linux"))


def test_a_system_without_linuxs_calls_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Waiting()
    began = threading.Event()
    monkeypatch.setattr(waiting, "_watch", began.set)
    monkeypatch.delattr(os, "register_at_fork", raising=False)
    waiting.start()
    assert not began.wait(0.2)


COUNT_SLEEPS = """
import resource, time, torch
from unbroken.machine.waiting import waiting

def sleeps():
    torch.set_num_threads(2)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    for _ in range(300):
        torch.ones(1 << 17).add_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before

sleeps()
assert waiting.find_openmp()
spinning = sleeps()
waiting.sleep()
time.sleep(0.3)
asleep = sleeps()
waiting.spin()
time.sleep(0.3)
print(spinning, asleep, sleeps())
"""


@pytest.mark.nightly
@pytest.mark.skipif(
    not sys.platform.startswith("linux") or len(os.sched_getaffinity(0)) < 2,
    reason="threads of Linux",
)
def test_waiting_threads_sleep_and_spin_as_told_while_the_process_goes_on() -> None:
    told = subprocess.run(
        [sys.executable, "-c", COUNT_SLEEPS], capture_output=True, text=True, check=True
    )
    spinning, asleep, again = map(int, told.stdout.split())
    assert asleep > 100  # counted by the kernel, so that a busy machine changes nothing
    assert max(spinning, again) < asleep / 3


@pytest.mark.nightly
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="GNU's OpenMP")
def test_a_change_of_waiting_in_mid_run_changes_no_bit(workplace: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if "OMP_" not in k} | {
        "OMP_NUM_THREADS": "2"
    }
    changing = ["--trainer.callbacks", "tests.test_waiting.ChangeWaiting"]
    for name, more in (("plain", []), ("changing", changing)):
        done = run("fit", *SMALL, "--max_epochs", "1", "--run_name", name, *more, env=environment)
        assert done.returncode == 0, done.stderr
    plain, changed = (
        checkpoint(Path("checkpoints", name, "last.ckpt"))["state_dict"]
        for name in ("plain", "changing")
    )
    assert all(torch.equal(plain[key], changed[key]) for key in plain)


def test_ranks_are_started_on_all_cores_although_this_process_shares_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waiting, moved = Waiting(), []
    waiting.core, waiting._move_to = 0, moved.append  # type: ignore[method-assign, assignment]
    monkeypatch.setattr(engine_trainer, "waiting", waiting)
    monkeypatch.setattr(
        torch, "set_num_threads", lambda _: moved.append("one thread")
    )  # then it shares none again
    threads.configure()
    build_trainer({"accelerator": "cpu", "devices": 2, "logger": False, "callbacks": []})
    assert moved == ["one thread", None]


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.alone
def test_a_busy_neighbour_and_a_second_run_slow_a_run_but_do_not_stop_it(workplace: Path) -> None:
    """At most 2.5 and 2.6 times as long; with threads that spin it was thirty times."""
    long = [*SMALL, "--max_epochs", "10"]
    seconds = {}
    assert run("fit", *long, "--run_name", "alone", fresh=True).returncode == 0
    neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        assert run("fit", *long, "--run_name", "beside", fresh=True).returncode == 0
    finally:
        neighbour.kill()
        neighbour.wait()
    words = {name: command("fit", *long, "--run_name", name) for name in ("one", "two")}
    both = [start(words[name], workplace / f"{name}.log", fresh=True) for name in words]
    assert [process.wait(timeout=200) for process in both] == [0, 0]
    for name in ("alone", "beside", "one", "two"):
        seconds[name] = summary(Path("checkpoints") / name)["fit_seconds"]
    assert seconds["beside"] <= 2.5 * seconds["alone"], seconds
    assert max(seconds["one"], seconds["two"]) <= 2.6 * seconds["alone"], seconds


def test_a_command_watches_the_cores_once_although_it_prepares_its_process_twice() -> None:
    code = "import threading; from unbroken.cli.start import prepare_process, run; "
    code += "prepare_process('__main__'); "
    code += "run(lambda _: print([each.name for each in threading.enumerate()].count('waiting')))"
    left = {
        name: text
        for name, text in os.environ.items()
        if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    }
    words = [sys.executable, "-c", code]
    told = subprocess.run(
        words, capture_output=True, text=True, check=True, env={**left, "OMP_NUM_THREADS": "2"}
    )
    assert told.stdout == ("1\n" if sys.platform == "linux" else "0\n")
