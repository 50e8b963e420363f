"""Which flags of ``fit`` suit a machine, each with its reason: facts in, advice out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# A GPU that computes this much for others, or has less than this part of its memory free, is taken.
BUSY_PCT, LEAST_FREE = 30, 0.5


@dataclass(frozen=True)
class Flag:
    """A flag with its value as they are typed, and the one reason for it."""

    flag: str
    value: str
    reason: str


def recommend(cpu: Mapping[str, Any], accelerators: Sequence[Mapping[str, Any]]) -> list[Flag]:
    """Flags for :func:`project.hardware.cpu` and :func:`project.hardware.accelerators`."""
    if not accelerators:
        return [
            Flag("--accelerator", "cpu", "there is no accelerator that PyTorch can use"),
            Flag("--devices", "1", f"one process runs {_cores(cpu)} as threads; more processes would only share them"),
            Flag("--precision", *cpu_precision(cpu)),
        ]
    if accelerators[0]["type"] == "mps":
        return [
            Flag("--accelerator", "mps", f"{accelerators[0]['name']} is here"),
            Flag("--devices", "1", "a Mac has one GPU"),
            Flag("--precision", "32-true", "every operation has it on MPS; mixed precision saves little there"),
        ]
    chosen, devices_reason = choose_gpus(accelerators)
    precision, precision_reason = gpu_precision(chosen)
    flags = [
        Flag("--accelerator", "gpu", f"{chosen[0]['name']} is here"),
        Flag("--devices", _device_list(chosen, accelerators), devices_reason),
    ]
    if len(chosen) > 1:
        flags.append(Flag("--strategy", "ddp", "one process per GPU, each with its part of every batch"))
    flags.append(Flag("--precision", precision, precision_reason))
    if all(row.get("tf32") for row in chosen):
        flags.append(Flag("--matmul_precision", "high", "what stays in float32 runs as TF32 on the tensor cores"))
    return flags


def choose_gpus(accelerators: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], str]:
    """The largest set of equal GPUs that nobody else is using, and why it is that one."""
    idle = [row for row in accelerators if not is_busy(row)]
    if not idle:
        freest = max(accelerators, key=lambda row: row.get("memory_free_gib", 0.0))
        return [freest], "every GPU is in use by others; this one has the most free memory"
    names = list(dict.fromkeys(row["name"] for row in idle))
    groups = [[row for row in idle if row["name"] == name] for name in names]
    chosen = max(groups, key=lambda group: (len(group), group[0]["memory_total_gib"]))
    if len(chosen) == len(accelerators):
        return chosen, "the only GPU" if len(chosen) == 1 else f"{len(chosen)} equal GPUs, none in use"
    left_out = len(accelerators) - len(chosen)
    others = "the other is" if left_out == 1 else f"the other {left_out} are"
    return chosen, f"idle{' and equal' if len(chosen) > 1 else ''}; {others} in use or of another kind"


def is_busy(row: Mapping[str, Any]) -> bool:
    """Whether others are computing on a GPU or hold most of its memory."""
    free = row.get("memory_free_gib", row["memory_total_gib"])
    return bool(row.get("utilization_pct", 0) > BUSY_PCT or free < LEAST_FREE * row["memory_total_gib"])


def gpu_precision(chosen: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Value of ``--precision`` and its reason."""
    if all(row.get("bf16") for row in chosen):
        return "bf16-mixed", "bfloat16 tensor cores: half the memory of activations, and no loss scaling as in float16"
    if all(row.get("tensor_cores") for row in chosen):
        return "16-mixed", "float16 tensor cores; bfloat16 comes with compute capability 8.0"
    if chosen[0]["type"] == "rocm":
        return "32-true", "safe on every AMD GPU; try bf16-mixed on MI200 and later"
    return "32-true", "no tensor cores: 16 bits would save memory but not time"


def cpu_precision(cpu: Mapping[str, Any]) -> tuple[str, str]:
    """Value of ``--precision`` and its reason. The figure: steps of 128 on one core of an EPYC with AVX512-BF16."""
    if cpu.get("bf16"):
        return "bf16-mixed", "this CPU multiplies bfloat16: 1.7 times the default network's speed where it was measured"
    return "32-true", "this CPU has no bfloat16 arithmetic: fewer bits would be slower"


def _cores(cpu: Mapping[str, Any]) -> str:
    return "the only core" if cpu["cores"] == 1 else f"all {cpu['cores']} cores"


def _device_list(chosen: Sequence[Mapping[str, Any]], accelerators: Sequence[Mapping[str, Any]]) -> str:
    if len(chosen) == len(accelerators):
        return str(len(chosen))
    # a comma makes it a list of indices, not a count
    return ",".join(str(row["index"]) for row in chosen) + ("," if len(chosen) == 1 else "")
