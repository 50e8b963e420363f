from __future__ import annotations

import json
import os
import shlex
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from numerals.data import MNISTDataModule
from numerals.fit import job as fit
from unbroken.cli import start as entry
from unbroken.commands import devices
from unbroken.commands.devices import recommend
from unbroken.machine import hardware

from tests.commands import complete, run

CPU = {"name": "x", "cores": 8, "cores_of_machine": 8, "bf16": False, "amx": False}


A100 = {"name": "NVIDIA A100", "major": 8, "minor": 0, "total_memory": 80 * hardware.GIB}


def one_gpu(monkeypatch: pytest.MonkeyPatch, **facts: Any) -> None:
    """Let this machine have one GPU, which nobody uses."""
    properties = SimpleNamespace(**(A100 | facts))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(
        torch.cuda, "device_memory_used", lambda index: 0.01 * properties.total_memory
    )
    monkeypatch.setattr(torch.cuda, "utilization", lambda index: 0)
    monkeypatch.setattr(
        torch.cuda, "mem_get_info", lambda index: (60 * hardware.GIB, 80 * hardware.GIB)
    )


def gpu(index: int = 0, **other: Any) -> dict[str, Any]:
    facts = {key: other.pop(key) for key in list(other) if key in A100}
    with pytest.MonkeyPatch.context() as patch:
        one_gpu(patch, **facts)
        (row,) = hardware.accelerators()
    return {**row, "index": index, **other}


def line(accelerators: list[dict[str, Any]], cpu: dict[str, Any] = CPU) -> str:
    return " ".join(f"{flag.flag} {flag.value}" for flag in recommend(cpu, accelerators))


@pytest.mark.parametrize(
    ("accelerators", "flags"),
    [
        ([], "--accelerator cpu --devices 1 --precision 32-true"),
        ([gpu()], "--accelerator gpu --devices 1 --precision 32-true"),
        (
            [gpu(0), gpu(1)],
            "--accelerator gpu --devices 2 --strategy ddp --precision 32-true",
        ),
        (
            [gpu(name="Tesla T4", major=7, minor=5)],
            "--accelerator gpu --devices 1 --precision 32-true",
        ),
        (
            [gpu(name="NVIDIA GeForce GTX 1660", major=7, minor=5)],
            "--accelerator gpu --devices 1 --precision 32-true",
        ),
        (
            [gpu(name="Tesla P100", major=6, minor=0)],
            "--accelerator gpu --devices 1 --precision 32-true",
        ),
        (
            [gpu(0, utilization_pct=90), gpu(1), gpu(2, memory_free_gib=3.0), gpu(3)],
            "--accelerator gpu --devices 1,3 --strategy ddp --precision 32-true",
        ),
        (
            [gpu(0, name="Tesla T4", major=7, minor=5, total_memory=16 * hardware.GIB), gpu(1)],
            "--accelerator gpu --devices 1, --precision 32-true",
        ),
        (
            [gpu(0, memory_free_gib=2.0), gpu(1, memory_free_gib=9.0)],
            "--accelerator gpu --devices 1, --precision 32-true",
        ),
        (
            [
                {
                    "index": 0,
                    "type": "mps",
                    "name": "Apple M3",
                    "memory_total_gib": 16.0,
                    "memory_free_gib": 15.0,
                }
            ],
            "--accelerator mps --devices 1 --precision 32-true",
        ),
        (
            [{"index": 0, "type": "rocm", "name": "AMD Instinct", "memory_total_gib": 64.0}],
            "--accelerator gpu --devices 1 --precision 32-true",
        ),
    ],
)
def test_the_recommended_flags_follow_from_what_is_here(
    accelerators: list[dict[str, Any]], flags: str
) -> None:
    assert line(accelerators) == flags
    assert all(flag.reason for flag in recommend(CPU, accelerators))


@pytest.mark.parametrize(
    ("accelerators", "cpu", "other"),
    [
        ([], CPU, None),
        ([], {**CPU, "bf16": True}, "bf16-mixed"),
        ([gpu()], CPU, "bf16-mixed"),
        ([gpu(name="Tesla T4", major=7, minor=5)], CPU, "16-mixed"),
        ([gpu(name="NVIDIA GeForce GTX 1660", major=7, minor=5)], CPU, None),
    ],
)
def test_a_precision_that_was_not_measured_is_named_and_not_recommended(
    accelerators: list[dict[str, Any]], cpu: dict[str, Any], other: str | None
) -> None:
    flag = recommend(cpu, accelerators)[-1]
    assert (flag.flag, flag.value) == ("--precision", "32-true")
    assert flag.reason == "float32 throughout" + (
        f"; try {other} as well, which this hardware can compute" if other else ""
    )


def test_devices_without_a_gpu_reports_and_recommends_a_line_that_fit_accepts(
    tmp_path: Path,
) -> None:
    environment = {**os.environ, "NETRC": str(tmp_path / "none"), "WANDB_MODE": ""}
    environment |= {"CUDA_VISIBLE_DEVICES": ""} if torch.cuda.is_available() else {}
    done = run("devices", "--output", str(tmp_path / "devices.json"), env=environment)
    assert done.returncode == 0, done.stderr
    report = done.stdout
    assert report.startswith("CPU ")
    assert "not logged in" in report
    facts = json.loads((tmp_path / "devices.json").read_text())
    assert facts["cpu"]["cores"] == len(os.sched_getaffinity(0))
    assert 0 < facts["memory"]["available_gib"] <= facts["memory"]["total_gib"]
    assert facts["accelerators"] == []
    assert facts["recommended"]["command"] in report
    words = shlex.split(facts["recommended"]["command"])
    assert words[:3] == ["python", "-m", "numerals.fit"]
    assert set(facts["recommended"]["reasons"]) == {word for word in words if word.startswith("--")}
    assert complete([sys.executable, *words[1:], "--print_config"]).returncode == 0


