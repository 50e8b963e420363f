"""Runs that differ in nothing but their seed: fit trains them, and here they are averaged."""

import hashlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from unbroken.commands.runs.listing import SEED, differing, shown_settings
from unbroken.commands.runs.saved_run import SavedRun
from unbroken.errors import UserError
from unbroken.tables import Row, is_number


def train_seeds(
    package: str, count: int, name: str | None, root: str, fit_arguments: Sequence[str]
) -> list[str]:
    """Let fit train, or go on with, a run of each seed from 1; returns the names of the runs.

    It ends at the first one that fails or is stopped, with the exit code of that one.
    """
    if bool(count) != bool(name) or count < 0:
        raise UserError(
            "--seeds N, at least 1, and --run_name NAME go together: "
            "they train the runs NAME-1 to NAME-N."
        )
    names = [f"{name}-{seed}" for seed in range(1, count + 1)]
    for seed, run_name in enumerate(names, start=1):
        own = [
            f"--run_name={run_name}",
            f"--{SEED}={seed}",
            f"--default_root_dir={root}",
            "--ckpt_path=auto",
        ]
        command = [sys.executable, "-m", f"{package}.fit", *fit_arguments, *own]
        process = subprocess.Popen(command, env={"WANDB_RUN_GROUP": str(name), **os.environ})
        try:
            exit_code = process.wait()
        finally:
            # Where this process is stopped, the run is stopped cleanly as well.
            process.terminate()
            process.wait()
        if exit_code:
            raise SystemExit(exit_code)
    return names


def by_configuration(runs: Sequence[SavedRun]) -> list[tuple[Row, list[SavedRun]]]:
    """Groups of runs that differ only in the seed and in where they lie.

    Each comes with the settings by which the groups differ, as they are shown. Runs that found
    other data, as ``data.source`` auto may, are another group, and so are those whose settings
    changed at a resume.
    """
    names = [name for name in differing(runs) if name != SEED]
    groups: dict[str, tuple[Row, list[SavedRun]]] = {}
    for run, shown in zip(runs, shown_settings(runs, names), strict=True):
        settings = {name: run.settings.get(name) for name in names}
        # A hash, for there may be very many settings.
        key = hashlib.sha256(json.dumps(settings, default=str).encode()).hexdigest()
        _, group = groups.setdefault(key, (shown, []))
        group.append(run)
    return list(groups.values())


def newest_of_each_seed(runs: Sequence[SavedRun]) -> list[SavedRun]:
    """One run of each seed.

    A run that was repeated with its seed gives the same numbers: counted twice, it would make the
    deviation over seeds too small.
    """
    newest: dict[Any, SavedRun] = {}
    for run in sorted(runs, key=lambda run: str(run.summary.get("date"))):
        seed = run.settings.get(SEED)
        has_seed = isinstance(seed, int) and not isinstance(seed, bool)
        # Without a seed of its own a run is like no other.
        newest[seed if has_seed else run.name] = run
    return list(newest.values())


def seed_rows(runs: Sequence[SavedRun]) -> list[Row]:
    """One row per configuration: its runs, and means and deviations over the seeds of the finished
    ones.

    A standard deviation is that of a sample; a single seed has none.
    """
    rows: list[Row] = []
    for settings, group in by_configuration(runs):
        finished = [run for run in group if run.state == "finished"]
        names = " ".join(run.name for run in group)
        averaged = newest_of_each_seed(finished)
        # A run that was repeated with its seed is one of the finished, and no further seed.
        row: dict[str, Any] = {"runs": names, **settings}
        values_of: dict[str, list[float]] = {}
        for run in averaged:
            own: dict[str, Any] = {**run.results, "fit_seconds": run.summary.get("fit_seconds")}
            for metric, value in own.items():
                if is_number(value):
                    values_of.setdefault(metric, []).append(value)
        for metric, values in values_of.items():
            row[metric] = statistics.fmean(values)
            row[f"{metric} std"] = statistics.stdev(values) if len(values) > 1 else None
        row |= {"seeds": len(averaged), "finished": len(finished)}
        rows.append(row)
    return rows
