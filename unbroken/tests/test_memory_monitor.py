"""Memory: exact values on a known allocator, and the truth on a real host."""

from __future__ import annotations

import gc
import json
import mmap
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from lightning.fabric.utilities.data import AttributeDict
from lightning.pytorch import Callback
from torch import nn
from unbroken.errors import UserError, is_out_of_memory
from unbroken.machine.live_memory import LiveMemory
from unbroken.monitors.memory import (
    ACTIVATIONS,
    GIB,
    MIB,
    MemoryMonitor,
    host_memory,
    leak_report,
    memory_breakdown,
)
from unbroken.monitors.memory_snapshot import MemorySnapshot
from unbroken.monitors.out_of_memory import batch_size, flags_to_try

from tests.monitored import (
    Linear,
    Points,
    in_a_fork,
    make_trainer,
    one_thread,  # noqa: F401 - the fixture of every test here
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*logging interval", "ignore:.*does not have many workers"
)


class FakeAllocator:
    """A device of 8 GiB on which what is allocated and reserved is set by hand."""

    def __init__(self) -> None:
        self.now = {"allocated": 0, "reserved": 0}
        self.peak = dict(self.now)
        self.resets = 0

    def hold(self, allocated_gib: float, reserved_gib: float | None = None) -> None:
        self.now = {
            "allocated": int(allocated_gib * GIB),
            "reserved": int((reserved_gib or 2 * allocated_gib) * GIB),
        }
        self.peak = {name: max(self.peak[name], size) for name, size in self.now.items()}

    def read(self, device: torch.device, reset_peaks: bool = False) -> dict[str, int]:
        sizes = {
            **self.now,
            **{f"peak_{name}": size for name, size in self.peak.items()},
            "total": 8 * GIB,
        }
        if reset_peaks:
            self.resets += 1
            self.peak = dict(self.now)
        return sizes


class FakeHost:
    """A host whose memory is set by hand, in GiB."""

    def __init__(self, process: float = 1.0, workers: float = 0.5, peak: float = 1.25) -> None:
        self.process, self.workers, self.peak = process, workers, peak

    def __call__(self) -> dict[str, int]:
        sizes = {"process": self.process, "rss": self.process + self.workers, "peak_rss": self.peak}
        return {name: int(size * GIB) for name, size in sizes.items()}


def known_run(
    folder: Path, **options: Any
) -> tuple[Any, Any, FakeAllocator, MemoryMonitor, Linear]:
    """A run that holds 1 GiB; a training step touches 3, a validation step 5, what came before
    training 6.
    """
    allocator = FakeAllocator()
    monitor = MemoryMonitor(allocator.read, FakeHost())
    trainer, rows = make_trainer(folder, monitor, **{"log_every_n_steps": 4, **options})

    def touch(gib: float) -> None:
        allocator.hold(gib)
        allocator.hold(1.0)

    touch(6.0)
    return trainer, rows, allocator, monitor, Linear(lambda: touch(3.0), lambda: touch(5.0))


GPU_ROW = {
    "allocated_gib": 1.0,
    "reserved_gib": 2.0,
    "peak_allocated_gib": 3.0,
    "peak_reserved_gib": 6.0,
    "peak_reserved_pct": 75.0,
    "rss_gib": 1.5,
}


def test_device_memory_is_logged_at_log_steps_and_epoch_ends_with_peaks_of_their_own(tmp_path):
    trainer, rows, allocator, _, module = known_run(tmp_path)
    trainer.fit(module, Points(80, 8).loader())
    assert rows.of("memory") == [(3, GPU_ROW), (7, GPU_ROW), (9, GPU_ROW)]
    assert allocator.resets == 1 + 3  # when training starts, and with every row


