"""What this machine has, and the flags of fit that suit it.

python -m project.devices
python -m project.devices --output devices.json --data.root /data
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

MNIST_FILES = tuple(
    f"{part}-{kind}" for part in ("train", "t10k") for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")
)


def main(argv: list[str]) -> int:
    """Report as ``argv`` says. The first lines appear before torch, which takes seconds, is imported."""
    from project.engine.command import CommandParser
    from project.tables import check_output, format_table, write_rows

    parser = CommandParser("project.devices", __doc__)
    parser.add_argument("--output", metavar="FILE.json", help="also write everything as JSON")
    parser.add_argument("--data.root", dest="root", default="data", metavar="DIR", help="where to look for MNIST")
    args = parser.parse_args(argv)
    output = check_output(args.output, (".json",)) if args.output else None

    from project import hardware

    facts: dict[str, Any] = {"cpu": hardware.cpu(), "memory": hardware.memory()}
    say("CPU", cpu_line(facts["cpu"]))
    say("memory", f"{facts['memory']['total_gib']:.1f} GiB, {facts['memory']['available_gib']:.1f} GiB available")
    facts["wandb"] = wandb_state(os.environ)
    say("W&B", facts["wandb"]["text"])
    facts["mnist"] = mnist_state(Path(args.root))
    say("MNIST", facts["mnist"]["text"])

    facts["accelerators"] = hardware.accelerators()
    if facts["accelerators"]:
        print("\n" + format_table(facts["accelerators"]))
    else:
        say("GPU", hardware.unusable_gpus() or "none")
    flags = recommend(facts["cpu"], facts["accelerators"])
    if facts["mnist"]["found"] and args.root != "data":
        flags.append(Flag("--data.root", shlex.quote(args.root), "the full MNIST set is there"))
    facts["recommended"] = {
        "command": " ".join(["python -m project.fit", *(f"{flag.flag} {flag.value}" for flag in flags)]),
        "reasons": {flag.flag: flag.reason for flag in flags},
    }
    print(f"\n{facts['recommended']['command']}\n")
    width = max(len(f"{flag.flag} {flag.value}") for flag in flags)
    for flag in flags:
        print(f"  {f'{flag.flag} {flag.value}':{width}}  {flag.reason}")
    if output:
        write_rows(output, facts)
    return 0


def say(name: str, text: str) -> None:
    """Print one line of the report, at once."""
    print(f"{name:<7} {text}", flush=True)


def cpu_line(cpu: Mapping[str, Any]) -> str:
    """The CPU for a person."""
    cores = f"{cpu['cores']} core{'s' if cpu['cores'] > 1 else ''}"
    if cpu["cores"] != cpu["cores_of_machine"]:
        cores += f" of {cpu['cores_of_machine']} (affinity or container limit)"
    has = [name for name, there in (("bfloat16", cpu["bf16"]), ("AMX", cpu["amx"])) if there]
    return f"{cpu['name']}, {cores}, {' and '.join(has) if has else 'no bfloat16 arithmetic'}"


def wandb_state(environ: Mapping[str, str]) -> dict[str, Any]:
    """How ``fit`` would log to W&B: ``mode`` (online, offline, disabled, refused), ``logged_in``, ``text``. No network.

    Decides as :mod:`project.loggers.wandb` does, whose import would bring Lightning's seconds with it.
    """
    logged_in = "WANDB_API_KEY" if environ.get("WANDB_API_KEY") else _wandb_netrc(environ)
    mode = environ.get("WANDB_MODE", "").lower()
    if mode == "disabled" or environ.get("WANDB_DISABLED", "").lower() in ("true", "1"):
        mode = "disabled"
    elif mode in ("online", "run") and not logged_in:
        mode = "refused"
    else:
        mode = "offline" if mode in ("offline", "dryrun") or not logged_in else "online"
    login = f"logged in ({logged_in})" if logged_in else "not logged in (wandb login)"
    then = {
        "online": "runs go online",
        "offline": "runs are kept offline, for wandb sync",
        "disabled": "switched off",
        "refused": "but WANDB_MODE wants online runs, fit will refuse",
    }
    return {"mode": mode, "logged_in": bool(logged_in), "text": f"{login}: {then[mode]}"}


def _wandb_netrc(environ: Mapping[str, str]) -> str | None:
    import netrc

    path = environ.get("NETRC", str(Path.home() / ".netrc"))
    try:
        hosts = netrc.netrc(path).hosts
    except (OSError, netrc.NetrcParseError):
        return None
    own_server = urlparse(environ.get("WANDB_BASE_URL", "")).hostname
    return path if any(host == own_server or "wandb" in host for host in hosts) else None


def mnist_state(root: Path) -> dict[str, Any]:
    """Whether the four files of the full set lie below ``root``: ``found``, ``folder``, ``text``."""
    folder = root / "MNIST" / "raw"
    missing = [name for name in MNIST_FILES if not any((folder / f"{name}{end}").is_file() for end in ("", ".gz"))]
    text = f"found in {folder}" if not missing else f"not in {folder}: fit downloads it, or uses the bundled digits"
    if missing and len(missing) < len(MNIST_FILES):
        text = f"incomplete in {folder}: {', '.join(missing)} missing"
    return {"found": not missing, "folder": str(folder), "text": text}


# Which flags of ``fit`` suit a machine, each with its reason: facts in, advice out.


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


if __name__ == "__main__":
    from project.engine.command import run

    run(main)