def test_without_nvml_the_gpu_is_still_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(index: int) -> int:
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")

    one_gpu(monkeypatch)
    monkeypatch.setattr(torch.cuda, "device_memory_used", no_library)
    monkeypatch.setattr(torch.cuda, "utilization", no_library)
    monkeypatch.setitem(sys.modules, "pynvml", None)  # importing it is an ImportError
    (row,) = hardware.accelerators()
    assert row == {
        "index": 0,
        "type": "cuda",
        "name": "NVIDIA A100",
        "memory_total_gib": 80.0,
        "compute_capability": "8.0",
        "tensor_cores": True,
        "bf16": True,
        "tf32": True,
        "memory_free_gib": 60.0,
    }


def test_with_nvml_the_driver_and_what_others_use_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    one_gpu(monkeypatch)
    monkeypatch.setattr(torch.cuda, "device_memory_used", lambda index: 73 * hardware.GIB)
    monkeypatch.setattr(torch.cuda, "utilization", lambda index: 42)
    nvml = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: "580.1",
    }
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(**nvml))
    (row,) = hardware.accelerators()
    assert (row["driver"], row["memory_free_gib"], row["utilization_pct"]) == ("580.1", 7.0, 42)
    assert devices.choose_gpus([row]) == (
        [row],
        "every GPU is in use by others; this one has the most free memory",
    )


def test_of_an_amd_gpu_only_name_and_memory_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    one_gpu(monkeypatch, name="AMD Instinct")
    monkeypatch.setattr(torch.version, "hip", "6.2")
    (row,) = hardware.accelerators()
    assert (row["type"], row["name"], row["memory_total_gib"]) == ("rocm", "AMD Instinct", 80.0)
    assert not {"bf16", "tf32", "tensor_cores", "compute_capability"} & {*row}


def test_a_gpu_that_pytorch_cannot_use_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(hardware, "nvidia_driver", lambda: "470.1")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "built without CUDA" in str(hardware.unusable_gpus())
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "driver may be too old" in str(hardware.unusable_gpus())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES='' hides" in str(hardware.unusable_gpus())


def test_mps_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 12 * hardware.GIB)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 2 * hardware.GIB)
    (row,) = hardware.accelerators()
    assert (row["type"], row["memory_total_gib"], row["memory_free_gib"]) == ("mps", 12.0, 10.0)


@pytest.mark.parametrize(
    ("text", "bf16", "amx"),
    [
        ("model name\t: Xeon\nflags\t\t: fpu avx512_bf16 amx_bf16 amx_tile\n", True, True),
        ("model name\t: EPYC\nflags\t\t: fpu avx512_bf16\n", True, False),
        ("model name\t: Core\nflags\t\t: fpu avx2\n", False, False),
        ("processor\t: 0\nFeatures\t: fp asimd bf16\n", True, False),
    ],
)
def test_cpu_features_are_read_from_cpuinfo(
    tmp_path: Path, text: str, bf16: bool, amx: bool
) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    facts = hardware.cpu(tmp_path / "cpuinfo")
    assert (facts["bf16"], facts["amx"]) == (bf16, amx)
    assert facts["name"]


def test_a_containers_memory_limit_is_what_counts(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(f"{hardware.GIB}\n")
    (tmp_path / "memory.current").write_text(f"{hardware.GIB // 4}\n")
    facts = hardware.memory(tmp_path)
    assert facts["total_gib"] == 1
    assert facts["available_gib"] <= 0.75
    (tmp_path / "memory.max").write_text("max\n")
    assert hardware.memory(tmp_path)["total_gib"] > 1


def test_mnist_is_found_plain_or_zipped_or_said_to_be_incomplete(tmp_path: Path) -> None:
    folder = tmp_path / "MNIST" / "raw"
    folder.mkdir(parents=True)
    assert "fit downloads it" in devices.state_of_files(fit, str(tmp_path))["text"]
    for index, name in enumerate(MNISTDataModule.files):
        assert not devices.state_of_files(fit, str(tmp_path))["found"]
        (folder / (name + (".gz" if index % 2 else ""))).touch()
        assert index == 3 or "incomplete" in devices.state_of_files(fit, str(tmp_path))["text"]
    assert devices.state_of_files(fit, str(tmp_path))["found"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--output", "devices.csv"], "--output must end in .json, got devices.csv"),
        (["--outputs", "x"], "unknown option --outputs. Did you mean --output?"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert entry.exit_code(partial(devices.main, "numerals"), words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.gpu
def test_devices_on_a_gpu_tells_what_it_can_do(tmp_path: Path) -> None:
    assert (
        entry.exit_code(
            partial(devices.main, "numerals"), ["--output", str(tmp_path / "devices.json")]
        )
        == 0
    )
    facts = json.loads((tmp_path / "devices.json").read_text())
    row = facts["accelerators"][0]
    assert row["name"] == torch.cuda.get_device_name(0)
    assert 0 < row["memory_free_gib"] <= row["memory_total_gib"]
    assert row["compute_capability"] == ".".join(map(str, torch.cuda.get_device_capability(0)))
    assert 0 <= row["utilization_pct"] <= 100
    assert row["driver"]
    assert "--accelerator gpu" in facts["recommended"]["command"]
