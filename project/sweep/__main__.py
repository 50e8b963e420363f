"""Search hyperparameters here, without an account: parallel trials of fit, hopeless ones stopped early (Optuna).

python -m project.sweep --trials 20 --jobs 2
python -m project.sweep --name lr --trials 8 --max_epochs 2 --data.source sample   # other options are those of fit
python -m project.sweep --name lr --trials 16       # goes on: after a kill, or with more trials
"""

from __future__ import annotations

import argparse
import fcntl
import json
import re
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from project.engine.command import CommandParser, add_output, run
from project.errors import UserError
from project.tables import check_output, format_table, write_rows

if TYPE_CHECKING:
    import optuna

    from project.sweep.trials import Space

SPACE = Path("configs", "sweep.yaml")
PLACE, METRIC = "--name and --root", "`metric:` of the sweep file"
OWN_FLAGS = dict.fromkeys(("--run_name", "--ckpt_path", "--default_root_dir", "--trainer.default_root_dir"), PLACE)
OWN_FLAGS |= dict.fromkeys(("--monitor", "--mode"), METRIC)
STATES = {"COMPLETE": "done", "PRUNED": "stopped early", "RUNNING": "interrupted"}
COLOURS = {"stopped early": "#b0b7bf", "finished": "#33658a", "best": "#c1272d"}  # from the lowest layer to the highest


def main(argv: list[str]) -> int:
    """Sweep as ``argv`` says; returns the exit code."""
    parser = CommandParser("project.sweep", __doc__)
    parser.add_argument("--trials", type=int, default=20, help="trials of the whole sweep (default: 20)")
    parser.add_argument("--jobs", type=int, default=1, help="trials at the same time (default: 1)")
    parser.add_argument("--name", help="folder of the sweep in checkpoints/; an existing one goes on (default: a time)")
    parser.add_argument("--space", type=Path, help=f"sweep file in W&B's format (default: {SPACE})")
    parser.add_argument("--root", type=Path, default=Path("checkpoints"), help="where the sweep's folder lies")
    parser.add_argument("--seed", type=int, default=0, help="of the search (default: 0)")
    add_output(parser)
    args, fit_arguments = parser.parse_known_args(argv)
    check(args, fit_arguments)
    output = check_output(args.output) if args.output else None
    try:
        from project.sweep.trials import open_study, read_space, run_trials
    except ModuleNotFoundError as error:
        if error.name != "optuna":
            raise
        raise UserError("a local sweep needs Optuna. Install it: pip install -e '.[sweep]'") from None

    name = args.name or time.strftime("sweep_%Y-%m-%d_%H-%M-%S")
    folder, space_file = args.root / name, args.space or default_space(Path(__file__).parents[2])
    space, is_new = read_space(space_file), not folder.exists()
    fit_arguments, lock = claim(folder, space_file, fit_arguments)
    with lock:
        study, left = open_study(folder, space, args.trials, args.seed)
        if study.trials:
            print(f"going on with {name}: {len(study.trials)} of {args.trials} trials were begun.", flush=True)
        try:
            run_trials(study, left, space, folder, fit_arguments, args.trials, args.jobs)
        except UserError:
            if is_new and not any(path.is_dir() for path in folder.iterdir()):  # no trial has begun to train
                shutil.rmtree(folder)
            raise
        finally:
            if folder.exists() and (rows := result_rows(study, space)):
                draw(folder / "sweep.png", study, space, f"{name}: {len(rows)} trials")
        print("\n" + format_table(rows))
        if output:
            write_rows(output, rows)
    if not any(trial.state.name == "COMPLETE" for trial in study.trials):
        raise UserError(f"no trial finished; see {folder}/*.log.")
    best = study.best_trial
    flags = [f"--{key} {value}" for key, value in best.params.items()]
    print(f"\npicture: {folder}/sweep.png\nbest:    {folder}/trial-{best.number:03}\n")
    print(" ".join(["python -m project.fit", *fit_arguments, *flags]))
    return 0


