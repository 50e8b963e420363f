"""Search hyperparameters here, without an account: parallel trials of fit, hopeless ones stopped early (Optuna).

python -m project.sweep --trials 20 --jobs 2
python -m project.sweep --name lr --trials 8 --max_epochs 2 --data.source sample   # other options are those of fit
python -m project.sweep --name lr --trials 16       # goes on: after a kill, or with more trials
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from project import threads
from project.engine.command import CommandParser, add_output, prepare_process, run
from project.engine.signals import end_with_parent
from project.errors import UserError, nearest, require
from project.tables import (
    format_cell,
    format_table,
    is_number,
    load_yaml,
    read_rows,
    write_atomically,
    write_rows,
)

prepare_process(__name__)  # signals, before optuna and torch are imported

try:
    import optuna
except ModuleNotFoundError:
    raise UserError("a local sweep needs Optuna. Install it: pip install -e '.[sweep]'") from None
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.storages.journal import JournalFileBackend
from optuna.trial import Trial, TrialState

SPACE = Path("configs", "sweep.yaml")
PLACE = "--name and --root"
OWN_FLAGS = dict.fromkeys(
    ("--run_name", "--ckpt_path", "--default_root_dir", "--trainer.default_root_dir"), PLACE
)
OWN_FLAGS |= dict.fromkeys(("--monitor", "--mode"), "`metric:` of the sweep file")
STATES = {
    "COMPLETE": "done",
    "PRUNED": "stopped early",
    "RUNNING": "interrupted",
    "WAITING": "interrupted",
}
COLOURS = {
    "stopped early": "#b0b7bf",
    "finished": "#33658a",
    "best": "#c1272d",
}  # the best is drawn on top
TRIAL = "trial-{:03}"  # name of a run, by its number
POLL_SECONDS = 0.2
NO_TEST = "--limit_test_batches=0"  # trials are compared by validation; the test set is for the one that is chosen
STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM, -signal.SIGINT, -signal.SIGTERM)  # exit codes
RANGES = ("int_uniform", "uniform", "log_uniform_values")  # W&B's distributions with min and max


def main(argv: list[str]) -> int:
    """Sweep as ``argv`` says; returns the exit code."""
    parser = CommandParser("project.sweep", __doc__)
    parser.add_argument(
        "--trials", type=int, default=20, help="trials of the whole sweep (default: 20)"
    )
    parser.add_argument("--jobs", type=int, default=1, help="trials at the same time (default: 1)")
    parser.add_argument(
        "--name",
        help="folder of the sweep in checkpoints/; an existing one goes on (default: a time)",
    )
    parser.add_argument("--space", type=Path, help=f"sweep file in W&B's format (default: {SPACE})")
    parser.add_argument(
        "--root", type=Path, default=Path("checkpoints"), help="where the sweep's folder lies"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the search (default: 0)")
    add_output(parser)
    args, fit_arguments = parser.parse_known_args(argv)
    require(args.trials >= 1, "--trials", "be at least 1", args.trials)
    require(args.jobs >= 1, "--jobs", "be at least 1", args.jobs)
    require(0 <= args.seed < 2**32, "--seed", f"be from 0 to {2**32 - 1}", args.seed)
    name = time.strftime("sweep_%Y-%m-%d_%H-%M-%S") if args.name is None else args.name
    require(
        re.fullmatch(r"\w[\w.\-]{0,99}", name),
        "--name",
        "be 1 to 100 letters, digits or .-_",
        f"'{name}'",
    )
    for flag in (word.split("=")[0] for word in fit_arguments):
        if flag in OWN_FLAGS:
            raise UserError(
                f"{flag} is set for every trial. Use {OWN_FLAGS[flag]} for the whole sweep."
            )
    folder, of_repository = args.root / name, Path(__file__).parents[1] / SPACE
    space_file = args.space or next(
        (path for path in (SPACE, of_repository) if path.is_file()), SPACE
    )
    space, is_new = read_space(space_file), not folder.exists()
    fit_arguments, lock = claim(folder, space_file, fit_arguments)
    with lock:
        study = open_study(folder, space, args.trials, args.seed)
        if study.trials:
            print(
                f"going on with {name}: {len(study.trials)} of {args.trials} trials were begun.",
                flush=True,
            )
        try:
            run_trials(study, space, folder, fit_arguments, args)
        except UserError:
            if is_new and not any(
                path.is_dir() for path in folder.iterdir()
            ):  # no trial has begun to train
                shutil.rmtree(folder)
            raise
        finally:
            if folder.exists() and (rows := result_rows(study, space)):
                draw(folder / "sweep.png", study, space, f"{name}: {len(rows)} trials")
        print("\n" + format_table(rows))
        if args.output:
            write_rows(args.output, rows)
    if not any(trial.state.name == "COMPLETE" for trial in study.trials):
        raise UserError(f"no trial finished; see {folder}/*.log.")
    best = study.best_trial
    flags = [word for key, value in best.params.items() for word in (f"--{key}", str(value))]
    chosen = shlex.quote(f"{folder}/{TRIAL.format(best.number)}/best.ckpt")
    print(f"\npicture: {folder}/sweep.png\nbest:    python -m project.test --ckpt_path {chosen}\n")
    print(shlex.join(["python", "-m", "project.fit", *fit_arguments, *flags]))
    return 0


def claim(folder: Path, space: Path, fit_arguments: list[str]) -> tuple[list[str], Any]:
    """Lock a sweep's folder, new or begun with the same space and arguments; returns the arguments and the lock."""
    record = folder / "sweep.json"
    got, hint = f"{folder}, which holds something else", " Choose another name."
    require(
        record.exists() or not any(folder.glob("[!.]*")),
        "--name",
        "be new, or a sweep's",
        got,
        hint,
    )
    folder.mkdir(parents=True, exist_ok=True)
    lock = open(folder / ".lock", "a")  # noqa: SIM115 - held until the sweep ends
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise UserError(
            f"--name {folder.name}: another process is sweeping there. Wait or choose another."
        ) from None
    now = {"fit": fit_arguments, "space": space.read_text()}
    if not record.exists():
        write_atomically(json.dumps(now, indent=2), record)
    try:
        begun = json.loads(record.read_text())
        space_then, fit_then = begun["space"], [*map(str, begun["fit"])]
    except (ValueError, TypeError, KeyError):
        raise UserError(
            f"--name {folder.name}: {record} is damaged. Choose another name."
        ) from None
    if space_then != now["space"]:
        raise UserError(
            f"--name {folder.name} was begun with another search space. Choose another name."
        )
    if fit_arguments and fit_arguments != fit_then:
        advice = "Leave these options away to go on with it, or choose another name."
        raise UserError(f"--name {folder.name} was begun with `{shlex.join(fit_then)}`. {advice}")
    return fit_then, lock


