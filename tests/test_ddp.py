"""Promises 2, 4 and 8 on several processes: one folder, one curve, exact evaluation, a job that restarts by itself."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from project import fit
from project import test as test_command
from tests.commands import (
    CPU2,
    SMALL,
    checkpoint,
    rows,
    run,
    summary,
)


def test_two_ranks_train_what_one_trains(workplace: Path) -> None:
    steady = [*SMALL, "--model.schedule", "constant"]
    assert fit.main([*steady, "--run_name", "one"]) == 0
    two = run("fit", *steady, "--data.batch_size", "32", "--run_name", "two", *CPU2)
    assert two.returncode == 0, two.stderr
    assert summary(Path("checkpoints/two"))["world_size"] == 2
    assert [p.name for p in Path("checkpoints").iterdir() if p.is_dir() and not p.is_symlink()].count("two") == 1
    ours, theirs = rows(Path("checkpoints/one")), rows(Path("checkpoints/two"))
    assert [row["step"] for row in ours] == [row["step"] for row in theirs]
    for name in ("train/loss", "train/accuracy", "val/loss"):
        a, b = ([float(row[name]) for row in table if name in row] for table in (ours, theirs))
        assert a == pytest.approx(b, rel=2e-2, abs=5e-3), name
    # before rounding errors have grown, the curves are one
    assert float(ours[0]["train/loss"]) == pytest.approx(float(theirs[0]["train/loss"]), rel=1e-5)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """best.ckpt of a small run."""
    previous = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("trained"))
    try:
        assert fit.main([*SMALL, "--max_epochs", "1", "--run_name", "t"]) == 0
        return Path("checkpoints/t/best.ckpt").absolute()
    finally:
        os.chdir(previous)


@pytest.mark.parametrize("count", [1, 33, 1999])
def test_evaluation_on_two_ranks_equals_one_exactly(workplace: Path, trained: Path, count: int) -> None:
    common = ["--ckpt_path", str(trained), "--data.test_samples", str(count), "--output"]
    assert test_command.main([*common, "one.json"]) == 0
    two = run("test", *common, "two.json", "--devices", "2", "--accelerator", "cpu", "--data.eval_batch_size", "7")
    assert two.returncode == 0, two.stderr
    one, other = (json.loads(Path(name).read_text()) for name in ("one.json", "two.json"))
    assert other["world_size"] == 2
    assert one["test_samples"] == other["test_samples"] == count
    assert one["test/accuracy"] == other["test/accuracy"]
    assert one["test/loss"] == pytest.approx(other["test/loss"], rel=1e-5)


def test_evaluation_does_not_depend_on_batch_size_or_workers(workplace: Path, trained: Path) -> None:
    figures = []
    for options in (
        [],
        ["--data.eval_batch_size", "1999"],
        ["--data.eval_batch_size", "64", "--data.num_workers", "2"],
    ):
        assert test_command.main(["--ckpt_path", str(trained), "--output", "m.json", *options]) == 0
        figures.append(json.loads(Path("m.json").read_text()))
    assert len({figure["test/accuracy"] for figure in figures}) == 1
    assert [f["test/loss"] for f in figures] == pytest.approx([figures[0]["test/loss"]] * 3, rel=1e-5)


def test_a_launcher_s_world_that_contradicts_the_flags_is_an_error(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from project.cli import ProjectCLI
    from project.errors import UserError
    from project.training import trainer_flags

    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert trainer_flags(ProjectCLI([]))["devices"] == 2
    with pytest.raises(UserError, match="the launcher started"):
        trainer_flags(ProjectCLI(["--devices", "3"]))


def test_the_ranks_generators_and_metrics_are_all_in_the_checkpoint(workplace: Path) -> None:
    two = run("fit", *SMALL, "--max_epochs", "1", "--run_name", "two", *CPU2)
    assert two.returncode == 0, two.stderr
    ranks = checkpoint(Path("checkpoints/two/last.ckpt"))["run"]["state"]["ranks"]
    assert len(ranks) == 2
    assert all(isinstance(rank["random"]["torch"], torch.Tensor) for rank in ranks)