def check(args: argparse.Namespace, fit_arguments: list[str]) -> None:
    """Raise a UserError for what cannot be."""
    for option, value in (("trials", args.trials), ("jobs", args.jobs)):
        if value < 1:
            raise UserError(f"--{option} must be at least 1, got {value}.")
    if not 0 <= args.seed < 2**32:
        raise UserError(f"--seed must be from 0 to {2**32 - 1}, got {args.seed}.")
    if args.name is not None and not re.fullmatch(r"\w[\w.\-]{0,99}", args.name):
        raise UserError(f"--name must be 1 to 100 letters, digits or .-_, got '{args.name}'.")
    for flag in (word.split("=")[0] for word in fit_arguments):
        if flag in OWN_FLAGS:
            raise UserError(f"{flag} is set for every trial. Use {OWN_FLAGS[flag]} for the whole sweep.")


def default_space(repository: Path) -> Path:
    """The sweep file of the working folder, else the repository's; an error where the package was installed by pip."""
    for path in (SPACE, repository / SPACE):
        if path.is_file():
            return path
    raise UserError(f"--space: there is no {SPACE} here. Name a sweep file, such as a copy of the repository's.")


def claim(folder: Path, space: Path, fit_arguments: list[str]) -> tuple[list[str], Any]:
    """Make or take up a sweep's folder, which one process may use, and always with the same arguments and space.

    Returns the arguments of ``fit`` and the lock to hold.
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
    begun = json.loads(record.read_text())
    if begun["space"] != text:
        raise UserError(f"--name {folder.name} was begun with another search space. Choose another name.")
    if fit_arguments and fit_arguments != begun["fit"]:
        advice = "Leave these options away to go on with it, or choose another name."
        raise UserError(f"--name {folder.name} was begun with `{' '.join(begun['fit'])}`. {advice}")
    return begun["fit"], lock


def result_rows(study: optuna.Study, space: Space) -> list[dict[str, Any]]:
    """A row per trial that measured anything, the best first."""
    rows = []
    for trial in study.trials:
        if (best := space.best(trial.intermediate_values.values())) is not None:
            seconds = {"seconds": trial.duration.total_seconds()} if trial.duration else {}
            row = {"trial": trial.number, space.metric: best, **trial.params, "epochs": len(trial.intermediate_values)}
            rows.append(row | seconds | {"state": STATES.get(trial.state.name, "failed")})
    return sorted(rows, key=lambda row: row[space.metric], reverse=space.maximize)


def draw(path: Path, study: optuna.Study, space: Space, title: str) -> None:
    """Every trial's curve over the epochs, and its best value over each parameter, as PNG.

    Optuna's own pictures neither mark the best trial nor show the parameters of those stopped early.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from optuna.distributions import CategoricalDistribution

    varied = {name: drawn_from for name, drawn_from in space.parameters.items() if not drawn_from.single()}
    figure = Figure(figsize=(3.4 + 2.4 * len(varied), 3.6), layout="constrained")
    first, *others = figure.subplots(1, 1 + len(varied), sharey=True, squeeze=False)[0]
    first.set(xlabel="epoch", ylabel=space.metric)
    first.xaxis.get_major_locator().set_params(integer=True)
    finished = [trial.number for trial in study.trials if trial.state.name == "COMPLETE"]
    for trial in study.trials:
        if (score := space.best(trial.intermediate_values.values())) is None:
            continue
        kind = "finished" if trial.number in finished else "stopped early"
        kind = "best" if finished and trial.number == study.best_trial.number else kind
        style: dict[str, Any] = {"color": COLOURS[kind], "zorder": 2 + list(COLOURS).index(kind)}
        epochs, values = zip(*sorted(trial.intermediate_values.items()), strict=True)
        first.plot([epoch + 1 for epoch in epochs], values, marker="o", markersize=3, linewidth=1.4, **style)
        for axis, (name, drawn_from) in zip(others, varied.items(), strict=True):
            axis.scatter(drawn_from.to_internal_repr(trial.params[name]), score, s=28, **style)
    for axis, (name, drawn_from) in zip(others, varied.items(), strict=True):
        axis.set_xlabel(name)
        if isinstance(drawn_from, CategoricalDistribution):  # choices stand at equal distances
            axis.set_xticks(range(len(drawn_from.choices)), map(str, drawn_from.choices))
        axis.set_xscale("log" if getattr(drawn_from, "log", False) else "linear")
    for axis in (first, *others):
        axis.grid(alpha=0.25)
    handles = [Line2D([], [], color=colour, marker="o", markersize=4, label=kind) for kind, colour in COLOURS.items()]
    figure.legend(handles=handles[::-1], loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    run(main)
