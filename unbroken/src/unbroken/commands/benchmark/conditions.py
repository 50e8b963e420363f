"""What must be known to judge a measurement: the machine, the versions, the commit, the load."""

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from unbroken.machine import hardware
from unbroken.results.facts import command_line, git_state, versions
from unbroken.tables import Row


def conditions(code: Path) -> Row:
    """The conditions of this moment and this process; what cannot be known is left out."""
    commit, is_dirty = git_state(code)
    facts: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command_line().replace(".__main__", "", 1),
        "git_commit": commit,
        "git_dirty": is_dirty,
        "hardware": machine(),
        "versions": versions(),
        "cpu_threads": torch.get_num_threads(),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "default"),
        "omp_spin_count": os.environ.get("GOMP_SPINCOUNT", "default"),
    }
    # At this moment the load is that of others: nothing has begun here.
    load = hardware.load_average()
    if load is not None:
        facts["load_average"] = load
        # Whether nothing else was running.
        facts["quiet"] = load < hardware.QUIET_LOAD
    return without_unknown(facts)


def machine() -> Row:
    """CPU, memory and GPUs."""
    cpu = hardware.cpu()
    facts: dict[str, Any] = {
        "cpu": cpu["name"],
        "cpu_cores": cpu["cores"],
        "memory_gib": round(hardware.memory()["total_gib"], 1),
    }
    gpus = hardware.accelerators()
    if gpus:
        facts["gpus"] = [gpu["name"] for gpu in gpus]
        facts["cuda"] = torch.version.cuda
        facts["driver"] = gpus[0].get("driver")
    return without_unknown(facts)


def without_unknown(facts: Row) -> Row:
    """The facts that are known."""
    return {name: fact for name, fact in facts.items() if fact is not None}


def line_of(facts: Row) -> str:
    """The conditions for a person, above the tables."""
    here = facts["hardware"]
    parts = [f"{here['cpu']}, {here['cpu_cores']} cores", *here.get("gpus", [])]
    versions_of = facts["versions"]
    parts += [f"{name} {versions_of[name]}" for name in ("torch", "lightning")]
    parts.append(f"commit {facts.get('git_commit', 'unknown')[:7]}")
    parts.append(facts["date"])
    line = " | ".join(parts)
    if facts.get("quiet", True):
        return line
    return f"{line}\nthe machine was busy (load {facts['load_average']}): compare ratios"
