"""Promise 3: a checkpoint is whole or absent, a failed save is an error, and nothing that was good
is lost.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import warnings
from collections import Counter, OrderedDict, defaultdict
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from numerals.fit import job as fit
from unbroken import ExactCheckpoint, run_folder
from unbroken.cli import start as entry
from unbroken.errors import UserError
from unbroken.loggers.metrics_csv import MetricsCSV
from unbroken.run import Job
from unbroken.run_folder import RunFolder, choose, find_checkpoint, newest_run, point_latest_at
from unbroken.storage import run_files
from unbroken.storage.checkpoint_files import AtomicCheckpointIO, damage, read
from unbroken.storage.files import write_atomically
from unbroken.storage.usable import usable_best
from unbroken.storage.weights import load_weights

from tests.commands import (
    SMALL,
    WHOLE_NETWORK,
    assert_same_run,
    build_with,
    checkpoint,
    command,
    differences,
    finished_run,
    kill_group,
    start,
    summary,
    wait_for,
)
from tests.plain_module import Regression


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


@pytest.mark.daily(2)
@pytest.mark.parametrize("text", ["[]", "null", "{", "[" * 100_000])
def test_a_summary_that_is_none_leaves_the_run_unfinished(
    copied: Path, finished: Path, text: str
) -> None:
    (copied / "summary.json").write_text(text)
    assert not choose(Path("checkpoints"), "r", "auto").finished
    shutil.copy(finished / "summary.json", copied)
    assert choose(Path("checkpoints"), "r", "auto").finished


def test_a_run_that_another_process_finishes_while_this_one_starts_is_left_alone(
    copied: Path, finished: Path
) -> None:
    chosen = choose(Path("checkpoints"), "r", "auto")
    assert not chosen.finished
    shutil.copy(finished / "summary.json", copied)
    with pytest.raises(UserError, match="was written by another process while this one started"):
        chosen.create()
    again = choose(Path("checkpoints"), "r", "auto")
    assert again.finished
    again.create()
    again.release()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", ["run-id.txt", "metrics.csv", "summary.json"])
def test_a_run_does_not_wait_for_a_named_pipe(
    name: str, copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (copied / name).unlink(missing_ok=True)
    os.mkfifo(copied / name)
    assert entry.exit_code(fit.main, ["--run_name", "r", "--ckpt_path", "auto"]) == 2
    assert f"{copied / name} is a named pipe" in capsys.readouterr().err


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
    flags = [*SMALL, *WHOLE_NETWORK, "--run_name", "r", "--ckpt_path", "auto"]
    assert fit.main(flags) == 0
    shown = capsys.readouterr().out
    assert "skipped" in shown
    assert "afresh" in shown
    assert_same_run(finished, copied)


@pytest.mark.nightly
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


@pytest.mark.nightly
def test_a_best_that_names_no_run_is_set_aside(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(checkpoint(copied / "best.ckpt") | {"run": ["none"]}, copied / "best.ckpt")
    assert fit.main(["--run_name", "r", "--ckpt_path", "last", "--max_epochs", "4"]) == 0
    assert "best.ckpt belongs to another run. It was set aside; the best" in capsys.readouterr().out


@pytest.mark.nightly
def test_a_best_that_is_missing_is_not_said_to_be_set_aside(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (copied / "best.ckpt").unlink()
    assert fit.main(["--run_name", "r", "--ckpt_path", "last", "--max_epochs", "4"]) == 0
    told = capsys.readouterr().out
    assert "best.ckpt is missing; the best is looked for anew." in told
    assert "set aside" not in told


@pytest.mark.nightly
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


@pytest.mark.nightly
def test_a_run_that_ends_on_a_full_disk_says_so_in_one_line_and_keeps_what_was_whole(
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
            *WHOLE_NETWORK,
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
        # There is room for the record of the next start, and for no state.
        record = sum(path.stat().st_size for path in (disk / "r").glob("uncommitted.diff"))
        free = 200_000 + 2 * record
        (disk / "filler").write_bytes(b"x" * max(0, shutil.disk_usage(disk).free - free))
        capsys.readouterr()
        code = entry.exit_code(fit.main, [*arguments, "--ckpt_path", "auto", "--max_epochs", "3"])
        assert code == 1
        told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert len(told) == 1
        assert "No space left" in told[0]
        assert {path.name for path in (disk / "r").glob("*.ckpt")} >= kept
        assert all(damage(path) is None for path in (disk / "r").glob("*.ckpt"))
        assert not list((disk / "r").glob(".*.part"))
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)  # a file may still be open


class FillsTheDisk(Callback):
    """Leaves no room on a disk for some steps."""

    def __init__(self, disk: Path) -> None:
        self.filler = disk / "filler"

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 4:
            with suppress(OSError), open(self.filler, "wb", buffering=0) as file:
                while file.write(bytes(4096)):
                    pass
        elif trainer.global_step == 48:
            self.filler.unlink()


@pytest.mark.nightly
def test_a_disk_that_is_full_for_a_while_ends_no_run_and_loses_no_row(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = workplace / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small disk needs the right to mount one")
    flags = [*SMALL, "--max_epochs", "1", "--log_every_n_steps", "1", "--checkpoint_every", "2"]
    flags += ["--logger", "false", "--data.train_samples", "3200"]
    try:
        assert fit.main([*flags, "--run_name", "undisturbed"]) == 0
        capsys.readouterr()
        monkeypatch.setattr(Job, "build", build_with(FillsTheDisk(disk)))
        assert fit.main([*flags, "--run_name", "full", "--default_root_dir", str(disk)]) == 0
        told = capsys.readouterr().out
        assert told.count("metrics.csv is not written: ") == 1
        assert told.count("metrics.csv is written again, since ") == 1
        assert told.count("saves fail: ") == 1
        assert told.count("the run is saved again, since ") == 1
        assert_same_run(Path("checkpoints/undisturbed"), disk / "full")
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)  # a file may still be open


@pytest.mark.parametrize("size", [0, 2**30], ids=["in the background", "at once"])
def test_a_folder_that_cannot_be_reached_for_a_while_ends_no_run(
    workplace: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    size: int,
) -> None:
    class Hides(Callback):
        def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
            # A slow disk puts the next save off, and none might fall into these two steps.
            keep.own_folder.files.wait()
            if trainer.global_step == 2:
                Path("mine").rename("hidden")
                Path("mine").write_text("a file is in its place")
            elif trainer.global_step == 4:
                Path("mine").unlink()
                Path("hidden").rename("mine")

    monkeypatch.setattr(run_files, "WRITTEN_AT_ONCE", size)
    keep = ExactCheckpoint("mine/r", every="1")
    module = Regression()
    flags = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(
        accelerator="cpu", callbacks=[Hides(), keep], max_epochs=2, limit_train_batches=6, **flags
    )
    trainer.fit(module)
    assert read(keep.last_path)["global_step"] == trainer.global_step > 4
    told = capsys.readouterr().out
    assert told.count("saves fail: ") == 1
    assert told.count("the run is saved again, since ") == 1


def test_a_checkpoint_waits_until_the_rows_that_it_counts_are_on_the_disk(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[bool] = []
    write = MetricsCSV.write

    def noted(self: MetricsCSV, to_disk: bool = False) -> None:
        waited.append(to_disk)
        write(self, to_disk)

    monkeypatch.setattr(MetricsCSV, "write", noted)
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
    contents = {"state_dict": {}, "loops": {}, "callbacks": {"data": [value]}}
    with pytest.raises(TypeError, match=r"callbacks.*data.*plain"):
        AtomicCheckpointIO().save_checkpoint(contents, tmp_path / "x.ckpt")
    assert not (tmp_path / "x.ckpt").exists()


class Scaled(Regression):
    """Saves an object of its own, which its constructor makes, and needs it when it is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.scaler = SimpleNamespace(factor=2.0)
        self.count = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.count += 1
        return super().training_step(batch, batch_idx) * self.scaler.factor

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["hyper_parameters"] = {}
        checkpoint["scaling"] = {"scaler": self.scaler, "count": self.count}
        checkpoint["count"] = self.count

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.scaler = checkpoint["scaling"]["scaler"]
        self.count = checkpoint["count"]


