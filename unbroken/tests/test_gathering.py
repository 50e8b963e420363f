"""Steps that gather the batches of all ranks: contrastive losses, retrieval."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.commands import assert_same_run, checkpoint, kill_group, run_ranks, start
from tests.test_exact_checkpoint import assert_same_end

SCRIPT = [sys.executable, "-m", "tests.gathering_script"]
FLAGS = ["--model", "tests.gathering_script.Contrasts", "--data", "null", "--max_epochs", "2"]
FLAGS += ["--logger", "false", "--monitors", "none", "--accelerator", "cpu"]
FLAGS += ["--report", "false"]


@pytest.mark.nightly
def test_two_ranks_that_gather_in_their_steps_are_killed_and_go_on_bit_identically(
    workplace: Path,
) -> None:
    flags = [*FLAGS, "--checkpoint_every", "2"]
    reference = run_ranks("fit", *flags, "--run_name", "reference")
    assert reference.returncode == 0, reference.stderr
    # The last of seven batches has five samples on each rank, one of them for the second time.
    assert run_ranks("tests.interrupted", "7", "SIGKILL", *flags, "--run_name", "killed").returncode
    assert checkpoint(Path("checkpoints/killed/last.ckpt"))["global_step"] == 6
    resumed = run_ranks("fit", "--run_name", "killed", "--ckpt_path", "auto")
    assert resumed.returncode == 0, resumed.stderr
    assert_same_run(Path("checkpoints/reference"), Path("checkpoints/killed"))


def test_an_evaluation_that_gathers_batches_of_other_sizes_says_what_to_write(
    workplace: Path,
) -> None:
    flags = [*FLAGS, "--max_epochs", "1", "--limit_train_batches", "2"]
    plainly = run_ranks("fit", *flags, "--model.how", "plainly")
    assert plainly.returncode == 2
    assert "gathers tensors of the sizes [5, 3] and [6, 3]" in plainly.stderr
    assert "gather_all_tensors(tensor)) there." in plainly.stderr
    assert "Traceback" not in plainly.stderr
    any_size = run_ranks("fit", *flags, "--model.how", "any size")
    assert any_size.returncode == 0, any_size.stderr


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_gather_whatever_the_number_of_samples(ranks: int, workplace: Path) -> None:
    log = workplace / "log.txt"
    samples = list(map(str, range(96, 109)))
    process = start([*SCRIPT, "r", str(ranks), *samples], log)
    assert process.wait(timeout=800) == 0, log.read_text()[-3000:]
    assert log.read_text().count("trained ") == len(samples)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_script_whose_ranks_gather_is_killed_and_goes_on_bit_identically(
    ranks: int, workplace: Path
) -> None:
    log = workplace / "log.txt"
    undisturbed = start([*SCRIPT, "undisturbed", str(ranks), "105"], log)
    assert undisturbed.wait(timeout=200) == 0, log.read_text()[-3000:]
    kills = {**os.environ, "KILL_AT": "9"}
    # The server of forks does not know the ranks that rank zero leaves behind.
    killed = start([*SCRIPT, "killed", str(ranks), "105"], log, fresh=True, env=kills)
    try:
        assert killed.wait(timeout=200) != 0
    finally:
        # The other ranks are of the same group.
        kill_group(killed)
    resumed = start([*SCRIPT, "killed", str(ranks), "105"], log)
    assert resumed.wait(timeout=200) == 0, log.read_text()[-3000:]
    assert_same_end(Path("undisturbed-105"), Path("killed-105"))
