"""Throughput: exact values on a known clock."""

from __future__ import annotations

import json
import logging
import random
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.data import AttributeDict
from lightning.pytorch import Callback
from lightning.pytorch.profilers import PassThroughProfiler, Profiler
from lightning.pytorch.strategies import FSDPStrategy
from numerals.model.networks import MLP, ConvNet
from torch.utils.data import DataLoader
from unbroken.cli.shown_warnings import silence_unfounded_advice
from unbroken.monitors.flops import (
    may_use_tf32,
    mfu_per_sample_per_sec,
    peak_flops,
    training_flops_per_sample,
)
from unbroken.monitors.throughput import (
    GpuUtilization,
    ThroughputMonitor,
    Window,
    rates,
    samples_in,
)
from unbroken.results.facts import Summary
from unbroken.results.run_result import RunResult
from unbroken.tasks.supervised import recompute_activations

from tests.monitored import (
    FakeClock,
    Linear,
    Points,
    Rows,
    in_a_fork,
    make_trainer,
    one_thread,  # noqa: F401 - used by every test
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

FETCH, STEP = 0.005, 0.010  # seconds a batch takes in the known runs


class Known:
    """A run on 83 samples in batches of 8, the last of 3: eleven batches of 15 ms, of which 5 ms
    are waiting.
    """

    def __init__(self, folder: Path, *callbacks: Callback, **options: Any) -> None:
        self.clock = FakeClock()
        self.waits: list[float] = []
        self.monitor = ThroughputMonitor(
            self.clock, lambda device: self.waits.append(self.clock.now)
        )
        options = {"log_every_n_steps": 4, **options}
        self.trainer, self.rows = make_trainer(folder, *callbacks, self.monitor, **options)
        self.data = Points(83, 8, on_fetch=lambda: self.clock.advance(FETCH)).loader()
        self.module = Linear(lambda: self.clock.advance(STEP), lambda: self.clock.advance(100.0))

    def fit(self, **options: Any) -> list[tuple[int, dict[str, float]]]:
        self.trainer.fit(self.module, self.data, **options)
        return self.rows.of("throughput")


def expected(
    batches: int, samples: int, steps: int | None = None, extra_seconds: float = 0.0
) -> Any:
    seconds = batches * (FETCH + STEP) + extra_seconds
    return pytest.approx(
        {
            "samples_per_sec": samples / seconds,
            "device_samples_per_sec": samples / seconds,
            "batches_per_sec": batches / seconds,
            "step_ms": 1000 * seconds / (steps or batches),
            "data_wait_pct": 100 * batches * FETCH / seconds,
        }
    )


def test_windows_end_at_log_steps_and_at_the_epochs_end_without_the_warm_up(tmp_path):
    run = Known(tmp_path)
    assert run.fit() == [(3, expected(2, 16)), (7, expected(4, 32)), (10, expected(3, 19))]


def test_every_epoch_begins_a_new_window_and_only_the_first_warms_up(tmp_path):
    run = Known(tmp_path, max_epochs=2)
    rows = run.fit()
    # 11 steps an epoch: the log steps 12, 16 and 20 fall on the second epoch's 1st, 5th and 9th
    # batch
    assert rows[3:] == [
        (11, expected(1, 8)),
        (15, expected(4, 32)),
        (19, expected(4, 32)),
        (21, expected(2, 11)),
    ]


def test_the_device_is_waited_for_at_the_edges_of_windows_only(tmp_path):
    run = Known(tmp_path, max_epochs=2)
    run.fit()
    assert len(run.waits) == 2 + 3 + 4  # two warm-up steps and seven windows, in 22 steps


def test_validation_in_mid_epoch_is_outside(tmp_path):
    run = Known(tmp_path, val_check_interval=3)
    run.trainer.fit(
        run.module, run.data, Points(24, 8, on_fetch=lambda: run.clock.advance(50.0)).loader()
    )
    assert run.rows.of("throughput") == [
        (3, expected(2, 16)),
        (7, expected(4, 32)),
        (10, expected(3, 19)),
    ]


def test_the_start_of_the_validation_loader_is_outside(tmp_path):
    run = Known(tmp_path, val_check_interval=3)

    class SlowToStart:
        def __iter__(self):
            run.clock.advance(30.0)
            return iter([(torch.randn(8, 8), torch.zeros(8).long())])

        def __len__(self):
            return 1

    run.trainer.fit(run.module, run.data, SlowToStart())
    assert run.rows.of("throughput")[1] == (7, expected(4, 32))


def test_checkpoint_saving_is_outside_whoever_saves(tmp_path):
    class Saver(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            trainer.save_checkpoint(tmp_path / "x.ckpt")

        def on_save_checkpoint(self, trainer, pl_module, checkpoint):
            known.clock.advance(7.0)

    for order in ((Saver(), None), (None, Saver())):
        known = Known(tmp_path)
        known.trainer.callbacks = [c for c in (order[0], known.monitor, order[1]) if c is not None]
        assert known.fit() == [(3, expected(2, 16)), (7, expected(4, 32)), (10, expected(3, 19))]


def test_what_a_callback_pauses_for_is_outside_also_when_pauses_nest(tmp_path):
    class Paused(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            with run.monitor.pause():
                run.clock.advance(3.0)
                with run.monitor.pause():
                    run.clock.advance(4.0)

    run = Known(tmp_path, Paused())
    assert run.fit() == [(3, expected(2, 16)), (7, expected(4, 32)), (10, expected(3, 19))]


def test_what_other_callbacks_do_in_a_step_is_part_of_the_run(tmp_path):
    class Slow(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            run.clock.advance(0.004)

    run = Known(tmp_path, Slow())
    assert run.fit()[1] == (7, expected(4, 32, extra_seconds=4 * 0.004))


def test_the_work_between_two_epochs_is_outside(tmp_path):
    class Between(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            run.clock.advance(9.0)

        def on_train_epoch_start(self, trainer, pl_module):
            run.clock.advance(9.0)

    run = Known(tmp_path, Between(), max_epochs=2)
    assert run.fit()[3] == (11, expected(1, 8))


class Workers:
    """A loader whose workers take 40 s to start, each with its first batch of the epoch."""

    num_workers = 2

    def __init__(self, run: Known, persistent: bool) -> None:
        self.run = run
        self.persistent_workers = persistent
        self.epochs = 0

    def __len__(self) -> int:
        return 11

    def __iter__(self) -> Any:
        starts = self.epochs == 0 or not self.persistent_workers
        self.epochs += 1
        for place, batch in enumerate(Points(83, 8).loader()):
            self.run.clock.advance(40.0 if starts and place < self.num_workers else FETCH)
            yield batch


@pytest.mark.parametrize("persistent", [False, True])
def test_the_start_of_workers_is_no_wait_for_data(tmp_path, persistent):
    run = Known(tmp_path, max_epochs=2, log_every_n_steps=11)
    run.data = Workers(run, persistent)
    (first, second) = run.fit()
    assert first == (10, expected(9, 67))
    # Workers that live on are waited for like any other loader.
    waits = 11 if persistent else 9
    seconds = 11 * STEP + waits * FETCH
    assert second[1]["samples_per_sec"] == pytest.approx(83 / seconds)
    assert second[1]["data_wait_pct"] == pytest.approx(100 * waits * FETCH / seconds)
    told = run.monitor.advice(run.trainer, run.monitor.summary())
    assert told.startswith("loader-bound: 1")


def test_a_short_run_with_workers_is_not_called_loader_bound(tmp_path):
    run = Known(tmp_path, max_epochs=2, limit_train_batches=2)
    run.data = Workers(run, persistent=False)
    run.fit()
    assert (
        run.monitor.advice(run.trainer, run.monitor.summary())
        == "10.0 ms a batch, 0 % of it waiting for data."
    )


def test_a_step_of_accumulated_batches_counts_all_of_them(tmp_path):
    # optimizer steps after batches 3, 6, 9 and 11; the first two warm up
    run = Known(tmp_path, accumulate_grad_batches=3, log_every_n_steps=2)
    assert run.fit() == [(3, expected(5, 35, steps=2))]


@pytest.mark.parametrize(("every", "steps_a_batch"), [(1, 2), (2, 1)])
def test_a_module_that_steps_itself_has_its_own_optimizer_steps_counted(
    tmp_path, every, steps_a_batch
):
    class StepsItself(Linear):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            self.manual_backward(super().training_step(batch, batch_idx))
            if batch_idx % every == 0:
                for _ in range(steps_a_batch):
                    self.optimizers().step()

    run = Known(tmp_path)
    run.module = StepsItself(lambda: run.clock.advance(STEP))
    # The windows of 2, 4 and 3 batches begin with the third.
    steps = [1, 2, 2] if every == 2 else [4, 8, 6]
    found = [row["step_ms"] for _, row in run.fit()]
    batches = [2, 4, 3]
    assert found == [
        pytest.approx(1000 * count * (FETCH + STEP) / taken)
        for count, taken in zip(batches, steps, strict=True)
    ]


def test_where_the_optimizer_takes_no_step_there_is_no_time_of_one(tmp_path):
    class NeverSteps(Linear):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)

    run = Known(tmp_path)
    run.module = NeverSteps(lambda: run.clock.advance(STEP))
    rows = run.fit()
    assert len(rows) == 3
    assert all("step_ms" not in row and row["samples_per_sec"] > 0 for _, row in rows)


def test_a_run_shorter_than_the_logging_interval_logs_at_its_end(tmp_path):
    assert Known(tmp_path, limit_train_batches=5, log_every_n_steps=50).fit() == [
        (4, expected(3, 24))
    ]


@pytest.mark.parametrize("batches", [1, 2])
def test_a_run_shorter_than_the_warm_up_reports_its_last_step(tmp_path, batches):
    run = Known(tmp_path, limit_train_batches=batches)
    assert run.fit() == [(batches - 1, expected(1, 8))]
    assert run.monitor.summary()["throughput/step_ms"] == pytest.approx(15)


def test_a_run_that_stops_in_mid_epoch_logs_the_rest(tmp_path):
    assert Known(tmp_path, max_steps=7, max_epochs=-1).fit() == [
        (3, expected(2, 16)),
        (6, expected(3, 24)),
    ]


def test_a_run_resumed_in_mid_epoch_warms_up_again_and_keeps_the_log_steps(tmp_path):
    class SaveAfterFive(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.global_step == 5:
                trainer.save_checkpoint(tmp_path / "mid.ckpt")

    Known(tmp_path, SaveAfterFive()).fit()
    rows = Known(tmp_path, log_every_n_steps=2).fit(
        ckpt_path=tmp_path / "mid.ckpt", weights_only=True
    )
    # a plain loader begins at its first batch again; the sixth and seventh step warm up
    assert [(step, row["step_ms"]) for step, row in rows] == [
        (step, pytest.approx(1000 * (FETCH + STEP))) for step in (7, 9, 10)
    ]
    # with one step left, that one is reported
    ((step, row),) = Known(tmp_path, max_steps=6).fit(
        ckpt_path=tmp_path / "mid.ckpt", weights_only=True
    )
    assert (step, row["step_ms"]) == (5, pytest.approx(1000 * (FETCH + STEP)))


def test_the_sanity_check_is_outside(tmp_path):
    run = Known(tmp_path, num_sanity_val_steps=2)
    run.trainer.fit(run.module, run.data, Points(24, 8).loader())
    assert run.rows.of("throughput")[0] == (3, expected(2, 16))


def test_a_monitor_can_be_used_again(tmp_path):
    run = Known(tmp_path)
    rows = list(run.fit())
    assert {
        name for name in vars(run.trainer) if callable(getattr(type(run.trainer), name, None))
    } == set()
    again = Known(tmp_path)
    again.monitor = run.monitor
    again.monitor.clock = again.clock
    again.trainer, again.rows = make_trainer(tmp_path, run.monitor, log_every_n_steps=4)
    assert again.fit() == rows


def test_validation_in_the_midst_of_accumulated_batches_is_outside(tmp_path):
    run = Known(tmp_path, val_check_interval=4, accumulate_grad_batches=3, log_every_n_steps=2)
    run.trainer.fit(
        run.module, run.data, Points(24, 8, on_fetch=lambda: run.clock.advance(50.0)).loader()
    )
    # the fetch of the first validation batch is not: only then does Lightning say that it validates
    ((_, row),) = run.rows.of("throughput")
    assert row["step_ms"] == pytest.approx(1000 * 5 * (FETCH + STEP) / 2)


def test_a_validation_without_a_batch_pauses_nothing(tmp_path):
    run = Known(tmp_path, val_check_interval=3)
    run.module.allow_zero_length_dataloader_with_multiple_devices = True
    run.trainer.fit(run.module, run.data, DataLoader([]))
    assert run.rows.of("throughput") == [
        (3, expected(2, 16)),
        (7, expected(4, 32)),
        (10, expected(3, 19)),
    ]


def test_a_validation_without_a_batch_at_the_epochs_end_takes_nothing_from_the_next_epoch(tmp_path):
    class Between(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            run.clock.advance(9.0)

    run = Known(
        tmp_path, Between(), max_epochs=2, log_every_n_steps=11
    )  # nothing is left to log at the epoch's end
    run.module.allow_zero_length_dataloader_with_multiple_devices = True
    run.trainer.fit(run.module, run.data, DataLoader([]))
    assert run.rows.of("throughput") == [(10, expected(9, 67)), (21, expected(11, 83))]


def test_a_run_that_fails_can_be_measured_again(tmp_path):
    run = Known(tmp_path)
    run.module.on_step = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        run.fit()
    run.module.on_step = lambda: run.clock.advance(STEP)
    run.trainer, run.rows = make_trainer(tmp_path, run.monitor, log_every_n_steps=4)
    assert run.fit() == [(3, expected(2, 16)), (7, expected(4, 32)), (10, expected(3, 19))]


def test_a_profiler_made_from_the_idle_one_hears_everything(tmp_path):
    heard: list[str] = []

    class Own(PassThroughProfiler):
        def profile(self, action_name):
            heard.append(action_name)
            return super().profile(action_name)

    Known(tmp_path, profiler=Own()).fit()
    assert "run_training_batch" in heard


class Heard(Profiler):
    """A profiler that keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def start(self, action_name: str) -> None:
        self.told.append(f"start {action_name}")

    def stop(self, action_name: str) -> None:
        self.told.append(f"stop {action_name}")

    def setup(self, stage: str, *args: Any, **kwargs: Any) -> None:
        super().setup(stage, *args, **kwargs)
        self.told.append(f"setup {stage}")

    def summary(self) -> str:
        self.told.append("summary")
        return ""


def test_the_users_profiler_behind_ours_hears_what_it_would_hear_alone(tmp_path):
    class Saver(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            trainer.save_checkpoint(tmp_path / "x.ckpt")

    alone, behind = Heard(), Heard()
    for profiler in (alone, behind):
        run = Known(tmp_path, Saver(), limit_train_batches=3)
        monitors = [] if profiler is alone else [run.monitor]
        run.trainer, _ = make_trainer(
            tmp_path, Saver(), *monitors, limit_train_batches=3, profiler=profiler
        )
        run.trainer.fit(run.module, run.data, Points(24, 8).loader())
    assert [told for told in behind.told if "ThroughputMonitor" not in told] == alone.told
    assert any(told.startswith("setup") for told in behind.told)
    assert {"start save_checkpoint", "stop run_training_batch", "summary"} <= set(behind.told)


def test_the_trainer_has_its_own_profiler_again_after_a_run_that_ends_or_fails(tmp_path):
    own = Heard()
    run = Known(tmp_path, profiler=own)
    seen: list[Any] = []

    def look() -> None:
        seen.append(run.trainer.profiler.told)
        run.trainer.profiler.summary()

    run.module.on_step = look
    run.fit()
    assert seen[0] is own.told, "a module's own code reaches what the user's profiler has"
    assert own.told.count("summary") > 1
    assert run.trainer.profiler is own
    run = Known(tmp_path, profiler=own)
    run.module.on_step = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        run.fit()
    assert run.trainer.profiler is own


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("simple", "run_training_epoch"),
        ("Advanced", "run_training_epoch"),
        ("pytorch", "Self CPU time total"),
    ],
)
def test_lightnings_profilers_work_by_name(tmp_path, caplog, name, word):
    caplog.set_level("INFO", logger="lightning.pytorch.profilers.profiler")
    monitor = ThroughputMonitor()
    trainer, _ = make_trainer(tmp_path, monitor, limit_train_batches=3, profiler=name)
    trainer.fit(Linear(), Points(80, 8).loader())
    assert word in caplog.text


def test_profilers_may_print_where_lightnings_other_notes_may_not():
    names = ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.profilers.profiler")
    before = {name: logging.getLogger(name).level for name in names}
    try:
        with warnings.catch_warnings():
            silence_unfounded_advice()
        assert logging.getLogger("lightning.pytorch.profilers.profiler").isEnabledFor(logging.INFO)
        assert not logging.getLogger("lightning.pytorch.utilities.rank_zero").isEnabledFor(
            logging.INFO
        )
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


def test_the_summary_is_the_median_over_windows(tmp_path):
    run = Known(tmp_path)
    rows = [row for _, row in run.fit()]
    middle = sorted(row["samples_per_sec"] for row in rows)[1]
    assert run.monitor.summary()["throughput/samples_per_sec"] == pytest.approx(middle)
    assert run.monitor.summary().keys() == {f"throughput/{name}" for name in rows[0]}


def test_rates_of_several_ranks_are_totals_over_their_mean_time():
    first = Window(0.0, batches=4, steps=2, samples=30, waited=0.5, seconds=2.0, gpu_pct=40.0)
    second = Window(0.0, batches=4, steps=2, samples=18, waited=1.0, seconds=4.0, gpu_pct=60.0)
    assert rates([first, second]) == pytest.approx(
        {
            "throughput/samples_per_sec": 48 / 3,
            "throughput/device_samples_per_sec": 48 / 6,
            "throughput/batches_per_sec": 8 / 3,
            "throughput/step_ms": 1500.0,
            "throughput/data_wait_pct": 25.0,
            "throughput/gpu_utilization_pct": 50.0,
        }
    )


def test_a_clock_that_stood_still_gives_no_rates_and_no_error():
    assert rates([Window(0.0, batches=1, steps=1, samples=8, seconds=0.0)]) == {}


def test_samples_are_left_out_where_a_batch_does_not_tell():
    assert "throughput/samples_per_sec" not in rates([Window(0.0, batches=4, steps=4, seconds=1.0)])


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        (torch.zeros(5, 3), 5),
        ((torch.zeros(4), torch.zeros(9)), 4),
        ([{"ids": torch.zeros(3, 2)}, 1], 3),
        (["name", {"words": ["a", "b"], "ids": torch.zeros(3, 2)}], 3),
        ({"x": (torch.zeros(2),)}, 2),
        (torch.tensor(1.0), 1),
        ("text", 0),
        ([], 0),
    ],
)
def test_samples_in_a_batch(batch, count):
    assert samples_in(batch) == count


def two_rank_run(folder: Path) -> None:
    """Rank 1 takes twice as long for a step; every rank writes down what it logged."""
    run = Known(
        folder, accelerator="cpu", devices=2, strategy="ddp_fork", use_distributed_sampler=False
    )

    class Report(Callback):
        def on_train_start(self, trainer, pl_module):
            seconds = STEP * (1 + trainer.global_rank)
            pl_module.on_step = lambda: run.clock.advance(seconds)

        def on_train_end(self, trainer, pl_module):
            rows = [(step, row) for step, row in run.rows.of("throughput")]
            report = {"rows": rows, "summary": run.monitor.summary()}
            (folder / f"{trainer.global_rank}.json").write_text(json.dumps(report))

    run.trainer.callbacks.append(Report())
    run.trainer.fit(run.module, run.data)


def test_two_ranks_report_their_totals_under_the_same_names(tmp_path):
    in_a_fork(two_rank_run, tmp_path)
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert reports[0]["summary"] == pytest.approx(reports[1]["summary"])
    step, row = reports[0]["rows"][1]
    slow, fast = 4 * (FETCH + 2 * STEP), 4 * (FETCH + STEP)
    mean = (slow + fast) / 2
    assert (step, row) == (
        7,
        pytest.approx(
            {
                "samples_per_sec": 64 / mean,
                "device_samples_per_sec": 32 / mean,
                "batches_per_sec": 8 / mean,
                "step_ms": 1000 * mean / 4,
                "data_wait_pct": 100 * 8 * FETCH / (slow + fast),
            }
        ),
    )


# GPU-only metrics, on fakes


def test_gpu_metrics_join_the_window(tmp_path, monkeypatch):
    class Steady:
        paused, ended = False, threading.Event()

        def mean(self):
            return 42.0

    monkeypatch.setattr("unbroken.monitors.throughput.mfu_per_sample_per_sec", lambda *_: 0.001)
    monkeypatch.setattr("unbroken.monitors.throughput.GpuUtilization", lambda read: Steady())
    _, row = Known(tmp_path).fit()[1]
    assert row["gpu_utilization_pct"] == 42.0
    assert row["mfu_pct"] == pytest.approx(0.001 * 32 / 0.060)


class Readings:
    """Utilization as the driver would tell it, value by value; ``drained`` is set when the last one
    was taken.
    """

    def __init__(self, *values: float) -> None:
        self.values = list(values)
        self.made, self.drained, self.over = threading.Event(), threading.Event(), threading.Event()
        self.sampler = GpuUtilization(self.read, interval_seconds=0.001)
        self.made.set()

    def read(self) -> float:
        self.made.wait(10)  # the sampler's thread may be quicker than the line that names it
        if not self.values:
            self.drained.set()
            self.over.wait(10)
            raise OSError("no driver")
        value = self.values.pop(0)
        self.sampler.paused = value == 90.0  # as during a validation
        return value


def test_utilization_is_the_mean_of_the_samples_since_the_last_window_or_the_last_mean():
    readings = Readings(10.0, 30.0, 50.0)
    assert readings.drained.wait(10)
    assert readings.sampler.mean() == 30.0
    assert readings.sampler.mean() is None
    readings.over.set()
    readings.sampler.ended.set()


def test_utilization_leaves_out_what_the_gpu_does_meanwhile():
    readings = Readings(10.0, 90.0, 20.0)
    assert readings.drained.wait(10)
    assert readings.sampler.mean() == 15.0
    readings.over.set()
    readings.sampler.ended.set()


def test_a_driver_that_tells_nothing_more_is_not_asked_again_and_nothing_is_made_up():
    readings = Readings(10.0)
    assert readings.drained.wait(10)
    readings.over.set()
    readings.sampler.ended.set()
    assert readings.sampler.mean() == 10.0
    assert readings.sampler.mean() is None


def test_flops_of_the_mlp_are_those_of_its_matrix_products():
    module = Linear()
    module.layer = MLP()
    forward = 2 * (784 * 256 + 256 * 128 + 128 * 10)
    backward = 2 * forward - 2 * 784 * 256  # the input needs no gradient
    assert (
        training_flops_per_sample(module, [torch.zeros(6, 1, 28, 28), None]) == forward + backward
    )


class DrawsAndKeeps(Linear):
    """Draws in each forward pass, and keeps what it has computed."""

    def forward(self, images: Any) -> Any:
        self.mean = images.mean(0)
        torch.rand(1)
        random.random()
        return super().forward(images)


def test_counting_flops_draws_nothing_and_keeps_nothing():
    module = DrawsAndKeeps()
    before = torch.get_rng_state(), random.getstate()
    training_flops_per_sample(module, torch.zeros(4, 8))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert not hasattr(module, "mean")
    assert module.training


@pytest.mark.nightly
def test_counting_flops_leaves_no_trace():
    network = ConvNet(dropout=0.5)
    module = Linear()
    module.layer = network
    network.head.eval()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    random_state = torch.get_rng_state()
    plain = training_flops_per_sample(module, torch.zeros(4, 1, 28, 28))
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(p.grad is None for p in module.parameters())
    assert network.training
    assert not network.head.training
    network.compile()
    assert training_flops_per_sample(module, torch.zeros(4, 1, 28, 28)) == plain
    module.layer = again = ConvNet(dropout=0.5)
    recompute_activations(again)  # the second forward pass is no useful work
    assert training_flops_per_sample(module, torch.zeros(4, 1, 28, 28)) == plain


@pytest.mark.parametrize(
    ("name", "dtype", "tf32", "tflops"),
    [
        ("NVIDIA H200", torch.bfloat16, False, 989.5),
        ("NVIDIA H200 NVL", torch.bfloat16, False, 835.5),
        ("NVIDIA H100 80GB HBM3", torch.float16, False, 989.4),
        ("NVIDIA H100 PCIe", torch.float16, False, 756),
        ("NVIDIA A100-SXM4-80GB", torch.float32, True, 156),
        ("NVIDIA A100-SXM4-40GB", torch.float32, False, 19.5),
        ("NVIDIA A100 80GB PCIe", torch.bfloat16, False, 312),
        ("NVIDIA L4", torch.bfloat16, False, 121),
        ("NVIDIA L40S", torch.bfloat16, False, 362),
        ("Tesla T4", torch.float16, False, 65),
        ("Tesla T4", torch.float32, True, 8.1),
        ("Tesla T4", torch.bfloat16, False, None),
        ("Tesla V100-SXM2-16GB", torch.float16, False, 125),
        ("NVIDIA GeForce RTX 3090", torch.float16, False, 71.2),
        ("NVIDIA GeForce RTX 4090", torch.bfloat16, False, 165.2),
        ("NVIDIA GeForce RTX 4080 SUPER", torch.float32, True, 52.2),
        ("NVIDIA GeForce RTX 5090", torch.bfloat16, False, 209.6),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", torch.bfloat16, False, None),
        ("NVIDIA GeForce RTX 4090 D", torch.bfloat16, False, None),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", torch.bfloat16, False, None),
        ("NVIDIA H100 80GB HBM2e", torch.bfloat16, False, None),
        ("Some GPU", torch.float32, False, None),
        ("NVIDIA H200", torch.float64, False, None),
    ],
)
def test_peak_rates_are_dense_and_by_exact_name(name, dtype, tf32, tflops):
    found = peak_flops(name, dtype, tf32)
    assert found == (pytest.approx(1e12 * tflops) if tflops else None)


def cuda_trainer(precision: str) -> Any:
    return SimpleNamespace(
        strategy=SimpleNamespace(root_device=torch.device("cuda")), precision=precision
    )


def test_flops_are_not_counted_where_weights_are_sharded(monkeypatch):
    trainer = cuda_trainer("bf16-mixed")
    trainer.strategy = FSDPStrategy()
    monkeypatch.setattr(FSDPStrategy, "root_device", torch.device("cuda"))
    with pytest.warns(
        UserWarning, match="mfu_pct is left out: FLOPs cannot be counted where a strategy shards"
    ):
        assert mfu_per_sample_per_sec(trainer, Linear(), [torch.zeros(6, 8)]) is None


def test_tf32_is_known_however_it_was_switched_on():
    dense, convolving = Linear(), ConvNet()
    assert not may_use_tf32(dense)
    assert may_use_tf32(convolving)  # cuDNN's default
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        with pytest.raises(RuntimeError):  # torch's older getter does not tell
            torch.get_float32_matmul_precision()
        assert may_use_tf32(dense)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    torch.set_float32_matmul_precision("high")
    try:
        assert may_use_tf32(dense)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_mfu_is_flops_over_peak(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    module = Linear()
    scale = mfu_per_sample_per_sec(cuda_trainer("bf16-mixed"), module, [torch.zeros(6, 8), None])
    assert scale == pytest.approx(
        100 * (2 * 2 * 8 * 2) / 989.5e12
    )  # forward, and the weights' gradient


def test_an_unknown_gpu_is_said_and_left_out(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Something 9000")
    with pytest.warns(
        UserWarning, match="mfu_pct is left out: no known peak of NVIDIA Something 9000"
    ):
        assert (
            mfu_per_sample_per_sec(cuda_trainer("16-mixed"), Linear(), [torch.zeros(6, 8)]) is None
        )


def test_a_network_that_cannot_be_counted_is_said_and_left_out(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    with pytest.warns(UserWarning, match="FLOPs cannot be counted"):
        assert mfu_per_sample_per_sec(cuda_trainer("16-mixed"), Linear(), "no tensor") is None


def test_the_median_of_a_resumed_run_is_over_the_windows_of_all_its_starts(tmp_path):
    run = Known(tmp_path)
    run.fit()
    name = "throughput/samples_per_sec"
    facts = Summary("r", True, "cpu", "32-true", 1, parameters=5, epochs=1, steps=5)
    result = RunResult(facts, config="", series={name: [(1, 1.0), (2, 3.0), (3, 2.0)]})
    run.monitor.add_facts(run.trainer, result)
    assert facts.metrics[name] == 2.0
    # What no logger's file tells is of this start.
    assert facts.metrics["throughput/step_ms"] == pytest.approx(15)


# Advice


def advice(datamodule: Any = None, devices: int = 1, **metrics: float) -> str:
    known = {"data_wait_pct": 1.0, "batches_per_sec": 100.0, **metrics}
    trainer: Any = SimpleNamespace(world_size=devices, datamodule=datamodule)
    medians = {f"throughput/{name}": value for name, value in known.items()}
    return ThroughputMonitor().advice(trainer, medians)


def test_advice_says_what_was_measured():
    assert advice() == "10.0 ms a batch, 1 % of it waiting for data."
    assert advice(devices=2) == "20.0 ms a batch, 1 % of it waiting for data."
    assert advice(gpu_utilization_pct=30.0).startswith(
        "10.0 ms a batch, 1 % of it waiting for data, the GPU idle 70 %"
    )
    tune = " The command tune batch_size finds the fastest batch size."
    assert advice(datamodule=SimpleNamespace(batch_size=64)).endswith(tune)
    assert advice(datamodule=SimpleNamespace(hparams=AttributeDict(batch_size=64))).endswith(tune)


def test_a_bound_loader_is_told_and_given_no_workers_that_may_make_it_slower():
    data = SimpleNamespace(batch_size=64, num_workers=0)
    assert (
        advice(data, data_wait_pct=40.0)
        == "loader-bound: 10.0 ms a batch, 40 % of it waiting for data."
    )


def test_a_run_that_measured_nothing_has_no_advice():
    assert ThroughputMonitor().advice(cuda_trainer("32-true"), {}) == ""
    assert ThroughputMonitor().summary() == {}


def test_a_run_gives_advice(tmp_path):
    run = Known(tmp_path)
    run.fit()
    told = run.monitor.advice(run.trainer, run.monitor.summary())
    assert told.startswith("loader-bound: 15.0 ms a batch, 33 % of it")


def test_rows_logger_sees_scalars_only(tmp_path):
    run = Known(tmp_path)
    run.fit()
    assert isinstance(run.rows, Rows)
    assert all(
        isinstance(value, (int, float)) for _, row in run.rows.rows for value in row.values()
    )
