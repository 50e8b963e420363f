"""The trials of a sweep: where their values come from, and their processes, which are runs of ``fit``."""

from __future__ import annotations

import contextlib
import csv
import fcntl
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import optuna
import torch
import yaml
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import Trial, TrialState

from project import threads
from project.engine.signals import end_with_parent
from project.errors import UserError, nearest
from project.tables import format_cell

POLL_SECONDS = 0.2
ORPHAN_SECONDS = 60
STARTUP_SHARE = 0.4  # of the trials: random search, before the sampler learns from them
BAD_INPUT = 2  # exit code
STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM, -signal.SIGINT, -signal.SIGTERM)  # exit codes
RANGES = ("int_uniform", "uniform", "log_uniform_values")  # W&B's names of distributions from min to max


@dataclass
class Space:
    """What a sweep file in W&B's format says, as far as a local sweep needs it."""

    parameters: dict[str, BaseDistribution]  # option of ``fit`` without its dashes, such as model.lr → its values
    metric: str = "val/accuracy"  # anything that fit logs
    maximize: bool = True
    min_epochs: int = 1  # no trial is stopped before

    def best(self, values: Any) -> float | None:
        """The best of some values of the metric; None where none of them is a number."""
        return (max if self.maximize else min)(filter(math.isfinite, values), default=None)


def read_space(path: Path) -> Space:
    """The search space of a sweep file; a UserError says what in it a local sweep cannot search."""
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise UserError(f"--space: {path} cannot be read: {error.strerror}.") from None
    except (UnicodeDecodeError, yaml.YAMLError):
        raise UserError(f"--space: {path} is not valid YAML.") from None
    section = {key: value for key, value in content.items() if value} if isinstance(content, dict) else {}
    parameters, metric, stop = (section.get(key, {}) for key in ("parameters", "metric", "early_terminate"))
    if not isinstance(parameters, dict) or not parameters:
        raise UserError(f"--space: {path} must have a section `parameters:`, as configs/sweep.yaml has.")
    goal = metric.get("goal", "maximize") if isinstance(metric, dict) else None
    if goal not in ("maximize", "minimize"):
        raise UserError(f"--space: metric must be {{name: ..., goal: maximize or minimize}}, got {metric}.")
    least = stop.get("min_iter", 1) if isinstance(stop, dict) else stop
    if type(least) is not int or least < 1:
        raise UserError(f"--space: early_terminate.min_iter must be a whole number of at least 1, got {least}.")
    found = {str(name): distribution(name, entry) for name, entry in parameters.items()}
    return Space(found, str(metric.get("name", "val/accuracy")), goal == "maximize", least)


def distribution(name: Any, entry: Any) -> BaseDistribution:
    """Where the values of a parameter come from; a UserError for an entry of a sweep file that is none of W&B's."""
    entry = entry if isinstance(entry, dict) else {"value": entry}
    if "value" in entry or "values" in entry:
        values = [entry["value"]] if "value" in entry else entry["values"]
        if not isinstance(values, list) or not values:
            raise UserError(f"--space: {name}.values must be a list of at least one value, got {values}.")
        return CategoricalDistribution(values)
    low, high = entry.get("min"), entry.get("max")
    whole = type(low) is type(high) is int
    kind = entry.get("distribution", "int_uniform" if whole else "uniform")
    if kind not in RANGES:
        known = ", ".join(RANGES)
        raise UserError(f"--space: {name}.distribution must be one of {known}, got {kind}.{nearest(str(kind), RANGES)}")
    numbers = whole or all(type(end) in (int, float) and math.isfinite(end) for end in (low, high))
    if not numbers or low >= high or (kind == "int_uniform" and not whole):
        hint = " YAML reads 1e-4 as text: write 0.0001." if isinstance(low, str) or isinstance(high, str) else ""
        must = "whole numbers" if kind == "int_uniform" else "numbers"
        raise UserError(f"--space: {name} needs values, or {must} min below max, got min {low}, max {high}.{hint}")
    if kind == "int_uniform":
        return IntDistribution(low, high)
    if kind == "log_uniform_values" and low <= 0:
        raise UserError(f"--space: {name}.min must be above 0 on a logarithmic scale, got {low}.")
    return FloatDistribution(low, high, log=kind == "log_uniform_values")