def test_objects_of_a_modules_own_entries_are_left_out_said_once_and_made_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fit(folder: str, **flags: Any) -> Scaled:
        seed_everything(7, verbose=False)
        keep = ExactCheckpoint(tmp_path / folder, every="5")
        module = Scaled()
        quiet: Any = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
        trainer = Trainer(accelerator="cpu", callbacks=[keep], **quiet, **flags)
        trainer.fit(module, ckpt_path=keep.resume_from)
        return module

    whole = fit("whole", max_steps=60)
    said = "left out of checkpoints, which hold plain values only: scaling['scaler']."
    assert capsys.readouterr().out.count(said) == 1
    found = torch.load(tmp_path / "whole" / "last.ckpt", weights_only=True)
    assert "scaling" not in found
    assert found["count"] == 60
    fit("cut", max_steps=33)
    resumed = fit("cut", max_steps=60)
    assert resumed.count == 60
    assert differences(whole.state_dict(), resumed.state_dict(), "weights") == []
    again = Scaled()
    assert load_weights(again, read(tmp_path / "cut" / "last.ckpt"), tmp_path)
    assert again.scaler.factor == 2
    assert again.count == 60


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


def saved_and_read(contents: dict[str, Any], path: Path) -> dict[str, Any]:
    AtomicCheckpointIO().save_checkpoint({"state_dict": {}, "loops": {}, **contents}, path)
    return AtomicCheckpointIO().load_checkpoint(path)


