"""The engine outside of our command line: a plain Trainer script with one callback more keeps the
promises.
"""

from __future__ import annotations

import copy
import os
import random
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer, seed_everything
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler
from torchmetrics import Metric, SumMetric
from unbroken import ExactCheckpoint, Part, Stopped
from unbroken.checkpoint import ending
from unbroken.checkpoint.hooks import Hooks
from unbroken.errors import UserError
from unbroken.lightning_internals import EMPTY_HOOKS
from unbroken.storage import run_files
from unbroken.storage.checkpoint_files import AtomicCheckpointIO
from unbroken.storage.files import NotWritten
from unbroken.tasks import SupervisedModule
from unbroken.tensors.same_values import is_same

from tests.commands import (
    checkpoint,
    differences,
    differences_in_training,
    kill_group,
    start,
    wait_for,
)
from tests.other_tasks import LoaderWithState
from tests.plain_module import Dies, Regression, StepsByItself, rows

SCRIPT = [sys.executable, "-m", "tests.plain_script"]


def assert_same_end(one: Path, other: Path) -> None:
    """Two folders hold the same weights, optimizers, counters, generators and logged sums, bit for
    bit.
    """
    for name in ("last.ckpt", "best.ckpt"):
        a = checkpoint(one / name)
        b = checkpoint(other / name)
        assert differences_in_training(a, b, name) == []
        assert differences(a["run"]["state"], b["run"]["state"], f"{name}:state") == []


def wait_for_step(folder: Path, step: int, process: Any) -> None:
    """Wait until ``last.ckpt`` has reached a step."""
    last = folder / "last.ckpt"
    while process.poll() is None:
        if last.exists() and checkpoint(last)["global_step"] >= step:
            return
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("workers", "devices", "kills"),
    [
        (0, 1, 1),
        pytest.param(0, 1, 5, marks=pytest.mark.nightly),
        pytest.param(2, 1, 5, marks=pytest.mark.nightly),
        # Lightning starts the second rank, which imports torch.
        pytest.param(0, 2, 5, marks=pytest.mark.nightly),
    ],
)
def test_a_plain_script_that_is_killed_at_random_moments_ends_as_if_it_were_not(
    workplace: Path, workers: int, devices: int, kills: int
) -> None:
    words = [str(workers), str(devices)]
    log = workplace / "log.txt"
    undisturbed = start([*SCRIPT, "undisturbed", *words], log)
    assert undisturbed.wait(timeout=120) == 0, log.read_text()[-3000:]
    steps = checkpoint(Path("undisturbed/last.ckpt"))["global_step"]
    chance = random.Random(f"{workers}{devices}")
    moments = sorted(chance.sample(range(steps), kills))
    for moment in moments:
        process = start([*SCRIPT, "killed", *words], log)
        wait_for_step(Path("killed"), moment, process)
        kill_group(process)
    last = start([*SCRIPT, "killed", *words], log)
    assert last.wait(timeout=120) == 0, log.read_text()[-3000:]
    assert_same_end(Path("undisturbed"), Path("killed"))


@pytest.mark.daily(1)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_plain_script_that_is_asked_to_stop_saves_the_step_and_ends_with_the_code(
    workplace: Path, number: signal.Signals, code: int
) -> None:
    log = workplace / "log.txt"
    process = start([*SCRIPT, "stopped", "0", "1"], log)
    wait_for_step(Path("stopped"), 20, process)
    os.kill(process.pid, number)
    assert process.wait(timeout=30) == code, log.read_text()[-3000:]
    assert "Traceback" not in log.read_text()
    assert not list(Path("stopped").glob(".*.part"))
    assert checkpoint(Path("stopped/last.ckpt"))["global_step"] >= 20


def fit(
    folder: str, *further: Callback, epochs: int = 2, make: Any = Regression, **flags: Any
) -> ExactCheckpoint:
    """What a cell of a notebook does."""
    seed_everything(7, verbose=False)
    keep = ExactCheckpoint(folder, monitor="val_loss", mode="min", every="5")
    flags = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, **flags}
    trainer = Trainer(max_epochs=epochs, accelerator="cpu", callbacks=[keep, *further], **flags)
    trainer.fit(make(), ckpt_path=keep.resume_from)
    return keep


@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
def test_a_module_that_gives_lightning_no_optimizer_resumes_exactly(workplace: Path) -> None:
    fit("undisturbed", make=StepsByItself)
    with pytest.raises(RuntimeError, match="died"):
        fit("killed", Dies(33), make=StepsByItself)
    fit("killed", make=StepsByItself)
    assert_same_end(Path("undisturbed"), Path("killed"))


class Ends(Callback):
    """Changes a weight when a training ends, and notes the weights that it leaves."""

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        with torch.no_grad():
            pl_module.net[0].bias.add_(1)

    def on_fit_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.left = copy.deepcopy(pl_module.state_dict())


@pytest.mark.parametrize("kind", [EMAWeightAveraging, StochasticWeightAveraging])
def test_a_finished_training_that_is_started_again_leaves_the_same_weights(
    workplace: Path, kind: Any
) -> None:
    """The checkpoint after the last step is saved before the hooks that end a training."""
    settings = {"swa_lrs": 0.01, "swa_epoch_start": 1} if "Stochastic" in kind.__name__ else {}
    first = Ends()
    fit("run", kind(**settings), first, limit_train_batches=6)
    saved = checkpoint(Path("run/last.ckpt"))
    again = Ends()
    fit("run", kind(**settings), again, limit_train_batches=6)
    assert differences(first.left, again.left, "weights") == []
    assert differences(saved, checkpoint(Path("run/last.ckpt")), "last.ckpt") == []


class EndsAtItsStart(Callback):
    """Ends a training before its first batch, and notes which hooks are called."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.called.append("start")
        trainer.should_stop = True

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.called.append("end")


def test_a_resumed_training_that_ends_at_its_start_calls_its_hooks_once(workplace: Path) -> None:
    fit("run", epochs=1, limit_train_batches=3)
    ends = EndsAtItsStart()
    fit("run", ends, epochs=2, limit_train_batches=3)
    assert ends.called == ["start", "end"]


class Normed(Regression):
    """With a batch norm, for which StochasticWeightAveraging adds an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


def test_a_training_that_averaged_batch_norms_have_ended_is_started_again(workplace: Path) -> None:
    """Lightning's callback cannot end a training whose last epoch it has not seen itself."""
    for _ in range(2):
        average = StochasticWeightAveraging(0.01, swa_epoch_start=1)
        fit("run", average, make=Normed, limit_train_batches=6)
    assert checkpoint(Path("run/last.ckpt"))["epoch"] == 3