def open_study(folder: Path, space: Space, trials: int, seed: int) -> tuple[optuna.Study, list[Trial]]:
    """The study in a folder, new or continued (its journal survives any kill), and its unfinished trials."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = JournalStorage(JournalFileBackend(str(folder / "journal.log")))
    startup = max(3, int(trials * STARTUP_SHARE))
    study = optuna.create_study(
        storage=storage,
        study_name="sweep",
        load_if_exists=True,
        direction="maximize" if space.maximize else "minimize",
        sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=startup, constant_liar=True),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=space.min_epochs - 1),
    )
    id_of = partial(storage.get_trial_id_from_study_id_trial_number, storage.get_study_id_from_name("sweep"))
    left = [Trial(study, id_of(trial.number)) for trial in study.get_trials(states=(TrialState.RUNNING,))]
    for trial in left:
        if trial.params.keys() != space.parameters.keys():  # killed while they were drawn
            study.tell(trial.number, state=TrialState.FAIL)
    return study, [trial for trial in left if trial.params.keys() == space.parameters.keys()]


class RunningTrial:
    """One trial and its process: a run in the sweep's ``folder``; ``fit_arguments`` are what all trials share."""

    def __init__(
        self, trial: Trial, space: Space, folder: Path, fit_arguments: list[str], environment: dict[str, str]
    ) -> None:
        self.trial, self.space, self.name = trial, space, trial_name(trial.number)
        self.folder, self.log_path = folder / self.name, folder / f"{self.name}.log"
        self.reported = set(trial.study.trials[trial.number].intermediate_values)  # epochs
        self.pruned = False
        flags = [f"--{name}={value}" for name, value in trial.params.items()]  # what W&B's ${args} looks like
        goal = ["--monitor", space.metric, "--mode", "max" if space.maximize else "min"]
        run = ["--default_root_dir", str(folder), "--run_name", self.name, "--ckpt_path", "auto"]
        words = [sys.executable, "-m", f"{__name__.split('.')[0]}.fit", *fit_arguments, *flags, *goal, *run]
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(words, stdout=log, env=environment, preexec_fn=end_with_parent, **pipes)

    def watch(self) -> int | None:
        """Report epochs that are over to Optuna, stop a hopeless trial; the exit code where the process has ended."""
        exit_code, rows = self.process.poll(), self.rows()
        now = max((row["epoch"] for row in rows), default=0)
        for epoch, score in self.scores(rows).items():
            if epoch in self.reported or (epoch == now and exit_code is None):
                continue
            self.trial.report(score, epoch)
            self.reported.add(epoch)
            if exit_code is None and not self.pruned and self.trial.should_prune() and not self.has_trained(rows):
                self.pruned = True
                self.process.terminate()  # a clean stop: fit saves and ends
        return exit_code

    def rows(self) -> list[dict[str, float]]:
        """The rows of metrics.csv, without empty cells; none where there is no such file yet."""
        with contextlib.suppress(FileNotFoundError), open(self.folder / "metrics.csv", newline="") as file:
            rows = [{key: float(text) for key, text in row.items() if text} for row in csv.DictReader(file)]
            return [row for row in rows if "epoch" in row]
        return []

    def scores(self, rows: list[dict[str, float]]) -> dict[int, float]:
        """The metric's last value of every epoch that has one."""
        return {int(row["epoch"]): row[self.space.metric] for row in rows if self.space.metric in row}

    def has_trained(self, rows: list[dict[str, float]]) -> bool:
        """Whether nothing but the final test is left, which no signal should cut off."""
        if not rows:
            return False
        limits = yaml.safe_load((self.folder / "config.yaml").read_text())["trainer"]
        epochs, steps = (limits.get(name) or -1 for name in ("max_epochs", "max_steps"))  # -1: no limit
        return 0 < epochs <= max([*self.scores(rows), -1]) + 1 or 0 < steps <= max(row["step"] for row in rows) + 1


