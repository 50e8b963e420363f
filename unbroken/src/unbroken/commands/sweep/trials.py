"""The trials of a sweep: each is a process of ``fit``, watched through the files that it writes."""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import filelock
import optuna
from optuna.trial import Trial, TrialState
from unbroken.cli.start import LONGEST
from unbroken.commands.sweep.journal import LAST_EPOCH, SECONDS, is_finite
from unbroken.commands.sweep.space import Space, as_typed
from unbroken.commands.sweep.study import has_next_trial, next_trial
from unbroken.errors import UserError, printable
from unbroken.machine import threads
from unbroken.stopping.signals import end_with_parent
from unbroken.storage.reading import UNREADABLE, read_end, read_json, read_text, yaml_in
from unbroken.tables import format_cell, read_rows

# The name of a run, by its number.
TRIAL = "trial-{:03}"
POLL_SECONDS = 0.2
# Trials are compared by validation. The test set is for the one that is chosen.
NO_TEST = "--limit_test_batches=0"
# Exit codes of a run that SIGINT (2) or SIGTERM (15) has ended, with a clean stop or without one.
STOPPED = (130, 143, -2, -15)
# How long a sweep that is stopped waits for its trials to save their step.
STOP_SECONDS = 15
# How long a continued sweep waits for a trial of the killed one that still saves.
FREE_SECONDS = 60


