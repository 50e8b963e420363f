"""What a save costs, and what a disk that fails does: copies in memory, a thread that writes."""

from __future__ import annotations

import errno
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import FSDPStrategy, SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from unbroken import ExactCheckpoint
from unbroken.checkpoint.interval import Interval
from unbroken.checkpoint.kept import KeptParts
from unbroken.errors import NotSaved
from unbroken.storage import checkpoint_files, files, run_files
from unbroken.storage.checkpoint_files import AtomicCheckpointIO
from unbroken.storage.files import NotWritten, copy_atomically
from unbroken.storage.run_files import Costs
from unbroken.storage.staging import Staging, bytes_in, memory_made_for, memory_of
from unbroken.storage.writing_thread import WritingThread

from tests.commands import checkpoint


class Small(LightningModule):
    """A line through points, whose weights change at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.line(batch[0]).square().mean()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


class WaitsForSaves(Small):
    """Begins no step before the save that is under way is on the disk."""

    def on_train_batch_start(self, *_: Any) -> None:
        until_written()


def until_written() -> None:
    """Wait for the thread that writes a checkpoint, if there is one."""
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join()


def fit(
    keep: ExactCheckpoint,
    steps: int = 8,
    kind: type[Small] = Small,
    epochs: int = 1,
    resume: bool = False,
) -> Small:
    """Train so many epochs of ``steps`` steps, from the start or where it was saved."""
    torch.manual_seed(1)
    module = kind()
    data = TensorDataset(torch.linspace(-1, 1, 3 * steps).reshape(steps, 3))
    resumed = keep.resume_from if resume else None
    trainer = Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        callbacks=[keep],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = None if kind is Streams else DataLoader(data, batch_size=1)
    trainer.fit(module, loader, ckpt_path=resumed)
    return module


@pytest.fixture
def _every_save_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_files, "WRITTEN_AT_ONCE", 0)


@pytest.mark.usefixtures("_every_save_is_large")
def test_a_file_holds_the_step_at_which_it_was_saved_however_late_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights: dict[int, Tensor] = {}
    written: dict[int, Tensor] = {}
    steps_done: list[int] = [0]
    write = checkpoint_files.save_to

    def late(contents: dict[str, Any], path: Path) -> None:
        # The weights are changed by the next step before a byte is written.
        step = contents["global_step"]
        while step < 6 and steps_done[0] == step:
            time.sleep(0.001)
        write(contents, path)
        written[step] = contents["state_dict"]["line.weight"].clone()

    class Watches(Small):
        def on_train_batch_end(self, *_: Any) -> None:
            steps_done[0] = self.global_step
            if self.global_step % 2:
                until_written()
            weights[self.global_step] = self.line.weight.detach().clone()

    monkeypatch.setattr(checkpoint_files, "save_to", late)
    fit(ExactCheckpoint(tmp_path, every="2"), 6, Watches)
    assert set(written) == {2, 4, 6}
    assert all(torch.equal(written[step], weights[step]) for step in written)
    assert checkpoint(tmp_path / "last.ckpt")["global_step"] == 6


@pytest.mark.usefixtures("_every_save_is_large")
def test_a_save_that_is_due_waits_for_the_one_before_and_training_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write = checkpoint_files.save_to
    written: list[int] = []
    reached_fifth = threading.Event()

    def first_is_slow(contents: dict[str, Any], path: Path) -> None:
        # Training that waited for this file would never reach its fifth step.
        assert reached_fifth.wait(60)
        write(contents, path)
        written.append(contents["global_step"])

    class Reaches(Small):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 4:
                reached_fifth.set()
                until_written()

    monkeypatch.setattr(checkpoint_files, "save_to", first_is_slow)
    fit(ExactCheckpoint(tmp_path, every="2"), kind=Reaches)
    # Those of the second and fourth step wait, and become one.
    assert written[:2] == [2, 5]
    assert written[-1] == 8
    told = capsys.readouterr().out
    assert told.count("2 steps take less time than the disk needs for a save") == 1


@pytest.mark.usefixtures("_every_save_is_large")
def test_a_large_state_is_not_saved_after_each_short_epoch_but_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = checkpoint_files.save_to
    written: list[int] = []

    def slow(contents: dict[str, Any], path: Path) -> None:
        # A hundred epochs would not be long enough for a save of this cost.
        time.sleep(0.3)
        write(contents, path)
        written.append(contents["epoch"])

    monkeypatch.setattr(checkpoint_files, "save_to", slow)
    fit(ExactCheckpoint(tmp_path), steps=2, kind=WaitsForSaves, epochs=10)
    assert written == [1, 2, 10], "two saves show what one costs"
    assert checkpoint(tmp_path / "last.ckpt")["global_step"] == 20


def test_a_stop_that_the_disk_makes_slow_says_how_long_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Stops(Small):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 4:
                signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(run_files.RunFiles, "seconds_to_save", lambda self: 21.4)
    with pytest.raises(SystemExit):
        fit(ExactCheckpoint(tmp_path, every="2"), kind=Stops)
    assert "is on the disk, in about 21 s." in capsys.readouterr().out
    assert checkpoint(tmp_path / "last.ckpt")["global_step"] == 5


@pytest.mark.usefixtures("_every_save_is_large")
def test_runs_with_saves_in_the_background_have_the_weights_of_one_without(tmp_path: Path) -> None:
    saved = fit(ExactCheckpoint(tmp_path / "saved", every="1"))
    unsaved = fit(ExactCheckpoint(None))
    assert torch.equal(saved.line.weight, unsaved.line.weight)
    last = checkpoint(tmp_path / "saved" / "last.ckpt")["state_dict"]["line.weight"]
    assert torch.equal(last, unsaved.line.weight)


@pytest.mark.parametrize("size", [0, 2**30], ids=["in the background", "at once"])
def test_a_disk_that_fails_for_a_while_ends_no_run(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_files, "WRITTEN_AT_ONCE", size)
    write = checkpoint_files.save_to
    tries: list[int] = []

    def fails_every_third_time(contents: dict[str, Any], path: Path) -> None:
        tries.append(contents["global_step"])
        if len(tries) % 3 == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(contents, path)

    monkeypatch.setattr(checkpoint_files, "save_to", fails_every_third_time)
    fit(ExactCheckpoint(tmp_path, every="1"), kind=WaitsForSaves)
    told = capsys.readouterr().out
    assert tries == [1, 2, 3, 4, 5, 6, 7, 8, 8]
    assert told.count("saves fail:") == 3
    assert told.count("No space left on device") == 3
    assert told.count("the run is saved again") == 3
    assert checkpoint(tmp_path / "last.ckpt")["global_step"] == 8
    assert sorted(path.name for path in tmp_path.iterdir() if ".part" in path.name) == []


def test_a_run_whose_last_state_cannot_be_saved_says_so_and_keeps_the_file_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = checkpoint_files.save_to

    def has_room_for_three_steps(contents: dict[str, Any], path: Path) -> None:
        if contents["global_step"] > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(contents, path)

    monkeypatch.setattr(checkpoint_files, "save_to", has_room_for_three_steps)
    with pytest.raises(NotSaved, match=r"its last state is not saved: .*No space left on device"):
        fit(ExactCheckpoint(tmp_path, every="1"), kind=WaitsForSaves)
    assert checkpoint(tmp_path / "last.ckpt")["global_step"] == 3


@pytest.mark.usefixtures("_every_save_is_large")
def test_a_save_is_written_at_once_where_there_is_no_memory_for_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def has_no_memory(*_: Any) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(Staging, "copy", has_no_memory)
    fit(ExactCheckpoint(tmp_path, every="1"))
    assert checkpoint(tmp_path / "last.ckpt")["global_step"] == 8


class Streams(Small):
    """Reads what cannot be started inside an epoch, and is asked to stop in the second one."""

    def train_dataloader(self) -> Any:
        return DataLoader(Numbers(), batch_size=1)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 6:
            signal.raise_signal(signal.SIGTERM)


class Numbers(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([(row,) for row in torch.linspace(-1, 1, 12).reshape(4, 3)])


def test_a_stop_that_has_nothing_to_save_says_that_the_epochs_save_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def has_no_room(contents: dict[str, Any], path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint_files, "save_to", has_no_room)
    with pytest.raises(NotSaved, match=r"its last state is not saved: .*No space left on device"):
        fit(ExactCheckpoint(tmp_path), kind=Streams, epochs=3)


def test_a_run_that_cannot_start_inside_an_epoch_takes_nothing_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []
    take = KeptParts.take

    def noting(self: KeptParts, trainer: Trainer, place: Any) -> Any:
        taken.append(place)
        return take(self, trainer, place)

    monkeypatch.setattr(KeptParts, "take", noting)
    with pytest.raises(SystemExit):
        fit(ExactCheckpoint(tmp_path, every="1"), kind=Streams, epochs=3)
    assert taken == ["epoch", "batch"], "at the first epoch's end and at the stop"


@pytest.mark.usefixtures("_every_save_is_large")
def test_what_a_write_in_the_background_raises_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(contents: dict[str, Any], path: Path) -> None:
        raise ValueError("a fault of ours")

    monkeypatch.setattr(checkpoint_files, "save_to", breaks)
    with pytest.raises(ValueError, match="a fault of ours"):
        fit(ExactCheckpoint(tmp_path, every="1"))


def test_saves_that_cost_too_much_come_less_often_and_a_line_says_so_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    interval = Interval.of("60s")
    assert interval.seconds_with(Costs()) == 60
    costs = Costs(last_wait_seconds=0.3, last_background_seconds=4.1, seconds_before=5.0)
    assert interval.seconds_with(costs) == pytest.approx(220)
    assert interval.seconds_with(costs) == pytest.approx(220)
    told = capsys.readouterr().out
    assert told == (
        "a save takes 4.4 s of writing and waiting: every 220 s in the place of every 60 s.\n"
    )


def test_a_save_that_a_disk_has_slowed_down_once_changes_no_interval() -> None:
    interval = Interval.of("60s")
    for before in (0.0, 0.5):
        slow = Costs(last_background_seconds=180.0, seconds_before=before)
        assert interval.seconds_with(slow) == 60
        assert not interval.is_too_soon(60, slow)
    twice = Costs(last_background_seconds=180.0, seconds_before=170.0)
    assert interval.seconds_with(twice) == pytest.approx(8500)


@pytest.mark.daily(1)
@pytest.mark.parametrize("size", [0, 2**30], ids=["in the background", "at once"])
def test_a_save_that_fails_slowly_is_tried_again_after_the_interval(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_files, "WRITTEN_AT_ONCE", size)
    seconds = 0.5

    def times_out(contents: dict[str, Any], path: Path) -> None:
        time.sleep(seconds)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(checkpoint_files, "save_to", times_out)
    keep = ExactCheckpoint(tmp_path, every="2")
    with pytest.raises(NotSaved):
        fit(keep, 4, WaitsForSaves)
    assert keep.own_folder.files.costs.usual_seconds < seconds


@pytest.mark.usefixtures("_every_save_is_large")
def test_a_best_that_the_disk_does_not_take_needs_no_further_memory_to_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = checkpoint_files.save_to
    copy = Staging.copy
    has_failed: list[int] = []

    def has_room_later(contents: dict[str, Any], path: Path) -> None:
        if not has_failed:
            has_failed.append(contents["global_step"])
            # There is memory for no second copy.
            monkeypatch.setattr(Staging, "copy", has_no_memory)
            raise OSError(errno.ENOSPC, "No space left on device")
        monkeypatch.setattr(Staging, "copy", copy)
        write(contents, path)

    def has_no_memory(*_: Any) -> None:
        raise MemoryError

    class Validates(WaitsForSaves):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            # The first is the best.
            self.log("val_loss", float(self.current_epoch))

        def val_dataloader(self) -> Any:
            return DataLoader(torch.zeros(1, 3), batch_size=1)  # type: ignore[arg-type]

    monkeypatch.setattr(checkpoint_files, "save_to", has_room_later)
    keep = ExactCheckpoint(tmp_path, monitor="val_loss", mode="min", every="100")
    fit(keep, 4, Validates, epochs=3)
    assert has_failed == [4]
    assert keep.best.score == 0
    assert checkpoint(tmp_path / "best.ckpt")["global_step"] == 4


def test_a_copy_shares_what_its_tensors_share_and_uses_its_memory_again() -> None:
    staging = Staging()
    whole = torch.arange(12.0).reshape(3, 4)
    state = {"whole": whole, "row": whole[1], "numbers": [1, (2.5, "text")], "other": torch.ones(2)}
    first = staging.copy(state)
    place = first["whole"].data_ptr()
    whole.zero_()
    assert torch.equal(first["row"], torch.tensor([4.0, 5, 6, 7]))
    assert first["row"].untyped_storage().data_ptr() == first["whole"].untyped_storage().data_ptr()
    assert first["numbers"] == [1, (2.5, "text")]
    again = staging.copy(state)
    assert again["whole"].data_ptr() == place
    assert not again["row"].any()


@pytest.mark.skipif(sys.platform != "linux", reason="the system tells no mapped pages")
def test_a_resume_reads_the_weights_from_the_files_pages_and_keeps_nothing_of_it(
    tmp_path: Path,
) -> None:
    keep = ExactCheckpoint(tmp_path, every="2")
    fit(keep, 4)
    is_mapped: dict[str, bool] = {}

    class Looks(Small):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            moments = checkpoint["optimizer_states"][0]["state"][0]["exp_avg"]
            is_mapped["weights"] = lies_in(tmp_path / "last.ckpt", self.weights_of(checkpoint))
            is_mapped["moments"] = lies_in(tmp_path / "last.ckpt", moments)

        def weights_of(self, checkpoint: dict[str, Any]) -> Tensor:
            weights: Tensor = checkpoint["state_dict"]["line.weight"]
            return weights

        def on_train_batch_end(self, *_: Any) -> None:
            trained = [*self.parameters(), self.optimizers().state[self.line.weight]["exp_avg"]]  # type: ignore[union-attr]
            is_mapped["trained"] = any(lies_in(tmp_path / "last.ckpt", each) for each in trained)

    fit(keep, 4, Looks, epochs=2, resume=True)
    assert is_mapped == {"weights": True, "moments": False, "trained": False}


def lies_in(path: Path, tensor: Tensor) -> bool:
    """Whether a tensor lies on the pages of a file."""
    place = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, _, end = line.split()[0].partition("-")
        if str(path) in line and int(first, 16) <= place < int(end, 16):
            return True
    return False


def test_what_fsdp_has_gathered_for_a_checkpoint_is_not_copied_and_all_else_is() -> None:
    module = nn.BatchNorm1d(2)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.randn(4, 2)).square().sum().backward()
    optimizer.step()
    trainer: Any = SimpleNamespace(strategy=FSDPStrategy(), optimizers=[optimizer])
    trainer.strategy.model = module
    gathered = torch.ones(2)
    moments = {"exp_avg": torch.ones(2), "step": optimizer.state[module.weight]["step"]}
    checkpoint = {
        "state_dict": {"weight": gathered, "running_mean": module.running_mean},
        "optimizer_states": [{"state": {0: moments}}],
        "callbacks": {"average": torch.ones(2)},
    }
    private = memory_made_for(checkpoint, trainer)
    assert private == {memory_of(gathered), memory_of(moments["exp_avg"])}
    copied = Staging().copy(checkpoint, private)
    assert copied["state_dict"]["weight"].data_ptr() == gathered.data_ptr()
    assert copied["state_dict"]["running_mean"].data_ptr() != module.running_mean.data_ptr()  # type: ignore[union-attr]
    trainer.strategy = SingleDeviceStrategy()
    assert memory_made_for(checkpoint, trainer) == set()


def test_the_bytes_of_a_state_are_counted_at_any_depth() -> None:
    assert bytes_in({"a": [torch.zeros(3)], "b": (torch.zeros(2, dtype=torch.int64), "x", 1)}) == 28


def test_a_copied_file_is_not_damaged_with_the_other_one(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_bytes(b"whole" * 1000)
    copy_atomically(first, second)
    with open(first, "r+b") as file:
        file.write(b"damage")
    assert second.read_bytes() == b"whole" * 1000


def test_a_copy_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_bytes(b"new")
    second.write_bytes(b"old")

    def fails(path: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(files, "flush", fails)
    with pytest.raises(NotWritten, match="Input/output error"):
        copy_atomically(first, second)
    assert second.read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "second"]


def test_a_writer_writes_one_at_a_time_and_tells_an_error_once() -> None:
    writer = WritingThread()
    order: list[str] = []
    go = threading.Event()

    def first() -> None:
        assert go.wait(10)
        order.append("first")

    writer.begin(first)
    assert writer.is_busy
    go.set()
    writer.begin(lambda: order.append("second"))
    writer.wait()
    assert order == ["first", "second"]
    assert not writer.is_busy

    def breaks() -> None:
        raise OSError("gone")

    writer.begin(breaks)
    with pytest.raises(OSError, match="gone"):
        writer.wait()
    writer.wait()


class FullDisk(AtomicCheckpointIO):
    """Takes a file or not, as ``is_full`` says."""

    is_full = True

    def write(self, checkpoint: dict[str, Any], path: Path) -> None:
        if self.is_full:
            raise NotWritten(f"{path} could not be saved: no space.")
        path.write_bytes(b"whole")


def test_a_best_alone_does_not_end_the_trouble_of_a_last_that_is_missing(tmp_path: Path) -> None:
    of_run = run_files.RunFiles(tmp_path)
    disk = FullDisk()
    last = run_files.WriteJob(disk, of_run.last, None, lambda: None)
    best = run_files.WriteJob(disk, of_run.best, None, lambda: None)

    def save(job: run_files.WriteJob, is_full: bool) -> bool:
        """Whether there is trouble behind it."""
        disk.is_full = is_full
        of_run._to_disk(job, {}, is_copy=True)
        return of_run.trouble.reason is not None

    assert save(last, is_full=True)
    assert save(best, is_full=False)
    assert not save(last, is_full=False)
    assert save(best, is_full=True)
    assert not save(best, is_full=False)
