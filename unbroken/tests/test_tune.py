from __future__ import annotations

import gc
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from numerals.fit import job as fit
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from unbroken.cli import start as entry
from unbroken.cli.cli import Configuration, configure
from unbroken.commands.tune import command as tune
from unbroken.commands.tune.advice import advice_lines, advise
from unbroken.commands.tune.batch_size import Search, rows_of
from unbroken.commands.tune.learning_rate import RateRamp, flag_of, read_curve
from unbroken.commands.tune.short_training import one_device_flags, train_shortly
from unbroken.commands.tune.steps import CannotTrain, Measured, TrainingSteps
from unbroken.errors import UserError, is_out_of_memory
from unbroken.machine.hardware import GIB

from tests.monitored import FakeClock

SMALL = ["--data.source", "sample", "--data.train_samples", "2000", "--accelerator", "cpu"]


def fits_up_to(
    largest: int, tried: list[int], step_ms: Callable[[int], float] = lambda _: 1.0
) -> Callable[[int], Measured | None]:
    def measure(size: int) -> Measured | None:
        tried.append(size)
        return Measured(size, step_ms(size), 1000 * size) if size <= largest else None

    return measure


@pytest.mark.parametrize(
    "largest", [0, 1, 2, 15, 16, 17, 31, 32, 33, 1000, 4095, 4096, 4097, 54_999]
)
def test_the_search_finds_the_exact_largest_batch_in_few_tries(largest: int) -> None:
    tried: list[int] = []
    search = Search(fits_up_to(largest, tried))
    limited_by = search.find_largest(55_000, "the training set", 60)
    fitting = search.fitting
    assert (max(fitting, default=0), limited_by) == (largest, "memory")
    assert {*tried} - {*fitting} == {size for size in tried if size > largest}
    assert largest + 1 in tried
    assert len(tried) == len(set(tried)) <= 30


@pytest.mark.parametrize(
    ("ceiling", "sizes"), [(100, [16, 32, 64, 100]), (10, [10]), (64, [16, 32, 64])]
)
def test_the_search_stops_at_the_ceiling_and_says_so(ceiling: int, sizes: list[int]) -> None:
    tried: list[int] = []
    search = Search(fits_up_to(55_000, tried))
    limited_by = search.find_largest(ceiling, "the training set", 60)
    assert tried == list(search.fitting) == sizes
    assert limited_by == "the training set"


def test_no_size_is_tried_whose_step_would_take_longer_than_allowed() -> None:
    tried: list[int] = []
    search = Search(fits_up_to(55_000, tried, lambda size: size * 1000 / 64))
    limited_by = search.find_largest(55_000, "", 2)
    assert tried == [16, 32, 64, 128]
    assert "--max_step_seconds" in limited_by


def measured(rates: dict[int, float], samples: int | None) -> list[Measured]:
    """Sizes that were timed, with their samples per second."""
    return [
        Measured(
            size,
            1000 * size / rate,
            rate,
            steps_per_epoch=None if samples is None else samples // size,
        )
        for size, rate in rates.items()
    ]


RATES = {16: 500, 32: 900, 64: 1600, 128: 1950, 256: 2000, 512: 1980}


def test_advice_names_the_fastest_size_and_the_one_past_which_it_stops_paying() -> None:
    best, enough, use = advise(measured(RATES, None), present=16)
    assert (best.batch_size, enough.batch_size) == (256, 128)
    assert best.samples_per_sec == pytest.approx(2000)
    assert use is enough


@pytest.mark.parametrize(
    ("samples", "present", "use"),
    [
        (55_000, 32, 128),  # of full speed, and 429 steps an epoch
        (6_399, 32, 64),  # 128 would leave 49
        (6_400, 32, 128),
        (6_399, 64, 64),  # nothing that is allowed is faster
        (55_000, 256, 256),  # 128 is no faster
        (700, 32, 32),  # every size leaves less than 50
        (700, 1000, None),  # nor does the present one fit
    ],
)
def test_no_size_is_recommended_that_leaves_fewer_than_50_steps_an_epoch_or_gains_nothing(
    samples: int, present: int, use: int | None
) -> None:
    _, _, found = advise(measured(RATES, samples), present)
    assert (found.batch_size if found else None) == use