def result_rows(study: optuna.Study, space: Space) -> list[dict[str, Any]]:
    """A row per trial that measured anything, the best first."""
    rows = []
    for trial in study.trials:
        if (best := space.best(trial.intermediate_values.values())) is not None:
            row = {
                "trial": trial.number,
                space.metric: best,
                **trial.params,
                "epochs": len(trial.intermediate_values),
            }
            rows.append(row | trial.user_attrs | {"state": STATES.get(trial.state.name, "failed")})
    return sorted(rows, key=lambda row: row[space.metric], reverse=space.goal == "maximize")


def draw(path: Path, study: optuna.Study, space: Space, title: str) -> None:
    """Every trial's curve, and its best value over each parameter. Optuna's pictures leave out those stopped early."""
    from matplotlib.figure import Figure

    varied = {
        name: drawn_from for name, drawn_from in space.parameters.items() if not drawn_from.single()
    }
    figure = Figure(figsize=(3.4 + 2.4 * len(varied), 3.6), layout="constrained")
    first, *others = figure.subplots(1, 1 + len(varied), sharey=True, squeeze=False)[0]
    first.set(xlabel="epoch", ylabel=space.metric)
    first.grid(alpha=0.25)
    first.xaxis.get_major_locator().set_params(integer=True)
    finished = [trial.number for trial in study.trials if trial.state.name == "COMPLETE"]
    best = study.best_trial.number if finished else None
    for trial in study.trials:
        if (score := space.best(trial.intermediate_values.values())) is not None:
            kind = (
                "best"
                if trial.number == best
                else "finished"
                if trial.number in finished
                else "stopped early"
            )
            style: dict[str, Any] = {
                "color": COLOURS[kind],
                "zorder": 2 + list(COLOURS).index(kind),
            }
            epochs, values = zip(*sorted(trial.intermediate_values.items()), strict=True)
            first.plot(
                [epoch + 1 for epoch in epochs],
                values,
                marker="o",
                markersize=3,
                linewidth=1.4,
                **style,
            )
            for axis, (name, drawn_from) in zip(others, varied.items(), strict=True):
                axis.scatter(
                    drawn_from.to_internal_repr(trial.params[name]),
                    score,
                    s=28,
                    clip_on=False,
                    **style,
                )
    for axis, (name, drawn_from) in zip(others, varied.items(), strict=True):
        axis.set(xlabel=name, xscale="log" if getattr(drawn_from, "log", False) else "linear")
        axis.grid(alpha=0.25)
        if isinstance(drawn_from, CategoricalDistribution):  # all choices, at equal distances
            axis.set_xticks(range(len(drawn_from.choices)), map(str, drawn_from.choices))
        elif isinstance(drawn_from, FloatDistribution | IntDistribution):  # all of its range
            axis.set_xlim(drawn_from.low, drawn_from.high)
            axis.tick_params(
                axis="x", which="minor", labelsize=7, labelrotation=90
            )  # 2×10⁻³ beside 3×10⁻³
    for kind, colour in reversed(COLOURS.items()):
        first.plot([], [], color=colour, marker="o", markersize=4, label=kind)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=150)


