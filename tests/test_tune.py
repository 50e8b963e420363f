from __future__ import annotations

import gc
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from project.engine import command as entry
from project.engine.cli import ProjectCLI
from project.errors import UserError
from project.hardware import GIB
from project.tune import __main__ as tune
from project.tune.batch_size import advise, find_largest, sizes_to_sweep
from project.tune.learning_rate import read_curve
from project.tune.short_training import LiveMemory, Measured, TrainingSteps, is_out_of_memory

SMALL = ["--data.source", "sample", "--data.train_samples", "2000", "--accelerator", "cpu"]


def fits_up_to(
    largest: int, tried: list[int], step_ms: Callable[[int], float] = lambda _: 1.0
) -> Callable[[int], Measured]:
    def one_try(size: int) -> Measured:
        tried.append(size)
        if size > largest:
            raise torch.OutOfMemoryError
        return Measured(size, step_ms(size))

    return one_try


@pytest.mark.parametrize("largest", [0, 1, 2, 15, 16, 17, 31, 32, 33, 1000, 4095, 4096, 4097, 54_999])
def test_the_search_finds_the_exact_largest_batch_in_few_tries(largest: int) -> None:
    tried: list[int] = []
    search = find_largest(fits_up_to(largest, tried), 55_000, "the training set", 60, lambda _: None)
    assert (search.largest, search.smallest_failed, search.limited_by) == (largest, largest + 1, "memory")
    assert len(tried) == len(set(tried)) <= 30


@pytest.mark.parametrize(("ceiling", "sizes"), [(100, [16, 32, 64, 100]), (10, [10]), (64, [16, 32, 64])])
def test_the_search_stops_at_the_ceiling_and_says_so(ceiling: int, sizes: list[int]) -> None:
    tried: list[int] = []
    search = find_largest(fits_up_to(55_000, tried), ceiling, "the training set", 60, lambda _: None)
    assert tried == sizes
    assert (search.largest, search.limited_by) == (ceiling, "the training set")


def test_no_size_is_tried_whose_step_would_take_longer_than_allowed() -> None:
    tried: list[int] = []
    search = find_largest(fits_up_to(55_000, tried, lambda size: size * 1000 / 64), 55_000, "", 2, lambda _: None)
    assert tried == [16, 32, 64, 128]
    assert "--max_step_seconds" in search.limited_by


def test_advice_names_the_fastest_size_and_the_one_past_which_it_stops_paying() -> None:
    rates = {16: 500, 32: 900, 64: 1600, 128: 1950, 256: 2000, 512: 1980}
    advice = advise([Measured(size, 1000 * size / rate) for size, rate in rates.items()])
    assert (advice.best, advice.enough) == (256, 128)
    assert advice.samples_per_sec == pytest.approx(2000)
    assert sizes_to_sweep(200) == [16, 32, 64, 128, 200]
    assert sizes_to_sweep(64) == [16, 32, 64]
    assert sizes_to_sweep(9) == [9]


def test_live_memory_counts_each_tensor_from_birth_to_death_and_raises_at_the_limit() -> None:
    memory = LiveMemory()
    with memory:
        before = torch.zeros(1000)  # 4,000 bytes
        view = before.view(10, 100)[:5]
        view.add_(1)
        assert (memory.live_bytes, memory.peak_bytes) == (4000, 4000)
        after = before * 2
        assert memory.live_bytes == 8000
        del before, view
        assert (memory.live_bytes, memory.peak_bytes) == (4000, 8000)
    del after
    assert memory.live_bytes == 0
    with pytest.raises(torch.OutOfMemoryError), LiveMemory(limit_bytes=3999):
        torch.zeros(1000)
    with LiveMemory(limit_bytes=4000):
        torch.zeros(1000)


def test_live_memory_counts_what_backward_and_the_optimizer_hold() -> None:
    network = nn.Linear(100, 100, bias=False)  # 40,000 bytes
    optimizer = torch.optim.AdamW(network.parameters())
    memory = LiveMemory()
    with memory:
        memory.count(network.parameters())
        assert memory.live_bytes == 40_000
        network(torch.zeros(1, 100)).sum().backward()
        gc.collect()
        assert 80_000 <= memory.live_bytes < 81_000  # and gradients
        optimizer.step()
        assert 160_000 <= memory.live_bytes < 162_000  # and two moments


@pytest.fixture
def steps(workplace: Path) -> TrainingSteps:
    cli = ProjectCLI([*SMALL, "--model.network", "MLP"], "project.tune")
    return TrainingSteps(cli, tune.one_device_flags(cli))


def test_with_a_simulated_memory_limit_the_exact_largest_batch_is_found(steps: TrainingSteps) -> None:
    """Against every size's own peak, measured without a limit."""
    steps.memory_limit_bytes = int(steps.one_try(301).peak_bytes or 0) + 100
    search = find_largest(steps.one_try, steps.training_samples, "", 60, lambda _: None)
    limit, steps.memory_limit_bytes = steps.memory_limit_bytes, None
    peaks = {size: steps.one_try(size).peak_bytes or 0 for size in range(298, 305)}
    assert search.largest == max(size for size, peak in peaks.items() if peak <= limit) == 301
    assert peaks[302] > limit
    assert search.limited_by == "memory"