def run_trials(
    study: optuna.Study, left: list[Trial], space: Space, folder: Path, fit_arguments: list[str], trials: int, jobs: int
) -> None:
    """Bring a study to ``trials`` trials, ``jobs`` at a time; those ``left`` by a killed sweep go on first."""
    running: dict[int, RunningTrial] = {}
    try:
        while left or running or len(study.trials) < trials:
            for slot in set(range(jobs)) - running.keys():
                if left:
                    wait_until_free(folder / trial_name(left[0].number))
                elif len(study.trials) >= trials:
                    break
                trial = left.pop(0) if left else study.ask(space.parameters)
                running[slot] = RunningTrial(trial, space, folder, fit_arguments, environment_of(slot, jobs, folder))
            time.sleep(POLL_SECONDS)
            for slot, watched in list(running.items()):
                if (exit_code := watched.watch()) is not None:
                    finish(study, running.pop(slot), exit_code)
    finally:
        processes = [watched.process for watched in running.values()]
        for process in processes:
            process.terminate()  # all at once: each saves its step, and a resumed sweep goes on from there
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=15)
            process.kill()  # nothing happens to one that has ended
            process.wait()


def wait_until_free(run_folder: Path) -> None:
    """Wait for the process of a killed sweep's trial, which saves its step before it ends; an error if it does not."""
    until = time.monotonic() + ORPHAN_SECONDS
    with contextlib.suppress(FileNotFoundError), open(run_folder / ".lock") as lock:
        while time.monotonic() < until:
            with contextlib.suppress(BlockingIOError):
                return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            time.sleep(POLL_SECONDS)
        raise UserError(f"{run_folder} is still written by a process of the sweep that was killed. Wait or stop it.")


def finish(study: optuna.Study, ended: RunningTrial, exit_code: int) -> None:
    """Tell Optuna and the user how a trial ended; a UserError where ``fit`` refused its flags or lacks the metric."""
    rows, log = ended.rows(), f"see {ended.log_path}"
    score = ended.space.best(ended.scores(rows).values())
    stopped = exit_code != 0 and (ended.pruned or exit_code in STOPPED)
    state, end = TrialState.FAIL, f"failed (exit code {exit_code}, {log})"
    if (exit_code == 0 or (stopped and ended.has_trained(rows))) and score is not None:
        state, end = TrialState.COMPLETE, "done"
    elif stopped and ended.pruned:
        state, end = TrialState.PRUNED, f"stopped after {len(ended.reported)} epochs"
    study.tell(ended.trial.number, score if end == "done" else None, state)
    if exit_code == BAD_INPUT:
        lines = [line for line in ended.log_path.read_text().splitlines() if line.startswith("error: ")]
        raise UserError(f"{ended.name}: {lines[-1].removeprefix('error: ') if lines else log}")
    if exit_code == 0 and not ended.scores(rows):
        names = sorted({name for row in rows for name in row} - {"epoch", "step"})
        raise UserError(f"--space: metric {ended.space.metric} is not logged. {ended.name} logged {', '.join(names)}.")
    shown = "  ".join(f"{name} {format_cell(value)}" for name, value in ended.trial.params.items())
    print(f"{ended.name}  {ended.space.metric} {format_cell(score)}  {shown}  {end}", flush=True)


def environment_of(slot: int, jobs: int, folder: Path) -> dict[str, str]:
    """A trial's environment: its share of the cores, a GPU of its own where there are several, one W&B group."""
    environment = {"WANDB_RUN_GROUP": folder.name, **os.environ, **threads.share(jobs)}
    if "CUDA_VISIBLE_DEVICES" not in environment and torch.cuda.device_count() > 1:
        environment["CUDA_VISIBLE_DEVICES"] = str(slot % torch.cuda.device_count())
    return environment


def trial_name(number: int) -> str:
    """Name of a trial's run."""
    return f"trial-{number:03}"
