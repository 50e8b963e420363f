"""Promise 2: a run that was killed at any moment, with any signal, and resumed is bit-identical to
one that was not.

The whole matrix, with more than 30 kills, is ``python -m pytest -m nightly tests/test_resume.py``.
"""

from __future__ import annotations

import contextlib
import random
import sys
import time
from pathlib import Path

import pytest
import torch
from numerals.fit import job as fit
from unbroken.storage.seals import outline

from tests.commands import (
    CONVNET,
    SMALL,
    Process,
    assert_same_run,
    checkpoint,
    command,
    complete,
    kill_group,
    run,
    run_ranks,
    start,
    start_ranks,
    summary,
    wait_for,
)

# Checkpoints so often that many kills hit one being written
OFTEN = ["--checkpoint_every", "3", "--val_check_interval", "0.4"]
# Augmentation and dropout, so that the random generators matter
RANDOM = ["--model.network.dropout", "0.2", "--data.rotate_degrees", "10"]
# Validated, tested and saved are averaged weights; trained are others
AVERAGED = """
trainer:
  callbacks: {class_path: lightning.pytorch.callbacks.EMAWeightAveraging, init_args: {decay: 0.9}}
"""
SHORT = [(1, 0, 2, 2)]  # devices, workers, accumulated batches, kills
WHOLE = [
    (devices, workers, accumulate, 4)
    for devices in (1, 2)
    for workers in (0, 2)
    for accumulate in (1, 2)
]


def wait_for_saves(count: int, process: Process) -> None:
    """Wait until last.ckpt has been written ``count`` times."""
    last, seen = Path("checkpoints/killed/last.ckpt"), set[int]()
    while len(seen) <= count and process.poll() is None:
        with contextlib.suppress(FileNotFoundError):
            seen.add(last.stat().st_mtime_ns)
        time.sleep(0.001)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("devices", "workers", "accumulate", "kills"),
    [*SHORT, *(pytest.param(*setting, marks=pytest.mark.nightly) for setting in WHOLE)],
)
def test_matrix_of_killed_and_resumed_runs_is_bit_identical(
    workplace: Path, devices: int, workers: int, accumulate: int, kills: int
) -> None:
    arguments = [*SMALL, *OFTEN, *RANDOM, "--data.num_workers", str(workers)]
    arguments += ["--accumulate_grad_batches", str(accumulate)]
    if devices == 2:
        arguments += ["--data.batch_size", "32"]
    to_the_end = run_ranks if devices == 2 else run
    reference = to_the_end("fit", "--run_name", "reference", *arguments)
    assert reference.returncode == 0, reference.stderr
    chance = random.Random(f"{devices}{workers}{accumulate}")
    log = workplace / "log.txt"
    for number in range(kills):
        # twice in a row without a step between them is part of it: the second kill may come before
        # the first step
        words, store = ["fit", "--run_name", "killed", "--ckpt_path", "auto", *arguments], None
        if devices == 2:
            with open(log, "ab") as file:
                processes, store = start_ranks(*words, files=(file, file))
        else:
            processes = [start(command(*words), log)]
        process, size = processes[0], log.stat().st_size
        assert wait_for("training samples", log, process, since=size)
        if number % 2:  # at an epoch's end, when best.ckpt and last.ckpt are written
            assert wait_for("train/loss", log, process, since=size)
        else:  # after some saves, of which there are 15 an epoch; the next one may be under way
            wait_for_saves(chance.randint(0, 12), process)
        assert process.poll() is None, "the run ended before it could be killed"
        for one in processes:
            kill_group(one)
        del store
    resumed = to_the_end("fit", "--run_name", "killed", "--ckpt_path", "auto", *arguments)
    assert resumed.returncode == 0, resumed.stderr
    assert_same_run(Path("checkpoints/reference"), Path("checkpoints/killed"))
    assert (
        summary(Path("checkpoints/killed"))["test/accuracy"]
        == summary(Path("checkpoints/reference"))["test/accuracy"]
    )


# With 2 it falls inside a step.
@pytest.mark.parametrize(
    ("accumulate", "step"), [pytest.param(1, 17, marks=pytest.mark.nightly), (2, 9)]
)
def test_a_run_killed_soon_after_a_validation_inside_an_epoch_goes_on_bit_identically(
    workplace: Path, accumulate: int, step: int
) -> None:
    arguments = [*SMALL, *RANDOM, "--max_epochs", "1", "--accumulate_grad_batches", str(accumulate)]
    arguments += [
        "--val_check_interval",
        "15",
        "--checkpoint_every",
        "1000",
    ]  # batches; so only a new best is saved
    assert fit.main(["--run_name", "reference", *arguments]) == 0
    words = [
        sys.executable,
        "-m",
        "tests.interrupted",
        str(step),
        "SIGKILL",
        "--run_name",
        "killed",
        *arguments,
    ]
    assert complete(words).returncode == -9
    assert 0 < checkpoint(Path("checkpoints/killed/last.ckpt"))["global_step"] < step
    assert fit.main(["--run_name", "killed", "--ckpt_path", "auto"]) == 0
    assert_same_run(Path("checkpoints/reference"), Path("checkpoints/killed"))


