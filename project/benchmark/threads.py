"""What thread counts and wait policies cost on an idle machine, and beside a busy neighbour."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

from project.benchmark.flags import Settings
from project.benchmark.steps import Steps
from project.benchmark.timing import alternate, median_and_spread
from project.engine.cli import ProjectCLI
from project.threads import SPINS, available_cores

POLICIES = ("PASSIVE", f"spin {SPINS}", "default", "ACTIVE")
VARIABLES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "MKL_NUM_THREADS", "KMP_BLOCKTIME")


def measure(cli: ProjectCLI, settings: Settings) -> list[dict[str, Any]]:
    """One row per thread count, wait policy and company: milliseconds per step of the hand-written loop.

    The settings only take effect before torch is imported, so each has a process of its own. All are started first and
    then asked in turn, one at a time; a process that is not asked is stopped, for its threads would spin on.
    """
    cores = available_cores()
    kinds = [(1, "PASSIVE"), *((cores, policy) for policy in POLICIES if cores > 1)]
    steps = Steps("threads", 2 * len(kinds) * (settings.n + 1))
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        workers = {kind: stack.enter_context(worker(cli, *kind, settings)) for kind in kinds}
        asked: dict[str, Any] = {f"{count} threads, {policy}": workers[count, policy] for count, policy in kinds}
        for beside in ("nobody", "busy neighbour"):
            with busy_neighbour() if beside == "busy neighbour" else contextlib.nullcontext():
                alternate({name: partial(ask, process) for name, process in asked.items()}, 1, steps)
                results = alternate({name: partial(ask, process) for name, process in asked.items()}, settings.n, steps)
            for (count, policy), values in zip(kinds, results.values(), strict=True):
                row = {"threads": count, "wait_policy": policy, "beside": beside}
                rows.append({**row, **median_and_spread("step_ms", values)})
    steps.finish()
    alone = {(row["threads"], row["wait_policy"]): row["step_ms"] for row in rows if row["beside"] == "nobody"}
    for row in rows:
        row["network"], row["batch_size"] = type(cli.model.network).__name__, cli.datamodule.batch_size
        row["times_alone"] = row["step_ms"] / alone[row["threads"], row["wait_policy"]]
        row["times_best_alone"] = row["step_ms"] / min(alone.values())
    return rows


@contextlib.contextmanager
def worker(cli: ProjectCLI, count: int, policy: str, settings: Settings) -> Iterator[subprocess.Popen[str]]:
    """A process with its own thread settings that trains a few steps whenever it is asked to."""
    environment = {key: value for key, value in os.environ.items() if key not in VARIABLES}
    environment["OMP_NUM_THREADS"] = str(count)
    if policy.startswith("spin "):
        environment["GOMP_SPINCOUNT"] = policy.removeprefix("spin ")
    elif policy != "default":
        environment["OMP_WAIT_POLICY"] = policy
    command = [sys.executable, "-m", "project.benchmark.thread_worker", "10" if settings.quick else "100"]
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdin is not None
        process.stdin.write(json.dumps(cli.resolved()) + "\n")
        process.stdin.flush()
        yield process
    finally:
        process.kill()
        process.wait()


def ask(process: subprocess.Popen[str]) -> float:
    """Milliseconds per step, measured by a worker now."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.send_signal(signal.SIGCONT)
    process.stdin.write("measure\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    process.send_signal(signal.SIGSTOP)
    if not answer:
        raise RuntimeError(f"a measuring process ended with exit code {process.wait()}")
    return float(answer)


@contextlib.contextmanager
def busy_neighbour() -> Iterator[None]:
    """Another process that keeps one core busy."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()
