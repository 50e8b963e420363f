"""A table of disks that fail: what is written, how, where in its file the disk refuses it, how
long, and how the run ends. What a run tells, ends with and leaves must be true in each cell.
"""

from __future__ import annotations

import errno
import os
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from unbroken import ExactCheckpoint
from unbroken.checkpoint.interval import Interval
from unbroken.checkpoint.kept import KeptParts
from unbroken.cli import start as command
from unbroken.storage import run_files
from unbroken.storage.files import NotWritten, copy_atomically, write_atomically
from unbroken.storage.usable import read_or_reason

from tests.commands import checkpoint
from tests.failing_disk import BOTH, MANY, PLACES, Disk, FailingDisk, Place, SmallDisk, mounted

# Four steps each, with a save every second step
EPOCHS = 3
END = 4 * EPOCHS
# A validation that no scores name has none of the best.
NO_BEST = 9.0


class Stream(IterableDataset[Any]):
    """The samples, of which none can be started at."""

    def __iter__(self) -> Iterator[Any]:
        return iter(zip(rows(), strict=True))


def rows() -> Tensor:
    """The samples of an epoch."""
    return torch.linspace(-1, 1, 4 * 32).reshape(4, 32)


@dataclass
class Plan:
    """What happens in a run.

    Attributes:
        scores: What the validations behind these steps log. The least is the best.
        streams: Whether no run can start inside an epoch. There is a validation inside each.
        stops: The step in which the run gets SIGTERM. None: it trains to its end.
        at: What is done at the end of a step.
        weights: What they were behind each step.
    """

    scores: dict[int, float] = field(default_factory=dict)
    streams: bool = False
    stops: int | None = None
    at: dict[int, Callable[[], None]] = field(default_factory=dict)
    weights: dict[int, Tensor] = field(default_factory=dict)