def test_no_size_is_recommended_for_a_gain_that_is_smaller_than_the_measurements_vary() -> None:
    sizes = measured(RATES, 55_000)
    command = "python -m numerals.tune lr --data.batch_size"
    for spread, size in ((50, 128), (150, 32)):
        for row in sizes:
            row.spread_pct = spread
        _, _, found = advise(sizes, 32)
        assert found is not None
        assert found.batch_size == size
    lines = advice_lines(sizes, "no more", 32, command)
    assert "now: 32 at 900 samples/s" in lines
    assert lines[-2:] == [
        "256 seems 122 % faster, but the measurements vary by 150 %. Measure again on an idle"
        " machine.",
        "Keep --data.batch_size 32.",
    ]
    assert "now: 24, which was not measured" in advice_lines(sizes, "no more", 24, command)
    notes = [row["note"] for row in rows_of(sizes, advise(sizes, 32), 32)]
    assert notes[1] == "now, use"


def test_the_advice_says_what_a_larger_batch_costs() -> None:
    def told(samples: int, present: int) -> list[str]:
        sizes = measured(RATES, samples)
        return advice_lines(
            sizes, "no more", present, "python -m numerals.tune lr --data.batch_size"
        )

    lines = told(6_399, 32)
    costs = "A larger batch is faster per sample but takes fewer optimizer steps"
    assert f"{costs}: 99 an epoch at 64 and 24 an epoch at 256." in lines
    assert lines[-4:] == [
        "  --data.batch_size 64",
        "",
        "It wants another learning rate:",
        "  python -m numerals.tune lr --data.batch_size 64",
    ]
    assert (
        told(6_399, 64)[-1]
        == "Keep --data.batch_size 64: no size that leaves 50 of them is 5 % faster."
    )
    assert told(700, 1000)[-1] == "No size that leaves 50 of them fits."


@pytest.fixture(autouse=True)
def _short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is timed is judged nowhere here."""
    monkeypatch.setattr("unbroken.commands.tune.steps.WINDOW_SECONDS", 0.01)


@pytest.fixture
def steps(workplace: Path) -> TrainingSteps:
    config = configure(fit, "tune", [*SMALL, "--model.network", "MLP"])
    return TrainingSteps(config, one_device_flags(config))


def test_memory_is_freed_on_mps_where_the_general_call_fails(
    steps: TrainingSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fake: ``torch.accelerator.empty_cache`` asserts there."""
    freed: list[str] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: pytest.fail("asserts on MPS"))
    monkeypatch.setattr(torch.mps, "empty_cache", lambda: freed.append("mps"))
    monkeypatch.setattr(steps, "_train", lambda size: None)
    assert steps.measure(16) is None
    assert freed == ["mps", "mps"]  # before and after the training


def peak_of(steps: TrainingSteps, size: int) -> int:
    """The peak in bytes of a training at this batch size."""
    measured = steps.measure(size)
    assert measured is not None
    return int((measured.peak_allocated_gib or 0) * GIB)


@pytest.mark.nightly
def test_with_a_simulated_memory_limit_the_exact_largest_batch_is_found(
    steps: TrainingSteps,
) -> None:
    """Against every size's own peak, measured without a limit."""
    steps.memory_limit_bytes = peak_of(steps, 301) + 100
    search = Search(steps.measure)
    limited_by = search.find_largest(steps.training_samples or 0, "", 60)
    fitting = search.fitting
    limit, steps.memory_limit_bytes = steps.memory_limit_bytes, None
    peaks = {size: peak_of(steps, size) for size in range(298, 305)}
    assert max(fitting) == max(size for size, peak in peaks.items() if peak <= limit) == 301
    assert peaks[302] > limit
    assert limited_by == "memory"