class AsksToStop(Callback):
    """Sends this process SIGTERM after a step. It is agreed on at the end of the next one."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_cell_that_is_run_again_after_an_error_goes_on_in_the_same_process(
    workplace: Path,
) -> None:
    fit("undisturbed")
    with pytest.raises(RuntimeError, match="died"):
        fit("again", Dies(33))
    assert checkpoint(Path("again/last.ckpt"))["global_step"] == 30
    fit("again")
    assert_same_end(Path("undisturbed"), Path("again"))


def test_a_stop_in_a_notebook_is_an_exit_and_leaves_its_signals_as_they_were(
    workplace: Path,
) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with pytest.raises(Stopped) as stopped:
        fit("stopped", AsksToStop(30))
    assert stopped.value.code == 143
    assert {number: signal.getsignal(number) for number in before} == before
    fit("stopped")
    fit("undisturbed")
    assert_same_end(Path("undisturbed"), Path("stopped"))


def test_the_best_and_the_last_are_called_as_modelcheckpoint_calls_them(workplace: Path) -> None:
    keep = fit("r")
    assert keep.best_model_path == str(workplace / "r/best.ckpt")
    assert keep.last_model_path == str(workplace / "r/last.ckpt")
    assert (
        keep.best_model_score
        == checkpoint(Path("r/best.ckpt"))["callbacks"]["ExactCheckpoint"]["score"]
    )
    assert (keep.monitor, keep.mode) == ("val_loss", "min")
    assert keep.resume_from == keep.last_model_path


def test_what_the_trainer_was_given_stays_and_its_own_modelcheckpoint_works(
    workplace: Path,
) -> None:
    own = ModelCheckpoint("own", monitor="val_loss", save_top_k=1)
    seed_everything(7, verbose=False)
    keep = ExactCheckpoint("r", monitor="val_loss", mode="min")
    trainer = Trainer(
        max_epochs=2,
        accelerator="cpu",
        callbacks=[own, keep],
        logger=False,
        enable_progress_bar=False,
    )
    io = trainer.strategy.checkpoint_io
    trainer.fit(Regression())
    assert Path(own.best_model_path).is_file()
    assert trainer.strategy.checkpoint_io is io
    assert not [
        name for name in vars(trainer.strategy) if name in ("process_dataloader", "on_train_start")
    ]
    assert "convert_input" not in vars(trainer.precision_plugin)
    assert trainer.validate(Regression(), ckpt_path=keep.best_model_path, verbose=False)


@pytest.mark.nightly
def test_checkpoints_that_were_copied_alone_go_on_with_their_best(workplace: Path) -> None:
    fit("whole", epochs=1)
    Path("copied").mkdir()
    for name in ("last.ckpt", "best.ckpt"):
        shutil.copy(f"whole/{name}", f"copied/{name}")
    keep = fit("copied", epochs=2)
    assert not Path("copied/best.ckpt.set-aside").exists()
    fit("whole", epochs=2)
    assert (
        keep.best.score
        == checkpoint(Path("whole/best.ckpt"))["callbacks"]["ExactCheckpoint"]["score"]
    )
    assert_same_end(Path("whole"), Path("copied"))


def test_a_checkpoint_that_another_program_has_saved_is_not_replaced(workplace: Path) -> None:
    module = Regression()
    trainer = Trainer(max_steps=1, logger=False, enable_progress_bar=False, accelerator="cpu")
    trainer.fit(module)
    trainer.save_checkpoint("mine/last.ckpt")
    before = Path("mine/last.ckpt").read_bytes()
    with pytest.raises(UserError, match=r"mine/last\.ckpt was not saved by a run of this folder"):
        fit("mine")
    assert Path("mine/last.ckpt").read_bytes() == before
    assert os.listdir("mine") == ["last.ckpt"]


def test_a_folder_that_another_process_writes_is_refused(workplace: Path) -> None:
    code = "import sys, time; from unbroken.run_folder import RunFolder\n"
    code += "run = RunFolder('r'); run.create(); print('held', flush=True); time.sleep(60)"
    log = workplace / "log.txt"
    other = start([sys.executable, "-c", code], log)
    assert wait_for("held", log, other)
    with pytest.raises(UserError, match="run r is written by another process"):
        fit("r")
    kill_group(other)
    fit("r")


class Freezes(Regression):
    """Freezes a layer as it is told."""

    def __init__(self, is_frozen: bool = False) -> None:
        super().__init__()
        self.net[0].requires_grad_(not is_frozen)


def test_a_layer_that_is_not_frozen_any_more_is_trained(workplace: Path) -> None:
    fit("run", make=lambda: Freezes(is_frozen=True), epochs=1, limit_train_batches=8)
    thawed = Freezes()
    fit("run", make=lambda: thawed, epochs=2, limit_train_batches=8)
    assert thawed.net[0].weight.requires_grad


class CountsValidations(Regression):
    """Counts the batches of its validations."""

    def __init__(self) -> None:
        super().__init__()
        self.val_batches = 0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.val_batches += 1
        super().validation_step(batch, batch_idx)


def test_a_run_that_was_killed_before_its_first_validation_has_what_the_sanity_check_has_changed(
    workplace: Path,
) -> None:
    undisturbed = CountsValidations()
    fit("undisturbed", make=lambda: undisturbed, epochs=1, limit_train_batches=8)
    with pytest.raises(RuntimeError, match="died"):
        fit("killed", Dies(6), make=CountsValidations, epochs=1, limit_train_batches=8)
    resumed = CountsValidations()
    fit("killed", make=lambda: resumed, epochs=1, limit_train_batches=8)
    assert resumed.val_batches == undisturbed.val_batches > 0


class Temperature(Part):
    """A part of one's own: state that the user's code keeps outside of the module's state dict."""

    name = "temperature"

    def take(self, trainer: Trainer) -> float:
        return trainer.lightning_module.temperature

    def give_back(self, trainer: Trainer, value: float) -> None:
        trainer.lightning_module.temperature = value


class Cools(Regression):
    """Has a temperature that falls with every step, as a plain attribute."""

    temperature = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.temperature *= 0.99
        return super().training_step(batch, batch_idx) * self.temperature


def test_a_part_of_ones_own_comes_back(workplace: Path) -> None:
    def train(folder: str, *further: Callback) -> Cools:
        seed_everything(7, verbose=False)
        keep = ExactCheckpoint(folder, every="5", parts=[Temperature()])
        module = Cools()
        trainer = Trainer(
            max_epochs=2, accelerator="cpu", callbacks=[keep, *further], logger=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, ckpt_path=keep.resume_from)
        return module

    undisturbed = train("undisturbed")
    with pytest.raises(RuntimeError, match="died"):
        train("killed", Dies(33))
    resumed = train("killed")
    assert resumed.temperature == undisturbed.temperature
    assert torch.equal(resumed.net[0].weight, undisturbed.net[0].weight)
    assert_same_end(Path("undisturbed"), Path("killed"))


def test_steps_that_end_a_run_inside_an_epoch_leave_the_rest_of_it_to_a_longer_run(
    workplace: Path,
) -> None:
    fit("undisturbed", epochs=-1, max_steps=120)
    fit("longer", epochs=-1, max_steps=70)
    assert checkpoint(Path("longer/last.ckpt"))["global_step"] == 70
    fit("longer", epochs=-1, max_steps=120)
    assert_same_end(Path("undisturbed"), Path("longer"))


