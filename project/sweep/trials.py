"""Trials of a sweep as processes of ``fit``: started, watched by their metrics.csv, stopped early, gone on with."""

from __future__ import annotations

import contextlib
import csv
import ctypes
import fcntl
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from project import threads
from project.errors import UserError, nearest

POLL_SECONDS = 0.2
ORPHAN_SECONDS = 60
FIT = f"{__name__.split('.')[0]}.fit"
BAD_INPUT = 2


class RunningTrial:
    """One trial and its process.

    Args:
        trial: Optuna's trial; its parameters are known.
        space: The sweep's search space.
        folder: The sweep's folder; the trial is a run in it.
        fit_arguments: Arguments of ``fit`` that all trials share.
        environment: Of the process.
    """

    def __init__(
        self, trial: Any, space: Space, folder: Path, fit_arguments: list[str], environment: dict[str, str]
    ) -> None:
        self.trial = trial
        self.space = space
        self.name = trial_name(trial.number)
        self.metrics_path = folder / self.name / "metrics.csv"
        self.log_path = folder / f"{self.name}.log"
        self.reported = len(trial.study.trials[trial.number].intermediate_values)
        self.pruned = False
        values = {parameter.name: parameter.suggest(trial) for parameter in space.parameters}
        self.values = values
        flags = [f"--{name}={value}" for name, value in values.items()]  # what W&B's ${args} looks like
        run = ["--default_root_dir", str(folder), "--run_name", self.name, "--ckpt_path", "auto"]
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", FIT, *fit_arguments, *flags, *run],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment,
                preexec_fn=_end_with_parent,
            )

    def watch(self) -> int | None:
        """Report new values to Optuna, stop a hopeless trial; the exit code where the process has ended."""
        ended = self.process.poll()
        scores = read_scores(self.metrics_path, self.space.metric)
        for epoch, score in list(enumerate(scores))[self.reported :]:
            self.trial.report(score, epoch)
            if ended is None and not self.pruned and self.trial.should_prune():
                self.pruned = True
                self.process.terminate()  # a clean stop: fit saves and ends
        self.reported = max(self.reported, len(scores))
        return ended

    def best(self) -> float | None:
        """The best value so far."""
        scores = read_scores(self.metrics_path, self.space.metric)
        return (max if self.space.maximize else min)(scores) if scores else None

    def stop(self) -> None:
        """End the process; it saves its step first, and a resumed sweep goes on from there."""
        self.process.terminate()
        try:
            self.process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def run_trials(study: Any, space: Space, folder: Path, fit_arguments: list[str], trials: int, jobs: int) -> None:
    """Bring a study to ``trials`` trials, ``jobs`` at a time; trials that a killed sweep left go on first.

    Raises:
        UserError: ``fit`` refused the arguments.
    """
    import optuna

    running: dict[int, RunningTrial] = {}
    abandoned = [t for t in study.trials if t.state == optuna.trial.TrialState.RUNNING]
    try:
        while True:
            for slot in set(range(jobs)) - running.keys():
                if abandoned:
                    wait_until_free(folder / trial_name(abandoned[0].number))
                    trial = optuna.trial.Trial(study, abandoned.pop(0)._trial_id)
                elif len(study.trials) < trials:
                    trial = study.ask()
                else:
                    break
                running[slot] = RunningTrial(trial, space, folder, fit_arguments, environment_of(slot, jobs, folder))
            if not running:
                return
            time.sleep(POLL_SECONDS)
            for slot, watched in list(running.items()):
                exit_code = watched.watch()
                if exit_code is not None:
                    del running[slot]
                    finish(study, watched, exit_code)
    finally:
        for left in running.values():
            left.process.terminate()  # all at once, then wait for each
        for left in running.values():
            left.stop()


def wait_until_free(run_folder: Path) -> None:
    """Wait for the process of a killed sweep's trial, which saves its step before it ends.

    Raises:
        UserError: It does not end.
    """
    if not (run_folder / ".lock").exists():
        return
    until = time.monotonic() + ORPHAN_SECONDS
    with open(run_folder / ".lock") as lock:
        while time.monotonic() < until:
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            time.sleep(POLL_SECONDS)
    raise UserError(f"{run_folder} is still being written by a process of the sweep that was killed. Wait or stop it.")


def finish(study: Any, ended: RunningTrial, exit_code: int) -> None:
    """Tell Optuna and the user how a trial ended."""
    from optuna.trial import TrialState

    score = ended.best()
    if exit_code == BAD_INPUT:
        lines = [line for line in ended.log_path.read_text().splitlines() if line.startswith("error: ")]
        study.tell(ended.trial.number, state=TrialState.FAIL)
        reason = lines[-1].removeprefix("error: ") if lines else f"see {ended.log_path}"
        raise UserError(f"{ended.name}: {reason}")
    if ended.pruned and exit_code != 0:
        study.tell(ended.trial.number, state=TrialState.PRUNED)
        end = f"stopped after {ended.reported} epochs"
    elif exit_code == 0 and score is not None:
        study.tell(ended.trial.number, score)
        end = "done"
    else:
        study.tell(ended.trial.number, state=TrialState.FAIL)
        end = f"failed (exit code {exit_code}, see {ended.log_path})"
    shown = "  ".join(f"{name} {short(value)}" for name, value in ended.values.items())
    print(f"{ended.name}  {ended.space.metric} {short(score)}  {shown}  {end}", flush=True)


