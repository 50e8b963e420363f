"""Promise 3: a checkpoint is whole or absent, a failed save is an error, and nothing that was good is lost."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch

from project import fit
from project.engine import command as entry
from project.engine.checkpoint_files import AtomicCheckpointIO, damage
from project.engine.run_folder import choose, find_checkpoint, newest_run
from project.errors import UserError
from project.loggers.metrics_csv import MetricsCSV
from project.tables import write_atomically
from tests.commands import (
    SMALL,
    assert_same_run,
    checkpoint,
    command,
    finished_run,
    kill_group,
    start,
    summary,
    wait_for,
)


@pytest.fixture
def finished() -> Path:
    """The folder of a run of three epochs."""
    return finished_run()


@pytest.fixture
def copied(finished: Path, workplace: Path) -> Path:
    """A copy of that run in this test's own folder, as if it had been killed before its summary."""
    shutil.copytree(finished, "checkpoints/r", ignore_dangling_symlinks=True)
    Path("checkpoints/r/summary.json").unlink()
    return Path("checkpoints/r")


@pytest.mark.parametrize("text", ["[]", "null", "{"])
def test_a_summary_that_is_none_leaves_the_run_unfinished(
    copied: Path, finished: Path, text: str
) -> None:
    (copied / "summary.json").write_text(text)
    assert not choose(Path("checkpoints"), "r", "auto").finished
    shutil.copy(finished / "summary.json", copied)
    assert choose(Path("checkpoints"), "r", "auto").finished