class StopsAfter(Callback):
    """Stops the run inside the validation behind a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_validation_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.daily(1)
@pytest.mark.parametrize("loads_late", [False, True])
def test_a_run_that_is_stopped_twice_in_its_last_validation_ends_as_if_it_were_not(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, loads_late: bool
) -> None:
    """FSDP and DeepSpeed load a checkpoint after the start-up hooks."""
    monkeypatch.setattr(SingleDeviceStrategy, "restore_checkpoint_after_setup", loads_late)
    flags = {"epochs": -1, "max_steps": 6, "val_check_interval": 3}
    fit("undisturbed", **flags)
    for _ in range(2):
        with pytest.raises(Stopped):
            fit("stopped", StopsAfter(6), **flags)
    fit("stopped", **flags)
    assert_same_end(Path("undisturbed"), Path("stopped"))
    longer = {**flags, "max_steps": 9}
    fit("undisturbed", **longer)
    fit("stopped", **longer)
    assert_same_end(Path("undisturbed"), Path("stopped"))


@pytest.mark.parametrize(
    ("before", "now", "is_told"),
    [
        ({"epochs": 2}, {"epochs": 1}, True),
        ({"epochs": -1, "max_steps": 8}, {"epochs": -1, "max_steps": 3}, True),
        ({"epochs": -1, "max_steps": 5}, {"epochs": -1, "max_steps": 5}, False),
        ({"epochs": 1}, {"epochs": 1}, False),
    ],
    ids=["fewer epochs", "fewer steps", "the same steps", "the same epochs"],
)
def test_where_a_checkpoint_is_ahead_it_is_said_what_a_longer_fit_needs(
    workplace: Path,
    capsys: pytest.CaptureFixture[str],
    before: dict[str, Any],
    now: dict[str, Any],
    is_told: bool,
) -> None:
    """A script trains a Trainer twice, and was killed in the second, longer training."""
    with suppress(Stopped):
        fit("twice", StopsAfter(8), limit_train_batches=6, val_check_interval=2, **before)
    capsys.readouterr()
    fit("twice", limit_train_batches=6, val_check_interval=2, **now)
    assert ("ckpt_path=keep.resume_from" in "".join(capsys.readouterr())) is is_told


class StreamOfRows(IterableDataset[Any]):
    """Twelve samples, and no state: no run can start inside its epochs."""

    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(3)
        for _ in range(12):
            yield torch.randn(4, generator=generator), torch.randn(1, generator=generator)


class ReadsAStream(Regression):
    def train_dataloader(self) -> Any:
        return DataLoader(StreamOfRows(), batch_size=2)


def test_a_stop_from_which_no_run_resumes_says_where_it_resumes(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(stop: int) -> str:
        with pytest.raises(Stopped):
            fit("stream", AsksToStop(stop), make=ReadsAStream)
        (line,) = [
            each for each in "".join(capsys.readouterr()).splitlines() if "the run stops at" in each
        ]
        return line.partition("the run stops at step ")[2]

    assert told(1) == "2, from which it cannot resume: there is no last.ckpt yet."
    assert told(7) == (
        "8, from which it cannot resume: last.ckpt holds step 6, and a resume repeats the steps"
        " since."
    )
    assert told(7) == (
        "8, from which it cannot resume: last.ckpt is still the one that this start has found."
    )


class StopsBehindTheEnd(Callback):
    """Stops a script when nothing is left to train."""

    def on_fit_end(self, trainer: Trainer, pl_module: Any) -> None:
        signal.raise_signal(signal.SIGTERM)


def test_a_signal_behind_the_last_step_is_not_lost(workplace: Path) -> None:
    fit("undisturbed", limit_train_batches=6)
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Stopped):
        fit("stopped", StopsBehindTheEnd(), limit_train_batches=6)
    assert signal.getsignal(signal.SIGTERM) is handler
    assert_same_end(Path("undisturbed"), Path("stopped"))
    fit("stopped", limit_train_batches=6)


class BestInTheMiddle(Regression):
    """Is best after its second epoch."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", abs(self.current_epoch - 1.0))


class FillsTheDisk(Callback):
    """Lets no checkpoint be written for some steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full = False
        self.refused: list[str] = []
        write = AtomicCheckpointIO.write

        def refuse_for_a_while(io: Any, contents: dict[str, Any], path: Path) -> None:
            if self.is_full:
                self.refused.append(path.name)
                raise NotWritten("the disk is full.")
            write(io, contents, path)

        monkeypatch.setattr(AtomicCheckpointIO, "write", refuse_for_a_while)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.is_full = 10 < trainer.global_step < 16


@pytest.mark.daily(1)
@pytest.mark.parametrize("size", [0, 2**30], ids=["in the background", "at once"])
def test_a_best_that_the_disk_did_not_take_is_written_when_it_does(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(run_files, "WRITTEN_AT_ONCE", size)
    flags: dict[str, Any] = {"epochs": 4, "limit_train_batches": 6, "make": BestInTheMiddle}
    fit("undisturbed", **flags)
    disk = FillsTheDisk(monkeypatch)
    assert fit("full", disk, **flags).best.epoch == 1
    assert "best.ckpt" in disk.refused
    assert_same_end(Path("undisturbed"), Path("full"))
    best = [checkpoint(Path(run, "best.ckpt")) for run in ("undisturbed", "full")]
    for key in ("state_dict", "optimizer_states", "loops"):
        assert differences(best[0][key], best[1][key], key) == []


class StopsInEpoch(Callback):
    """Stops the second epoch before a batch."""

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, number: int) -> None:
        if (trainer.current_epoch, number) == (1, 13):
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.nightly
def test_a_run_that_is_stopped_behind_an_epochs_last_validation_counts_those_of_the_next_alike(
    workplace: Path,
) -> None:
    flags = {"epochs": 3, "limit_train_batches": 15, "val_check_interval": 4}
    flags |= {"limit_val_batches": 3, "reload_dataloaders_every_n_epochs": 1}
    fit("undisturbed", **flags)
    with pytest.raises(Stopped):
        fit("stopped", StopsInEpoch(), **flags)
    fit("stopped", **flags)
    assert_same_end(Path("undisturbed"), Path("stopped"))


class Halves(Regression):
    """Lowers its rate as each epoch begins, and empties the optimizer's state."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch > 0:
            for group in self.optimizers().param_groups:
                group["lr"] *= 0.5
            self.optimizers().optimizer.state.clear()


class Queues(Regression):
    """Trains with a buffer that its state dict leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(16), persistent=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx) + self.queue.mean()
        self.queue = torch.cat([self.queue[4:], batch[1].detach().flatten()])
        return loss * (1 + self.queue.mean()) ** 2


@pytest.mark.daily(1)
@pytest.mark.parametrize("kind", [Halves, Queues])
def test_what_a_hook_does_at_an_epochs_start_and_what_no_state_dict_holds_come_back(
    workplace: Path, kind: type[Regression]
) -> None:
    def train(folder: str, *further: Callback) -> Regression:
        seed_everything(7, verbose=False)
        keep = ExactCheckpoint(folder, every="5")
        module = kind()
        trainer = Trainer(
            max_epochs=3, accelerator="cpu", callbacks=[keep, *further], logger=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, ckpt_path=keep.resume_from)
        return module

    train("undisturbed")
    for step in (63, 78, 128):
        with pytest.raises(RuntimeError, match="died"):
            train("killed", Dies(step))
    train("killed")
    assert_same_end(Path("undisturbed"), Path("killed"))


# Mistakes and habits of the user's own hooks


class Named(Regression):
    """Sets an entry of a checkpoint that is this project's."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["run"] = "the id of a tracker's run"