class Line(LightningModule):
    """Begins no step before the save that is under way is over."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(32, 32)

    def on_train_batch_start(self, *_: Any) -> None:
        for thread in threading.enumerate():
            if thread.name == "checkpoint":
                thread.join()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(rows()[:1]), batch_size=1)


def module_of(plan: Plan) -> LightningModule:
    """A module that does what is planned.

    The plan is no attribute of it: the library would look into that.
    """

    class Planned(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if self.global_step + 1 == plan.stops:
                signal.raise_signal(signal.SIGTERM)
            loss: Tensor = self.line(batch[0]).square().mean()
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", plan.scores.get(self.global_step, NO_BEST))

        def on_train_batch_end(self, *_: Any) -> None:
            plan.weights[self.global_step] = self.line.weight.detach().clone()
            plan.at.get(self.global_step, nothing)()

        def train_dataloader(self) -> Any:
            data: Any = Stream() if plan.streams else TensorDataset(rows())
            return DataLoader(data, batch_size=1)

    return Planned()


def nothing() -> None:
    """What is planned at most steps."""


def fit(keep: ExactCheckpoint, plan: Plan) -> int:
    """Train from what is saved, or from the start; returns the exit code."""
    torch.manual_seed(1)
    trainer = Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        callbacks=[keep],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        val_check_interval=2 if plan.streams else None,
        default_root_dir=keep.folder,
    )
    module = module_of(plan)

    def main(_: list[str]) -> int:
        trainer.fit(module, ckpt_path=keep.resume_from)
        return 0

    return command.exit_code(main, [])


@cache
def undisturbed(streams: bool) -> dict[int, Tensor]:
    """The weights behind each step of a run that nothing disturbs."""
    plan = Plan(streams=streams)
    assert fit(ExactCheckpoint(None), plan) == 0
    return plan.weights


@dataclass(frozen=True)
class Case:
    """A run on a disk that fails.

    Attributes:
        scores: Of the validations behind these steps. The least is the best.
        fails: The step at whose end the disk begins to fail.
        mends: That at whose end it takes files again. None: never by itself.
        stops: The step behind which SIGTERM stops the run. None: it trains to its end.
        refuses: The names of files that the disk does not take.
        files_refused: After how many refused files it mends itself.
        streams: Whether no run can start inside an epoch.
        code: How the run ends. 1: its last state is not saved.
        last: The step that last.ckpt holds then. None: there is none.
        best: That of best.ckpt.
    """

    scores: dict[int, float]
    fails: int
    mends: int | None = None
    stops: int | None = None
    refuses: tuple[str, ...] = BOTH
    files_refused: int = MANY
    streams: bool = False
    code: int = 0
    last: int | None = END
    best: int | None = None

    def plan(self, disk: Disk) -> Plan:
        """What happens in the run."""
        at = {self.fails: disk.fail}
        if self.mends is not None:
            at[self.mends] = disk.mend
        return Plan(self.scores, self.streams, self.stops, at)


FIRST = {4: 0.0}
SECOND = {4: 1.0, 8: 0.0}
THIRD = {4: 1.0, 12: 0.0}
# Of validations inside epochs, too
INSIDE = {4: 1.0, 6: 0.0}
LAST = ("last.ckpt",)
CASES = {
    # The first save is that of the second step. Nothing is there before.
    "first, for a while": Case(FIRST, 1, mends=5, best=4),
    "first, to the end": Case(FIRST, 1, code=1, last=None),
    "first, stopped": Case(FIRST, 1, stops=5, code=1, last=None),
    # Those of steps 2 and 4 were saved, and the one of step 6 is refused.
    "last, for a while": Case(FIRST, 5, mends=9, best=4),
    "last, for a while, then stopped": Case(FIRST, 5, mends=9, stops=11, code=143, last=11, best=4),
    "last, to the end": Case(FIRST, 5, code=1, last=4, best=4),
    "last, stopped": Case(FIRST, 5, stops=9, code=1, last=4, best=4),
    "last, at the end once": Case(FIRST, 11, files_refused=1, best=4),
    "last, at the end twice": Case(FIRST, 11, files_refused=2, code=1, last=10, best=4),
    "last, at the stop once": Case(FIRST, 9, stops=9, files_refused=1, code=143, last=9, best=4),
    "last, at the stop twice": Case(FIRST, 9, stops=9, files_refused=2, code=1, last=8, best=4),
    # The new best of step 6, inside an epoch, comes without a last.
    "best alone, mended at the stop": Case(
        INSIDE, 5, mends=7, stops=7, streams=True, code=143, last=4, best=6
    ),
    "best alone, for a while": Case(INSIDE, 5, mends=7, streams=True, best=6),
    "best alone, for a while, then stopped": Case(
        INSIDE, 5, mends=7, stops=9, streams=True, code=143, last=8, best=6
    ),
    "best alone, to the end": Case(INSIDE, 5, streams=True, code=1, last=4, best=4),
    "best alone, stopped": Case(INSIDE, 5, stops=7, streams=True, code=1, last=4, best=4),
    # The new best of step 8 is refused.
    "best and last, for a while": Case(SECOND, 7, mends=9, best=8),
    "best and last, for a while, then stopped": Case(
        SECOND, 7, mends=9, stops=11, code=143, last=11, best=8
    ),
    "best and last, to the end": Case(SECOND, 7, code=1, last=6, best=4),
    "best and last, stopped": Case(SECOND, 7, stops=9, code=1, last=6, best=4),
    "best and last, mended at the stop": Case(
        SECOND, 7, mends=9, stops=9, code=143, last=9, best=8
    ),
    "best and last, at the end once": Case(THIRD, 11, files_refused=1, best=12),
    "best and last, at the end twice": Case(THIRD, 11, files_refused=2, code=1, last=10, best=4),
    # The new best of step 8 is taken, and its copy as last is not.
    "copy, for a while": Case(SECOND, 7, mends=9, refuses=LAST, best=8),
    "copy, for a while, then stopped": Case(
        SECOND, 7, mends=9, stops=11, refuses=LAST, code=143, last=11, best=8
    ),
    "copy, to the end": Case(SECOND, 7, refuses=LAST, code=1, last=6, best=8),
    "copy, stopped": Case(SECOND, 7, stops=9, refuses=LAST, code=1, last=6, best=8),
    "copy, at the end once": Case(THIRD, 11, files_refused=1, refuses=LAST, best=12),
    "copy, at the end twice": Case(
        THIRD, 11, files_refused=2, refuses=LAST, code=1, last=10, best=12
    ),
}


@pytest.fixture(params=["at once", "behind training"])
def _writes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a state be written while training waits, or by the thread."""
    size = 2**30 if request.param == "at once" else 0
    monkeypatch.setattr(run_files, "WRITTEN_AT_ONCE", size)
    # However long the saves before have taken, each epoch's end is saved.
    monkeypatch.setattr(Interval, "is_too_soon", lambda *_: False)