class RunningTrial:
    """One trial and its process: a run in the sweep's ``folder``."""

    def __init__(
        self,
        trial: Trial,
        space: Space,
        folder: Path,
        fit: list[str],
        env: dict[str, str],
    ) -> None:
        self.trial = trial
        self.space = space
        self.name = TRIAL.format(trial.number)
        self.folder = folder / self.name
        self.log_path = folder / f"{self.name}.log"
        # The epochs that Optuna knows. A trial that goes on has some.
        self.reported = set(trial.study.trials[trial.number].intermediate_values)
        self.pruned = False
        self.values = space.values_in(trial.params)
        self.process = self._start(folder, fit, env)

    def _start(self, folder: Path, fit: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", fit[0], NO_TEST, *fit[1:]]
        # This is how W&B writes ${args}.
        words += [f"--{name}={as_typed(value)}" for name, value in self.values.items()]
        words += ["--monitor", self.space.metric, "--mode", self.space.goal[:3]]
        words += ["--default_root_dir", str(folder), "--run_name", self.name, "--ckpt_path", "auto"]
        # Only Linux can end a child with its parent. Elsewhere the trials of a sweep that was
        # killed run to their ends, and the continued sweep waits for them.
        before_start = end_with_parent if sys.platform == "linux" else None
        with open(self.log_path, "ab") as log:
            return subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                preexec_fn=before_start,
            )

    def watch(self) -> bool:
        """Report epochs that have ended, and stop a hopeless trial. Returns whether it has
        ended.
        """
        exit_code = self.process.poll()
        rows = self.rows()
        scores = self.scores(rows)
        now = max((row["epoch"] for row in rows), default=0)
        for epoch, score in scores.items():
            # An epoch may have several values. The best counts, once the next epoch has begun.
            is_over = epoch != now or exit_code is not None
            if is_over and epoch not in self.reported:
                self.trial.report(score, epoch)
                self.reported.add(epoch)
                if exit_code is None:
                    self.stop_if_hopeless(rows)
        if exit_code is None:
            return False
        self.finish(exit_code, rows, self.space.best(scores.values()))
        return True

    def stop_if_hopeless(self, rows: list[dict[str, float]]) -> None:
        """Ask the process to stop where the trial is worse than the others at the same epoch."""
        if self.pruned or not self.trial.should_prune() or self.has_trained(rows):
            return
        self.pruned = True
        # This is a clean stop: fit saves and ends. (On Windows the process ends at once.)
        self.process.terminate()

    def rows(self) -> list[dict[str, float]]:
        """The rows of metrics.csv; those before any tells an epoch are of the first. What somebody
        else has left there counts as none, until ``fit`` replaces it.
        """
        try:
            rows = list(read_rows(self.folder / "metrics.csv", is_bounded=True))
        except UNREADABLE:
            return []
        rows = [{"epoch": 0.0, **row} for row in rows]
        is_of_a_run = all(0 <= row["epoch"] <= LAST_EPOCH for row in rows)
        return rows if is_of_a_run else []

    def scores(self, rows: list[dict[str, float]]) -> dict[int, float]:
        """The best value of the metric in each epoch that has one, by the epoch's number: a run
        keeps the best of several validations.
        """
        metric = self.space.metric
        values: dict[int, list[float]] = {}
        for row in rows:
            if metric in row:
                values.setdefault(int(row["epoch"]), []).append(row[metric])
        best = {epoch: self.space.best(several) for epoch, several in values.items()}
        return {epoch: score for epoch, score in best.items() if score is not None}

    def has_trained(self, rows: list[dict[str, float]]) -> bool:
        """Whether only the report is left (and a test that was asked for): no signal should cut it
        off.
        """
        max_epochs = self.limit("max_epochs")
        max_steps = self.limit("max_steps")
        last_epoch = max(self.scores(rows), default=-1)
        last_step = max((row.get("step", -1) for row in rows), default=-1)
        all_epochs = max_epochs > 0 and last_epoch + 1 >= max_epochs
        all_steps = max_steps > 0 and last_step + 1 >= max_steps
        return all_epochs or all_steps

    def limit(self, name: str) -> int:
        """A limit of the Trainer; -1 where there is none, also where somebody else has left the
        file, until ``fit`` replaces it.
        """
        try:
            value = yaml_in(read_text(self.folder / "config.yaml"))["trainer"][name]
        except (*UNREADABLE, LookupError, TypeError):
            return -1
        return value if type(value) is int else -1

    def finish(self, exit_code: int, rows: list[dict[str, float]], score: float | None) -> None:
        """Tell Optuna and the user how the trial ended.

        A UserError where ``fit`` refused the first flags, or logs no such metric: every trial
        would do so. Once a trial has trained, a refusal is that of one trial's values.
        """
        state = self.state_of(exit_code, rows, score)
        seconds = self.seconds_of_training()
        if seconds is not None:
            self.trial.set_user_attr(SECONDS, seconds)
        value = score if state == TrialState.COMPLETE else None
        self.trial.study.tell(self.trial, value, state)
        if exit_code == 2 and not any_has_trained(self.trial.study):
            raise UserError(f"{self.name}: {self.refusal()}")
        if exit_code == 0:
            self.check_metric(rows)
        end = f"failed (exit code {exit_code}, see {self.log_path})"
        if exit_code == 2:
            end = f"failed ({self.refusal()})"
        if state == TrialState.COMPLETE:
            end = "done"
        elif state == TrialState.PRUNED:
            end = f"stopped after {len(self.reported)} epochs"
        values = [f"{name} {format_cell(value)}" for name, value in self.values.items()]
        shown = "  ".join(values)
        print(f"{self.name}  {self.space.metric} {format_cell(score)}  {shown}  {end}", flush=True)

    def state_of(
        self, exit_code: int, rows: list[dict[str, float]], score: float | None
    ) -> TrialState:
        """How the trial ended, in Optuna's words."""
        was_stopped = self.pruned or exit_code in STOPPED
        has_ended = exit_code == 0 or (was_stopped and self.has_trained(rows))
        if score is not None and has_ended:
            return TrialState.COMPLETE
        if self.pruned and exit_code != 0:
            return TrialState.PRUNED
        return TrialState.FAIL

    def seconds_of_training(self) -> float | None:
        """Seconds of training, in all parts of an interrupted trial; None where no checkpoint
        tells.
        """
        seconds: Any = None
        # A run that has ended has written them down.
        with contextlib.suppress(*UNREADABLE):
            seconds = read_json(self.folder / "summary.json").get("fit_seconds")
        if seconds is None:
            from unbroken.trust.torch_file import read_file

            # The trial may have saved nothing, or a file may be damaged.
            with contextlib.suppress(Exception):
                saved = read_file(self.folder / "last.ckpt")
                seconds = saved["callbacks"]["RunTimer"]["seconds"]
        return float(seconds) if is_finite(seconds) else None

    def refusal(self) -> str:
        """The line with which ``fit`` refused its arguments."""
        return reason_in(self.log_path) or f"see {self.log_path}"

    def check_metric(self, rows: list[dict[str, float]]) -> None:
        """A UserError where the run logged no such metric."""
        logged = {name for row in rows for name in row} - {"epoch", "step"}
        if self.space.metric not in logged:
            names = ", ".join(sorted(logged))
            told = f"metric {self.space.metric} is not logged. {self.name} logged {names}."
            raise UserError(f"--space: {told}")


