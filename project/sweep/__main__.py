"""Search hyperparameters here, without an account: parallel trials of fit, hopeless ones stopped early (Optuna).

python -m project.sweep --trials 20 --jobs 2
python -m project.sweep --name lr --trials 8 --max_epochs 2 --data.source sample   # other options are those of fit
python -m project.sweep --name lr --trials 16       # goes on: after a kill, or with more trials
"""

from __future__ import annotations

import fcntl
import json
import re
import time
from pathlib import Path
from typing import Any

from project.errors import UserError

SPACE = Path(__file__).parents[1] / "configs" / "sweep.yaml"
# Trials that random search tries before the sampler learns from them.
STARTUP_SHARE = 0.4
OWN_FLAGS = ("--run_name", "--ckpt_path", "--default_root_dir")


def main(argv: list[str]) -> int:
    """Sweep as ``argv`` says; returns the exit code."""
    from project.engine.command import CommandParser, add_output
    from project.tables import check_output, format_table, write_rows

    parser = CommandParser("project.sweep", __doc__)
    parser.add_argument("--trials", type=int, default=20, help="trials of the whole sweep (default: 20)")
    parser.add_argument("--jobs", type=int, default=1, help="trials at the same time (default: 1)")
    parser.add_argument("--name", help="folder of the sweep in checkpoints/; an existing one goes on (default: a time)")
    parser.add_argument("--space", type=Path, default=SPACE, help="sweep file in W&B's format (default: %(default)s)")
    parser.add_argument("--root", type=Path, default=Path("checkpoints"), help="where the sweep's folder lies")
    parser.add_argument("--seed", type=int, default=0, help="of the search (default: 0)")
    add_output(parser)
    args, fit_arguments = parser.parse_known_args(argv)
    check(args.trials, args.jobs, args.name, fit_arguments)
    output = check_output(args.output) if args.output else None

    from project.sweep.trials import read_space

    name = args.name or time.strftime("sweep_%Y-%m-%d_%H-%M-%S")
    folder = args.root / name
    space = read_space(args.space)
    fit_arguments, lock = claim(folder, args.space, fit_arguments)
    study = open_study(folder, space, args.trials, args.seed)
    if study.trials:
        print(f"going on with {name}: {len(study.trials)} of {args.trials} trials were begun.", flush=True)

    from project.sweep import picture
    from project.sweep.trials import run_trials

    try:
        run_trials(study, space, folder, fit_arguments, args.trials, args.jobs)
    finally:
        rows = result_rows(study, space)
        if rows:
            picture.draw(folder / "sweep.png", study, space, f"{name}: {len(rows)} trials")
    print("\n" + format_table(rows))
    if output:
        write_rows(output, rows)
    lock.close()
    best = picture.best_trial(study.trials, space)
    if best is None:
        raise UserError(f"no trial finished; see {folder}/*.log.")
    flags = " ".join(f"--{key} {value}" for key, value in best.params.items())
    print(f"\npicture: {folder}/sweep.png\nbest:    {folder}/trial-{best.number:03}\n")
    print(" ".join(["python -m project.fit", *fit_arguments, flags]))
    return 0


def check(trials: int, jobs: int, name: str | None, fit_arguments: list[str]) -> None:
    """Raise a UserError for what cannot be."""
    for option, value in (("trials", trials), ("jobs", jobs)):
        if value < 1:
            raise UserError(f"--{option} must be at least 1, got {value}.")
    if name is not None and not re.fullmatch(r"\w[\w.\-]{0,99}", name):
        raise UserError(f"--name must be 1 to 100 letters, digits or .-_, got '{name}'.")
    for word in fit_arguments:
        if word.split("=")[0] in OWN_FLAGS:
            raise UserError(f"{word.split('=')[0]} is set for every trial. Use --name and --root for the whole sweep.")


def claim(folder: Path, space: Path, fit_arguments: list[str]) -> tuple[list[str], Any]:
    """Make or take up a sweep's folder. Returns the arguments of ``fit`` and the lock to hold.

    Raises:
        UserError: Another process sweeps there, or the sweep was begun with other arguments or another space.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = open(folder / ".lock", "a")  # noqa: SIM115 - held until the sweep ends
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise UserError(f"--name {folder.name}: another process is sweeping there. Wait or choose another.") from None
    record, text = folder / "sweep.json", space.read_text()
    if not record.exists():
        record.write_text(json.dumps({"fit": fit_arguments, "space": text}, indent=2))
        return fit_arguments, lock
    begun = json.loads(record.read_text())
    if begun["space"] != text:
        raise UserError(f"--name {folder.name} was begun with another search space. Choose another name.")
    if fit_arguments and fit_arguments != begun["fit"]:
        raise UserError(
            f"--name {folder.name} was begun with `{' '.join(begun['fit'])}`. Leave these options away to go on with "
            "it, or choose another name."
        )
    return begun["fit"], lock


def open_study(folder: Path, space: Any, trials: int, seed: int) -> Any:
    """The Optuna study in a folder, new or as it was left: a journal survives any kill."""
    try:
        import optuna
    except ModuleNotFoundError:
        raise UserError("a local sweep needs Optuna. Install it: pip install -e '.[sweep]'") from None
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = JournalStorage(JournalFileBackend(str(folder / "journal.log")))
    sampler = optuna.samplers.TPESampler(
        seed=seed, n_startup_trials=max(3, int(trials * STARTUP_SHARE)), constant_liar=True
    )
    return optuna.create_study(
        storage=storage,
        study_name="sweep",
        load_if_exists=True,
        direction="maximize" if space.maximize else "minimize",
        sampler=sampler,
        pruner=optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=space.min_epochs - 1),
    )


def result_rows(study: Any, space: Any) -> list[dict[str, Any]]:
    """A row per trial that measured anything, the best first."""
    rows = []
    for trial in study.trials:
        if not trial.intermediate_values:
            continue
        best = (max if space.maximize else min)(trial.intermediate_values.values())
        state = {"COMPLETE": "done", "PRUNED": "stopped early", "RUNNING": "interrupted"}.get(
            trial.state.name, "failed"
        )
        seconds = {"seconds": trial.duration.total_seconds()} if trial.duration else {}
        row = {"trial": trial.number, space.metric: best, **trial.params, "epochs": len(trial.intermediate_values)}
        rows.append(row | seconds | {"state": state})
    return sorted(rows, key=lambda row: row[space.metric], reverse=space.maximize)


if __name__ == "__main__":
    from project.engine.command import run

    run(main)