@dataclass
class Space:
    """The part of a sweep file in W&B's format that a local sweep uses."""

    parameters: dict[
        str, BaseDistribution
    ]  # option of ``fit`` without its dashes, such as model.lr → its values
    metric: str = "val/accuracy"  # anything that fit logs
    goal: Literal["maximize", "minimize"] = "maximize"
    min_epochs: int = 1  # of a trial that is stopped early

    def best(self, values: Any) -> float | None:
        """The best of some values of the metric; None where none is finite."""
        return (max if self.goal == "maximize" else min)(
            filter(math.isfinite, values), default=None
        )


def read_space(path: Path) -> Space:
    """The search space of a sweep file; a UserError for what a local sweep cannot search."""
    try:
        content = load_yaml(path.read_text())
    except OSError as error:
        raise UserError(
            f"--space: {path} cannot be read: {error.strerror}. Name a file in W&B's format."
        ) from None
    except (ValueError, yaml.YAMLError):
        raise UserError(f"--space: {path} is not valid YAML.") from None
    section = (
        {key: value for key, value in content.items() if value} if isinstance(content, dict) else {}
    )
    parameters, metric, stop = (
        section.get(key, {}) for key in ("parameters", "metric", "early_terminate")
    )
    if not isinstance(parameters, dict) or not parameters:
        raise UserError(
            f"--space: {path} must have a section `parameters:`, as configs/sweep.yaml has."
        )
    goal: Any = metric.get("goal", "maximize") if isinstance(metric, dict) else None
    require(
        goal in ("maximize", "minimize"),
        "--space: metric",
        "be {name: ..., goal: maximize or minimize}",
        metric,
    )
    least = stop.get("min_iter", 1) if isinstance(stop, dict) else stop
    require(
        type(least) is int and least > 0,
        "--space: early_terminate.min_iter",
        "be an integer of at least 1",
        least,
    )
    found = {str(name): distribution(name, entry) for name, entry in parameters.items()}
    return Space(found, str(metric.get("name", "val/accuracy")), goal, least)


def distribution(name: Any, entry: Any) -> BaseDistribution:
    """The distribution of a parameter; a UserError for an entry that is not in W&B's format."""
    entry = entry if isinstance(entry, dict) else {"value": entry}
    if "value" in entry or "values" in entry:
        values = [entry["value"]] if "value" in entry else entry["values"]
        require(
            isinstance(values, list) and values,
            f"--space: {name}.values",
            "be a non-empty list",
            values,
        )
        return CategoricalDistribution(
            json.loads(json.dumps(values, default=str))
        )  # a date is text
    low, high = entry.get("min"), entry.get("max")
    kind = entry.get("distribution", "int_uniform" if type(low) is type(high) is int else "uniform")
    must, hint = f"be one of {', '.join(RANGES)}", nearest(str(kind), RANGES)
    require(kind in RANGES, f"--space: {name}.distribution", must, kind, hint)
    types, must = ((int,), "whole numbers") if kind == "int_uniform" else ((int, float), "numbers")
    if not all(type(end) in types and is_number(end) for end in (low, high)) or low >= high:
        hint = (
            " YAML reads 1e-4 as text: write 0.0001."
            if isinstance(low, str) or isinstance(high, str)
            else ""
        )
        raise UserError(
            f"--space: {name} needs values, or {must} min below max, got min {low}, max {high}.{hint}"
        )
    log = kind == "log_uniform_values"
    require(not log or low > 0, f"--space: {name}.min", "be above 0 on a logarithmic scale", low)
    return (
        IntDistribution(low, high)
        if kind == "int_uniform"
        else FloatDistribution(low, high, log=log)
    )