def any_has_trained(study: optuna.Study) -> bool:
    """Whether a trial of the study has ended an epoch."""
    return any(
        trial.intermediate_values or trial.state == TrialState.COMPLETE for trial in study.trials
    )


def run_trials(
    study: optuna.Study,
    space: Space,
    folder: Path,
    fit: list[str],
    trials: int,
    jobs: int,
) -> None:
    """Bring a study to ``trials`` trials, ``jobs`` at a time; those that were interrupted come
    first.
    """
    running: dict[int, RunningTrial] = {}
    try:
        while True:
            for slot in range(jobs):
                if slot not in running and has_next_trial(study, space, trials):
                    trial = next_trial(study, space)
                    wait_until_free(folder / TRIAL.format(trial.number))
                    environment = environment_of(slot, jobs, folder)
                    running[slot] = RunningTrial(trial, space, folder, fit, environment)
            if not running:
                return
            time.sleep(POLL_SECONDS)
            for slot, watched in list(running.items()):
                if watched.watch():
                    del running[slot]
    finally:
        stop_all(list(running.values()))


def stop_all(running: list[RunningTrial]) -> None:
    """Stop trials: each saves its step, and a continued sweep goes on from there."""
    # All are asked before the first is waited for.
    for watched in running:
        watched.process.terminate()
    for watched in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            watched.process.wait(timeout=STOP_SECONDS)
        # This has no effect on a process that has ended.
        watched.process.kill()
        watched.process.wait()


def wait_until_free(run_folder: Path) -> None:
    """Wait until a killed sweep's trial has saved its step and ended; a UserError after a
    minute.
    """
    lock_file = run_folder / ".lock"
    if not lock_file.exists():
        return
    lock = filelock.FileLock(lock_file)
    try:
        lock.acquire(timeout=FREE_SECONDS, poll_interval=POLL_SECONDS)
    except filelock.Timeout:
        raise UserError(
            f"{run_folder} is still written by a process of the sweep that was killed. "
            "Wait or stop it."
        ) from None
    lock.release()


def environment_of(slot: int, jobs: int, folder: Path) -> dict[str, str]:
    """A trial's environment: its share of the cores, one of several GPUs, the sweep's W&B group."""
    import torch

    # A group that the user has set in the environment wins.
    environment = {"WANDB_RUN_GROUP": folder.name, **os.environ, **threads.share(jobs)}
    gpus = torch.cuda.device_count()
    if gpus > 1:
        names = [str(number) for number in range(gpus)]
        # A list that the user has set, or SLURM, has its own numbers or names.
        given = os.environ.get("CUDA_VISIBLE_DEVICES")
        if given:
            names = [name.strip() for name in given.split(",")][:gpus]
        environment["CUDA_VISIBLE_DEVICES"] = names[slot % len(names)]
    return environment


def reason_in(log: Path) -> str:
    """Why a trial failed: its error of one line, else the last line of what it printed; nothing
    where it printed nothing.
    """
    lines: list[str] = []
    with contextlib.suppress(*UNREADABLE):
        lines = read_end(log).decode(errors="replace").splitlines()
    printed = [line for line in lines if line.strip()]
    errors = [line for line in printed if line.startswith("error: ")]
    told = [*printed[-1:], *errors[-1:]]
    return printable(told[-1].removeprefix("error: ")[:LONGEST]) if told else ""