@pytest.mark.nightly
def test_memory_is_free_again_after_a_try_that_fitted_and_after_those_that_did_not(
    steps: TrainingSteps,
) -> None:
    steps.measure(64)  # the images stay
    gc.collect()
    before = tensor_bytes()
    gc.disable()  # only what a try itself frees is free
    try:
        peak = peak_of(steps, 1000)
        assert tensor_bytes() <= before + 100_000
        for share in (0.5, 0.999):  # in the first forward pass, and in the second step
            steps.memory_limit_bytes = int(share * peak)
            assert steps.measure(1000) is None
            assert tensor_bytes() <= before + 100_000
    finally:
        gc.enable()


def tensor_bytes() -> int:
    storages = {}
    for thing in gc.get_objects():
        is_tensor = type(thing) in (torch.Tensor, torch.nn.Parameter)
        if is_tensor and thing.device.type == "cpu" and thing.layout == torch.strided:
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    return sum(storages.values())


def test_tries_are_real_steps_at_that_batch_size_and_leave_the_weights_alone(
    steps: TrainingSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    from unbroken.tasks import ImageClassifier

    seen = []
    step = ImageClassifier.training_step
    monkeypatch.setattr(
        ImageClassifier,
        "training_step",
        lambda self, batch, index: seen.append(len(batch[1])) or step(self, batch, index),
    )
    monkeypatch.setattr("unbroken.commands.tune.steps.WINDOW_SECONDS", 0)
    steps.flags["accumulate_grad_batches"] = 2
    measured = steps.measure(48)
    assert measured is not None
    assert seen == [48] * 2 * (
        3 + 3
    )  # two batches for each optimizer step of the warm-up and the windows
    assert measured.batch_size == 48
    assert measured.peak_allocated_gib
    assert measured.step_ms > 0
    assert os.listdir() == []  # the current folder


@pytest.mark.parametrize("accumulated", [1, 2, 3])
def test_the_speed_is_of_the_samples_that_were_seen(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, accumulated: int
) -> None:
    """An epoch has a batch of 20 samples and one of 10; each takes a second."""
    clock = FakeClock()
    step = PlainModule.training_step

    def timed_step(self: Any, batch: Any, index: int) -> Any:
        clock.advance(1)
        return step(self, batch, index)

    monkeypatch.setattr(PlainModule, "training_step", timed_step)
    monkeypatch.setattr("unbroken.commands.tune.steps.time", SimpleNamespace(perf_counter=clock))
    monkeypatch.setattr("unbroken.commands.tune.steps.WINDOW_SECONDS", 2)
    config = plain(PlainModule(), PlainData(20, samples=30))
    steps = TrainingSteps(config, one_device_flags(config))
    steps.flags["accumulate_grad_batches"] = accumulated
    measured = steps.measure(20)
    assert measured is not None
    assert measured.samples_per_sec == 15
    assert measured.steps_per_epoch == (2 if accumulated == 1 else 1)


def test_a_mistake_in_the_model_is_its_own_error_and_not_a_lack_of_memory(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from unbroken.tasks import ImageClassifier

    def broken(*_: Any) -> None:
        raise ValueError("a mistake in the model")

    monkeypatch.setattr(ImageClassifier, "training_step", broken)
    with pytest.raises(ValueError, match="a mistake"):
        tune.main("numerals", ["batch_size", *SMALL, "--max_batch_size", "64"])
    assert is_out_of_memory(torch.OutOfMemoryError())


class Normalized(LightningModule):
    """BatchNorm cannot train on a single sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_size_that_cannot_train_is_named_and_does_not_end_the_search(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 65 samples, 16, 32 and 64 leave a single one."""
    config = plain(Normalized(), PlainData(13, samples=65))
    monkeypatch.setattr("unbroken.cli.cli.configure", lambda *_: config)
    assert (
        entry.exit_code(partial(tune.main, "numerals"), ["batch_size", "--output", "sizes.json"])
        == 0
    )
    facts = json.loads(Path("sizes.json").read_text())
    assert [row["batch_size"] for row in facts["sizes"]] == [13, 65]
    assert list(facts["cannot_train"]) == ["16", "32", "64"]
    told = capsys.readouterr()
    assert "No training with a batch size of 16, 32, 64: ValueError: Expected more than" in told.out
    assert "batch size 64: cannot train (ValueError" in told.err


def test_a_size_that_cannot_train_says_nothing_about_memory() -> None:
    def measure(size: int) -> Measured | None:
        tried.append(size)
        if size == 16:
            raise CannotTrain("odd")
        return Measured(size, 1.0, 1000.0) if size <= 40 else None

    tried: list[int] = []
    search = Search(measure)
    assert search.find_largest(1000, "", 60) == "memory"
    assert tried[:3] == [16, 32, 64]
    assert max(search.fitting) == 40
    assert search.failed == {16: "odd"}


@pytest.mark.daily(2)
@pytest.mark.parametrize(("load", "is_said"), [(3.2, True), (0.1, False), (None, False)])
def test_a_busy_machine_is_said(
    load: float | None,
    is_said: bool,
    workplace: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("unbroken.machine.hardware.load_average", lambda: load)
    config = plain(PlainModule(), PlainData())
    monkeypatch.setattr("unbroken.cli.cli.configure", lambda *_: config)
    monkeypatch.setattr(TrainingSteps, "measure", lambda self, size: fits_up_to(64, [])(size))
    assert (
        entry.exit_code(partial(tune.main, "numerals"), ["batch_size", "--output", "sizes.json"])
        == 0
    )
    told = capsys.readouterr().out
    assert ("The machine was busy when this began (load 3.2)" in told) == is_said
    assert json.loads(Path("sizes.json").read_text()).get("load_average") == load


def test_tune_batch_size_writes_a_table_and_a_picture_and_touches_no_run(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [
        "--max_batch_size",
        "100",
        "--memory_limit_gib",
        "0.05",
        "--output",
        "sizes.json",
        "--plot",
        "sizes.png",
    ]
    assert (
        entry.exit_code(
            partial(tune.main, "numerals"), ["batch_size", *SMALL, "--model.network", "MLP", *flags]
        )
        == 0
    )
    told = capsys.readouterr().out
    facts = json.loads(Path("sizes.json").read_text())
    assert facts["largest_batch_size"] == 100
    assert facts["limited_by"] == "--max_batch_size allows no larger one"
    assert [row["batch_size"] for row in facts["sizes"]] == [16, 32, 64, 100]
    for row in facts["sizes"]:
        assert row["samples_per_sec"] == pytest.approx(1000 * row["batch_size"] / row["step_ms"])
        assert 0 < row["peak_allocated_gib"] < 0.05
        assert row["steps_per_epoch"] == 2000 // row["batch_size"]
    assert facts["recommended_batch_size"] in (16, 32)  # 64 leaves 31 steps an epoch
    assert f"--data.batch_size {facts['recommended_batch_size']}\n" in told
    assert sorted(os.listdir()) == ["sizes.json", "sizes.png"]


@pytest.mark.nightly
def test_a_size_that_fits_two_steps_but_not_many_is_not_called_fitting(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from unbroken.tasks import ImageClassifier

    step = ImageClassifier.training_step

    def grows(self: Any, batch: Any, index: int) -> torch.Tensor:
        if index == 5 and len(batch[1]) > 32:
            raise torch.OutOfMemoryError
        return step(self, batch, index)

    monkeypatch.setattr(ImageClassifier, "training_step", grows)
    flags = ["--max_batch_size", "64", "--output", "sizes.json", "--model.network", "MLP"]
    assert entry.exit_code(partial(tune.main, "numerals"), ["batch_size", *SMALL, *flags]) == 0
    assert json.loads(Path("sizes.json").read_text())["largest_batch_size"] == 32
    assert "largest batch that fits: 32 (33 does not)" in capsys.readouterr().out


def test_the_learning_rate_is_where_the_loss_is_lowest_whatever_diverges_behind() -> None:
    rates = [1e-6 * 10 ** (6 * step / 200) for step in range(200)]
    losses = [0.2 + min(2.1, abs(math.log10(rate / 0.01))) for rate in rates]
    for diverged in (losses[-1], 1e12, math.nan, math.inf):
        smooth, lowest = read_curve([*losses[:190], *[diverged] * 10])
        assert rates[lowest] == pytest.approx(0.01, rel=0.1)
        assert len(smooth) == (200 if math.isfinite(diverged) else 190)
    _, lowest = read_curve([loss - 5 for loss in losses])
    assert rates[lowest] == pytest.approx(0.01, rel=0.1)


@pytest.mark.parametrize(
    "losses", [[2.3] * 50, [2.3 + step for step in range(50)], [math.nan] * 50, [], [-2.3] * 50]
)
def test_a_loss_that_never_falls_is_no_suggestion_but_an_error(losses: list[float]) -> None:
    with pytest.raises(UserError, match="the loss never fell"):
        read_curve(losses)


def test_the_ramp_records_the_rate_and_the_loss_of_every_optimizer_step() -> None:
    """Two batches a step, one of them without a loss; two groups of an optimizer."""
    groups: list[dict[str, Any]] = [{"lr": 0.5, "initial_lr": 0.7}, {"lr": torch.tensor(0.1)}]
    trainer: Any = SimpleNamespace(
        global_step=0,
        accumulate_grad_batches=2,
        should_stop=False,
        optimizers=[SimpleNamespace(param_groups=groups)],
        strategy=SimpleNamespace(),
    )
    ramp = RateRamp(0.001, 0.1, 3)
    module: Any = None
    ramp.on_train_start(trainer, module)
    assert ramp.present == 0.7
    for step, pair in enumerate([(2.0, 4.0), (1.0, None), (0.5, 0.5)]):
        for batch, loss in enumerate(pair):
            ramp.on_train_batch_start(trainer, module, None, batch)
            assert [float(group["lr"]) for group in groups] == pytest.approx([0.001 * 10**step] * 2)
            assert not trainer.should_stop
            trainer.global_step = step + batch
            outputs = (
                {} if loss is None else {"loss": torch.tensor(loss / 2)}
            )  # as Lightning divides it
            ramp.on_train_batch_end(trainer, module, outputs, None, batch)
    assert ramp.rates == pytest.approx([0.001, 0.01, 0.1])
    assert ramp.losses == [3.0, 1.0, 0.5]
    assert trainer.should_stop


class PlainModule(LightningModule):
    """Nothing of ours: no ``lr``, its rate in the optimizer, a schedule that waits for a
    validation.
    """

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(8, width)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(
            [{"params": [self.layer.weight]}, {"params": [self.layer.bias], "lr": 0.2}], lr=0.1
        )
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "monitor": "val/error"},
        }


class PlainData(LightningDataModule):
    """Samples of a linear map."""

    def __init__(self, batch_size: int = 20, samples: int = 200) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.samples = samples

    def train_dataloader(self) -> DataLoader[Any]:
        inputs = torch.randn(self.samples, 8, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(inputs, inputs[:, :4] * 3), batch_size=self.batch_size)


class SavedSize(LightningDataModule):
    """Its batch size is one of its ``hparams`` alone."""

    def __init__(self, batch_size: int = 20, eval_batch_size: int = 50) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> DataLoader[Any]:
        return PlainData(self.hparams["batch_size"]).train_dataloader()


class ReadOnlySize(SavedSize):
    """A property follows its ``hparams``."""

    @property
    def batch_size(self) -> int:
        return int(self.hparams["batch_size"])


class SizeTwice(SavedSize):
    """Its loader follows an attribute that was copied from its ``hparams``."""

    def __init__(self, batch_size: int = 20) -> None:
        super().__init__(batch_size)
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[Any]:
        return PlainData(self.batch_size).train_dataloader()


def plain(module: LightningModule, datamodule: LightningDataModule | None) -> Configuration:
    """A command line that names a user's classes."""
    config = configure(fit, "tune", SMALL)
    config.module, config.datamodule = module, datamodule
    config.resolved["model"] = {"class_path": "mine.PlainModule", "init_args": {"width": 4}}
    config.fresh_module = lambda: type(module)()  # type: ignore[method-assign]
    return config


@pytest.mark.parametrize(
    ("name", "flag"),
    [("lr", "--model.lr"), ("learning_rate", "--model.learning_rate"), ("width", "learning rate")],
)
def test_the_flag_is_the_modules_own_argument(name: str, flag: str) -> None:
    config = plain(PlainModule(), PlainData())
    config.resolved["model"]["init_args"] = {name: 0.1}
    assert flag_of(config) == flag


def test_a_module_without_lr_is_tuned_by_the_rates_of_its_optimizer(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = plain(PlainModule(), PlainData())
    monkeypatch.setattr("unbroken.cli.cli.configure", lambda *_: config)
    assert (
        entry.exit_code(
            partial(tune.main, "numerals"), ["lr", "--max_lr", "10", "--output", "lr.json"]
        )
        == 0
    )
    facts = json.loads(Path("lr.json").read_text())
    assert 0.005 < facts["suggested_lr"] < 2
    assert facts["suggested_lr"] == facts["lowest_loss_lr"] / 2
    assert f"  learning rate {facts['suggested_lr']:.2g}\n\nIt was 0.2." in capsys.readouterr().out
    assert [round(math.log10(row["lr"]), 2) for row in facts["curve"][:2]] == [-6, -5.96]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("largest", "present", "shown"),
    [
        (200, 100, [16, 32, 64, 100, 128, 200]),
        (64, 128, [16, 32, 64]),
        (18, 32, [16, 18]),  # what the search tries between a size that fits and one that does not
        (9, 16, [8, 9]),
    ],
)
def test_every_size_that_fits_is_shown_and_the_present_one_as_well(
    largest: int, present: int, shown: list[int], workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = plain(PlainModule(), PlainData(present))
    monkeypatch.setattr("unbroken.cli.cli.configure", lambda *_: config)
    monkeypatch.setattr(TrainingSteps, "measure", lambda self, size: fits_up_to(largest, [])(size))
    assert (
        entry.exit_code(partial(tune.main, "numerals"), ["batch_size", "--output", "sizes.json"])
        == 0
    )
    assert [
        row["batch_size"] for row in json.loads(Path("sizes.json").read_text())["sizes"]
    ] == shown


def test_a_plain_data_module_is_searched_for_a_batch_size(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = plain(PlainModule(), PlainData())
    monkeypatch.setattr("unbroken.cli.cli.configure", lambda *_: config)
    assert (
        entry.exit_code(partial(tune.main, "numerals"), ["batch_size", "--output", "sizes.json"])
        == 0
    )
    facts = json.loads(Path("sizes.json").read_text())
    assert facts["limited_by"] == "the training set has no more samples"
    assert [row["batch_size"] for row in facts["sizes"]] == [16, 20, 32, 64, 128, 200]
    assert (
        facts["recommended_batch_size"] == 20
    )  # every size leaves less than 50 steps: the present one


@pytest.mark.daily(1)
@pytest.mark.parametrize("kind", [SavedSize, ReadOnlySize, SizeTwice])
def test_a_batch_size_among_the_hparams_is_found_and_followed(
    kind: type[LightningDataModule], workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[int] = set()

    class Watching(PlainModule):
        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            seen.add(len(batch[0]))
            return super().training_step(batch, batch_idx)

    config = plain(Watching(), kind())
    monkeypatch.setattr("unbroken.cli.cli.configure", lambda *_: config)
    words = ["batch_size", "--output", "sizes.json", "--max_batch_size", "40"]
    assert entry.exit_code(partial(tune.main, "numerals"), words) == 0
    facts = json.loads(Path("sizes.json").read_text())
    assert [row["batch_size"] for row in facts["sizes"]] == [16, 20, 32, 40]
    # 200 samples end with 8 where a batch has 16 or 32 of them and the training lasts that long.
    assert seen - {8} == {16, 20, 32, 40}


def test_what_cannot_be_tuned_is_refused_before_any_work(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Manual(PlainModule):
        automatic_optimization = False

    class Fixed(LightningDataModule):
        def prepare_data(self) -> None:
            pytest.fail("work")

    for module, data, what, message in (
        (Manual(), PlainData(), "lr", "needs Lightning's automatic optimization, and Manual"),
        (
            PlainModule(),
            Fixed(),
            "batch_size",
            "needs a data module whose loader follows its attribute batch_size or hparams",
        ),
        (
            PlainModule(),
            None,
            "batch_size",
            "needs a data module whose loader follows its attribute batch_size or hparams",
        ),
    ):
        config = plain(module, data)
        monkeypatch.setattr("unbroken.cli.cli.configure", lambda *_, config=config: config)
        with pytest.raises(UserError, match=message):
            tune.main("numerals", [what])
    assert os.listdir() == []


def test_the_range_test_ends_at_a_loss_that_is_no_number_and_runs_none_after_it(
    workplace: Path,
) -> None:
    class Bursting(PlainModule):
        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            assert self.layer.weight.isfinite().all(), "a step after the loss was no number"
            loss = super().training_step(batch, batch_idx)
            return loss * (
                math.nan if float(self.optimizers().param_groups[0]["lr"]) > 0.3 else 1.0
            )

    config = plain(Bursting(), PlainData())
    ramp = RateRamp(1e-4, 10, 50)
    train_shortly(one_device_flags(config), ramp, config.module, config.datamodule)
    smooth, _ = read_curve(ramp.losses)
    assert max(ramp.rates[: len(smooth)]) < 0.3
    assert len(smooth) == len(ramp.losses) - 1 < 50


def test_tune_lr_suggests_a_rate_that_trains_and_touches_no_run(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        entry.exit_code(
            partial(tune.main, "numerals"),
            [*SMALL, "lr", "--output", "curve.csv", "--steps", "100"],
        )
        == 0
    )
    told = capsys.readouterr().out
    suggested = float(told.split("--model.lr ")[1].split()[0])
    assert 2e-4 < suggested < 5e-2
    lines = Path("curve.csv").read_text().splitlines()
    assert lines[0].startswith("lr,loss")
    assert len(lines) <= 101
    assert sorted(os.listdir()) == ["curve.csv", "tune_lr.png"]
    # It replaces its own picture, and no other one of that name.
    assert str(tune.read_options("numerals", ["lr"]).plot) == "tune_lr.png"
    Path("tune_lr.png").write_bytes(b"x")
    with pytest.raises(UserError, match=r"tune_lr\.png was not written by this command"):
        tune.read_options("numerals", ["lr"])
    assert str(tune.read_options("numerals", ["lr", "--plot", "tune_lr.png"]).plot) == "tune_lr.png"


def test_an_optimizer_without_a_learning_rate_is_told(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        entry.exit_code(
            partial(tune.main, "numerals"),
            ["lr", "--model", "tests.other_tasks.OwnPace", "--data", "null"],
        )
        == 2
    )
    assert (
        capsys.readouterr().err.splitlines()[-1]
        == "error: tune lr: the optimizer has no learning rate."
    )


def test_help_is_quick_for_it_imports_no_torch() -> None:
    code = "import sys; from unbroken.commands.tune.command import main; "
    code += "from unbroken.cli.start import exit_code"
    code += "; assert exit_code(lambda argv: main('numerals', argv), ['--help']) == 0"
    code += "; assert 'torch' not in sys.modules"
    help_text = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert "--memory_limit_gib" in help_text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "lr|batch_size"),
        (["batchsize"], "tune what? lr or batch_size, got batchsize. Did you mean batch_size?"),
        (["lr", "--output", "x.txt"], "--output must end in .json or .csv, got x.txt"),
        (["lr", "--plot", "x.svg"], "--plot must end in .png, got x.svg"),
        (
            ["lr", "--min_lr", "1", "--max_lr", "0.1"],
            "--min_lr must be below --max_lr (0.1), got 1",
        ),
        (["lr", "--steps", "5"], "--steps must be at least 20, got 5"),
        (["batch_size", "--max_batch_size", "0"], "--max_batch_size must be above 0, got 0"),
        (
            ["batch_size", "--memory_limit_gib", "nan"],
            "--memory_limit_gib must be above 0, got nan",
        ),
        (
            ["batch_size", "--memory_limit_gb", "2"],
            "unknown option --memory_limit_gb. Did you mean --memory_limit_gib?",
        ),
        (["batch_size", "--data.sorce", "sample"], "--data.sorce"),
        (["batch_size", *SMALL, "--devices", "2"], "tune measures one process on one device"),
        (["lr", *SMALL, "--strategy", "ddp"], "got --devices auto --num_nodes 1 --strategy ddp"),
        (["lr", *SMALL, "--num_nodes", "2"], "got --devices auto --num_nodes 2"),
        (["batch_size", *SMALL, "--memory_limit_gib", "0.00001"], "not even one sample fits"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    words: list[str], message: str, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert entry.exit_code(partial(tune.main, "numerals"), words) == 2
    (line,) = [
        line for line in capsys.readouterr().err.splitlines() if not line.startswith("batch size")
    ]
    assert line.startswith("error: ")
    assert message in line
    assert os.listdir() == []


def test_tune_refuses_to_run_under_a_launcher(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="tune measures one process on one device"):
        tune.main("numerals", ["batch_size", *SMALL])


@pytest.mark.gpu
def test_on_a_gpu_a_memory_limit_is_kept_to_and_memory_is_free_between_tries(
    workplace: Path,
) -> None:
    flags = ["--data.source", "sample", "--accelerator", "gpu", "--model.network", "ConvNet"]
    config = configure(fit, "tune", flags)
    steps = TrainingSteps(config, one_device_flags(config))
    steps.measure(64)
    before = torch.cuda.memory_allocated()
    steps.memory_limit_bytes = GIB // 4
    search = Search(steps.measure)
    limited_by = search.find_largest(steps.training_samples or 0, "", 60)
    fitting = search.fitting
    assert limited_by == "memory"
    assert steps.measure(max(fitting) + 1) is None
    assert torch.cuda.memory_allocated() <= before + 2**20
    assert all((row.peak_allocated_gib or 0) <= 0.25 for row in fitting.values())
    torch.cuda.set_per_process_memory_fraction(1.0)  # for the tests that follow in this process


@pytest.mark.gpu
def test_tune_batch_size_on_a_gpu(workplace: Path) -> None:
    assert (
        entry.exit_code(
            partial(tune.main, "numerals"),
            ["batch_size", "--data.source", "sample", "--output", "sizes.json"],
        )
        == 0
    )
    facts = json.loads(Path("sizes.json").read_text())
    assert facts["largest_batch_size"] == 9000
    assert all(math.isfinite(row["samples_per_sec"]) for row in facts["sizes"])