def test_a_truncated_last_is_named_and_skipped_for_the_best(
    copied: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last = copied / "last.ckpt"
    last.write_bytes(last.read_bytes()[:1000])
    assert fit.main(["--run_name", "r", "--ckpt_path", "auto"]) == 0
    assert "last.ckpt" in capsys.readouterr().out
    assert_same_run(finished, copied)


def test_without_a_whole_checkpoint_the_run_starts_afresh_and_says_so(
    copied: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("last.ckpt", "best.ckpt"):
        (copied / name).write_bytes(b"garbage")
    assert fit.main([*SMALL, "--run_name", "r", "--ckpt_path", "auto"]) == 0
    shown = capsys.readouterr().out
    assert "skipped" in shown
    assert "afresh" in shown
    assert_same_run(finished, copied)


def test_a_best_of_another_run_is_set_aside_not_lost(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = [*SMALL, "--model.network", "ConvNet", "--max_epochs", "1", "--run_name", "other"]
    assert fit.main(other) == 0
    foreign = Path("checkpoints/other/best.ckpt").read_bytes()
    (copied / "best.ckpt").write_bytes(foreign)
    assert fit.main(["--run_name", "r", "--ckpt_path", "last", "--max_epochs", "4"]) == 0
    assert "best.ckpt belongs to another run. It was set aside; the best" in capsys.readouterr().out
    assert (copied / "best.ckpt.set-aside").read_bytes() == foreign
    assert (
        checkpoint(copied / "best.ckpt")["run"]["run_id"]
        == checkpoint(copied / "last.ckpt")["run"]["run_id"]
    )


def test_a_best_that_names_no_run_is_set_aside(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(checkpoint(copied / "best.ckpt") | {"run": ["none"]}, copied / "best.ckpt")
    assert fit.main(["--run_name", "r", "--ckpt_path", "last", "--max_epochs", "4"]) == 0
    assert "best.ckpt belongs to another run. It was set aside; the best" in capsys.readouterr().out


def test_a_best_that_is_missing_is_not_said_to_be_set_aside(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (copied / "best.ckpt").unlink()
    assert fit.main(["--run_name", "r", "--ckpt_path", "last", "--max_epochs", "4"]) == 0
    told = capsys.readouterr().out
    assert "best.ckpt is missing; the best is looked for anew." in told
    assert "set aside" not in told


def test_two_resumes_of_one_run_at_once_the_second_is_refused(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = workplace / "log.txt"
    process = start(command("fit", *SMALL, "--max_epochs", "1000", "--run_name", "r"), log)
    try:
        assert wait_for("training samples", log, process)
        while not Path("checkpoints/r/last.ckpt").exists():
            assert process.poll() is None
        assert entry.exit_code(fit.main, ["--run_name", "r", "--ckpt_path", "auto"]) == 2
        assert "written by another process" in capsys.readouterr().err
        assert process.poll() is None
    finally:
        kill_group(process)


def test_a_full_disk_ends_the_run_with_one_line_and_keeps_what_was_whole(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = workplace / "disk"
    disk.mkdir()
    size = sum(weight.nbytes for weight in torch.nn.Linear(784, 400).parameters()) // 1024
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={5 * size}k", "tmpfs", disk], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("a small disk needs the right to mount one")
    try:
        arguments = [
            *SMALL,
            "--default_root_dir",
            str(disk),
            "--run_name",
            "r",
            "--logger",
            "false",
        ]
        assert entry.exit_code(
            fit.main, [*arguments, "--max_epochs", "1", "--limit_val_batches", "0"]
        ) in (0, 2)
        kept = {path.name for path in (disk / "r").glob("*.ckpt")}
        (disk / "filler").write_bytes(b"x" * max(0, shutil.disk_usage(disk).free - 200_000))
        capsys.readouterr()
        code = entry.exit_code(fit.main, [*arguments, "--ckpt_path", "auto", "--max_epochs", "3"])
        assert code == 2
        told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert len(told) == 1
        assert "No space left" in told[0]
        assert {path.name for path in (disk / "r").glob("*.ckpt")} >= kept
        assert all(damage(path) is None for path in (disk / "r").glob("*.ckpt"))
        assert not list((disk / "r").glob(".*.part"))
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)  # a file may still be open


def test_a_checkpoint_waits_until_the_rows_that_it_counts_are_on_the_disk(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[bool] = []
    save = MetricsCSV.save

    def noted(self: MetricsCSV, to_disk: bool = False) -> int:
        waited.append(to_disk)
        return save(self, to_disk)

    monkeypatch.setattr(MetricsCSV, "save", noted)
    assert entry.exit_code(fit.main, [*SMALL, "--run_name", "r", "--max_epochs", "1"]) == 0
    assert any(waited)


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "last.ckpt"
    write_atomically(b"old", target)

    def refuse(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(UserError, match="No space left"):
        write_atomically(b"new", target)
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]


UNFIT = [
    Path("x"),
    torch.nn.ReLU(),
    slice(1),
    range(3),
    max,
    np.arange(3),
    defaultdict(int),
]


@pytest.mark.parametrize("value", UNFIT)
def test_what_would_not_load_again_is_not_saved(tmp_path: Path, value: object) -> None:
    contents = {"state_dict": {}, "loops": {}, "mine": {"data": [value]}}
    with pytest.raises(TypeError, match=r"mine.*data.*plain"):
        AtomicCheckpointIO().save_checkpoint(contents, tmp_path / "x.ckpt")
    assert not (tmp_path / "x.ckpt").exists()


def test_what_is_saved_loads_again(tmp_path: Path) -> None:
    plain = {
        "x": [
            OrderedDict(a=1),
            Counter("ab"),
            (1, None, True),
            {1.5},
            b"ab",
            1j,
            torch.float16,
            torch.Size([2]),
        ]
    }
    contents = {
        "state_dict": {"w": torch.nn.Parameter(torch.ones(2))},
        "loops": {},
        "hyper_parameters": plain,
    }
    AtomicCheckpointIO().save_checkpoint(contents, tmp_path / "x.ckpt")
    assert AtomicCheckpointIO().load_checkpoint(tmp_path / "x.ckpt")["hyper_parameters"] == plain


def test_a_checkpoint_elsewhere_starts_a_new_run(copied: Path) -> None:
    shutil.copy(copied / "best.ckpt", "elsewhere.ckpt")
    assert (
        fit.main(["--ckpt_path", "elsewhere.ckpt", "--run_name", "fork", "--max_epochs", "4"]) == 0
    )
    assert summary(Path("checkpoints/fork"))["epochs"] == 4
    ids = {
        checkpoint(Path(f"checkpoints/{name}/last.ckpt"))["run"]["run_id"] for name in ("fork", "r")
    }
    assert len(ids) == 2


def test_a_checkpoint_of_a_run_elsewhere_goes_on_there(copied: Path) -> None:
    shutil.copytree(copied, "backup/r")
    chosen = choose(Path("checkpoints"), None, "backup/r/last.ckpt")
    assert chosen.folder == Path("backup/r").absolute()
    assert choose(Path("checkpoints"), None, "checkpoints/r/last.ckpt").folder == copied.absolute()


def test_a_file_that_cannot_be_read_now_is_not_taken_for_damaged(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("zipfile.ZipFile", denied)
    with pytest.raises(UserError, match="Permission denied"):
        choose(Path("checkpoints"), "r", "auto")


def test_last_and_best_mean_the_newest_run(copied: Path) -> None:
    """It is found by its files: no link is needed, and a copy of the link as a folder misleads nobody."""
    with pytest.raises(UserError, match="no run"):
        find_checkpoint("last", root=Path("nowhere"))
    assert find_checkpoint("last") == Path("checkpoints/r/last.ckpt")
    assert find_checkpoint() == Path("checkpoints/r/best.ckpt")
    assert choose(Path("checkpoints"), None, "last").folder.name == "r"
    shutil.copytree(copied, "checkpoints/latest")
    assert newest_run(Path("checkpoints")) == Path("checkpoints/r")
    shutil.copytree(copied, "checkpoints/earlier")
    os.utime("checkpoints/earlier/config.yaml", (0, 0))
    assert newest_run(Path("checkpoints")) == Path("checkpoints/r")
    with pytest.raises(UserError, match="Did you mean"):
        find_checkpoint("best", run_name="rr")