def test_a_peak_belongs_to_its_own_window(tmp_path):
    trainer, rows, allocator, monitor, module = known_run(tmp_path)

    class Spike(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx == 5:
                allocator.hold(3.5)

    trainer.callbacks.append(Spike())
    trainer.fit(module, Points(80, 8).loader())
    assert [row["peak_allocated_gib"] for _, row in rows.of("memory")] == [3.0, 3.5, 3.0]
    assert monitor.peaks == {
        "memory/peak_allocated_gib": 3.5,
        "memory/peak_reserved_gib": 7.0,
        "memory/peak_reserved_pct": 87.5,
        "memory/peak_rss_gib": 1.5,
    }


def test_validation_counts_for_the_peak_but_not_for_the_breakdown_of_a_training_step(tmp_path):
    trainer, rows, allocator, monitor, module = known_run(tmp_path, val_check_interval=6)

    class SpikeRightBefore(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx == 5:
                allocator.hold(3.5)

    trainer.callbacks.append(SpikeRightBefore())
    trainer.fit(module, Points(80, 8).loader(), Points(16, 8).loader())
    assert [row["peak_allocated_gib"] for _, row in rows.of("memory")] == [3.0, 5.0, 3.0]
    assert monitor.peaks["memory/peak_allocated_gib"] == 5.0
    assert sum(monitor.breakdown.values()) == pytest.approx(3.5)


def test_an_accumulated_step_is_logged_once(tmp_path):
    trainer, rows, _, _, module = known_run(
        tmp_path, accumulate_grad_batches=3, log_every_n_steps=1
    )
    trainer.fit(module, Points(72, 8).loader())
    assert [step for step, _ in rows.of("memory")] == [0, 1, 2, 2]  # and again at the epoch's end


def test_the_peak_of_a_resumed_run_is_the_largest_of_its_starts(tmp_path):
    def fit(gib: int, epochs: int, **options: Any) -> MemoryMonitor:
        size = gib * int(GIB)
        host = {"process": size, "rss": size, "peak_rss": size}
        monitor = MemoryMonitor(host=lambda: host)
        trainer, _ = make_trainer(tmp_path, monitor, max_epochs=epochs)
        trainer.fit(Linear(), Points(16, 8).loader(), **options)
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        return monitor

    resume = {"ckpt_path": tmp_path / "last.ckpt", "weights_only": True}
    assert fit(5, 1).peaks == {"memory/peak_rss_gib": 5.0}
    assert fit(2, 2, **resume).peaks == {"memory/peak_rss_gib": 5.0}
    assert fit(7, 3, **resume).peaks == {"memory/peak_rss_gib": 7.0}


def test_a_row_written_again_at_the_epochs_end_keeps_its_peak(tmp_path):
    trainer, rows, _, monitor, module = known_run(tmp_path)
    trainer.fit(module, Points(64, 8).loader())
    assert [(step, row["peak_allocated_gib"]) for step, row in rows.of("memory")] == [
        (3, 3.0),
        (7, 3.0),
        (7, 3.0),
    ]
    trainer, rows, _, monitor, module = known_run(tmp_path)
    trainer.fit(module, Points(64, 8).loader(), Points(8, 8).loader())
    assert [(step, row["peak_allocated_gib"]) for step, row in rows.of("memory")] == [
        (3, 3.0),
        (7, 3.0),
        (7, 5.0),
    ]
    assert sum(monitor.breakdown.values()) == pytest.approx(3.0)


def test_the_breakdown_adds_up_tensors_exactly(tmp_path):
    trainer, _, _, monitor, module = known_run(tmp_path)
    module.layer = nn.Linear(8, 2, dtype=torch.float32)
    module.register_buffer("table", torch.zeros(100, dtype=torch.float64))
    trainer.fit(module, Points(80, 8).loader())
    weights, parameters = (8 * 2 + 2) * 4 + 100 * 8, (8 * 2 + 2) * 4
    assert monitor.breakdown == pytest.approx(
        {
            "weights": weights / GIB,
            "gradients": parameters / GIB,
            "optimizer state": (2 * parameters + 2 * 4)
            / GIB,  # two moments each, and a float32 step count per tensor
            ACTIVATIONS: 3.0 - (weights + 3 * parameters + 8) / GIB,
        }
    )


class Late(torch.optim.Adam):
    """Its first step is skipped, as a gradient scaler skips it."""

    skipped = False

    def step(self, closure: Any = None) -> Any:
        if self.skipped:
            return super().step(closure)
        self.skipped = True
        return None if closure is None else closure()


def test_a_first_step_that_two_optimizers_skip_does_not_hide_their_state(tmp_path):
    class Two(Linear):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(self(batch[0]).sum())
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return Late([self.layer.weight]), Late([self.layer.bias])

    monitor = MemoryMonitor()
    trainer, _ = make_trainer(tmp_path, monitor)
    trainer.fit(Two(), Points(80, 8).loader())
    assert monitor.breakdown["optimizer state"] >= 2 * (8 * 2 + 2) * 4 / GIB


def test_a_second_training_does_not_show_the_first_ones_memory(tmp_path):
    monitor, activations = MemoryMonitor(), []
    for width in (10_000, 2):
        module = Linear()
        module.layer = nn.Linear(8, width)
        trainer, _ = make_trainer(tmp_path, monitor)
        trainer.fit(module, Points(80, 8).loader())
        activations.append(monitor.breakdown[ACTIVATIONS])
    assert activations[1] < activations[0] / 100


def test_a_run_on_the_cpu_logs_host_memory_alone_and_knows_its_tensors(tmp_path):
    monitor, measured = MemoryMonitor(), list[float]()
    trainer, rows = make_trainer(tmp_path, monitor)
    module = (
        Linear()
    )  # measures right after the monitor, and with the loader workers that other tests have left

    def measure(*_):
        processes = [os.getpid(), *(worker.pid for worker in multiprocessing.active_children())]
        measured.append(sum(psutil.Process(pid).memory_info().rss for pid in processes) / GIB)

    module.on_train_batch_end = measure
    trainer.fit(module, Points(80, 8).loader())
    ((step, row),) = rows.of("memory")
    assert (step, set(row)) == (9, {"rss_gib"})
    assert row["rss_gib"] == pytest.approx(measured[step], rel=0.05)
    assert monitor.peaks.keys() == {"memory/peak_rss_gib"}
    assert monitor.peaks["memory/peak_rss_gib"] >= row["rss_gib"]
    parts = monitor.breakdown
    assert parts.keys() == {"weights", "gradients", "optimizer state", ACTIVATIONS}
    assert parts["gradients"] == 72 / GIB
    assert (
        8 * 2 * 4 / GIB <= parts[ACTIVATIONS] < 4096 / GIB
    )  # the output of 8 samples, and what the loss makes of it


def test_data_that_live_on_the_device_are_a_part_of_their_own():
    def parts(device: str) -> dict[str, float]:
        datamodule = SimpleNamespace(bytes_on_device={"train": GIB, "val": GIB})
        place = SimpleNamespace(root_device=torch.device(device))
        trainer: Any = SimpleNamespace(
            lightning_module=nn.Linear(1, 1), optimizers=[], datamodule=datamodule, strategy=place
        )
        return memory_breakdown(trainer)

    assert parts("cuda")["data"] == 2
    assert "data" not in parts("cpu")  # they are where they always are


def test_the_breakdown_waits_for_the_first_optimizer_step(tmp_path):
    trainer, _, _, monitor, module = known_run(
        tmp_path, accumulate_grad_batches=4, limit_train_batches=5
    )
    trainer.fit(module, Points(80, 8).loader())
    assert monitor.breakdown["optimizer state"] == (2 * 72 + 8) / GIB


def test_the_highest_value_of_a_run_is_kept_over_epochs(tmp_path):
    trainer, rows, allocator, monitor, module = known_run(
        tmp_path, max_epochs=3, log_every_n_steps=50
    )

    class SpikeInTheSecond(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == 1:
                allocator.hold(4.0)

    trainer.callbacks.append(SpikeInTheSecond())
    trainer.fit(module, Points(80, 8).loader())
    assert monitor.peaks["memory/peak_allocated_gib"] == 4.0
    assert [row["peak_allocated_gib"] for step, row in rows.of("memory") if step % 10 == 9] == [
        3.0,
        4.0,
        3.0,
    ]


def two_rank_run(folder: Path) -> None:
    allocator = FakeAllocator()
    host = FakeHost()
    monitor = MemoryMonitor(allocator.read, host)
    trainer, rows = make_trainer(
        folder, monitor, devices=2, strategy="ddp_fork", use_distributed_sampler=False
    )

    class Differ(Callback):
        def on_train_start(self, trainer, pl_module):
            allocator.hold(1.0 + trainer.global_rank)
            host.process = 1.0 + trainer.global_rank

        def on_train_end(self, trainer, pl_module):
            report = [rows.of("memory"), monitor.peaks]
            (folder / f"{trainer.global_rank}.json").write_text(json.dumps(report))

    trainer.callbacks.append(Differ())
    trainer.fit(Linear(), Points(80, 8).loader())


@pytest.mark.nightly
def test_two_ranks_share_the_larger_device_figure_and_the_sum_of_host_memory(tmp_path):
    in_a_fork(two_rank_run, tmp_path)
    for rank in (0, 1):
        logged, summary = json.loads((tmp_path / f"{rank}.json").read_text())
        assert logged[-1][1]["allocated_gib"] == 2.0
        assert logged[-1][1]["peak_reserved_pct"] == 50.0
        assert logged[-1][1]["rss_gib"] == 1.5 + 2.5
        assert summary["memory/peak_rss_gib"] == 4.0  # above the sum of what the processes say: 2.5


# Host memory


def work(ready: Any, done: Any) -> None:
    block = bytearray(64 * MIB)
    block[::4096] = b"x" * len(block[::4096])
    ready.set()
    done.wait()


def test_host_memory_counts_workers_and_forgets_those_that_ended():
    alone = host_memory()["rss"]
    context = multiprocessing.get_context("fork")
    ready, done = context.Event(), context.Event()
    worker = context.Process(target=work, args=(ready, done))
    worker.start()
    ready.wait()
    both = host_memory()["rss"]
    done.set()
    worker.join()
    assert both > alone + 64 * MIB
    assert host_memory()["rss"] < both - 64 * MIB
    assert host_memory()["process"] == pytest.approx(psutil.Process().memory_info().rss, rel=0.05)


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell")
def test_the_peak_is_this_process_own_and_not_its_parents():
    script = "from unbroken.monitors.memory import host_memory; print(host_memory()['peak_rss'])"
    block = bytearray(512 * MIB)
    block[::4096] = b"x" * len(block[::4096])
    peak = int(
        subprocess.run(
            [sys.executable, "-c", script], capture_output=True, check=True, text=True
        ).stdout
    )
    assert 0 < peak < psutil.Process().memory_info().rss - 256 * MIB


# Growth


def test_steady_growth_is_reported_with_numbers_and_nothing_else_is():
    def last_report(*mib: float) -> str | None:
        return leak_report("host", list(mib))

    report = last_report(500, 508, 516, 524, 532)
    assert report is not None
    assert report.startswith(
        "host memory looks like it leaks: "
        "8.0 MiB more after each of the last 4 epochs (500 MiB → 532 MiB)"
    )
    assert last_report(500, 508, 516, 524) is None  # too few epochs to tell
    assert last_report(500, 564, 580, 588, 592) is None  # caches that fill up
    assert last_report(500, 508, 516, 516, 524) is None  # one epoch did not grow
    assert last_report(500, 501, 502, 503, 504) is None  # less than allocators wobble
    assert last_report(900, 500, 508, 516, 524, 532) is not None  # only the last epochs count


def leaky(mib: float) -> Linear:
    kept: list[Any] = []

    def leak() -> (
        None
    ):  # pages of their own: the heap would first hand out what earlier tests have freed
        kept.append(mmap.mmap(-1, int(mib * MIB)))
        kept[-1].write(b"x" * int(mib * MIB))

    module = Linear()
    if mib:
        module.on_validation = leak
    return module


def test_a_planted_leak_is_reported_once(tmp_path):
    monitor = MemoryMonitor()
    trainer, _ = make_trainer(tmp_path, monitor, max_epochs=8)
    with pytest.warns(UserWarning, match="host memory looks like it leaks") as record:
        trainer.fit(leaky(8), Points(80, 8).loader(), Points(8, 8).loader())
    assert len([w for w in record if "leaks" in str(w.message)]) == 1
    assert len(monitor.leaks) == 1
    assert "8." in monitor.leaks["host"]


def test_a_planted_leak_on_the_device_is_reported(tmp_path):
    trainer, _, allocator, _, module = known_run(tmp_path, max_epochs=8)

    class Keep(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            allocator.hold(1.0 + trainer.current_epoch / 1024)

    trainer.callbacks.insert(0, Keep())
    with pytest.warns(UserWarning, match=r"device memory looks like it leaks: 1\.0 MiB more"):
        trainer.fit(module, Points(80, 8).loader())


def test_a_long_clean_run_reports_no_leak(tmp_path, recwarn):
    monitor = MemoryMonitor()
    trainer, _ = make_trainer(tmp_path, monitor, max_epochs=25, log_every_n_steps=2)
    trainer.fit(leaky(0), Points(80, 8).loader(), Points(8, 8).loader())
    assert monitor.leaks == {}
    assert len(monitor._at_epoch_ends["host"]) == 25


# Advice


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 17 GB)"), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
            True,
        ),
        (MemoryError(), True),
        (
            RuntimeError(
                "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
            ),
            True,
        ),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("GET was unable to find an engine to execute this computation"), True),
        (RuntimeError("Unable to find an engine to execute this computation"), True),
        (
            RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if ..."),
            True,
        ),
        (RuntimeError("shapes do not match"), False),
        (RuntimeError(), False),
        (KeyError(3), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_what_counts_as_out_of_memory(error, expected):
    assert is_out_of_memory(error) is expected


def first_words(
    size: int | None, flag: str, precision: str, accumulate: int = 1, device: str = "cuda"
) -> list[str]:
    trainer: Any = SimpleNamespace(
        precision=precision,
        accumulate_grad_batches=accumulate,
        strategy=SimpleNamespace(root_device=torch.device(device)),
        lightning_module=SimpleNamespace(hparams={"activation_checkpointing": False}),
    )
    return [line.split("   ")[0] for line in flags_to_try(trainer, flag, size)]


def test_three_things_to_try_in_order_of_what_they_cost():
    assert first_words(64, "batch_size", "32-true") == [
        "--precision bf16-mixed",
        "--data.batch_size 32 --accumulate_grad_batches 2",
        "--model.activation_checkpointing true",
    ]
    assert first_words(64, "batch_size", "bf16-mixed", accumulate=2) == [
        "--data.batch_size 32 --accumulate_grad_batches 4",
        "--precision bf16-true",
        "--model.activation_checkpointing true",
    ]
    assert first_words(1000, "eval_batch_size", "32-true") == [
        "--data.eval_batch_size 500",
        "--precision bf16-mixed",
        "a smaller network",
    ]
    assert first_words(None, "batch_size", "32-true", device="cpu") == [
        "half the batch size in your DataLoader --accumulate_grad_batches 2",
        "--model.activation_checkpointing true",
        "a smaller network",
    ]
    assert len(first_words(8, "eval_batch_size", "16-true")) == 3


def test_flags_that_a_module_does_not_have_are_not_named(tmp_path):
    trainer, _, _, _, module = known_run(tmp_path)
    trainer.fit(module, Points(8, 8).loader())
    assert [line.split("   ")[0] for line in flags_to_try(trainer, "batch_size", None)] == [
        "half the batch size in your DataLoader --accumulate_grad_batches 2",
        "a smaller network",
        "SGD as the optimizer",
    ]


@pytest.mark.parametrize("place", ["attribute", "hparams"])
def test_the_advice_knows_a_batch_size_that_is_an_attribute_or_one_of_the_hparams(place: str):
    sizes = AttributeDict(batch_size=64, eval_batch_size=256)
    data = sizes if place == "attribute" else SimpleNamespace(hparams=sizes)
    trainer: Any = SimpleNamespace(datamodule=data)
    assert batch_size(trainer, is_evaluating=False) == ("batch_size", 64)
    assert batch_size(trainer, is_evaluating=True) == ("eval_batch_size", 256)


def test_a_simulated_out_of_memory_error_carries_the_advice_and_goes_on_its_way(tmp_path):
    trainer, _, allocator, monitor, module = known_run(tmp_path)

    def run_out() -> None:
        allocator.hold(7.5)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB")

    module.on_step = run_out
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer.fit(module, Points(80, 8).loader())
    lines = str(caught.value).splitlines()
    assert lines[0] == "CUDA out of memory. Tried to allocate 4.00 GiB"
    assert lines[2] == "Out of memory in training; the peak was 7.50 GiB of 8.00 GiB."
    assert lines[3].startswith("Memory by use: activations and the rest 7.50 GiB, weights 0.0 MiB")
    assert [line.strip()[:2] for line in lines[5:8]] == ["1.", "2.", "3."]
    assert lines[8] == "Nothing was saved yet: start again with one of these."
    monitor.on_exception(trainer, module, caught.value)  # a second callback or a second trip
    assert str(caught.value).count("Try, in this order") == 1


def test_another_error_keeps_its_message(tmp_path):
    trainer, _, _, _, module = known_run(tmp_path)
    module.on_step = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError, match=r"^division by zero$"):
        trainer.fit(module, Points(80, 8).loader())


# Snapshot


def test_a_snapshot_without_cuda_is_refused(tmp_path):
    trainer, _ = make_trainer(tmp_path, MemorySnapshot(str(tmp_path / "m.pickle")))
    with pytest.raises(UserError, match="--memory_snapshot needs a CUDA device, got cpu"):
        trainer.fit(Linear(), Points(80, 8).loader())


def test_a_snapshot_is_written_when_training_ends_and_when_it_fails(tmp_path, monkeypatch, capsys):
    calls: list[Any] = []
    memory = torch.cuda.memory
    monkeypatch.setattr(memory, "_record_memory_history", lambda **kwargs: calls.append(kwargs))
    monkeypatch.setattr(memory, "_dump_snapshot", lambda path: calls.append(path))
    cuda = SimpleNamespace(root_device=torch.device("cuda"))
    trainer: Any = SimpleNamespace(strategy=cuda, global_rank=1)
    snapshot = MemorySnapshot(str(tmp_path / "m.pickle"))
    snapshot.on_fit_start(trainer, Linear())
    snapshot.on_exception(trainer, Linear(), RuntimeError())
    snapshot.on_train_end(trainer, Linear())
    assert calls[1:] == [str(tmp_path / "m.rank1.pickle"), {"enabled": None}]
    trainer.global_rank = 0
    snapshot.on_fit_start(trainer, Linear())
    snapshot.on_train_end(trainer, Linear())
    assert calls[4] == str(tmp_path / "m.pickle")
    assert "https://pytorch.org/memory_viz" in capsys.readouterr().out
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    at_home = MemorySnapshot("~/home.pickle")
    at_home.on_fit_start(trainer, Linear())
    at_home.on_train_end(trainer, Linear())
    assert calls[7] == str(tmp_path / "home.pickle")
    with pytest.raises(UserError, match="must lie in a folder that exists"):
        MemorySnapshot("nowhere/m.pickle").on_fit_start(trainer, Linear())


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