def test_data_that_a_loader_draws_are_the_same_in_a_plain_trainer_and_in_a_resumed_run(
    workplace: Path,
) -> None:
    drawn: list[Tensor] = []

    class Draws(Regression):
        def train_dataloader(self) -> DataLoader[Any]:
            drawn.append(torch.randn(24, 4))
            data = list(zip(drawn[-1], drawn[-1].sum(1, keepdim=True), strict=True))
            return DataLoader(data, 4, shuffle=True)

    for is_kept in (False, True, True):
        seed_everything(7, verbose=False)
        keep = ExactCheckpoint("run", every="2", monitor="val_loss", mode="min")
        trainer = Trainer(
            max_epochs=len(drawn) + 1,
            accelerator="cpu",
            callbacks=[keep] if is_kept else [],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Draws(), ckpt_path=keep.resume_from)
    plain, *kept = drawn
    assert all(torch.equal(plain, each) for each in kept)


def test_an_entry_that_is_ours_is_refused_at_the_first_save(workplace: Path) -> None:
    with pytest.raises(UserError, match="a checkpoint's entry 'run' is this project's"):
        fit("r", make=Named)
    assert not Path("r/last.ckpt").exists()


class Mistaken(Regression):
    """Has a mistake in a hook that is called as a checkpoint is saved."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["count"] = len(None)  # type: ignore[arg-type]


def test_a_mistake_in_a_hook_of_a_save_keeps_its_traceback(workplace: Path) -> None:
    with pytest.raises(TypeError, match="has no len"):
        fit("r", make=Mistaken)


class LooksAround(Regression):
    """Counts its starts, and looks at entries of Lightning's when it loads the count."""

    looks_at = ("epoch", "global_step")

    def __init__(self) -> None:
        super().__init__()
        self.helper = {"starts": object()}
        self.starts = torch.zeros(())

    def on_train_start(self) -> None:
        self.starts = self.starts + 1

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["starts"] = self.starts

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert all(name in checkpoint for name in self.looks_at)
        self.starts = checkpoint["starts"]


class LooksAtWeights(LooksAround):
    looks_at = ("state_dict",)


@pytest.mark.daily(1)
@pytest.mark.parametrize("make", [LooksAround, LooksAtWeights])
def test_a_hook_of_a_load_that_looks_at_lightnings_entries_ends_no_resume(
    workplace: Path, make: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RuntimeError, match="died"):
        fit("r", Dies(33), make=make)
    fit("r", make=make)
    is_told = "not exact: on_load_checkpoint of LooksAtWeights" in capsys.readouterr().out
    assert is_told == (make is LooksAtWeights)
    # Where the hook cannot be called alone, the start of the resumed run is counted, too.
    expected = 2 if is_told else 1
    assert float(checkpoint(Path("r/last.ckpt"))["starts"]) == expected


def test_a_second_training_with_one_callback_has_a_best_of_its_own(workplace: Path) -> None:
    keep = ExactCheckpoint("r", monitor="val_loss", mode="min")
    flags: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "accelerator": "cpu"}
    logged: list[float] = []

    class Notes(Callback):
        def on_validation_end(self, trainer: Trainer, module: Any) -> None:
            logged.append(float(trainer.callback_metrics["val_loss"]))

    for epochs in (3, 1):
        logged.clear()
        trainer = Trainer(
            max_epochs=epochs, callbacks=[keep, Notes()], num_sanity_val_steps=0, **flags
        )
        trainer.fit(Regression())
        assert len(logged) == epochs
        assert keep.best.score == min(logged)
        saved = checkpoint(Path("r/best.ckpt"))["callbacks"]["ExactCheckpoint"]
        assert saved["score"] == keep.best.score


def test_a_training_that_replaces_another_says_so_and_how_to_go_on(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep = fit("r", epochs=1, limit_train_batches=3)
    fit("r", epochs=2, limit_train_batches=3)
    assert "starts anew" not in capsys.readouterr().out
    flags: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = Trainer(max_epochs=1, callbacks=[keep], limit_train_batches=3, **flags)
    trainer.fit(Regression())
    told = capsys.readouterr().out
    assert f"{workplace / 'r'} holds an earlier training, and this one starts anew" in told
    assert "ckpt_path=keep.resume_from" in told
    # The same Trainer trains longer.
    trainer.fit_loop.max_epochs = 2
    trainer.fit(trainer.lightning_module)
    assert trainer.global_step == 6
    assert "starts anew" not in capsys.readouterr().out


def test_a_checkpoint_that_a_script_saves_after_its_training_begins_the_next_epoch(
    workplace: Path,
) -> None:
    flags: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "accelerator": "cpu"}
    flags |= {"enable_model_summary": False, "limit_train_batches": 3}
    first = Trainer(max_epochs=1, callbacks=[ExactCheckpoint("r")], **flags)
    first.fit(Regression())
    first.save_checkpoint("own.ckpt", weights_only=False)
    longer = Trainer(max_epochs=2, callbacks=[ExactCheckpoint("s")], **flags)
    longer.fit(Regression(), ckpt_path="own.ckpt")
    assert longer.global_step == 6


@pytest.mark.parametrize("batches", [True, 2])
def test_a_rehearsal_leaves_the_folder_as_it_is(workplace: Path, batches: bool | int) -> None:
    """Else the next start would go on from an epoch that has had one batch."""
    keep = fit("new", fast_dev_run=batches)
    assert keep.resume_from is None
    assert not Path("new").exists()
    fit("old", epochs=1, limit_train_batches=1)
    saved = {path.name: path.read_bytes() for path in Path("old").iterdir()}
    again = fit("old", fast_dev_run=batches)
    assert again.best_model_path
    trainer = Trainer(fast_dev_run=batches, accelerator="cpu", callbacks=[again])
    trainer.fit(Regression())
    assert {path.name: path.read_bytes() for path in Path("old").iterdir()} == saved