def read_scores(path: Path, metric: str) -> list[float]:
    """The values of a metric in metrics.csv, in order; none where the file is not there yet."""
    try:
        with open(path, newline="") as file:
            return [float(row[metric]) for row in csv.DictReader(file) if row.get(metric)]
    except FileNotFoundError:
        return []


def environment_of(slot: int, jobs: int, folder: Path) -> dict[str, str]:
    """A trial's environment: its share of the cores, a GPU of its own where there are several, one W&B group."""
    import torch

    environment = {"WANDB_RUN_GROUP": folder.name, **os.environ, **threads.share(jobs)}
    if "CUDA_VISIBLE_DEVICES" not in environment and torch.cuda.device_count() > 1:
        environment["CUDA_VISIBLE_DEVICES"] = str(slot % torch.cuda.device_count())
    return environment


def trial_name(number: int) -> str:
    """Name of a trial's run."""
    return f"trial-{number:03}"


def short(value: Any) -> str:
    """A value in four digits."""
    return f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value)


def _end_with_parent() -> None:
    """Linux: SIGTERM for the trial when the sweep dies, also by SIGKILL. Elsewhere trials then run to their end."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


# The search space of a sweep file in W&B's format, so that one file serves ``wandb sweep`` and the local sweep.


DISTRIBUTIONS = ("categorical", "constant", "int_uniform", "uniform", "log_uniform_values")


@dataclass
class Parameter:
    """One parameter of a sweep: an option of ``fit`` without its dashes, and where its values come from."""

    name: str  # model.lr
    distribution: str  # one of DISTRIBUTIONS
    values: list[Any]  # the choices, or [lowest, highest]

    def suggest(self, trial: Any) -> Any:
        """A value from an Optuna trial."""
        if self.distribution in ("categorical", "constant"):
            return trial.suggest_categorical(self.name, self.values)
        low, high = self.values
        if self.distribution == "int_uniform":
            return trial.suggest_int(self.name, low, high)
        return trial.suggest_float(self.name, low, high, log=self.is_log)

    @property
    def is_log(self) -> bool:
        """Whether equal factors, not equal steps, are equally likely."""
        return self.distribution == "log_uniform_values"


@dataclass
class Space:
    """What a sweep file says, as far as a local sweep needs it."""

    parameters: list[Parameter]
    metric: str
    maximize: bool
    min_epochs: int  # no trial is stopped before


def read_space(path: Path) -> Space:
    """The search space of a sweep file.

    Raises:
        UserError: There is no such file, it is no sweep file, or a distribution is not one of DISTRIBUTIONS.
    """
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise UserError(f"--space: {path} cannot be read: {error.strerror}.") from None
    except yaml.YAMLError:
        raise UserError(f"--space: {path} is not valid YAML.") from None
    if not isinstance(content, dict) or not isinstance(content.get("parameters"), dict):
        raise UserError(f"--space: {path} must have a section `parameters:`, as configs/sweep.yaml has.")
    metric = content.get("metric") or {}
    return Space(
        [_parameter(name, entry) for name, entry in content["parameters"].items()],
        metric.get("name", "val/accuracy"),
        metric.get("goal", "maximize") == "maximize",
        int((content.get("early_terminate") or {}).get("min_iter", 1)),
    )


def _parameter(name: str, entry: Any) -> Parameter:
    entry = entry if isinstance(entry, dict) else {"value": entry}
    if "value" in entry:
        return Parameter(name, "constant", [entry["value"]])
    if "values" in entry:
        return Parameter(name, "categorical", list(entry["values"]))
    whole = all(isinstance(entry.get(end), int) for end in ("min", "max"))
    distribution = entry.get("distribution", "int_uniform" if whole else "uniform")
    if distribution not in DISTRIBUTIONS:
        raise UserError(
            f"--space: {name}.distribution must be one of {', '.join(DISTRIBUTIONS)}, got {distribution}."
            f"{nearest(str(distribution), DISTRIBUTIONS)}"
        )
    low, high = entry.get("min"), entry.get("max")
    if not all(isinstance(end, (int, float)) for end in (low, high)) or low >= high:
        hint = " YAML reads 1e-4 as text: write 0.0001." if isinstance(low, str) or isinstance(high, str) else ""
        raise UserError(f"--space: {name} needs values, or numbers min below max, got min {low}, max {high}.{hint}")
    if distribution == "log_uniform_values" and low <= 0:
        raise UserError(f"--space: {name}.min must be above 0 on a logarithmic scale, got {low}.")
    return Parameter(name, distribution, [low, high])
