"""The profiler shows what a step is made of, in the run's folder, and changes nothing."""

from __future__ import annotations

import json
import os
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch.autograd import DeviceType
from unbroken.errors import UserError
from unbroken.monitors.profiler import REGIONS, StepProfiler, region_times
from unbroken.monitors.throughput import ThroughputMonitor

from tests.commands import run
from tests.monitored import Linear, Points, make_trainer, one_thread  # noqa: F401 - the fixture of every test here
from tests.promises import ROOT, SEARCHED

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

Span = tuple[float, float]


def fit(folder: Path, *callbacks: Callback, module: Linear | None = None, **options: Any) -> Linear:
    torch.manual_seed(0)
    module = module or Linear()
    trainer, _ = make_trainer(folder, *callbacks, gradient_clip_val=1.0, **options)
    trainer.fit(module, Points(160, 8).loader(), Points(16, 8).loader())
    return module


def events(folder: Path) -> list[dict[str, Any]]:
    (trace,) = (folder / "profile").glob(
        "rank0.*.pt.trace.json"
    )  # the ending is how TensorBoard knows it
    return json.loads(trace.read_text())["traceEvents"]


def spans(found: list[dict[str, Any]], name: str) -> list[Span]:
    named = [
        event for event in found if event.get("cat") == "user_annotation" and event["name"] == name
    ]
    return sorted((event["ts"], event["ts"] + event["dur"]) for event in named)


def test_every_recorded_step_has_its_regions_in_order(tmp_path):
    fit(tmp_path, profiler=StepProfiler(wait=2, warmup=1, active=3))
    found = events(tmp_path)
    counts = {name: len(spans(found, name)) for name in REGIONS}
    assert counts == {
        "data": 6,
        "forward": 3,
        "loss": 3,
        "backward": 3,
        "optimizer": 3,
    }  # data: fetching, and moving
    for step in range(3):
        fetching, moving = spans(found, "data")[2 * step : 2 * step + 2]
        parts = [fetching, moving, *(spans(found, name)[step] for name in REGIONS[1:])]
        assert all(before[1] <= after[0] for before, after in pairwise(parts))


def test_only_the_steps_of_the_schedule_are_recorded(tmp_path):
    fit(tmp_path, profiler=StepProfiler(wait=2, warmup=1, active=3), max_epochs=2)
    steps = {
        event["name"]
        for event in events(tmp_path)
        if str(event.get("name")).startswith("ProfilerStep#")
    }
    assert steps == {"ProfilerStep#3", "ProfilerStep#4", "ProfilerStep#5"}


def test_regions_hold_the_operations_that_belong_to_them(tmp_path):
    fit(tmp_path, profiler=StepProfiler(wait=2, warmup=1, active=1))
    found = events(tmp_path)
    operations = [event for event in found if event.get("cat") == "cpu_op"]

    def inside(name: str) -> set[str]:
        ((begin, end),) = spans(found, name)
        return {event["name"] for event in operations if begin <= event["ts"] <= end}

    assert "aten::addmm" in inside("forward")
    assert "aten::cross_entropy_loss" in inside("loss")
    assert "aten::cross_entropy_loss" not in inside("forward")
    assert "autograd::engine::evaluate_function: AddmmBackward0" in inside("backward")
    assert "aten::linalg_vector_norm" in inside("optimizer")  # clipping
    assert "aten::addcdiv_" in inside("optimizer")
    assert not inside("optimizer") & {"aten::addmm", "aten::cross_entropy_loss"}


def test_shapes_and_memory_are_recorded(tmp_path):
    fit(tmp_path, profiler=StepProfiler(wait=2, warmup=1, active=1))
    found = events(tmp_path)
    (product,) = [event for event in found if event.get("name") == "aten::addmm"]
    assert product["args"]["Input Dims"][:3] == [[2], [8, 8], [8, 2]]
    assert any(event.get("name") == "[memory]" for event in found)


def test_the_table_names_regions_and_operations_and_each_file_is_said_how_to_open(tmp_path, capsys):
    fit(tmp_path, profiler=StepProfiler(wait=2, warmup=1, active=3))
    table = (tmp_path / "profile" / "top_operations.txt").read_text()
    assert table.startswith("3 steps.")
    assert all(any(line.startswith(name) for line in table.splitlines()[2:7]) for name in REGIONS)
    assert "aten::addmm" in table
    assert "[8, 8], [8, 2]" in table
    printed = capsys.readouterr().out
    assert all(
        word in printed
        for word in ("perfetto", "tensorboard --logdir", "top_operations.txt", str(tmp_path))
    )


def test_profiling_changes_no_weight_and_leaves_no_hook(tmp_path):
    plain = fit(tmp_path / "a")
    profiled = fit(tmp_path / "b", profiler=StepProfiler(wait=2, warmup=1, active=3))
    assert all(
        torch.equal(a, b) for a, b in zip(plain.parameters(), profiled.parameters(), strict=True)
    )
    assert not profiled.layer._forward_hooks
    assert not profiled.layer._forward_pre_hooks
    assert not profiled.trainer.optimizers[0]._optimizer_step_post_hooks


