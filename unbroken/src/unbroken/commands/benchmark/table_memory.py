"""The table ``memory``: what precision, activation checkpointing and accumulation save."""

import itertools
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from tqdm import tqdm  # type: ignore[import-untyped]
from unbroken.cli.cli import Configuration
from unbroken.cli.program import Program
from unbroken.commands.benchmark import real_runs, table_devices, timing
from unbroken.errors import UserError
from unbroken.monitors.memory import ACTIVATIONS
from unbroken.tables import Row

SIZES = [256, 1024]
QUICK_SIZES = [64]
PARTS = (1, 4)
# The first of them makes the optimizer's state.
OPTIMIZER_STEPS = 3


class Case(NamedTuple):
    """A row of the table. ``batch_size`` is that of an optimizer step, in ``parts`` batches."""

    precision: str
    recomputes: bool
    parts: int
    batch_size: int


def measure_memory(config: Configuration, options: Namespace) -> Iterator[Row]:
    """One row per combination on the best device, measured once: the peak does not vary.

    The CPU's peak lacks scratch memory of libraries such as oneDNN.
    """
    device = real_runs.wanted_devices(config)[-1]
    cases = cases_of(config, device, options)
    measured = 0
    # The bar is on stderr. A log file gets none.
    for case in tqdm(cases, desc="memory", leave=False, disable=None):
        name = f"memory: {case.precision}, batch {case.batch_size} in {case.parts} parts"
        attempt = timing.Attempt(name, partial(run_of, config.program, case, device, options))
        run = attempt()
        if run is not None:
            measured += 1
            yield row_of(case, run)
    if measured == 0:
        raise UserError("memory: every training failed, see the lines above.")


def cases_of(config: Configuration, device: str, options: Namespace) -> list[Case]:
    """Every combination; activation checkpointing only where the module has it."""
    model = config.resolved["model"]
    can_recompute = "activation_checkpointing" in (model.get("init_args") or model)
    sizes = options.batch_sizes or (QUICK_SIZES if options.quick else SIZES)
    precisions = table_devices.usable(device, options.precisions)
    ways = (False, True) if can_recompute else (False,)
    return [Case(*case) for case in itertools.product(precisions, ways, PARTS, sizes)]


def run_of(program: Program, case: Case, device: str, options: Namespace) -> real_runs.RunClock:
    """Train a few optimizer steps."""
    flags = [
        *("--accumulate_grad_batches", str(case.parts)),
        *("--limit_train_batches", str(OPTIMIZER_STEPS * case.parts)),
        *("--limit_val_batches", "0"),
        *("--monitors", "memory"),
    ]
    if case.recomputes:
        flags += ["--model.activation_checkpointing", "true"]
    size = max(1, case.batch_size // case.parts)
    config = table_devices.configure_for(
        program, options.fit_flags, device, case.precision, size, *flags
    )
    return real_runs.run_epochs(config, 1)


def row_of(case: Case, run: real_runs.RunClock) -> Row:
    """The peak and its parts, in MiB."""
    # Without the activations, such as of a compiled network, there is no peak.
    peak_mib = 1024 * sum(run.memory.values()) if ACTIVATIONS in run.memory else None
    row: dict[str, Any] = {
        **run.names,
        "precision": case.precision,
        "activation_checkpointing": case.recomputes,
        "accumulation": case.parts,
        "batch_size": case.batch_size,
        "peak_mib": peak_mib,
        "n": 1,
    }
    for name, gib in run.memory.items():
        row[f"{name.split()[0]}_mib"] = 1024 * gib
    return row