def open_study(folder: Path, space: Space, trials: int, seed: int) -> optuna.Study:
    """The study in a folder, new or continued: it asks for unfinished trials first. Its journal survives any kill."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    startup = max(3, int(0.4 * trials))  # drawn at random, before the sampler learns from them
    sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=startup, constant_liar=True)
    pruner = optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=space.min_epochs - 1)
    settings: dict[str, Any] = {
        "study_name": "sweep",
        "direction": space.goal,
        "load_if_exists": True,
    }
    try:
        storage = optuna.storages.JournalStorage(JournalFileBackend(str(folder / "journal.log")))
        study = optuna.create_study(storage=storage, sampler=sampler, pruner=pruner, **settings)
    except Exception as error:  # Optuna does not check what it reads
        reason = f"{folder}/journal.log cannot be read ({type(error).__name__}: {error})"
        raise UserError(f"--name {folder.name}: {reason}. Choose another name.") from None
    study_id = storage.get_study_id_from_name("sweep")
    for begun in study.get_trials(
        states=(TrialState.RUNNING,)
    ):  # when the sweep was killed; keeps what was drawn
        trial_id = storage.get_trial_id_from_study_id_trial_number(study_id, begun.number)
        storage.set_trial_state_values(trial_id, TrialState.WAITING)
    return study


class RunningTrial:
    """One trial and its process: a run in the sweep's ``folder``. All trials share ``fit_arguments``."""

    def __init__(
        self,
        trial: Trial,
        space: Space,
        folder: Path,
        fit_arguments: list[str],
        env: dict[str, str],
    ) -> None:
        self.trial, self.space, self.name = trial, space, TRIAL.format(trial.number)
        self.folder, self.log_path = folder / self.name, folder / f"{self.name}.log"
        self.reported = set(trial.study.trials[trial.number].intermediate_values)  # epochs
        self.pruned = False
        words = [sys.executable, "-m", f"{__package__}.fit", NO_TEST, *fit_arguments]
        words += [
            f"--{name}={value}" for name, value in trial.params.items()
        ]  # as in W&B's ${args}
        words += ["--monitor", space.metric, "--mode", space.goal[:3]]
        words += ["--default_root_dir", str(folder), "--run_name", self.name, "--ckpt_path", "auto"]
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(
                words, stdout=log, env=env, preexec_fn=end_with_parent, **pipes
            )

    def watch(self) -> bool:
        """Report ended epochs, by their last value, and stop a hopeless trial; whether it has ended, which is told."""
        exit_code, rows = self.process.poll(), self.rows()
        scores = {
            int(row["epoch"]): row[self.space.metric] for row in rows if self.space.metric in row
        }
        now = max((row["epoch"] for row in rows), default=0)
        for epoch, score in scores.items():
            if epoch in self.reported or (epoch == now and exit_code is None):
                continue
            self.trial.report(score, epoch)
            self.reported.add(epoch)
            if (
                exit_code is None
                and not self.pruned
                and self.trial.should_prune()
                and not self.has_trained(rows)
            ):
                self.pruned = True
                self.process.terminate()  # a clean stop: fit saves and ends
        if exit_code is not None:
            self.finish(exit_code, rows, self.space.best(scores.values()))
        return exit_code is not None

    def rows(self) -> list[dict[str, float]]:
        """The rows of metrics.csv that belong to an epoch."""
        return [row for row in read_rows(self.folder / "metrics.csv") if "epoch" in row]

    def has_trained(self, rows: list[dict[str, float]]) -> bool:
        """Whether only the report (and a test that was asked for) is left, which no signal should cut off."""
        limits = yaml.safe_load((self.folder / "config.yaml").read_text())["trainer"]
        epochs, steps = (
            limits.get(name) or -1 for name in ("max_epochs", "max_steps")
        )  # -1: no limit
        scored = [row["epoch"] for row in rows if self.space.metric in row]
        return (
            0 < epochs <= max([*scored, -1]) + 1
            or 0 < steps <= max(row["step"] for row in rows) + 1
        )

    def finish(self, exit_code: int, rows: list[dict[str, float]], score: float | None) -> None:
        """Tell Optuna and the user how it ended; a UserError where ``fit`` refused its flags or logs no metric."""
        import torch

        log, metric = f"see {self.log_path}", self.space.metric
        state, end = TrialState.FAIL, f"failed (exit code {exit_code}, {log})"
        was_stopped = self.pruned or exit_code in STOPPED
        if score is not None and (exit_code == 0 or (was_stopped and self.has_trained(rows))):
            state, end = TrialState.COMPLETE, "done"
        elif self.pruned and exit_code != 0:
            state, end = TrialState.PRUNED, f"stopped after {len(self.reported)} epochs"
        with contextlib.suppress(Exception):  # a trial that has saved nothing, or a damaged file
            saved = torch.load(self.folder / "last.ckpt", weights_only=True, mmap=True)
            self.trial.set_user_attr(
                "seconds", saved["callbacks"]["RunTimer"]["seconds"]
            )  # of training, in all parts
        self.trial.study.tell(self.trial, score if end == "done" else None, state)
        if exit_code == 2:  # bad input
            lines = [
                line
                for line in self.log_path.read_text().splitlines()
                if line.startswith("error: ")
            ]
            raise UserError(f"{self.name}: {lines[-1].removeprefix('error: ') if lines else log}")
        names = sorted({name for row in rows for name in row} - {"epoch", "step"})
        if exit_code == 0 and metric not in names:
            raise UserError(
                f"--space: metric {metric} is not logged. {self.name} logged {', '.join(names)}."
            )
        shown = "  ".join(
            f"{name} {format_cell(value)}" for name, value in self.trial.params.items()
        )
        print(f"{self.name}  {metric} {format_cell(score)}  {shown}  {end}", flush=True)


