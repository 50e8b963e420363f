"""What this machine has, and the flags of fit that suit it.

python -m project.devices
python -m project.devices --output devices.json --data.root /data
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

MNIST_FILES = tuple(
    f"{part}-{kind}" for part in ("train", "t10k") for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")
)


def main(argv: list[str]) -> int:
    """Report as ``argv`` says. The first lines appear before torch, which takes seconds, is imported."""
    from project.arguments import CommandParser
    from project.tables import check_output, format_table, write_rows

    parser = CommandParser("project.devices", __doc__)
    parser.add_argument("--output", metavar="FILE.json", help="also write everything as JSON")
    parser.add_argument("--data.root", dest="root", default="data", metavar="DIR", help="where to look for MNIST")
    args = parser.parse_args(argv)
    output = check_output(args.output, (".json",)) if args.output else None

    from project import hardware
    from project.recommendation import Flag, recommend

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

    Decides as :mod:`project.wandb_logging` does, whose import would bring Lightning's seconds with it.
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


if __name__ == "__main__":
    from project.entry import run

    run(main)