def test_numbers_of_numpy_become_pythons_and_the_runs_own_stay(tmp_path: Path) -> None:
    group = {"lr": np.float64(0.1), "betas": (np.float32(0.5), 1)}
    contents = {
        "optimizer_states": [{"param_groups": [group]}],
        "lr_schedulers": [{"last_lr": [np.float64(0.1)], np.int64(3): np.bool_(True)}],
        "callbacks": {"Mine": {"best": np.float32(1.5), "name": np.str_("x")}},
        "mine": np.int64(7),
    }
    found = saved_and_read(contents, tmp_path / "x.ckpt")
    assert found["optimizer_states"] == [{"param_groups": [{"lr": 0.1, "betas": (0.5, 1)}]}]
    assert found["lr_schedulers"] == [{"last_lr": [0.1], 3: True}]
    assert found["callbacks"] == {"Mine": {"best": 1.5, "name": "x"}}
    assert found["mine"] == 7
    assert type(found["mine"]) is int
    assert type(group["lr"]) is np.float64


def test_a_number_that_python_lacks_is_left_out_or_named(tmp_path: Path) -> None:
    if type(np.longdouble(1).item()) is float:
        pytest.skip("a longdouble is a double here")
    found = saved_and_read({"mine": np.longdouble(1)}, tmp_path / "x.ckpt")
    assert "mine" not in found
    with pytest.raises(TypeError, match=r"callbacks\['best'\] is a numpy\.longdouble"):
        saved_and_read({"callbacks": {"best": np.longdouble(1)}}, tmp_path / "x.ckpt")


@pytest.mark.parametrize("layout", ["coo", "not coalesced", "csr", "csc", "bsr", "expanded"])
def test_a_tensor_that_is_not_dense_loads_again_with_its_meaning(
    layout: str, tmp_path: Path
) -> None:
    dense = torch.eye(3000)
    make = {
        "coo": dense.to_sparse,
        "not coalesced": lambda: torch.sparse_coo_tensor([[0, 0], [1, 1]], [1.0, 2.0], (9, 9)),
        "csr": dense.to_sparse_csr,
        "csc": dense.to_sparse_csc,
        "bsr": lambda: dense.to_sparse_bsr((2, 2)),
        "expanded": lambda: torch.ones(1, 3).expand(500, 3),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensor = make[layout]()
        path = tmp_path / "x.ckpt"
        found = saved_and_read({"state_dict": {"x": tensor}}, path)["state_dict"]["x"]
        assert found.layout == tensor.layout
        assert torch.equal(found.to_dense(), tensor.to_dense())
        assert damage(path) is None


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2, device="meta"),
        torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged),
    ],
    ids=["meta", "nested"],
)
def test_a_tensor_that_would_not_load_is_named_at_the_first_save(
    value: torch.Tensor, tmp_path: Path
) -> None:
    with pytest.raises(TypeError, match=r"state_dict\['odd'\] is a "):
        saved_and_read({"state_dict": {"odd": value}}, tmp_path / "x.ckpt")
    assert not (tmp_path / "x.ckpt").exists()


def test_a_file_that_could_not_be_read_again_is_refused_at_the_first_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep: list[Any] = []
    for _ in range(300):
        deep = [deep]
    with pytest.raises(UserError, match="was not saved, for it could not be read again: TooMuch"):
        saved_and_read({"mine": deep}, tmp_path / "x.ckpt")
    assert not (tmp_path / "x.ckpt").exists()