def keeping(folder: Path) -> ExactCheckpoint:
    return ExactCheckpoint(folder, monitor="val_loss", mode="min", every="2")


def check(
    case: Case,
    folder: Path,
    disk: Disk,
    reason: str,
    capsys: pytest.CaptureFixture[str],
    may_be_newer: bool = False,
) -> None:
    """Train on a disk that fails, look at what is told and left, and go on to the end.

    ``may_be_newer``: whether a file that counts as refused may be there all the same.
    """
    keep = keeping(folder)
    plan = case.plan(disk)
    assert fit(keep, plan) == case.code
    check_lines(case, reason, *capsys.readouterr())
    check_folder(folder, case.last, case.best, plan.weights, may_be_newer)
    if not may_be_newer:
        assert keep.saved_step == case.last
    disk.mend()
    if case.code:
        assert fit(keeping(folder), Plan(case.scores, case.streams)) == 0
    best_of_all = min(case.scores, key=lambda step: case.scores[step])
    check_folder(folder, END, best_of_all, undisturbed(case.streams))


def check_lines(case: Case, reason: str, told: str, errors: str) -> None:
    """The trouble is told as it begins, and as it ends."""
    is_saved = case.code != 1
    (line,) = (each for each in told.splitlines() if "saves fail: " in each)
    assert reason in line
    # The save that fails may be the last of the run.
    assert line.endswith(" The run tries again.")
    assert told.count("the run is saved again, since ") == is_saved, told
    assert errors.count("the run has ended, and its last state is not saved: ") == (not is_saved)
    assert is_saved or reason in errors
    if case.streams and case.code == 143:
        assert f"from which it cannot resume: last.ckpt holds step {case.last}," in told


def check_folder(
    folder: Path,
    last: int | None,
    best: int | None,
    weights: dict[int, Tensor],
    may_be_newer: bool = False,
) -> None:
    """Each file is whole, and holds the state of one step."""
    assert [path.name for path in folder.iterdir() if path.name.endswith(".part")] == []
    for name, expected in (("last.ckpt", last), ("best.ckpt", best)):
        path = folder / name
        if not path.exists():
            assert expected is None, f"{name} is missing"
            continue
        _, damage = read_or_reason(path)
        assert damage is None
        contents = checkpoint(path)
        step = contents["global_step"]
        assert torch.equal(contents["state_dict"]["line.weight"], weights[step])
        is_right = step >= (expected or 0) if may_be_newer else step == expected
        assert is_right, f"{name} holds step {step}"


