"""Modules, callbacks and flags of all kinds, interrupted in validation, in the test and between two
epochs.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torchmetrics
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from numerals.fit import job as fit
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Sampler,
    TensorDataset,
    random_split,
)
from unbroken import run_folder
from unbroken.checkpoint.following import Best
from unbroken.cli import start as entry
from unbroken.commands.test import main
from unbroken.loading import RunLoaders
from unbroken.run_folder import RunFolder as Run
from unbroken.stopping import signals

from tests.commands import (
    MEASURING,
    add_callbacks,
    assert_same_run,
    checkpoint,
    rows,
    run_ranks,
    summary,
)
from tests.other_tasks import Noisy, table
from tests.stopped_runs import SHORT, end_run, error_of, resume, train

HERE = "tests.test_interrupted_tasks"  # as a run imports it


@pytest.fixture(autouse=True)
def _no_wandb(monkeypatch: pytest.MonkeyPatch, workplace: Path) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")


class Task(LightningModule):
    """A small regression with all its loaders, 13 batches an epoch; ``gamma`` of its schedule may
    be typed.
    """

    monitor, mode = "val_loss", "min"

    def __init__(self, lr: float = 0.02, gamma: float = 0.9) -> None:
        super().__init__()
        self.lr, self.gamma = lr, gamma
        self.net = nn.Sequential(
            nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.1), nn.Linear(6, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).squeeze(1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", nn.functional.mse_loss(self(batch[0]), batch[1]))

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test_loss", nn.functional.mse_loss(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), self.lr)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, self.gamma)]

    def train_dataloader(self) -> Any:
        return DataLoader(Noisy(table(101)), 8, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(table(53), 10)

    def test_dataloader(self) -> Any:
        return DataLoader(table(37), 10)


class RandomStream(IterableDataset[Any]):
    """Draws while it is read, in the main process; a loader draws for it, too."""

    def __iter__(self) -> Any:
        return ((x + 0.1 * torch.randn(4), y) for x, y in table(53))


class ValidatesOnAStream(Task):
    """Its author's code looks at the loader."""

    def val_dataloader(self) -> Any:
        return DataLoader(RandomStream(), 10)

    def on_validation_epoch_start(self) -> None:
        assert self.trainer.val_dataloaders.batch_size == 10  # type: ignore[union-attr]


class LogsValidationSteps(Task):
    """Two validation sets, with values of each step."""

    monitor = "val_loss_epoch/dataloader_idx_0"

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log(
            "val_loss",
            nn.functional.mse_loss(self(batch[0]), batch[1]),
            on_step=True,
            on_epoch=True,
        )

    def val_dataloader(self) -> Any:
        return [DataLoader(table(53), 10), DataLoader(table(21), 4)]


class Wrapped(Task):
    """Metrics that keep more than sums."""

    def __init__(self) -> None:
        super().__init__()
        self.running, self.range = (
            torchmetrics.RunningMean(5),
            torchmetrics.MinMaxMetric(torchmetrics.MeanMetric()),
        )
        self.tracker = torchmetrics.MetricTracker(torchmetrics.MeanSquaredError())

    def on_train_epoch_start(self) -> None:
        self.tracker.increment()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.running.update(loss.detach())
        self.tracker.update(self(batch[0]).detach(), batch[1])
        self.range.update(loss.detach())
        self.log("running", self.running.compute())
        self.log("lowest", self.range.compute()["min"])
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("best_epoch", float(self.tracker.best_metric(return_step=True)[1]))


class AddsToATrainingMetric(Task):
    """A value that was logged in training has its precision after a resume, too."""

    def on_validation_epoch_end(self) -> None:
        self.log("val_sum", torch.rand(()) + self.trainer.callback_metrics["train_loss_step"])