def test_where_nothing_is_saved_no_file_of_the_working_folder_is_taken_for_ours(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = fit("r", epochs=1)
    shutil.copy("r/best.ckpt", "best.ckpt")
    keep = ExactCheckpoint(None)
    assert (keep.resume_from, keep.best_model_path, keep.last_model_path) == (None, "", "")
    trainer = Trainer(
        max_epochs=2, accelerator="cpu", callbacks=[keep], logger=False, enable_progress_bar=False
    )
    trainer.fit(Regression(), ckpt_path=first.last_model_path)
    assert keep.best.score is not None
    assert Path("best.ckpt").exists()
    told = capsys.readouterr().out
    assert "is missing" not in told
    assert "set aside" not in told


class AsksForAQueue(Regression):
    """Gets SLURM's signal in the first batch of a validation."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        os.kill(os.getpid(), self.number)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGHUP])
def test_slurms_signal_in_the_first_validation_queues_the_job_again(
    number: int, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queued: list[int] = []
    monkeypatch.setattr(ending, "requeue_job", lambda: queued.append(1))
    before = signal.getsignal(number)
    keep = ExactCheckpoint("r", requeue_signal=number)
    trainer = Trainer(
        max_epochs=1, accelerator="cpu", callbacks=[keep], logger=False, enable_progress_bar=False
    )
    with pytest.raises(Stopped) as stopped:
        trainer.fit(AsksForAQueue(number))
    assert stopped.value.code == 143
    assert queued == [1]
    assert signal.getsignal(number) == before


class StreamsAndAsks(AsksForAQueue):
    """Nothing is saved inside its epochs."""

    def train_dataloader(self) -> Any:
        return DataLoader(StreamOfRows(), 4)


@pytest.mark.parametrize(("make", "expected"), [(AsksForAQueue, [0]), (StreamsAndAsks, [])])
def test_a_queued_script_resumes_its_own_training_and_none_of_before(
    make: Any, expected: list[int], workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending, "requeue_job", lambda: None)
    fit("r")
    keep = ExactCheckpoint("r", requeue_signal=signal.SIGUSR1)
    trainer = Trainer(max_epochs=1, accelerator="cpu", callbacks=[keep], logger=False)
    with pytest.raises(Stopped):
        trainer.fit(make(signal.SIGUSR1))
    # Where nothing of this training is saved yet, the queued script starts anew, as this one did.
    found = [checkpoint(path)["global_step"] for path in Path().rglob("hpc_ckpt_*")]
    assert found == expected


def test_a_stop_is_saved_where_the_program_has_closed_its_streams(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("stdout", "stderr"):
        with Path(name).open("w") as closed:
            monkeypatch.setattr(sys, name, closed)
    with pytest.raises(Stopped):
        fit("r", AsksToStop(7))
    assert checkpoint(Path("r/last.ckpt"))["global_step"] == 8


class Stateless(LightningDataModule):
    """Its state_dict returns nothing, which Lightning accepts."""

    def train_dataloader(self) -> Any:
        return Regression().train_dataloader()

    def val_dataloader(self) -> Any:
        return Regression().val_dataloader()

    def state_dict(self) -> Any:
        return None


class StopsInValidation(Callback):
    """Sends this process SIGTERM in the first validation."""

    def on_validation_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_data_module_without_a_state_is_stopped_in_a_validation(workplace: Path) -> None:
    keep = ExactCheckpoint("r", monitor="val_loss")
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        callbacks=[keep, StopsInValidation()],
        logger=False,
        enable_progress_bar=False,
    )
    with pytest.raises(Stopped):
        trainer.fit(Regression(), datamodule=Stateless())
    assert checkpoint(Path("r/last.ckpt"))["run"]["state"]["place"] == "validation"


class Count:
    """Is not looked into, since it has no dictionary."""

    __slots__ = ("entries",)

    def __init__(self) -> None:
        self.entries: dict[str, int] = {}

    def add(self, name: str) -> None:
        self.entries[name] = self.entries.get(name, 0) + 1


class CountedData(Stateless):
    """Has an empty state until the first validation."""

    def __init__(self) -> None:
        super().__init__()
        self.count = Count()

    def state_dict(self) -> Any:
        return dict(self.count.entries)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count.entries = dict(state)


class CountsValidated(Callback):
    """Counts the batches of validations, itself and in the data module."""

    def __init__(self) -> None:
        self.count = Count()

    def on_validation_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self.count.add("batches")
        trainer.datamodule.count.add("batches")  # type: ignore[attr-defined]

    def on_validation_end(self, *_: Any) -> None:
        self.count.add("validations")

    def state_dict(self) -> dict[str, Any]:
        return dict(self.count.entries)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count.entries = dict(state_dict)


def test_a_stop_in_the_first_validation_saves_states_that_were_empty_before_it(
    workplace: Path,
) -> None:
    def ended(folder: str, *callbacks: Callback) -> list[dict[str, int]]:
        keep, counts, data = ExactCheckpoint(folder), CountsValidated(), CountedData()
        trainer = Trainer(
            max_epochs=1,
            accelerator="cpu",
            callbacks=[counts, keep, *callbacks],
            logger=False,
            enable_progress_bar=False,
            num_sanity_val_steps=0,
        )
        trainer.fit(Regression(), datamodule=data, ckpt_path=keep.resume_from)
        return [counts.count.entries, data.count.entries]

    undisturbed = ended("undisturbed")
    assert undisturbed[1]["batches"] > 0
    with pytest.raises(Stopped):
        ended("stopped", StopsInValidation())
    assert ended("stopped") == undisturbed


class InTwoGroups(Regression):
    """Its first layer has a group of its own."""

    def configure_optimizers(self) -> Any:
        groups = [{"params": list(part.parameters())} for part in (self.net[0], self.net[2])]
        return torch.optim.SGD(groups, 0.01)


class TakesAGroupOut(Callback):
    """Takes the first of two groups out of the optimizer as the first validation starts."""

    def on_validation_start(self, trainer: Trainer, *_: Any) -> None:
        groups = trainer.optimizers[0].param_groups
        if len(groups) == 2 and not trainer.sanity_checking:
            del groups[0]


def test_a_stop_in_a_validation_saves_a_group_that_its_start_has_taken_out(workplace: Path) -> None:
    flags = {"epochs": 1, "limit_train_batches": 20, "val_check_interval": 10}
    fit("undisturbed", TakesAGroupOut(), make=InTwoGroups, **flags)
    with pytest.raises(Stopped):
        fit("stopped", TakesAGroupOut(), StopsInValidation(), make=InTwoGroups, **flags)
    fit("stopped", TakesAGroupOut(), make=InTwoGroups, **flags)
    assert_same_end(Path("undisturbed"), Path("stopped"))


class NotesSamples(Regression):
    """Trains on a loader that has a state, and notes what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[list[float]] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.noted.append(batch[0].flatten().tolist())
        return self.net(batch[0]).square().mean()

    def train_dataloader(self) -> Any:
        return LoaderWithState()


def test_which_samples_an_epoch_begins_with_does_not_depend_on_whether_one_was_saved(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A large state is not saved after every short epoch.
    monkeypatch.setattr(run_files, "WRITTEN_AT_ONCE", 0)

    def trained(folder: str | None) -> list[list[float]]:
        module = NotesSamples()
        limits = {"limit_train_batches": 4, "limit_val_batches": 0}
        trainer = Trainer(
            max_epochs=4, accelerator="cpu", callbacks=[ExactCheckpoint(folder)], logger=False,
            enable_progress_bar=False, enable_model_summary=False, **limits,
        )  # fmt: skip
        trainer.fit(module)
        return module.noted

    assert trained("r") == trained(None)


class DrawsAsItIsSaved(Regression):
    """Keeps samples of the moment in each checkpoint, as generative models do."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["samples"] = torch.randn(2, 4)


class DrawsAsItIsAsked(Callback):
    """Its state has a random number in it."""

    def state_dict(self) -> dict[str, Any]:
        return {"number": random.random()}


class Noisy(list[Any]):
    """Rows, each with noise that is drawn as it is asked for."""

    def __getitem__(self, place: Any) -> Any:
        x, y = super().__getitem__(place)
        return x + 0.1 * torch.randn(4), y


class ReadsNoisyRows(Regression):
    def train_dataloader(self) -> Any:
        return DataLoader(Noisy(rows(40, 0)), 4)


class DrawsFromItsOwn(Regression):
    """Chooses what is kept in a checkpoint by the generator of its augmentation."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (1 + self.generator.random())

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["shown"] = int(self.generator.integers(32))


class Shuffled(list[float]):
    """Gives its entries in an order by chance."""

    def __iter__(self) -> Iterator[float]:
        places = torch.randperm(len(self)).tolist()
        return iter([self[place] for place in places])


class HoldsShuffled(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.pool = Shuffled([1.0, 2.0, 3.0])


class BeginsAsItIsAsked:
    """As torchdata's loader: to ask for a state where no iteration is on begins one, which the next
    ``iter`` takes over. It cannot be copied, so nobody can try whether its state is exact.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.left: list[int] = []
        self.is_begun = False

    def begin(self) -> list[int]:
        self.left = torch.randperm(10).tolist()
        return self.left

    def __iter__(self) -> Iterator[Any]:
        left = self.left if self.is_begun else self.begin()
        self.is_begun = False
        while left:
            number = left.pop()
            yield torch.full((4, 4), number / 10), torch.full((4, 1), number / 10)

    def state_dict(self) -> dict[str, Any]:
        if not self.left:
            self.begin()
            self.is_begun = True
        return {"left": self.left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.left = state["left"]
        self.is_begun = True


class ReadsOneThatBegins(Regression):
    def train_dataloader(self) -> Any:
        return BeginsAsItIsAsked()


@pytest.mark.daily(1)
@pytest.mark.parametrize("limits", [{"max_epochs": 2}, {"max_steps": 13}], ids=["whole", "cut"])
@pytest.mark.parametrize(
    ("make", "further"),
    [
        (DrawsAsItIsSaved, []),
        (Regression, [DrawsAsItIsAsked]),
        (ReadsNoisyRows, []),
        (DrawsFromItsOwn, []),
        (HoldsShuffled, []),
        (ReadsOneThatBegins, []),
    ],
)
def test_what_a_save_asks_of_the_users_code_leaves_no_trace(
    make: Any, further: list[Any], limits: dict[str, int], workplace: Path
) -> None:
    """Random numbers that are drawn then are not those of the training."""

    def trained(folder: str | None, every: str) -> dict[str, Any]:
        seed_everything(7, verbose=False)
        keep = ExactCheckpoint(folder, monitor="val_loss", every=every)
        trainer = Trainer(
            accelerator="cpu", callbacks=[keep, *(kind() for kind in further)], logger=False,
            enable_progress_bar=False, enable_model_summary=False, limit_train_batches=10, **limits,
        )  # fmt: skip
        module = make()
        trainer.fit(module)
        return module.state_dict() | {"torch": torch.rand(1), "python": random.random()}

    often = trained("often", "1")
    assert is_same(often, trained("seldom", "1000000"))
    assert is_same(often, trained(None, "1"))


class MeanOfUpdates(Metric):
    """Counts its updates, as a mean of batch means does, and draws a random number in each."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), "sum")
        self.add_state("updates", torch.tensor(0), "sum")

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        self.total += (predictions - targets).square().mean() + torch.rand(())
        self.updates += 1

    def compute(self) -> Tensor:
        return self.total / self.updates


class Supervised(SupervisedModule):
    """Counts its training batches together, some at a time."""

    def __init__(self) -> None:
        net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
        super().__init__(net, loss="MSELoss", metrics={"updates": MeanOfUpdates()})

    def train_dataloader(self) -> Any:
        return DataLoader(rows(90, 0), 4, shuffle=True)


@pytest.mark.nightly
def test_which_batches_are_counted_together_does_not_depend_on_the_saves(workplace: Path) -> None:
    def trained(folder: str | None, every: str, *further: Callback) -> dict[str, Any]:
        seed_everything(7, verbose=False)
        keep = ExactCheckpoint(folder, every=every)
        module = Supervised()
        trainer = Trainer(
            accelerator="cpu", callbacks=[keep, *further], logger=False, max_epochs=2,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, ckpt_path=keep.resume_from)
        return {**module.state_dict(), "metric": trainer.callback_metrics["train/updates"]}

    never = trained(None, "1")
    assert is_same(trained("often", "1"), never)
    assert is_same(trained("seldom", "7"), never)
    with pytest.raises(RuntimeError, match="died"):
        trained("killed", "7", Dies(31))
    assert is_same(trained("killed", "7"), never)


class CountsAtTheEnd(Regression):
    """Adds to a metric that it has logged, before Lightning computes the epoch's value."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.update(1.0)
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.seen.update(100.0)


@pytest.mark.parametrize("folder", ["r", None])
def test_hooks_of_the_end_of_an_epoch_that_is_cut_still_add_to_a_metric(
    folder: str | None, workplace: Path
) -> None:
    trainer = Trainer(
        max_steps=5, accelerator="cpu", callbacks=[ExactCheckpoint(folder)], logger=False,
        enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(CountsAtTheEnd())
    assert trainer.callback_metrics["seen"] == 105


class EndsEarly(Callback):
    """Ends the training after a step, as a condition of one's own would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.should_stop = True


@pytest.mark.daily(1)
@pytest.mark.parametrize("step", [7, 50])
def test_a_stop_in_the_validation_that_an_early_end_has_asked_for_repeats_it(
    workplace: Path, step: int
) -> None:
    undisturbed = fit("whole", EndsEarly(step))
    with pytest.raises(Stopped):
        fit("stopped", EndsEarly(step), StopsInValidation())
    assert not Path("stopped/best.ckpt").exists()
    resumed = fit("stopped", EndsEarly(step))
    assert undisturbed.best_model_score == resumed.best_model_score
    for name in ("best.ckpt", "last.ckpt"):
        whole, stopped = (checkpoint(Path(folder, name)) for folder in ("whole", "stopped"))
        assert whole["global_step"] == stopped["global_step"] == step
        assert differences(whole["state_dict"], stopped["state_dict"], name) == []


VALIDATES = """
import sys
import threading
from lightning.pytorch import Trainer, seed_everything
from unbroken import ExactCheckpoint
from tests.plain_module import Regression

seed_everything(7, verbose=False)
trainer = Trainer(
    accelerator="cpu",
    devices=int(sys.argv[1]),
    callbacks=[ExactCheckpoint("r")],
    logger=False,
    enable_progress_bar=False,
)
(found,) = trainer.validate(Regression(), verbose=False)
if trainer.is_global_zero:
    print("val_loss", f"{found['val_loss']:.5f}")
"""


@pytest.mark.nightly
def test_two_ranks_validate_alone_what_one_does(workplace: Path) -> None:
    Path("validates.py").write_text(VALIDATES)
    told = []
    for devices in ("1", "2"):
        log = workplace / f"log{devices}.txt"
        process = start([sys.executable, "-u", "validates.py", devices], log)
        assert process.wait(timeout=120) == 0, log.read_text()[-3000:]
        told.append(re.findall("val_loss .*", log.read_text()))
    assert told[0] == told[1]
    assert len(told[0]) == 1


DISAGREES = """
import os
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from torch.utils.data import DataLoader, Dataset
from unbroken import ExactCheckpoint
from tests.plain_module import Dies, Regression, rows


class Numbered(Dataset):
    rows = rows(40, 0)

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return (*self.rows[index], index)


class Disagrees(Regression):
    '''Its ranks have other seeds, other values to follow, and a transposed buffer.'''

    def __init__(self):
        super().__init__()
        self.register_buffer("turned", torch.arange(6.0).view(2, 3).t())
        self.trained = []

    def train_dataloader(self):
        return DataLoader(Numbered(), 4, shuffle=True)

    def training_step(self, batch, batch_idx):
        self.trained += batch[2].tolist()
        return super().training_step(batch[:2], batch_idx)

    def validation_step(self, batch, batch_idx):
        self.loss(batch)

    def on_validation_epoch_end(self):
        turn = (self.global_step + self.global_rank) % 2
        self.log("val_loss", float(turn))

    def on_train_epoch_end(self):
        found = [None, None]
        torch.distributed.all_gather_object(found, self.trained)
        assert sorted(found[0] + found[1]) == list(range(40)), found
        self.trained.clear()


class LogsSteps(Callback):
    def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx):
        module.log("seen", float(batch_idx), on_step=True, on_epoch=False)


rank = int(os.environ.get("LOCAL_RANK", "0"))
seed_everything(42 + rank, verbose=False)
trainer = Trainer(
    max_epochs=2,
    val_check_interval=2,
    accelerator="cpu",
    devices=2,
    callbacks=[ExactCheckpoint("r", monitor="val_loss", mode="min"), LogsSteps()],
    logger=False,
    enable_progress_bar=False,
)
trainer.fit(Disagrees())
"""


@pytest.mark.nightly
def test_two_ranks_that_disagree_about_seeds_and_the_best_train_to_the_end(workplace: Path) -> None:
    Path("disagrees.py").write_text(DISAGREES)
    log = workplace / "log.txt"
    process = start([sys.executable, "-u", "disagrees.py"], log)
    assert process.wait(timeout=120) == 0, log.read_text()[-3000:]
    assert checkpoint(Path("r/best.ckpt"))["callbacks"]["ExactCheckpoint"]["score"] == 0


class Fresh(Regression):
    """Shuffles by the seed of its start, and notes which samples a batch holds."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.sums.append(float(batch[0].sum()))
        return super().training_step(batch, batch_idx)


def test_a_script_that_seeds_each_start_anew_reads_each_sample_once(
    workplace: Path,
) -> None:
    read_by: list[list[float]] = []
    for seed, dies in ((7, [Dies(33)]), (8, [])):
        seed_everything(seed, verbose=False)
        keep = ExactCheckpoint("r", monitor="val_loss", mode="min", every="5")
        module = Fresh()
        trainer = Trainer(
            max_epochs=1,
            accelerator="cpu",
            callbacks=[keep, *dies],
            logger=False,
            enable_progress_bar=False,
        )
        with pytest.raises(RuntimeError, match="died") if dies else nullcontext():
            trainer.fit(module, ckpt_path=keep.resume_from)
        read_by.append(module.sums)
    # The attribute comes back: the second part holds all of the epoch.
    assert len(read_by[1]) == 50
    assert len(set(read_by[1])) == 50
    assert sum(read_by[1]) == pytest.approx(float(rows(200, 0).tensors[0].sum()), abs=1e-3)


class WithOwnGenerator(Regression):
    """Draws its noise from the generator that its loader and a weighted sampler have."""

    def __init__(self, seed: int = 3, workers: int = 0) -> None:
        super().__init__(workers)
        self.draw = torch.Generator().manual_seed(seed)
        self.seen: list[list[float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        noise = torch.rand(1, generator=self.draw)
        self.seen.append([*batch[0][:, 0].tolist(), float(noise)])
        return super().training_step(batch, batch_idx) + noise.sum() * self.net[0].weight.sum()

    def train_dataloader(self) -> DataLoader[Any]:
        sampler = WeightedRandomSampler([1.0] * 60, 60, generator=self.draw)
        return DataLoader(
            rows(60, 0), 4, sampler=sampler, num_workers=self.workers, generator=self.draw
        )


class Augmented(Dataset[Any]):
    """Rows with random numbers."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> list[Tensor]:
        return [torch.rand(4), torch.tensor([float(index)])]


class Augments(Regression):
    """Notes the order and the draws of its samples."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[float] = []
        self.drawn: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.order += batch[1].flatten().tolist()
        self.drawn += batch[0].flatten().tolist()
        return super().training_step(batch, batch_idx)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Augmented(), 4, shuffle=True)


def fit_unseeded(module: Any, folder: str, *further: Callback) -> Any:
    """What a script does that calls no ``seed_everything``."""
    keep = ExactCheckpoint(folder, monitor="val_loss", mode="min", every="5")
    flags: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(
        max_epochs=2, accelerator="cpu", callbacks=[keep, *further], logger=False, **flags
    )
    trainer.fit(module, ckpt_path=keep.resume_from)
    return module


@pytest.mark.daily(1)
@pytest.mark.parametrize("is_recorded", [False, True])
def test_order_and_draws_follow_torchs_generator_as_in_a_plain_trainer(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, is_recorded: bool
) -> None:
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    if is_recorded:
        # What a script does that calls seed_everything once.
        monkeypatch.setenv("PL_GLOBAL_SEED", "1")
    torch.manual_seed(1)
    # The modules draw as they are made. So they are made once: only loaders draw in between.
    module = Augments()
    again = copy.deepcopy(module)
    after = torch.get_rng_state()
    first = fit_unseeded(copy.deepcopy(module), "first")
    second = fit_unseeded(copy.deepcopy(module), "second")
    assert first.order != second.order
    assert not {*first.drawn} & {*second.drawn}
    torch.set_rng_state(after)
    repeated = fit_unseeded(again, "repeated")
    assert (repeated.order, repeated.drawn) == (first.order, first.drawn)
    assert sorted(first.order) == sorted([*map(float, range(24))] * 2)


def test_an_unseeded_run_that_dies_goes_on_with_the_seed_that_was_drawn(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(1)
    undisturbed = fit_unseeded(Augments(), "undisturbed")
    torch.manual_seed(1)
    with pytest.raises(RuntimeError, match="died"):
        fit_unseeded(Augments(), "killed", Dies(8))
    torch.manual_seed(2)
    resumed = fit_unseeded(Augments(), "killed")
    assert (resumed.order, resumed.drawn) == (undisturbed.order, undisturbed.drawn)
    assert_same_end(Path("undisturbed"), Path("killed"))
    assert "seed" not in capsys.readouterr().out


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.nightly)])
def test_a_loaders_own_generator_decides_the_order_and_keeps_its_place(
    workplace: Path, workers: int
) -> None:
    def make(seed: int, of_torch: int = 0) -> WithOwnGenerator:
        torch.manual_seed(of_torch)
        return WithOwnGenerator(seed, workers)

    def order(module: WithOwnGenerator) -> list[list[float]]:
        return [batch[:4] for batch in module.seen]

    undisturbed = fit_unseeded(make(3), "undisturbed")
    assert order(fit_unseeded(make(3, of_torch=1), "same")) == order(undisturbed)
    assert order(fit_unseeded(make(4), "another")) != order(undisturbed)
    with pytest.raises(RuntimeError, match="died"):
        fit_unseeded(make(3), "killed", Dies(8))
    # It may be another generator by now: the checkpoint has the place of the one that was saved.
    resumed = fit_unseeded(make(5), "killed")
    assert resumed.seen == undisturbed.seen
    assert_same_end(Path("undisturbed"), Path("killed"))


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        (False, "the order of samples stays that of the checkpoint's seed, 1"),
        (True, "the order of samples is that of seed 2 from here"),
    ],
)
def test_another_seed_inside_an_epoch_is_told(
    workplace: Path, capsys: pytest.CaptureFixture[str], changed: bool, line: str
) -> None:
    def train(seed: int, *further: Callback, **options: Any) -> None:
        keep = ExactCheckpoint("run", every="5", seed=seed, **options)
        trainer = Trainer(
            max_epochs=1, accelerator="cpu", callbacks=[keep, *further], logger=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(Regression(), ckpt_path=keep.resume_from)

    with pytest.raises(RuntimeError, match="died"):
        train(1, Dies(8))
    train(2, changed=changed)
    assert capsys.readouterr().out.count(line) == 1


class Improves(Regression):
    """Is better with each epoch."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", -float(self.current_epoch))


class Worse(Regression):
    """Is worse than that, and worse with each epoch."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", 5 + float(self.current_epoch))


def test_a_best_that_is_ahead_of_the_state_is_looked_for_anew(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit("r", epochs=1, make=Improves)
    shutil.copy("r/last.ckpt", "before.ckpt")
    fit("r", epochs=2, make=Improves)
    shutil.copy("before.ckpt", "r/last.ckpt")
    keep = fit("r", epochs=2, make=Worse)
    assert "best.ckpt is ahead of the checkpoint: the best is looked for anew." in (
        capsys.readouterr().out
    )
    saved = checkpoint(Path("r/best.ckpt"))["callbacks"]["ExactCheckpoint"]
    assert (saved["score"], saved["epoch"]) == (6, 1)
    assert keep.best.score == 6


class RaisesAtAnError(Callback):
    """Cannot clean up, and Lightning calls no further callback."""

    def on_exception(self, *_: Any) -> None:
        raise RuntimeError("cannot clean up")


def test_a_script_has_its_signals_again_where_another_callback_fails_at_an_error(
    workplace: Path,
) -> None:
    before = signal.getsignal(signal.SIGINT)
    callbacks = [RaisesAtAnError(), Dies(3), ExactCheckpoint("r", every="1")]
    trainer = Trainer(
        accelerator="cpu", callbacks=callbacks, logger=False, max_epochs=1,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="cannot clean up"):
        trainer.fit(Regression())
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    # The folder is free again: another object trains on in it.
    keep = fit("r", epochs=1, make=Regression)
    assert keep.saved_step == 50


class CountsSteps(Callback):
    """Notes the steps by which Lightning logs, and those that the optimizer has made."""

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.found = (trainer.fit_loop.epoch_loop._batches_that_stepped, trainer.global_step)


@pytest.mark.nightly
def test_steps_are_counted_alike_where_validations_come_at_other_moments(workplace: Path) -> None:
    with pytest.raises(RuntimeError, match="died"):
        fit("r", Dies(33), val_check_interval=10)
    counts = CountsSteps()
    fit("r", counts, val_check_interval=7)
    assert counts.found == (100, 100)


class Pauses(Callback):
    """Has a method of its own whose name a monitor might have."""

    def pause(self) -> None:
        raise AssertionError("called by a stranger")


def test_a_callbacks_own_pause_is_left_alone(workplace: Path) -> None:
    assert fit("r", Pauses(), epochs=1).best.score is not None


class CallsItsOwnHooks(Callback):
    """Calls a hook of its own that is empty, and wraps another one once training has begun."""

    def on_train_start(self, *_: Any) -> None:
        self.on_after_backward = Mock(wraps=self.on_after_backward)  # type: ignore[method-assign]

    def on_train_batch_end(self, *args: Any) -> None:
        self.on_train_batch_start(*args[:2], *args[-2:])


def test_a_steps_hooks_that_do_nothing_are_not_called_by_lightning_and_stay_what_they_are(
    workplace: Path,
) -> None:
    calls = CallsItsOwnHooks()
    profiler = SimpleProfiler()
    fit("r", calls, epochs=1, profiler=profiler)
    of_batches = {hook.__name__ for hook in EMPTY_HOOKS}
    found = {
        hook
        for hook in of_batches
        if f"[Callback]CallsItsOwnHooks.{hook}" in profiler.recorded_durations
    }
    assert found == {"on_train_batch_end", "on_after_backward"}
    assert calls.on_after_backward.call_count == 50


class MadeInSetup(Regression):
    """Makes its layers where Lightning has yet to give them the run's precision."""

    def __init__(self) -> None:
        super().__init__()
        del self.net

    def setup(self, stage: str) -> None:
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))