def test_memory_is_free_again_after_a_try_that_fitted_and_after_those_that_did_not(steps: TrainingSteps) -> None:
    steps.one_try(64)  # the images stay
    gc.collect()
    before = tensor_bytes()
    gc.disable()  # only what a try itself frees is free
    try:
        peak = steps.one_try(1000).peak_bytes or 0
        assert tensor_bytes() <= before + 100_000
        for share in (0.5, 0.999):  # in the first forward pass, and in the second step
            steps.memory_limit_bytes = int(share * peak)
            with pytest.raises(torch.OutOfMemoryError):
                steps.one_try(1000)
            assert tensor_bytes() <= before + 100_000
    finally:
        gc.enable()


def tensor_bytes() -> int:
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.device.type == "cpu":
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    return sum(storages.values())


def test_tries_are_real_steps_at_that_batch_size_and_leave_the_weights_alone(
    steps: TrainingSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    from project.model import ImageClassifier

    seen = []
    step = ImageClassifier.training_step
    monkeypatch.setattr(
        ImageClassifier,
        "training_step",
        lambda self, batch, index: seen.append(len(batch[1])) or step(self, batch, index),
    )
    steps.flags["accumulate_grad_batches"] = 2
    measured = steps.one_try(48)
    assert seen == [48] * 4  # two optimizer steps of two batches
    assert measured.batch_size == 48
    assert measured.peak_bytes
    assert measured.step_ms > 0
    assert os.listdir() == []  # the current folder


def test_an_error_that_is_no_lack_of_memory_is_not_taken_for_one(
    steps: TrainingSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    from project.model import ImageClassifier

    def broken(*_: Any) -> None:
        raise ValueError("a mistake in the model")

    monkeypatch.setattr(ImageClassifier, "training_step", broken)
    with pytest.raises(ValueError, match="a mistake"):
        steps.one_try(16)
    assert is_out_of_memory(torch.OutOfMemoryError())


def test_tune_batch_size_writes_a_table_and_a_picture_and_touches_no_run(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--max_batch_size", "100", "--memory_limit_gib", "0.05", "--output", "sizes.json", "--plot", "sizes.png"]
    started = time.perf_counter()
    assert entry.exit_code(tune.main, ["batch_size", *SMALL, "--model.network", "MLP", *flags]) == 0
    assert time.perf_counter() - started < 180
    told = capsys.readouterr().out
    facts = json.loads(Path("sizes.json").read_text())
    assert facts["largest_batch_size"] == 100
    assert facts["limited_by"] == "--max_batch_size allows no larger one"
    assert [row["batch_size"] for row in facts["sizes"]] == [16, 32, 64, 100]
    for row in facts["sizes"]:
        assert row["samples_per_sec"] == pytest.approx(1000 * row["batch_size"] / row["step_ms"])
        assert 0 < row["peak_allocated_gib"] < 0.05
    assert f"--data.batch_size {facts['enough_batch_size']}\n" in told
    assert sorted(os.listdir()) == ["sizes.json", "sizes.png"]


def test_a_size_that_fits_two_steps_but_not_many_is_not_called_fitting(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def timed(self: TrainingSteps, size: int) -> Measured:
        if size > 32:
            raise torch.OutOfMemoryError
        return Measured(size, 1.0)

    monkeypatch.setattr(TrainingSteps, "timed", timed)
    flags = ["--max_batch_size", "64", "--output", "sizes.json", "--model.network", "MLP"]
    assert entry.exit_code(tune.main, ["batch_size", *SMALL, *flags]) == 0
    assert json.loads(Path("sizes.json").read_text())["largest_batch_size"] == 32
    assert "largest batch that fits: 32 (64 does not)" in capsys.readouterr().out


def as_lightning_reports(losses: list[float]) -> list[float]:
    """The running means that the finder's own callback makes of losses."""
    from lightning.pytorch.tuner.lr_finder import _LRCallback

    callback = _LRCallback(len(losses), early_stop_threshold=None)
    trainer: Any = SimpleNamespace(
        fit_loop=SimpleNamespace(batch_idx=0),
        accumulate_grad_batches=1,
        should_stop=False,
        strategy=SimpleNamespace(broadcast=bool),
    )
    module: Any = None
    for trainer.global_step, loss in enumerate(losses, start=1):
        callback.on_train_batch_end(trainer, module, torch.tensor(loss, dtype=torch.float64), None, 0)
    return callback.losses


def test_the_learning_rate_is_where_the_loss_is_lowest_whatever_lags_behind() -> None:
    """A loss that is lowest at 0.01, as Lightning's callback would report it."""
    rates = [1e-6 * 10 ** (6 * step / 200) for step in range(200)]
    losses = [0.2 + min(2.1, abs(math.log10(rate / 0.01))) for rate in rates]
    means = as_lightning_reports(losses)
    test = read_curve(rates, means, 200)
    torch.testing.assert_close(test.losses, losses, rtol=1e-6, atol=1e-6)
    assert test.lowest == pytest.approx(0.01, rel=0.1)
    assert test.suggestion == test.lowest / 2
    lagging = rates[means.index(min(means[10:]))]
    assert lagging > 0.02  # what is mended here


@pytest.mark.parametrize("losses", [[2.3] * 50, [2.3 + step for step in range(50)], [math.nan] * 50, []])
def test_a_loss_that_never_falls_is_no_suggestion_but_an_error(losses: list[float]) -> None:
    rates = [10 ** (step / 10 - 6) for step in range(50)]
    with pytest.raises(UserError, match="the loss never fell"):
        read_curve(rates, as_lightning_reports(losses), 50)


def test_tune_lr_suggests_a_rate_that_trains_and_touches_no_run(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert entry.exit_code(tune.main, [*SMALL, "lr", "--output", "curve.csv", "--steps", "100"]) == 0
    told = capsys.readouterr().out
    suggested = float(told.split("--model.lr ")[1].split()[0])
    assert 2e-4 < suggested < 5e-2
    lines = Path("curve.csv").read_text().splitlines()
    assert lines[0].startswith("lr,loss")
    assert len(lines) <= 101
    assert sorted(os.listdir()) == ["curve.csv", "tune_lr.png"]


@pytest.mark.alone
def test_help_is_there_in_under_three_seconds() -> None:
    command = [sys.executable, "-m", "project.tune", "--help"]
    help_text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=3).stdout
    assert "--memory_limit_gib" in help_text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "lr|batch_size"),
        (["batchsize"], "tune what? lr or batch_size, got batchsize. Did you mean batch_size?"),
        (["lr", "--output", "x.txt"], "--output must end in .json or .csv, got x.txt"),
        (["lr", "--plot", "x.svg"], "--plot must end in .png, got x.svg"),
        (["lr", "--min_lr", "1", "--max_lr", "0.1"], "--min_lr must be below --max_lr (0.1), got 1"),
        (["lr", "--steps", "5"], "--steps must be at least 20, got 5"),
        (["batch_size", "--max_batch_size", "0"], "--max_batch_size must be above 0, got 0"),
        (["batch_size", "--memory_limit_gib", "nan"], "--memory_limit_gib must be above 0, got nan"),
        (
            ["batch_size", "--memory_limit_gb", "2"],
            "unknown option --memory_limit_gb. Did you mean --memory_limit_gib?",
        ),
        (["batch_size", "--data.sorce", "sample"], "--data.sorce"),
        (["batch_size", *SMALL, "--devices", "2"], "--devices must be 1, got 2: tune measures one process"),
        (["lr", *SMALL, "--strategy", "ddp"], "--strategy must be left away, got ddp: tune measures one process"),
        (["lr", *SMALL, "--num_nodes", "2"], "--num_nodes must be 1, got 2"),
        (["batch_size", *SMALL, "--memory_limit_gib", "0.00001"], "not even one sample fits"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    words: list[str], message: str, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert entry.exit_code(tune.main, words) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("batch size")]
    assert line.startswith("error: ")
    assert message in line
    assert os.listdir() == []


def test_tune_refuses_to_run_under_a_launcher(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="Start it without torchrun or srun"):
        tune.main(["batch_size", *SMALL])


@pytest.mark.gpu
def test_on_a_gpu_a_memory_limit_is_kept_to_and_memory_is_free_between_tries(workplace: Path) -> None:
    flags = ["--data.source", "sample", "--accelerator", "gpu", "--model.network", "ConvNet"]
    cli = ProjectCLI(flags, "project.tune")
    steps = TrainingSteps(cli, tune.one_device_flags(cli))
    steps.one_try(64)
    before = torch.cuda.memory_allocated()
    steps.memory_limit_bytes = GIB // 4
    search = find_largest(steps.one_try, steps.training_samples, "", 60, lambda _: None)
    assert search.limited_by == "memory"
    assert search.smallest_failed == search.largest + 1
    assert torch.cuda.memory_allocated() <= before + 2**20
    assert all((row.peak_bytes or 0) <= GIB // 4 for row in search.tries)


@pytest.mark.gpu
def test_tune_batch_size_on_a_gpu(workplace: Path) -> None:
    assert entry.exit_code(tune.main, ["batch_size", "--data.source", "sample", "--output", "sizes.json"]) == 0
    facts = json.loads(Path("sizes.json").read_text())
    assert facts["largest_batch_size"] == 9000
    assert all(math.isfinite(row["samples_per_sec"]) for row in facts["sizes"])