@pytest.mark.daily(5)
@pytest.mark.usefixtures("_writes")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", CASES)
def test_what_a_run_tells_and_leaves_is_true_wherever_and_as_long_as_a_disk_is_full(
    name: str,
    place: Place,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    case = CASES[name]
    disk = FailingDisk(tmp_path, place, errno.ENOSPC, case.refuses, case.files_refused)
    disk.watch(monkeypatch)
    if place == "folder" and sys.platform == "win32":
        pytest.skip("Windows opens no folder")
    # A file whose name alone may be lost is there.
    check(case, tmp_path, disk, os.strerror(errno.ENOSPC), capsys, place == "folder")
    assert set(disk.refused) <= set(case.refuses)
    assert disk.refused != []


@pytest.mark.usefixtures("_writes")
def test_what_one_training_could_not_save_is_none_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cell of a notebook is run again, with the same callback."""
    case = CASES["best alone, stopped"]
    disk = FailingDisk(tmp_path, "middle", errno.ENOSPC, case.refuses)
    disk.watch(monkeypatch)
    keep = keeping(tmp_path)
    plan = case.plan(disk)
    assert fit(keep, plan) == 1
    disk.mend()
    # It stops inside the next epoch, where nothing is saved.
    assert fit(keep, Plan(stops=5, streams=True)) == 143
    check_folder(tmp_path, 4, 4, plan.weights)


@pytest.mark.usefixtures("_writes")
def test_a_best_that_has_waited_is_written_after_the_rows_of_its_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES["best alone, mended at the stop"]
    disk = FailingDisk(tmp_path, "middle", errno.ENOSPC, case.refuses)
    disk.watch(monkeypatch)
    refused: list[str] = []
    kept_flush = KeptParts.flush

    def flush(parts: KeptParts) -> None:
        if disk.refused and not refused:
            refused.append("metrics.csv")
            raise NotWritten("metrics.csv is not written.")
        kept_flush(parts)

    monkeypatch.setattr(KeptParts, "flush", flush)
    plan = case.plan(disk)
    assert fit(keeping(tmp_path), plan) == 1
    assert refused == ["metrics.csv"]
    check_folder(tmp_path, 4, 4, plan.weights)


# What a device, a file system that has become read-only, a quota and rights answer
ERRORS: dict[str, tuple[int, Place]] = {
    "EIO in the middle": (errno.EIO, "middle"),
    "EIO at the flush": (errno.EIO, "flush"),
    "EROFS at the start": (errno.EROFS, "start"),
    "EROFS at the rename": (errno.EROFS, "rename"),
    "EDQUOT in the middle": (errno.EDQUOT, "middle"),
    "EDQUOT at the flush": (errno.EDQUOT, "flush"),
    "EACCES at the start": (errno.EACCES, "start"),
    "EACCES at the rename": (errno.EACCES, "rename"),
}


@pytest.mark.daily(1)
@pytest.mark.usefixtures("_writes")
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize(
    "name",
    [
        "last, for a while",
        "last, stopped",
        "best and last, for a while, then stopped",
        "best and last, to the end",
        "copy, at the end once",
        "best alone, stopped",
    ],
)
def test_all_errors_of_a_disk_are_one_kind_of_trouble(
    name: str,
    error: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    case = CASES[name]
    number, place = ERRORS[error]
    disk = FailingDisk(tmp_path, place, number, case.refuses, case.files_refused)
    disk.watch(monkeypatch)
    check(case, tmp_path, disk, os.strerror(number), capsys)


# It counts no files, and takes either all of them or none.
ON_A_REAL_ONE = [
    name for name, case in CASES.items() if case.files_refused == MANY and case.refuses == BOTH
]


@pytest.mark.daily(1)
@pytest.mark.usefixtures("_writes")
@pytest.mark.parametrize("place", ["start", "middle"])
@pytest.mark.parametrize("name", ON_A_REAL_ONE)
def test_a_real_file_system_that_is_full_is_such_a_disk(
    name: str, place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = CASES[name]
    with mounted(tmp_path / "disk") as folder:
        disk = SmallDisk(folder, place)
        check(case, folder / "run", disk, os.strerror(errno.ENOSPC), capsys)


def refuse_to_flush_folders(patch: pytest.MonkeyPatch, number: int, call: str) -> None:
    """Let the system answer with an error where a folder is opened, or where it is flushed."""
    system_call = getattr(os, call)

    def refuses(what: Any, *args: Any) -> Any:
        status = os.fstat(what) if call == "fsync" else os.stat(what)
        if stat.S_ISDIR(status.st_mode):
            raise OSError(number, os.strerror(number))
        return system_call(what, *args)

    patch.setattr(os, call, refuses)


@pytest.mark.parametrize(
    ("call", "number"),
    [
        # Windows opens no folder.
        ("open", errno.EACCES),
        ("open", errno.EISDIR),
        ("fsync", errno.EINVAL),
        ("fsync", errno.ENOTSUP),
        ("fsync", errno.EBADF),
    ],
)
def test_a_file_system_that_cannot_flush_a_folder_is_no_trouble(
    call: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_to_flush_folders(monkeypatch, number, call)
    write_atomically("new", tmp_path / "file")
    assert (tmp_path / "file").read_text() == "new"


@pytest.mark.skipif(sys.platform == "win32", reason="Windows opens no folder")
@pytest.mark.parametrize(
    ("call", "number"),
    [
        ("fsync", errno.EIO),
        ("fsync", errno.ENOSPC),
        ("fsync", errno.EDQUOT),
        ("open", errno.EIO),
        ("open", errno.EMFILE),
    ],
)
def test_a_rename_that_a_power_cut_may_undo_is_not_written_and_says_so(
    call: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, path = tmp_path / "source", tmp_path / "file"
    source.write_text("new")
    path.write_text("old")
    refuse_to_flush_folders(monkeypatch, number, call)
    said = f"{os.strerror(number)}. It is whole, and a power cut may bring back what was there"
    with pytest.raises(NotWritten, match=said):
        copy_atomically(source, path)
    assert path.read_text() == "new"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "source"]