def test_the_regions_are_the_same_behind_the_throughput_monitors_profiler(tmp_path):
    fit(tmp_path, ThroughputMonitor(), profiler=StepProfiler(wait=2, warmup=1, active=3))
    found = events(tmp_path)
    counts = {name: len(spans(found, name)) for name in REGIONS}
    assert counts == {"data": 6, "forward": 3, "loss": 3, "backward": 3, "optimizer": 3}


def test_accumulated_batches_have_an_optimizer_region_only_where_it_steps(tmp_path):
    fit(tmp_path, profiler=StepProfiler(wait=2, warmup=2, active=4), accumulate_grad_batches=2)
    found = events(tmp_path)
    assert Counter({name: len(spans(found, name)) for name in ("forward", "optimizer")}) == {
        "forward": 4,
        "optimizer": 2,
    }


@pytest.mark.nightly
def test_a_compiled_network_is_profiled_and_stays_compiled(tmp_path):
    module, compilations = Linear(), []

    def backend(graph: Any, inputs: Any) -> Any:
        compilations.append(len(inputs))
        return graph.forward

    module.layer.compile(backend=backend)
    fit(tmp_path, module=module, profiler=StepProfiler(wait=2, warmup=1, active=2))
    assert len(spans(events(tmp_path), "forward")) == 2
    count = len(compilations)
    assert count >= 1
    module.train()(torch.randn(8, 8))  # compiled as it was, with nothing around it
    assert len(compilations) == count
    assert not module.layer._forward_hooks


def test_a_region_holds_the_kernels_launched_in_it_by_any_thread_once():
    def event(
        name: str,
        start: float,
        end: float,
        kernels: Any = (),
        region: bool = False,
        device: Any = "CPU",
    ) -> Any:
        return SimpleNamespace(
            name=name,
            device_type=getattr(DeviceType, device),
            is_user_annotation=region,
            time_range=SimpleNamespace(start=start, end=end),
            kernels=[SimpleNamespace(duration=duration) for duration in kernels],
        )

    found = [
        event("forward", 0, 10, region=True),
        event("aten::addmm", 2, 5, kernels=[7.0, 1.0]),
        event("forward", 4, 24, region=True, device="CUDA"),  # the device's copy of the region
        event("gemm", 4, 12, device="CUDA"),
        event("backward", 20, 50, region=True),
        event(
            "autograd::engine::evaluate_function", 21, 30, kernels=[100.0]
        ),  # in autograd's own thread
        event("forward", 60, 65, region=True),
        event("aten::addmm", 61, 62, kernels=[2.0]),
        event("aten::zeros", 55, 56, kernels=[1000.0]),  # between the regions
    ]
    assert region_times(found) == {"forward": (15, 10.0), "backward": (30, 100.0)}


def test_a_run_that_ends_early_keeps_what_was_recorded(tmp_path):
    fit(tmp_path, profiler=StepProfiler(wait=2, warmup=1, active=100))
    assert len(spans(events(tmp_path), "forward")) == 17
    assert (tmp_path / "profile" / "top_operations.txt").read_text().startswith("17 steps.")


def test_a_run_too_short_to_record_anything_says_so(tmp_path):
    with pytest.warns(
        UserWarning, match="nothing was profiled: wait, warmup and active take 110 training steps"
    ):
        fit(tmp_path, profiler=StepProfiler(wait=50, warmup=50, active=10))
    assert not (tmp_path / "profile").exists()


@pytest.mark.parametrize(
    ("name", "value"), [("wait", -1), ("warmup", -1), ("active", 0), ("rows", 0)]
)
def test_a_schedule_that_makes_no_sense_is_refused(name, value):
    with pytest.raises(UserError, match=rf"^--profiler.{name} must be at least \d, got {value}\.$"):
        StepProfiler(**{name: value})


@pytest.mark.nightly
def test_the_profile_config_works_as_its_first_lines_say(tmp_path):
    config = ROOT / "configs" / "profile.yaml"
    flags = [
        "--config",
        str(config),
        "--data.source",
        "sample",
        "--accelerator",
        "cpu",
        "--limit_train_batches",
        "20",
    ]
    flags += ["--run_name", "profiled", "--data.batch_size", "32"]
    env = {**os.environ, "WANDB_MODE": "disabled", "PYTHONPATH": SEARCHED}
    ended = run("fit", *flags, cwd=tmp_path, env=env)
    assert ended.returncode == 0, ended.stderr
    folder = tmp_path / "checkpoints" / "profiled"
    found = events(folder)
    assert {name: len(spans(found, name)) for name in REGIONS} == {
        "data": 20,
        **dict.fromkeys(("forward", "loss", "backward", "optimizer"), 10),
    }
    assert "top_operations.txt" in ended.stdout
    assert (folder / "best.ckpt").exists()
