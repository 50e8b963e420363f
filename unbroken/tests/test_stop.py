"""Promise 4: SIGTERM or Ctrl-C, on any rank, saves the exact step and ends all ranks within 10 s
with 143 or 130.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from numerals.fit import job as fit
from unbroken.stopping.agreement import SAVE_DUE, Agreement, request_of, signal_of

from tests.commands import (
    CPU2,
    SMALL,
    assert_same_run,
    checkpoint,
    command,
    complete,
    family,
    run,
    start,
    summary,
    wait_for,
)

# Long enough that a stop at a random moment finds it training
LONG_RUN = [*SMALL, "--max_epochs", "400", "--val_check_interval", "0.5"]
GO_ON = (
    "saved in checkpoints/r/last.ckpt. To go on:\n"
    "  python -m numerals.fit --run_name r --ckpt_path auto\n"
)
# fit, which gets a signal in the final test pass, at its second batch
IN_THE_TEST = """
import os, signal, sys
from lightning.pytorch import Callback
from numerals.fit import job as fit
from tests.commands import build_with
from unbroken.run import Job
from unbroken.cli import start as command

class Hit(Callback):
    def on_test_batch_start(self, trainer, module, batch, batch_idx, dataloader_idx=0):
        if batch_idx == 1:
            os.kill(os.getpid(), signal.Signals[number])

number = sys.argv.pop(1)
Job.build = build_with(Hit())
command.run(fit.main)
"""


def stop(process, number: int, pid: int) -> float:  # type: ignore[no-untyped-def]
    """Send a signal; seconds until the process and its ranks were gone."""
    ranks = family(process.pid)
    os.kill(pid, number)
    began = time.monotonic()
    process.wait(timeout=30)
    while any(Path(f"/proc/{rank}").exists() for rank in ranks):
        assert time.monotonic() - began < 30, "a rank outlived the run"
        time.sleep(0.02)
    return time.monotonic() - began


@pytest.mark.daily(1)
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("devices", "number", "code", "stops"),
    [
        (1, signal.SIGTERM, 143, 1),
        (1, signal.SIGINT, 130, 1),
        (2, signal.SIGTERM, 143, 1),
        *(
            pytest.param(devices, number, code, stops, marks=pytest.mark.nightly)
            for devices, stops in ((1, 20), (2, 8))
            for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130))
        ),
    ],
)
def test_a_signal_to_any_rank_saves_the_step_that_was_reached(
    workplace: Path, devices: int, number: signal.Signals, code: int, stops: int
) -> None:
    arguments = [*LONG_RUN, *(CPU2 if devices == 2 else [])]
    chance = random.Random(f"{devices}{code}")
    log = workplace / "log.txt"
    reached = -1
    for _ in range(stops):
        process = start(command("fit", "--run_name", "r", "--ckpt_path", "auto", *arguments), log)
        size = log.stat().st_size
        # a metric is printed at each epoch's end: the next epoch has begun by then, or is about to
        assert wait_for("train/loss", log, process, since=size)
        # any rank: Lightning's own handling hears rank 0 only
        assert stop(process, number, chance.choice([process.pid, *family(process.pid)])) < 10
        assert process.returncode == code, log.read_text()[-2000:]
        assert GO_ON in log.read_text()[size:]
        last = checkpoint(Path("checkpoints/r/last.ckpt"))
        assert last["global_step"] > reached, "no step was saved since the stop before"
        reached = last["global_step"]
    assert not list(Path("checkpoints/r").glob(".*.part"))


@pytest.mark.nightly
def test_a_stopped_run_goes_on_to_the_same_end(workplace: Path) -> None:
    arguments = [*SMALL, "--max_epochs", "6", "--data.rotate_degrees", "10"]
    assert run("fit", "--run_name", "reference", *arguments).returncode == 0
    log = workplace / "log.txt"
    process = start(command("fit", "--run_name", "stopped", *arguments), log)
    assert wait_for("train/loss", log, process)
    stop(process, signal.SIGTERM, process.pid)
    assert process.returncode == 143
    resumed = run("fit", "--run_name", "stopped", "--ckpt_path", "last")
    assert resumed.returncode == 0, resumed.stderr
    assert_same_run(Path("checkpoints/reference"), Path("checkpoints/stopped"))


def test_a_signal_while_starting_ends_at_once(workplace: Path) -> None:
    log = workplace / "log.txt"
    process = start(command("fit", *LONG_RUN), log, fresh=True)
    while (
        "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()
    ):  # torch is being imported
        time.sleep(0.001)
    assert stop(process, signal.SIGTERM, process.pid) < 10
    assert process.returncode == 143


def test_a_run_that_was_ended_while_it_published_is_published_by_auto(workplace: Path) -> None:
    after = "import os, signal; from unbroken.run import main_job; "
    after += "main_job.finish = lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM)"
    imports = "from numerals.fit import job as fit; from unbroken.cli import start"
    code = f"{imports}; {after}; start.run(fit.main)"
    words = [sys.executable, "-c", code, *SMALL, "--max_epochs", "1", "--run_name", "r"]
    ended = complete(words)
    assert ended.returncode == 143, ended.stderr
    assert "--run_name r --ckpt_path auto" in ended.stdout
    assert not Path("checkpoints/r/summary.json").exists()
    assert fit.main(["--run_name", "r", "--ckpt_path", "auto"]) == 0
    assert summary(Path("checkpoints/r"))["finished"]


@pytest.mark.daily(1)
@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("SIGTERM", 143),
        ("SIGINT", 130),
        pytest.param("SIGHUP", 143, marks=pytest.mark.nightly),
    ],
)
def test_a_signal_in_the_final_test_ends_it_and_auto_finishes_the_run(
    workplace: Path, name: str, code: int
) -> None:
    flags = [*SMALL, "--max_epochs", "1", "--data.eval_batch_size", "20", "--run_name", "r"]
    ended = complete([sys.executable, "-c", IN_THE_TEST, name, *flags])
    assert ended.returncode == code, ended.stderr
    assert "Traceback" not in ended.stderr
    assert GO_ON in ended.stdout
    assert not Path("checkpoints/r/summary.json").exists()
    assert fit.main(["--run_name", "r", "--ckpt_path", "auto"]) == 0
    facts = summary(Path("checkpoints/r"))
    assert facts["finished"]
    assert facts["steps"] == 25
    assert facts["test/accuracy"] > 0.3


# fit, whose terminal is closed at a step, when it has ended a process that it had started
WHOLE_GROUP = """
import multiprocessing, os, signal, time
from lightning.pytorch import Callback
from numerals.fit import job as fit
from tests.commands import build_with
from unbroken.run import Job
from unbroken.cli import start as command