class Graph(LightningModule):
    """A sparse and an expanded buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.register_buffer("adjacency", torch.eye(3).to_sparse())
        self.register_buffer("wide", torch.ones(1).expand(7))


def test_expanded_and_sparse_buffers_are_loaded_into_a_module(tmp_path: Path) -> None:
    first, second = Graph(), Graph()
    weights = first.state_dict()
    contents = {"state_dict": weights, "loops": {}}
    AtomicCheckpointIO().save_checkpoint(contents, tmp_path / "x.ckpt")
    assert load_weights(second, read(tmp_path / "x.ckpt"), tmp_path)
    assert torch.equal(second.layer.weight, first.layer.weight)
    assert torch.equal(second.adjacency.to_dense(), torch.eye(3))


def test_a_second_run_in_one_process_takes_its_own_folder_again(tmp_path: Path) -> None:
    first = RunFolder(tmp_path / "r")
    first.create()
    (first.folder / "last.ckpt").touch()
    second = RunFolder(tmp_path / "r")
    second.create()
    assert second.run_id == first.run_id
    second.release()


def test_a_file_system_without_locks_is_said_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(run_folder.FileLock, "acquire", refuse)
    run = RunFolder(tmp_path / "r")
    run.create()
    assert "cannot be locked: do not start a second process of run r" in capsys.readouterr().out
    assert (tmp_path / "r" / "run-id.txt").read_text().strip() == run.run_id
    run.release()


def test_a_second_checkpoint_that_is_set_aside_leaves_the_first_one(tmp_path: Path) -> None:
    best = tmp_path / "best.ckpt"
    for text in ("first", "second", "third"):
        best.write_text(text)
        assert "It was set aside;" in str(usable_best(best, "id"))
    names = ["best.ckpt.set-aside", "best.ckpt.set-aside-2", "best.ckpt.set-aside-3"]
    assert [(tmp_path / name).read_text() for name in names] == ["first", "second", "third"]


def test_a_folder_of_the_users_is_taken_for_no_run_to_go_on_with(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path("checkpoints/mine")
    folder.mkdir(parents=True)
    for name in ("config.yaml", "report.html", "summary.json", "last.ckpt"):
        (folder / name).write_text("x")
    assert entry.exit_code(fit.main, ["--run_name", "mine", "--ckpt_path", "auto"]) == 2
    told = capsys.readouterr().err
    assert "checkpoints/mine is no run's folder: it holds config.yaml, and no run-id.txt" in told
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.yaml",
        "last.ckpt",
        "report.html",
        "summary.json",
    ]
    assert {path.read_text() for path in folder.iterdir()} == {"x"}


def test_a_checkpoint_beside_a_config_of_the_users_starts_a_new_run(copied: Path) -> None:
    (copied / "run-id.txt").unlink()
    chosen = choose(Path("checkpoints"), None, "checkpoints/r/last.ckpt")
    assert chosen.folder != copied.absolute()
    assert chosen.checkpoint == Path("checkpoints/r/last.ckpt")


def test_what_is_half_written_goes_with_the_next_start_and_what_is_the_users_stays(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "r"
    folder.mkdir()
    for name in (".last.ckpt.123.part", ".thesis.part", ".thesis.two.part"):
        (folder / name).write_text("x")
    (folder / ".folder.1.part").mkdir()
    run = RunFolder(folder)
    run.create()
    run.release()
    names = {path.name for path in folder.glob("*.part")}
    assert names == {".thesis.part", ".thesis.two.part", ".folder.1.part"}


def test_what_is_called_latest_and_is_no_link_to_a_run_stays(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    latest = tmp_path / "runs/latest"
    run = tmp_path / "runs/r"
    run.mkdir(parents=True)
    latest.write_text("x")
    point_latest_at(run)
    assert latest.read_text() == "x"
    latest.unlink()
    latest.symlink_to(tmp_path / "home")
    point_latest_at(run)
    assert latest.resolve() == tmp_path / "home"
    latest.unlink()
    latest.symlink_to("older")
    point_latest_at(run)
    assert latest.resolve() == run


@pytest.mark.nightly
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
    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("mmap.mmap", denied)
    with pytest.raises(UserError, match="Permission denied"):
        choose(Path("checkpoints"), "r", "auto")


def test_last_and_best_mean_the_newest_run(copied: Path) -> None:
    """It is found by its files: no link is needed, and a copy of the link as a folder misleads
    nobody.
    """
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