@pytest.mark.daily(1)
@pytest.mark.parametrize(
    ("make", "precision"),
    [
        (MadeInSetup, "64-true"),
        # Adam's smallest number is zero there, so that the weights are soon not a number.
        (Regression, "16-true"),
    ],
)
def test_weights_come_back_in_the_runs_own_precision(
    make: Any, precision: str, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit("undisturbed", make=make, epochs=1, precision=precision)
    with pytest.raises(RuntimeError, match="died"):
        fit("killed", Dies(11), make=make, epochs=1, precision=precision)
    fit("killed", make=make, epochs=1, precision=precision)
    ends = [checkpoint(Path(run, "last.ckpt"))["state_dict"] for run in ("undisturbed", "killed")]
    assert is_same(*ends)
    assert "not what was saved" not in capsys.readouterr().out


class Optimizes(Regression):
    """Makes an optimizer of the class that it is given."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind = kind

    def configure_optimizers(self) -> Any:
        return self.kind(self.parameters(), 0.01)


def test_an_optimizer_that_cannot_take_the_saved_state_is_refused_before_a_file_is_changed(
    workplace: Path,
) -> None:
    with pytest.raises(RuntimeError, match="died"):
        fit("r", Dies(11), make=lambda: Optimizes(torch.optim.AdamW), epochs=1)
    before = {path: path.read_bytes() for path in Path("r").glob("*.*")}
    for other in (torch.optim.SGD, torch.optim.Adamax):
        told = "holds the state of torch.optim.adamw.AdamW, .* cannot take it. Make the optimizer"
        with pytest.raises(UserError, match=told):
            fit("r", make=lambda kind=other: Optimizes(kind), epochs=1)
    assert {path: path.read_bytes() for path in Path("r").glob("*.*")} == before
    # Its state and its options have the same names.
    fit("r", make=lambda: Optimizes(torch.optim.Adam), epochs=1)
    assert checkpoint(Path("r/last.ckpt"))["global_step"] == 50


class LetsTheStateGo(Optimizes):
    """Wants no state of an optimizer from a checkpoint."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["optimizer_states"] = []


def test_another_optimizer_trains_on_where_nothing_of_the_saved_state_is_loaded(
    workplace: Path,
) -> None:
    with pytest.raises(RuntimeError, match="died"):
        fit("r", Dies(11), make=lambda: Optimizes(torch.optim.AdamW), epochs=1)
    fit("r", make=lambda: LetsTheStateGo(torch.optim.SGD), epochs=1)
    assert checkpoint(Path("r/last.ckpt"))["global_step"] == 50


class NotesTheSanityCheck(Regression):
    """Notes how long the Trainer's sanity check is, as each step of its training reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[float] = set()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.found.add(self.trainer.num_sanity_val_steps)


def test_a_resumed_run_reads_the_trainers_own_length_of_the_sanity_check(workplace: Path) -> None:
    with pytest.raises(RuntimeError, match="died"):
        fit("r", Dies(6), epochs=1, num_sanity_val_steps=1)
    resumed = NotesTheSanityCheck()
    fit("r", make=lambda: resumed, epochs=1, num_sanity_val_steps=1)
    assert resumed.found == {1}


def test_the_table_of_hooks_names_each_hook_that_is_there() -> None:
    rows = [line for line in str(Hooks.__doc__).splitlines() if line.strip().startswith("| ")]
    told = {name for row in rows for name in re.findall(r"on_\w+", row.split("|")[1])}
    assert told == {name for name in vars(Hooks) if name.startswith("on_")}