class Hit(Callback):
    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == 3:
            helper = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
            helper.start()
            time.sleep(0.1)
            helper.terminate()
            helper.join(30)
            print("the helper ended with", helper.exitcode)
            os.killpg(0, signal.SIGHUP)

Job.build = build_with(Hit())
command.run(fit.main)
"""


def test_a_signal_to_all_processes_is_the_runs_alone(workplace: Path) -> None:
    """The workers of the sanity check were forked in another phase, and live on."""
    flags = ["--data.num_workers", "1", "--num_sanity_val_steps", "1", "--run_name", "r"]
    ended = complete([sys.executable, "-c", WHOLE_GROUP, *SMALL, *flags])
    assert ended.returncode == 143, ended.stderr
    assert "the helper ended with -15" in ended.stdout
    assert ended.stderr.count("SIGHUP: finishing what is under way, then stopping") == 1
    assert checkpoint(Path("checkpoints/r/last.ckpt"))["global_step"] == 4


# fit, which gets Ctrl-C at a step, and once more while its results are put together
WHILE_IT_FINISHES = """
import os, signal, sys
from lightning.pytorch import Callback
from numerals.fit import job as fit
from tests.commands import build_with
from unbroken.run import Job
from unbroken.cli import start as command

class Hit(Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    def add_facts(self, trainer, result):
        os.kill(os.getpid(), signal.SIGINT)

Job.build = build_with(Hit())
command.run(fit.main)
"""


def test_a_further_ctrl_c_gives_the_report_up_and_leaves_the_command_that_resumes(
    workplace: Path,
) -> None:
    words = [sys.executable, "-c", WHILE_IT_FINISHES, *SMALL, "--run_name", "r"]
    done = complete(words)
    assert done.returncode == 130, done.stderr
    assert done.stdout.endswith(GO_ON), done.stdout
    assert not Path("checkpoints/r/report.html").exists()


@pytest.mark.nightly
def test_a_rank_that_dies_takes_the_job_down(workplace: Path) -> None:
    log = workplace / "log.txt"
    process = start(command("fit", "--run_name", "r", *LONG_RUN, *CPU2), log)
    assert wait_for("training samples", log, process)
    (child,) = family(process.pid)
    os.kill(child, signal.SIGKILL)
    began = time.monotonic()
    assert process.wait(timeout=60) != 0
    assert time.monotonic() - began < 30


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> Agreement:
    """The agreement of a rank whose neighbour asks for nothing."""
    reduced = SimpleNamespace(wait=lambda: None)
    monkeypatch.setattr("torch.distributed.all_reduce", lambda value, **_: reduced)
    agreement = Agreement()
    agreement.group = "two ranks"
    return agreement


def agreed(agreement: Agreement, request: int) -> int:
    """What is agreed on once more, after a request was sent."""
    agreement._request = 0
    agreement.agree(request)
    return agreement._request


def test_a_save_is_not_asked_for_again_by_a_request_from_before_it(two_ranks: Agreement) -> None:
    """Rank zero asks until the save is done, and each request arrives one call later."""
    assert agreed(two_ranks, SAVE_DUE) == 0
    assert agreed(two_ranks, SAVE_DUE) == SAVE_DUE
    two_ranks.forget()
    assert agreed(two_ranks, SAVE_DUE) == 0, "of the call before the save"
    assert agreed(two_ranks, 0) == SAVE_DUE, "of the call after it"


def test_a_stop_that_was_asked_for_before_a_save_counts_after_it(two_ranks: Agreement) -> None:
    two_ranks.agree(request_of(signal.SIGTERM))
    two_ranks.forget()
    two_ranks.agree(0)
    assert two_ranks.is_stop
    assert two_ranks.stop_signal == signal.SIGTERM


@pytest.mark.skipif(sys.platform == "win32", reason="of POSIX")
def test_a_job_is_queued_again_also_where_another_rank_was_asked_to_stop() -> None:
    requests = [request_of(signal.SIGTERM), request_of(signal.SIGUSR1), request_of(signal.SIGHUP)]
    assert max(requests) == requests[1]
    assert min(requests) == requests[0]
    assert [signal_of(each) for each in requests] == [
        *(signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
    ]


def test_a_request_of_one_training_does_not_reach_the_next(two_ranks: Agreement) -> None:
    two_ranks.agree(request_of(signal.SIGINT))
    two_ranks.begin(world_size=1)
    assert [agreed(two_ranks, 0), agreed(two_ranks, 0)] == [0, 0]


def test_ranks_agree_a_step_later_and_at_the_end_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = iter([request_of(signal.SIGTERM), 0])  # what the other rank has received, at each call

    def reduce(value: Any, **_: Any) -> Any:
        value.fill_(max(int(value), next(others)))
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr("torch.distributed.all_reduce", reduce)
    agreement = Agreement()
    assert agreed(agreement, SAVE_DUE) == SAVE_DUE, "alone"
    agreement.group = "two ranks"
    assert [agreed(agreement, 0), agreed(agreement, 0)] == [0, request_of(signal.SIGTERM)]

    def gather(found: list[Any], mine: Any, group: Any) -> None:
        found[:] = [mine, request_of(signal.SIGINT)]
        assert group == "two ranks"

    answers = {
        "is_initialized": lambda: True,
        "get_world_size": lambda: 2,
        "all_gather_object": gather,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(f"torch.distributed.{name}", answer)
    agreement.forget()
    agreement.agree_at_the_end(0)
    assert agreement.stop_signal == signal.SIGINT
    assert agreement.is_stop


# Counts on rank zero after which steps it has saved, with an interval of a second.
TIMED = """
import sys, time
from pathlib import Path
from lightning.pytorch import Trainer
from unbroken import ExactCheckpoint
from unbroken.storage import checkpoint_files
from tests.plain_module import Regression

write = checkpoint_files.save_to

def noting(contents, path):
    with open("saved.txt", "a") as file:
        print(contents["global_step"], file=file)
    write(contents, path)

class Slow(Regression):
    def training_step(self, batch, batch_idx):
        time.sleep(0.15)
        return super().training_step(batch, batch_idx)

checkpoint_files.save_to = noting
trainer = Trainer(
    max_steps=24, max_epochs=-1, limit_val_batches=0, accelerator="cpu", devices=2,
    callbacks=[ExactCheckpoint("r", every="1s")], logger=False, enable_progress_bar=False,
)
trainer.fit(Slow())
"""


@pytest.mark.nightly
def test_two_ranks_save_once_each_time_that_the_seconds_are_over(workplace: Path) -> None:
    Path("timed.py").write_text(TIMED)
    ended = complete([sys.executable, "timed.py"], fresh=True)
    assert ended.returncode == 0, ended.stderr
    saved = [int(line) for line in Path("saved.txt").read_text().split()]
    *timed, at_the_end = saved
    assert at_the_end == 24
    assert timed
    assert not [step for step in timed if step + 1 in saved], saved
