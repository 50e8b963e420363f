"""What this machine has, and the flags of fit that suit it.

python -m NAME.devices
python -m NAME.devices --output devices.json --data.root /data
"""

import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from unbroken import contract
from unbroken.cli.parser import CommandParser, add_output
from unbroken.cli.start import quick_imports
from unbroken.loggers.wandb_account import wandb_state
from unbroken.machine import hardware
from unbroken.tables import format_table, write_rows

# A GPU is taken if it computes so much for others, or if a smaller share of its memory is free.
BUSY_PCT = 30
LEAST_FREE = 0.5

if TYPE_CHECKING:
    from unbroken.cli.program import Program


class Flag(NamedTuple):
    """A flag of ``fit``, its value as it is typed, and why this machine wants it."""

    flag: str
    value: str
    reason: str


def main(package: str, argv: list[str]) -> int:
    """Report as ``argv`` says. The first lines appear before torch, which takes seconds, is
    imported.
    """
    parser = CommandParser(package, "devices", __doc__)
    add_output(parser, endings=(".json",), what="also write everything as JSON")
    parser.add_argument("--data.root", dest="root", default="data", help="the folder of the data")
    args = parser.parse_args(argv)

    cpu = hardware.cpu()
    memory = hardware.memory()
    print(f"CPU     {describe_cpu(cpu)}", flush=True)
    print(f"memory  {describe_memory(memory)}", flush=True)
    facts: dict[str, Any] = {"cpu": cpu, "memory": memory}
    facts["wandb"] = wandb_state()._asdict()
    print(f"W&B     {facts['wandb']['text']}", flush=True)
    with quick_imports():
        from unbroken.commands.program_of import program_of

        program = program_of(package)
    files = state_of_files(program, args.root)
    if files is not None:
        facts["data"] = files
        print(f"data    {files['text']}", flush=True)

    gpus = hardware.accelerators()
    facts["accelerators"] = gpus
    if gpus:
        print()
        print(format_table(gpus))
    else:
        print(f"GPU     {hardware.unusable_gpus() or 'none'}")

    flags = recommend(cpu, gpus)
    if files is not None and files["found"] and args.root != "data":
        flags.append(Flag("--data.root", shlex.quote(args.root), "the data are there"))
    command = " ".join(
        [f"python -m {package}.fit", *(f"{flag.flag} {flag.value}" for flag in flags)]
    )
    reasons = {flag.flag: flag.reason for flag in flags}
    facts["recommended"] = {"command": command, "reasons": reasons}
    print()
    print(command)
    print()
    print(format_table([flag._asdict() for flag in flags]))
    if args.output:
        write_rows(args.output, facts)
    return 0


def describe_cpu(cpu: Mapping[str, Any]) -> str:
    """The processor in one line: its name, the cores that may be used, and the arithmetic that it
    has.
    """
    # Affinity or a container's limit may leave fewer cores than the machine has.
    cores = f"{cpu['cores']} of {cpu['cores_of_machine']} cores"
    has = []
    if cpu["bf16"]:
        has.append("bfloat16")
    if cpu["amx"]:
        has.append("AMX")
    arithmetic = " and ".join(has) or "no bfloat16 arithmetic"
    return f"{cpu['name']}, {cores}, {arithmetic}"


def describe_memory(memory: Mapping[str, Any]) -> str:
    """The host's memory in one line."""
    return f"{memory['total_gib']:.1f} GiB, {memory['available_gib']:.1f} GiB available"


def state_of_files(program: "Program", root: str) -> dict[str, Any] | None:
    """Whether the files of the default data module lie where fit looks: ``found``, ``folder``,
    ``text``. None where it does not say so.
    """
    if program.data is None or not issubclass(program.data, contract.SaysWhatItFinds):
        return None
    return dict(program.data(root=root).state_of_files())


def recommend(cpu: Mapping[str, Any], accelerators: Sequence[Mapping[str, Any]]) -> list[Flag]:
    """Flags for what ``cpu`` and ``accelerators`` of :mod:`unbroken.machine.hardware` found."""
    if not accelerators:
        why = (
            f"one process uses all cores ({cpu['cores']}) as threads; "
            "more processes would only share them"
        )
        return [
            Flag("--accelerator", "cpu", "there is no accelerator that PyTorch can use"),
            Flag("--devices", "1", why),
            recommend_precision(has_bf16=cpu["bf16"], has_tensor_cores=False),
        ]
    chosen, why = choose_gpus(accelerators)
    kind = "mps" if chosen[0]["type"] == "mps" else "gpu"
    flags = [
        Flag("--accelerator", kind, f"{chosen[0]['name']} is here"),
        Flag("--devices", devices_value(chosen, accelerators), why),
    ]
    if len(chosen) > 1:
        reason = "one process per GPU, each with its part of every batch"
        flags.append(Flag("--strategy", "ddp", reason))
    has_bf16 = all(row.get("bf16") for row in chosen)
    has_tensor_cores = all(row.get("tensor_cores") for row in chosen)
    flags.append(recommend_precision(has_bf16, has_tensor_cores))
    return flags


def devices_value(
    chosen: Sequence[Mapping[str, Any]], accelerators: Sequence[Mapping[str, Any]]
) -> str:
    """The value of ``--devices`` for the chosen GPUs: their count, or their indices if some are
    left out.
    """
    if len(chosen) == len(accelerators):
        return str(len(chosen))
    indices = ",".join(str(row["index"]) for row in chosen)
    # A comma makes a single number an index instead of a count.
    return indices + "," if len(chosen) == 1 else indices


def recommend_precision(has_bf16: bool, has_tensor_cores: bool) -> Flag:
    """float32; another precision is only named, for its speed was not measured here."""
    # bfloat16 comes first, because it needs no loss scaling.
    other = None
    if has_bf16:
        other = "bf16-mixed"
    elif has_tensor_cores:
        other = "16-mixed"
    reason = "float32 throughout"
    if other is not None:
        reason += f"; try {other} as well, which this hardware can compute"
    return Flag("--precision", "32-true", reason)


def choose_gpus(accelerators: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], str]:
    """The largest set of equal GPUs that nobody else uses, and the reason for this choice."""
    idle = [row for row in accelerators if is_idle(row)]
    if not idle:
        freest = max(accelerators, key=lambda row: row.get("memory_free_gib", 0.0))
        return [freest], "every GPU is in use by others; this one has the most free memory"

    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in idle:
        groups.setdefault(row["name"], []).append(row)
    chosen = max(groups.values(), key=lambda group: (len(group), group[0]["memory_total_gib"]))

    left_out = len(accelerators) - len(chosen)
    if not left_out and len(chosen) == 1:
        return chosen, "the only GPU"
    if not left_out:
        return chosen, f"{len(chosen)} equal GPUs, none in use"
    are = "idle and equal" if len(chosen) > 1 else "idle"
    others = "the other is" if left_out == 1 else f"the other {left_out} are"
    return chosen, f"{are}; {others} in use or of another kind"


def is_idle(gpu: Mapping[str, Any]) -> bool:
    """Whether nobody else uses a GPU. What could not be measured counts as idle."""
    total = gpu["memory_total_gib"]
    free = gpu.get("memory_free_gib", total)
    return gpu.get("utilization_pct", 0) <= BUSY_PCT and free >= LEAST_FREE * total
