"""What this machine has, and the flags of fit that suit it.

python -m project.devices
python -m project.devices --output devices.json --data.root /data
"""

import shlex
from collections import namedtuple
from collections.abc import Mapping, Sequence
from typing import Any

from project import hardware
from project.engine.command import CommandParser, add_output, run
from project.loggers import wandb_state  # feature: wandb
from project.tables import format_table, write_rows

BUSY_PCT, LEAST_FREE = (
    30,
    0.5,
)  # a GPU that computes so much for others, or has less memory free, is taken


def main(argv: list[str]) -> int:
    """Report as ``argv`` says. The first lines appear before torch, which takes seconds, is imported."""
    parser = CommandParser("project.devices", __doc__)
    add_output(parser, endings=(".json",), what="also write everything as JSON")
    parser.add_argument(
        "--data.root", dest="root", default="data", help="the folder of MNIST"
    )  # feature: mnist
    args = parser.parse_args(argv)
    cpu, memory = hardware.cpu(), hardware.memory()
    arithmetic = " and ".join(
        name for name, there in (("bfloat16", cpu["bf16"]), ("AMX", cpu["amx"])) if there
    )
    cores = f"{cpu['cores']} of {cpu['cores_of_machine']} cores"  # fewer by affinity or by a container's limit
    print(f"CPU     {cpu['name']}, {cores}, {arithmetic or 'no bfloat16 arithmetic'}", flush=True)
    print(
        f"memory  {memory['total_gib']:.1f} GiB, {memory['available_gib']:.1f} GiB available",
        flush=True,
    )
    facts: dict[str, Any] = {"cpu": cpu, "memory": memory}
    facts["wandb"] = wandb_state()._asdict()  # feature: wandb
    print(f"W&B     {facts['wandb']['text']}", flush=True)  # feature: wandb
    facts["mnist"] = mnist_state(args.root)  # feature: mnist
    print(f"MNIST   {facts['mnist']['text']}", flush=True)  # feature: mnist
    facts["accelerators"] = gpus = hardware.accelerators()
    print(f"\n{format_table(gpus)}" if gpus else f"GPU     {hardware.unusable_gpus() or 'none'}")
    flags = recommend(cpu, gpus)
    if facts["mnist"]["found"] and args.root != "data":  # feature: mnist
        flags.append(Flag("--data.root", shlex.quote(args.root), "the full MNIST set is there"))
    command = " ".join(["python -m project.fit", *(f"{flag.flag} {flag.value}" for flag in flags)])
    facts["recommended"] = {
        "command": command,
        "reasons": {flag.flag: flag.reason for flag in flags},
    }
    print(f"\n{command}\n\n{format_table([flag._asdict() for flag in flags])}")
    if args.output:
        write_rows(args.output, facts)
    return 0


def mnist_state(root: str) -> dict[str, Any]:  # feature: mnist
    """Whether the four files of the full set lie where fit looks: ``found``, ``folder``, ``text``."""
    from project.data import MNISTDataModule

    data = MNISTDataModule(root)
    folder, missing = data.raw_folder(), data.missing()
    text = (
        f"incomplete in {folder}: {', '.join(missing)} missing" if missing else f"found in {folder}"
    )
    if len(missing) == len(data.files):
        text = f"not in {folder}: fit downloads it, or uses the bundled digits"
    return {"found": not missing, "folder": str(folder), "text": text}


Flag = namedtuple(
    "Flag", "flag value reason"
)  # a flag of ``fit``, its value as typed, why this machine wants it


def recommend(cpu: Mapping[str, Any], accelerators: Sequence[Mapping[str, Any]]) -> list[Flag]:
    """Flags for what :func:`project.hardware.cpu` and :func:`project.hardware.accelerators` found."""
    if accelerators:
        chosen, why = choose_gpus(accelerators)
        kind, here = "mps" if chosen[0]["type"] == "mps" else "gpu", f"{chosen[0]['name']} is here"
        devices = str(len(chosen))
        if len(chosen) < len(accelerators):  # a comma makes it a list of indices, not a count
            devices = ",".join(str(row["index"]) for row in chosen) + (
                "," if len(chosen) == 1 else ""
            )
    else:
        chosen, kind, here, devices = [], "cpu", "there is no accelerator that PyTorch can use", "1"
        why = f"one process uses all cores ({cpu['cores']}) as threads; more processes would only share them"
    flags = [Flag("--accelerator", kind, here), Flag("--devices", devices, why)]
    if len(chosen) > 1:
        flags.append(
            Flag("--strategy", "ddp", "one process per GPU, each with its part of every batch")
        )
    # named, not recommended, for its speed was not measured; bf16 comes first, because it needs no loss scaling
    other = "bf16-mixed" if all(row.get("bf16") for row in chosen or [cpu]) else None
    other = other or (
        "16-mixed" if chosen and all(row.get("tensor_cores") for row in chosen) else None
    )
    hint = f"; try {other} as well, which this hardware can compute" if other else ""
    return [*flags, Flag("--precision", "32-true", f"float32 throughout{hint}")]


def choose_gpus(accelerators: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], str]:
    """The largest set of equal GPUs that nobody else uses, and the reason for this choice."""
    idle = []
    for row in accelerators:
        free = row.get("memory_free_gib", row["memory_total_gib"])
        if (
            row.get("utilization_pct", 0) <= BUSY_PCT
            and free >= LEAST_FREE * row["memory_total_gib"]
        ):
            idle.append(row)
    if not idle:
        freest = max(accelerators, key=lambda row: row.get("memory_free_gib", 0.0))
        return [freest], "every GPU is in use by others; this one has the most free memory"
    groups = [
        [row for row in idle if row["name"] == name]
        for name in dict.fromkeys(row["name"] for row in idle)
    ]
    chosen = max(groups, key=lambda group: (len(group), group[0]["memory_total_gib"]))
    left_out = len(accelerators) - len(chosen)
    if not left_out:
        return chosen, "the only GPU" if len(
            chosen
        ) == 1 else f"{len(chosen)} equal GPUs, none in use"
    others = "the other is" if left_out == 1 else f"the other {left_out} are"
    return (
        chosen,
        f"idle{' and equal' if len(chosen) > 1 else ''}; {others} in use or of another kind",
    )


if __name__ == "__main__":
    run(main)