def run_trials(
    study: optuna.Study, space: Space, folder: Path, fit_arguments: list[str], args: Namespace
) -> None:
    """Bring a study to ``args.trials`` trials, ``args.jobs`` at a time; those that a killed sweep left go on first."""
    running: dict[int, RunningTrial] = {}
    try:
        while True:
            for slot in set(range(args.jobs)) - running.keys():
                if len(study.trials) < args.trials or study.get_trials(
                    states=(TrialState.WAITING,)
                ):
                    trial, environment = (
                        study.ask(space.parameters),
                        environment_of(slot, args.jobs, folder),
                    )
                    wait_until_free(folder / TRIAL.format(trial.number))
                    running[slot] = RunningTrial(trial, space, folder, fit_arguments, environment)
            if not running:
                break
            time.sleep(POLL_SECONDS)
            for slot, watched in list(running.items()):
                if watched.watch():
                    del running[slot]
    finally:
        for watched in running.values():
            watched.process.terminate()  # all at once: each saves its step, and a resumed sweep goes on from there
        for watched in running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                watched.process.wait(timeout=15)
            watched.process.kill()  # has no effect on one that has ended
            watched.process.wait()


def wait_until_free(run_folder: Path) -> None:
    """Wait until a killed sweep's trial has saved its step and ended; a UserError after a minute."""
    with contextlib.suppress(FileNotFoundError), open(run_folder / ".lock") as lock:
        for _ in range(int(60 / POLL_SECONDS)):
            with contextlib.suppress(BlockingIOError):
                return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            time.sleep(POLL_SECONDS)
        raise UserError(
            f"{run_folder} is still written by a process of the sweep that was killed. Wait or stop it."
        )


def environment_of(slot: int, jobs: int, folder: Path) -> dict[str, str]:
    """A trial's environment: its share of the cores, one of several GPUs, the sweep's W&B group."""
    import torch

    gpus = torch.cuda.device_count()
    ours = {"CUDA_VISIBLE_DEVICES": str(slot % gpus)} if gpus > 1 else {}
    return {
        "WANDB_RUN_GROUP": folder.name,
        **ours,
        **os.environ,
        **threads.share(jobs),
    }  # what the user set wins


if __name__ == "__main__":
    run(main)