class Keeps:
    """Has a state of one value, the attribute that ``kept`` names."""

    kept = "count"

    def state_dict(self) -> dict[str, Any]:
        return {self.kept: getattr(self, self.kept)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        setattr(self, self.kept, state_dict[self.kept])


class CountsEpochs(Keeps, Callback):
    """A callback with a state that changes as an epoch begins."""

    epochs = 0
    kept = "epochs"

    def on_train_epoch_start(self, trainer: Any, pl_module: LightningModule) -> None:
        self.epochs += 1
        pl_module.log("counted", float(self.epochs))


class MadeLate(Task):
    """Makes its network late, as large ones are, and splits its data by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.net = None  # type: ignore[assignment]

    def setup(self, stage: str) -> None:
        self.parts = random_split(table(122), [101, 21])

    def configure_model(self) -> None:
        if self.net is None:
            self.net = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.1), nn.Linear(6, 1))

    def train_dataloader(self) -> Any:
        return DataLoader(self.parts[0], 8, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self.parts[1], 10)


class Grouped(Task):
    """Two metrics that share their sums."""

    def __init__(self) -> None:
        super().__init__()
        both = {
            "mse": torchmetrics.MeanSquaredError(),
            "rmse": torchmetrics.MeanSquaredError(squared=False),
        }
        self.errors = torchmetrics.MetricCollection(both)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.errors.update(self(batch[0]).detach(), batch[1])
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.log_dict(self.errors.compute())
        self.errors.reset()


class Centred(Task):
    """Follows the mean of its inputs as they arrive."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(4))

    def on_after_batch_transfer(self, batch: list[Tensor], dataloader_idx: int) -> list[Tensor]:
        if self.trainer.training:
            self.centre = 0.9 * self.centre + 0.1 * batch[0].mean(dim=0)
        return [batch[0] - self.centre, *batch[1:]]


class Follows(Task):
    """Follows its loss in a buffer, and never lets go of the graph within an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("followed", torch.zeros(()))

    def on_train_epoch_start(self) -> None:
        self.followed = self.followed.detach()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.followed = 0.9 * self.followed + 0.1 * loss
        return loss


class Rolls(Keeps, IterableDataset[Any]):
    """Rows with a length and a state, from the first to the last and again."""

    row = 0
    kept = "row"

    def __len__(self) -> int:
        return 80

    def __iter__(self) -> Any:
        while self.row < 80:
            self.row += 1
            yield table(80)[self.row - 1]
        self.row = 0


class SumsBatches(Task):
    """Logs which batch came."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.log("sum", batch[1].sum())
        return super().training_step(batch, batch_idx)


class GoesRound(SumsBatches):
    """Trains on a stream."""

    def train_dataloader(self) -> Any:
        return DataLoader(Rolls(), 8)


class Unsized:
    """Fills one tensor again and again, and does not tell how often."""

    def __iter__(self) -> Any:
        shared = torch.zeros(2)
        for number in range(20):
            yield [shared.fill_(float(number))]


class RefillsInValidation(Task):
    """Validates on such batches."""

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", batch[0].mean())

    def val_dataloader(self) -> Any:
        return Unsized()


class CountsValidations(Keeps, Callback):
    """A callback with a state that changes as a validation goes on."""

    counts = (0, 0)
    kept = "counts"

    def on_validation_start(self, trainer: Any, pl_module: LightningModule) -> None:
        self.counts = (self.counts[0] + 1, self.counts[1])

    def on_validation_batch_end(self, trainer: Any, *_: Any) -> None:
        self.counts = (self.counts[0], self.counts[1] + 1)


class CountsRows(Keeps, LightningDataModule):
    """Counts the rows that it handed out."""

    count = 0

    def train_dataloader(self) -> Any:
        return DataLoader(table(101), 8, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(table(53), 10)

    def test_dataloader(self) -> Any:
        return DataLoader(table(37), 10)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.count += len(batch[0]) if self.trainer.training else 0  # type: ignore[union-attr]
        return batch


class NotesANumber(Callback):
    """Puts a plain number among the logged values."""

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        trainer.callback_metrics["noted"] = 0.5


class Refills:
    """Gives its batches in the same tensors again and again, as some loaders of large arrays do."""

    def __init__(self, rows: int, size: int, shares: bool) -> None:
        self.shares = shares
        self.batches = [tuple(part) for part in DataLoader(table(rows), size)]
        self.shared = [torch.empty_like(part) for part in self.batches[0]]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        for batch in self.batches:
            for mine, part in zip(self.shared, batch, strict=True):
                mine.resize_(part.shape).copy_(part)
            yield self.shared if self.shares else batch


class RefilledBatches(Task):
    """Its loaders own the memory of their batches."""

    shares = True

    def train_dataloader(self) -> Any:
        return Refills(101, 8, self.shares)

    def val_dataloader(self) -> Any:
        return Refills(53, 10, self.shares)

    def test_dataloader(self) -> Any:
        return Refills(37, 10, self.shares)


class OwnBatches(RefilledBatches):
    """The same batches, each in memory of its own."""

    shares = False


class EndsItself(Task):
    """Ends the training as its own code finds right."""

    def on_train_epoch_end(self) -> None:
        self.trainer.should_stop = self.current_epoch == 1


class WithoutLoaders(Task):
    """Its data come from a data module."""

    train_dataloader, val_dataloader = (
        LightningModule.train_dataloader,
        LightningModule.val_dataloader,
    )
    test_dataloader = LightningModule.test_dataloader


class Interrupts(Callback):
    """Asks the run to stop, or dies, at the ``number``-th call of a hook."""

    def __init__(self, hook: str, number: int, dies: bool) -> None:
        self.left = number
        self.dies = dies
        setattr(self, hook, self.count)

    def count(self, *_: Any) -> None:
        self.left -= 1
        if self.left == 0:
            end_run(self.dies)


def interrupted(name: str, hook: str, number: int, dies: bool, *flags: str) -> None:
    """A run that ends at a hook."""
    with pytest.MonkeyPatch.context() as patch:
        add_callbacks(patch, Interrupts(hook, number, dies))
        try:
            assert entry.exit_code(fit.main, [*flags, "--run_name", name]) == (1 if dies else 143)
        finally:
            signals.state.requested = 0


def of(module: str, *flags: str) -> list[str]:
    return ["--model", f"{HERE}.{module}", "--data", "null", "--accelerator", "cpu", *SHORT, *flags]


EARLY = ["--trainer.callbacks", "EarlyStopping", "--trainer.callbacks.monitor", "train_loss"]
EARLY += [
    "--trainer.callbacks.patience",
    "1",
    "--trainer.callbacks.min_delta",
    "100",
    "--max_epochs",
    "6",
]
CASES: dict[str, tuple[list[str], str, int, bool]] = {
    "validation on a stream": (of("ValidatesOnAStream"), "on_validation_batch_start", 3, False),
    "steps of a validation": (of("LogsValidationSteps"), "on_validation_batch_start", 15, False),
    "between such validations": (
        of("LogsValidationSteps", "--val_check_interval", "5"),
        "on_train_batch_end",
        22,
        False,
    ),
    "wrapped metrics": (of("Wrapped", "--log_every_n_steps", "1"), "on_train_batch_end", 33, False),
    "wrapped metrics, a validation": (of("Wrapped"), "on_validation_batch_start", 8, False),
    "a metric's precision": (of("AddsToATrainingMetric"), "on_validation_batch_start", 8, False),
    "a callback's state": (
        of("Task", "--trainer.callbacks", f"{HERE}.CountsEpochs"),
        "on_train_batch_end",
        20,
        False,
    ),
    "a number that is no tensor": (
        of("Task", "--trainer.callbacks", f"{HERE}.NotesANumber"),
        "on_train_batch_end",
        20,
        False,
    ),
    "a network made late": (of("MadeLate"), "on_train_batch_end", 20, False),
    "metrics that share sums": (of("Grouped"), "on_train_batch_end", 20, False),
    "a buffer of a hook for batches": (of("Centred"), "on_train_batch_end", 20, False),
    "a buffer on a graph": (of("Follows"), "on_train_batch_end", 20, False),
    "a part of a stream, in training": (
        of("GoesRound", "--limit_train_batches", "6"),
        "on_train_batch_end",
        9,
        False,
    ),
    "a part of a stream, in validation": (
        of("GoesRound", "--limit_train_batches", "5"),
        "on_validation_batch_end",
        8,
        False,
    ),
    "a callback's state in validation": (
        of("Task", "--trainer.callbacks", f"{HERE}.CountsValidations"),
        "on_validation_batch_end",
        8,
        False,
    ),
    "a data module's state": (
        [
            "--model",
            f"{HERE}.WithoutLoaders",
            "--data",
            f"{HERE}.CountsRows",
            "--accelerator",
            "cpu",
            *SHORT,
        ],
        "on_train_batch_end",
        20,
        False,
    ),
    "double precision": (of("Task", "--precision", "64-true"), "on_train_batch_end", 20, False),
    "steps, between epochs": (of("Task", "--max_steps", "24"), "on_train_epoch_start", 2, True),
    "steps, in the last validation": (
        of("Task", "--max_steps", "26"),
        "on_validation_batch_start",
        8,
        False,
    ),
    "stopped early, in the test": (of("Task", *EARLY), "on_test_start", 1, True),
    "ended itself, in the test": (
        of("EndsItself", "--max_epochs", "5"),
        "on_test_batch_end",
        1,
        False,
    ),
    "early, but not before": (
        of("Task", *EARLY, "--min_epochs", "4"),
        "on_train_batch_end",
        32,
        False,
    ),
}


# These run with every change, the others nightly.
QUICK = (
    "steps of a validation",
    "a network made late",
    "a data module's state",
    "stopped early, in the test",
)


def cases() -> list[Any]:
    """The names of all cases."""
    return [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.nightly) for name in CASES
    ]


@pytest.mark.daily(1)
@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`")
@pytest.mark.parametrize("case", cases())
def test_an_interrupted_run_is_bit_identical(case: str) -> None:
    flags, hook, number, dies = CASES[case]
    random.seed(0)
    reference = train("reference", *flags)
    interrupted("other", hook, number, dies, *flags)
    other = resume("other")
    # The callback that has interrupted the run counts.
    assert_same_run(reference, other, ignores=("Interrupts",))
    for name in ("last.ckpt", "best.ckpt"):
        ours, theirs = (checkpoint(run / name)["callbacks"] for run in (reference, other))
        kept = [{k: x for k, x in each.items() if k not in MEASURING} for each in (ours, theirs)]
        assert str(kept[0]) == str(kept[1])
        assert checkpoint(reference / name).get("CountsRows") == checkpoint(other / name).get(
            "CountsRows"
        )
    ours, theirs = (summary(run) for run in (reference, other))
    for name in ("epochs", "steps", "best_epoch", "test_loss", "train_samples", ours["monitor"]):
        assert ours[name] == theirs[name], name


@pytest.mark.nightly
def test_a_loader_may_fill_the_same_tensors_again() -> None:
    refilled, own = train("refilled", *of("RefilledBatches")), train("own", *of("OwnBatches"))
    assert_same_run(own, refilled)
    assert summary(own)["test_loss"] == summary(refilled)["test_loss"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "flags", [["--limit_val_batches", "0"], ["--check_val_every_n_epoch", "9"]], ids=str
)
def test_a_run_that_needs_its_last_validation_no_more_trains_no_step_more(flags: list[str]) -> None:
    interrupted("r", "on_validation_batch_start", 8, False, *of("Task", "--max_steps", "26"))
    saved, resumed = checkpoint(Path("checkpoints/r/last.ckpt")), resume("r", *flags)
    last = checkpoint(resumed / "last.ckpt")
    assert summary(resumed)["steps"] == saved["global_step"] == last["global_step"] == 26
    assert (
        summary(resumed)["epochs"]
        == last["loops"]["fit_loop"]["epoch_progress"]["current"]["completed"]
        == 2
    )
    assert all(
        torch.equal(saved["state_dict"][name], value) for name, value in last["state_dict"].items()
    )


@pytest.mark.nightly
def test_what_is_typed_beats_a_schedules_state() -> None:
    rate = lambda run: checkpoint(run / "last.ckpt")["optimizer_states"][0]["param_groups"][0]["lr"]  # noqa: E731
    assert rate(train("r", *of("Task", "--max_epochs", "2"))) == pytest.approx(0.02 * 0.9**2)
    assert rate(resume("r", "--max_epochs", "3", "--model.gamma", "0.5")) == pytest.approx(
        0.02 * 0.9**2 * 0.5
    )
    assert rate(resume("r", "--max_epochs", "4")) == pytest.approx(0.02 * 0.9**2 * 0.5**2)


class Cycle(Task):
    """Its schedule is as long as the run."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), self.lr)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.lr, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@pytest.mark.nightly
def test_a_schedule_is_as_long_as_the_run_that_was_typed() -> None:
    train("r", *of("Cycle", "--max_epochs", "2"))
    resumed = checkpoint(resume("r", "--max_epochs", "3") / "last.ckpt")
    assert resumed["lr_schedulers"][0]["total_steps"] == resumed["global_step"] == 39


@pytest.mark.nightly
def test_a_patience_that_is_typed_beats_the_checkpoints() -> None:
    run = train("r", *of("Task", *EARLY))
    assert summary(run)["epochs"] == 2
    resumed = resume("r", "--trainer.callbacks.patience", "3", "--max_epochs", "7")
    assert summary(resumed)["epochs"] == 4
    assert len([row for row in rows(resumed) if "val_loss" in row]) == 4


@pytest.mark.parametrize("kind", ["distributed", "drop_last"])
def test_ranks_evaluate_the_samples_that_one_process_does(kind: str) -> None:
    class Ranks:
        training, current_epoch, reload_dataloaders_every_n_epochs = False, 0, 0
        state = SimpleNamespace(fn="test")

        def __init__(self, global_rank: int, world_size: int) -> None:
            self.global_rank, self.world_size = global_rank, world_size

    def seen(rank: int, ranks: int) -> list[int]:
        numbers: Any = range(53)
        sampler: Any = (
            DistributedSampler(numbers, ranks, rank, shuffle=False)
            if kind == "distributed"
            else None
        )
        loader = DataLoader(numbers, 10, sampler=sampler, drop_last=kind == "drop_last")
        trainer: Any = Ranks(rank, ranks)
        return [
            int(number) for batch in RunLoaders(seed=0).exact(loader, trainer) for number in batch
        ]

    assert sorted([*seen(0, 2), *seen(1, 2)]) == sorted(seen(0, 1))


class Joins(Task):
    """Joins its ranks' values itself, as Lightning's documents advise."""

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)
        self.log("val_mean", batch[1].mean(), sync_dist=True)
        self.log("val_samples", float(len(batch[1])), reduce_fx="sum", sync_dist=True)
        self.log("val_largest", batch[1].max(), reduce_fx="max", sync_dist=True)


@pytest.mark.nightly
def test_values_that_a_module_joins_itself_are_those_of_one_process() -> None:
    one = train("one", *of("Joins", "--max_epochs", "1"))
    two = run_ranks("fit", *of("Joins", "--max_epochs", "1"), "--run_name", "two")
    assert two.returncode == 0, two.stderr
    for name in ("val_mean", "val_samples", "val_largest"):
        ours, theirs = (
            [float(row[name]) for row in rows(run) if name in row]
            for run in (one, one.with_name("two"))
        )
        assert ours == pytest.approx(theirs, rel=1e-6), name


class Deals(Keeps, Sampler[int]):
    """Another order at every pass, which its state alone tells. Two ranks can share it evenly."""

    passes = 0
    kept = "passes"

    def __len__(self) -> int:
        return 102

    def __iter__(self) -> Any:
        self.passes += 1
        return iter(torch.arange(102).roll(7 * self.passes).tolist())


class Dealt(Task):
    """Adds up the targets of an epoch."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.log("train_sum", batch[1].sum(), on_step=False, on_epoch=True, reduce_fx="sum")
        return super().training_step(batch, batch_idx)

    def train_dataloader(self) -> Any:
        return DataLoader(table(102), 8, sampler=Deals())


@pytest.mark.nightly
def test_a_further_rank_goes_on_with_the_samplers_state_too() -> None:
    interrupted("r", "on_train_batch_end", 20, False, *of("Dealt"))
    resumed = run_ranks("fit", "--run_name", "r", "--ckpt_path", "auto")
    assert resumed.returncode == 0, resumed.stderr
    sums = [float(row["train_sum"]) for row in rows(Path("checkpoints/r")) if "train_sum" in row]
    assert (
        sums[0]
        == pytest.approx(sums[-1], rel=1e-5)
        == pytest.approx(float(table(102).tensors[1].sum()), rel=1e-5)
    )


def test_only_rank_zero_discards_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path / "r")
    run.create()
    monkeypatch.setattr(run_folder, "is_rank_zero", lambda: False)
    run.discard()
    assert run.folder.exists(), "it is rank 0's"
    monkeypatch.undo()
    run.discard()
    assert not run.folder.exists()


def test_the_line_of_a_run_is_typed_again_and_adds_nothing_twice() -> None:
    line = of(
        "Task", "--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor", "val_loss"
    )
    line += ["--trainer.callbacks.patience", "5", f"--trainer.callbacks+={HERE}.CountsEpochs"]
    reference = train("reference", *line)
    interrupted("r", "on_train_batch_end", 20, False, *line)
    assert_same_run(reference, resume("r", *line))
    added = resume("r", *line, "--trainer.callbacks+=Timer", "--max_epochs", "4")
    callbacks = checkpoint(added / "last.ckpt")["run"]["config"]["trainer"]["callbacks"]
    assert [each["class_path"].rpartition(".")[2] for each in callbacks] == [
        "EarlyStopping",
        "CountsEpochs",
        "Timer",
    ]


@pytest.mark.nightly
@pytest.mark.parametrize("step", [20, 26])
def test_a_run_goes_on_from_a_file_of_lightnings_own_at_the_right_batch(
    step: int, capsys: pytest.CaptureFixture[str]
) -> None:
    own = ["--trainer.callbacks", "ModelCheckpoint", "--trainer.callbacks.save_top_k", "-1"]
    own += ["--trainer.callbacks.every_n_train_steps", str(step)]
    flags = [*of("SumsBatches"), *own, "--log_every_n_steps", "1"]
    reference = train("reference", *flags)
    (path,) = reference.rglob(f"*step={step}.ckpt")
    other = train("other", "--ckpt_path", str(path), "--trainer.callbacks", "null")
    sums = [
        [float(row["sum"]) for row in rows(run) if row.get("sum")] for run in (reference, other)
    ]
    assert sums[1] == sums[0][step:]
    assert "was not saved between two steps: the resume is not exact" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("monitor", "mode"),
    [
        ("val/perplexity", "min"),
        ("val_wer", "min"),
        ("val/certainty", "max"),
        ("val_rmse", "min"),
        ("power", "max"),
    ],
)
def test_the_name_of_a_metric_says_what_is_best(monitor: str, mode: str) -> None:
    assert Best(monitor).mode == mode
    assert Best(monitor, "min" if mode == "max" else "max").mode != mode


class Doubles(Task):
    """Reads float64."""

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(*(part.double() for part in table(101).tensors)), 8)

    val_dataloader = test_dataloader = train_dataloader


@pytest.mark.nightly
def test_a_run_in_double_precision_is_tested_in_it() -> None:
    run = train("r", *of("Doubles", "--precision", "64-true"))
    assert (
        main(
            "numerals",
            [
                "--ckpt_path",
                str(run / "best.ckpt"),
                "--accelerator",
                "cpu",
                "--output",
                "found.json",
            ],
        )
        == 0
    )
    assert json.loads(Path("found.json").read_text())["test_loss"] == summary(run)["test_loss"]


def test_an_epoch_of_a_part_of_a_stream_goes_on_where_the_one_before_ended() -> None:
    run = train(
        "r",
        *of(
            "GoesRound",
            "--limit_train_batches",
            "6",
            "--max_epochs",
            "5",
            "--log_every_n_steps",
            "1",
        ),
    )
    sums = [float(row["sum"]) for row in rows(run) if row.get("sum")]
    whole = [float(batch[1].sum()) for batch in DataLoader(table(80), 8)]
    assert sums == pytest.approx([*whole, *whole, *whole[:6]], rel=1e-5), "6, 4, 6, 4 and 6 batches"


def test_a_validation_stream_that_fills_one_tensor_again_is_not_read_ahead() -> None:
    run = train("r", *of("RefillsInValidation", "--limit_val_batches", "4", "--max_epochs", "1"))
    assert [float(row["val_loss"]) for row in rows(run) if row.get("val_loss")] == [1.5]


def test_a_profiler_that_does_not_exist_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = error_of(capsys, *of("Task", "--profiler", "fast"))
    assert "the Trainer refuses --profiler fast: " in line
    assert all(f"'{name}'" in line for name in ("simple", "advanced", "pytorch"))