@pytest.mark.nightly
def test_a_checkpoint_of_a_version_that_kept_less_goes_on(workplace: Path) -> None:
    arguments = [*SMALL, "--max_epochs", "1"]
    assert fit.main(["--run_name", "older", *arguments]) == 0
    path = Path("checkpoints/older/last.ckpt")
    older = checkpoint(path)
    for rank in older["run"]["state"]["ranks"]:
        del rank["gradients"]
    for name in ("frozen", "eval", "untracked", "callback_metrics", "start"):
        del older["run"]["state"][name]
    older["run"]["state"]["outline"] = outline(older)
    torch.save(older, path)
    flags = ["--run_name", "older", "--ckpt_path", "last", "--max_epochs", "2"]
    # Whoever changes a file breaks its seal.
    assert fit.main([*flags, "--trust_checkpoint", "true"]) == 0
    assert summary(path.parent)["epochs"] == 2


@pytest.mark.nightly
def test_two_ranks_with_workers_that_are_killed_go_on_bit_identically(workplace: Path) -> None:
    arguments = [
        *SMALL,
        *RANDOM,
        "--data.batch_size",
        "32",
        "--data.num_workers",
        "1",
        "--max_epochs",
        "2",
    ]
    arguments += ["--data.train_samples", "640"]  # 10 steps an epoch
    reference = run_ranks("fit", "--run_name", "reference", *arguments)
    assert reference.returncode == 0, reference.stderr
    named = ["--run_name", "killed", "--checkpoint_every", "7", *arguments]
    assert run_ranks("tests.interrupted", "19", "SIGKILL", *named).returncode
    assert checkpoint(Path("checkpoints/killed/last.ckpt"))["global_step"] == 14
    resumed = run_ranks("fit", "--ckpt_path", "auto", *named)
    assert resumed.returncode == 0, resumed.stderr
    assert_same_run(Path("checkpoints/reference"), Path("checkpoints/killed"))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("step", "epochs"),
    [pytest.param(25, "1", id="in validation"), pytest.param(60, "3", id="in training")],
)
def test_a_stopped_run_with_averaged_weights_is_bit_identical(
    workplace: Path, step: int, epochs: str
) -> None:
    Path("averaged.yaml").write_text(AVERAGED)
    arguments = [
        "--config",
        "averaged.yaml",
        *SMALL,
        *CONVNET,
        *RANDOM,
        "--val_check_interval",
        "0.5",
        "--max_epochs",
        epochs,
    ]
    assert fit.main(["--run_name", "reference", *arguments]) == 0
    words = [
        sys.executable,
        "-m",
        "tests.interrupted",
        str(step),
        "SIGTERM",
        "--run_name",
        "stopped",
        *arguments,
    ]
    stopped = complete(words)
    assert stopped.returncode == 143, stopped.stderr
    assert checkpoint(Path("checkpoints/stopped/last.ckpt"))["global_step"] in (step, step + 1)
    assert fit.main(["--run_name", "stopped", "--ckpt_path", "last"]) == 0
    assert_same_run(Path("checkpoints/reference"), Path("checkpoints/stopped"))


@pytest.mark.nightly
def test_data_on_the_device_give_the_weights_of_data_on_the_host_also_after_a_stop(
    workplace: Path,
) -> None:
    """On two processes: tests/test_scale_out.py."""
    arguments = [*SMALL, *CONVNET, *RANDOM, "--max_epochs", "1"]
    assert fit.main(["--run_name", "reference", *arguments, "--data.on_device", "false"]) == 0
    words = [
        sys.executable,
        "-m",
        "tests.interrupted",
        "15",
        "SIGTERM",
        "--run_name",
        "stopped",
        *arguments,
    ]
    stopped = complete([*words, "--data.on_device", "true"])
    assert stopped.returncode == 143, stopped.stderr
    assert fit.main(["--run_name", "stopped", "--ckpt_path", "last"]) == 0
    assert_same_run(Path("checkpoints/reference"), Path("checkpoints/stopped"))
