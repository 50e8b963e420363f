"""Search hyperparameters here, without an account: trials of fit side by side (Optuna).

python -m NAME.sweep --trials 20 --jobs 2
python -m NAME.sweep --name lr --trials 8 --max_epochs 2
python -m NAME.sweep --name lr --trials 16       # goes on: after a kill, or with more trials

Hopeless trials are stopped early. Options that are not named here are those of fit. The sweep
file's `method` is bayes (learns from the trials before), random, or grid (every setting once).
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import time
from argparse import Namespace
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import filelock
from unbroken.cli.parser import CommandParser, add_output
from unbroken.cli.program import folder_of
from unbroken.cli.start import quick_imports
from unbroken.errors import UserError, require
from unbroken.storage.files import write_atomically
from unbroken.storage.reading import read_json
from unbroken.tables import format_table, write_rows
from unbroken.trust import keys
from unbroken.trust.links import refuse_links_that_leave, refuse_pipes

try:
    import optuna
except ModuleNotFoundError:
    raise UserError("a local sweep needs Optuna. Install it: pip install optuna") from None

from unbroken.commands.sweep.results import draw, result_rows
from unbroken.commands.sweep.space import Space, as_typed, read_space
from unbroken.commands.sweep.study import number_of_trials, open_study
from unbroken.commands.sweep.trials import TRIAL, reason_in, run_trials

SPACE = Path("configs", "sweep.yaml")
# Flags of fit that a sweep sets for every trial, and what to use for the whole sweep.
PLACE = "--name and --root"
METRIC = "`metric:` of the sweep file"
SET_FOR_EVERY_TRIAL = {
    "--run_name": PLACE,
    "--ckpt_path": PLACE,
    "--default_root_dir": PLACE,
    "--trainer.default_root_dir": PLACE,
    "--monitor": METRIC,
    "--mode": METRIC,
}
# Characters of the options with which a sweep was begun
LONGEST_SHOWN = 400
# What keeps a trial short. What has won is trained without it.
LIMITS = (
    "max_epochs",
    "max_steps",
    "max_time",
    "limit_train_batches",
    "limit_val_batches",
    "limit_test_batches",
    "overfit_batches",
)


def main(package: str, argv: list[str]) -> int:
    """Sweep as ``argv`` says; returns the exit code."""
    args, fit_arguments = read_options(package, argv)
    space_file = args.space or default_space_file(package)
    space = read_space(space_file)
    searched = [f"--{name}" for name in space.parameters]
    refuse_options_of_the_sweep(searched, f" of {space_file}")
    folder = args.root / args.name
    is_new = not folder.exists()
    refuse_what_fit_refuses(package, space, space_file, fit_arguments)
    fit_arguments, lock = claim(folder, space_file, fit_arguments)
    try:
        study = open_study(folder, space, args.trials, args.seed)
        say_what_is_searched(study, space, args)
        try:
            run_trials(
                study, space, folder, [f"{package}.fit", *fit_arguments], args.trials, args.jobs
            )
        finally:
            # A sweep that is interrupted shows what it has, unless its folder was deleted.
            rows = result_rows(study, space)
            if rows and folder.exists():
                draw(folder / "sweep.png", study, space, f"{args.name}: {len(rows)} trials")
    except UserError:
        if is_new and not has_trained(folder):
            remove(folder, lock)
        raise
    finally:
        lock.release()
    if args.output:
        write_rows(args.output, rows)
    print("\n" + format_table(rows))
    say_what_is_best(package, study, folder, space, fit_arguments)
    return 0


def read_options(package: str, argv: list[str]) -> tuple[Namespace, list[str]]:
    """The sweep's own options, and the arguments that every trial gives to ``fit``."""
    parser = CommandParser(package, "sweep", __doc__)
    add = parser.add_argument
    add("--trials", type=int, default=20, help="trials of the whole sweep (default: 20)")
    add("--jobs", type=int, default=1, help="trials at the same time (default: 1)")
    goes_on = "an existing one goes on (default: a time)"
    add("--name", help=f"folder of the sweep in checkpoints/; {goes_on}")
    add("--space", type=Path, help=f"sweep file in W&B's format (default: {SPACE})")
    root = Path("checkpoints")
    add("--root", type=Path, default=root, help="where the sweep's folder lies")
    add("--seed", type=int, default=0, help="of the search (default: 0)")
    add_output(parser)
    args, fit_arguments = parser.parse_known_args(argv)
    require(args.trials >= 1, "--trials", "be at least 1", args.trials)
    require(args.jobs >= 1, "--jobs", "be at least 1", args.jobs)
    require(0 <= args.seed < 2**32, "--seed", f"be from 0 to {2**32 - 1}", args.seed)
    if args.name is None:
        args.name = time.strftime("sweep_%Y-%m-%d_%H-%M-%S")
    is_name = re.fullmatch(r"\w[\w.\-]{0,99}", args.name)
    require(is_name, "--name", "be 1 to 100 letters, digits or .-_", f"'{args.name}'")
    refuse_options_of_the_sweep(fit_arguments)
    return args, fit_arguments


def refuse_options_of_the_sweep(words: Iterable[str], where: str = "") -> None:
    """A UserError for an option of ``fit`` that no trial of a sweep can have, wherever it stands.

    Args:
        words: What was typed, or the options that a sweep file names.
        where: The file in which it stands, such as `` of sweep.yaml``.
    """
    for word in words:
        flag = word.partition("=")[0]
        if flag == "--mirror":
            raise UserError(f"{flag}{where} copies single runs, and no sweep. Leave it out.")
        if flag in SET_FOR_EVERY_TRIAL:
            use = f"Use {SET_FOR_EVERY_TRIAL[flag]} for the whole sweep."
            raise UserError(f"{flag}{where} is set for every trial. {use}")


def default_space_file(package: str) -> Path:
    """The sweep file of the working folder, else that of the package's repository."""
    of_repository = folder_of(package).parent / SPACE
    if not SPACE.is_file() and of_repository.is_file():
        return of_repository
    return SPACE


def claim(
    folder: Path, space: Path, fit_arguments: list[str]
) -> tuple[list[str], filelock.BaseFileLock]:
    """Lock a sweep's folder, new or begun with the same space and arguments.

    Returns the arguments with which it was begun, and the lock.
    """
    record = folder / "sweep.json"
    is_free = record.exists() or not any(folder.glob("[!.]*"))
    got = f"{folder}, which holds something else"
    require(is_free, "--name", "be new, or a sweep's", got, " Choose another name.")
    folder.mkdir(parents=True, exist_ok=True)
    refuse_links_that_leave(folder)
    refuse_pipes(folder)
    lock = filelock.FileLock(folder / ".lock")
    try:
        lock.acquire(blocking=False)
    except filelock.Timeout:
        busy = "another process is sweeping there"
        raise UserError(f"--name {folder.name}: {busy}. Wait or choose another.") from None
    try:
        begun_with = same_as_begun(
            record, {"fit": fit_arguments, "space": space.read_text(encoding="utf-8")}
        )
    except BaseException:
        lock.release()
        raise
    return begun_with, lock


def same_as_begun(record: Path, now: dict[str, Any]) -> list[str]:
    """Write down with what a sweep begins, or compare it with what is written there.

    Options of ``fit`` can run anything. So those that are written there are used if this user's key
    says that he has typed them, or if he types them again.

    Returns the arguments for ``fit``. A UserError where a sweep was begun with something else.
    """
    sealed = {**now, "seal": keys.seal(text_of(now["fit"]))}
    if not record.exists():
        write_atomically(json.dumps(sealed, indent=2), record)
    name = f"--name {record.parent.name}"
    try:
        begun = read_json(record)
        space = begun["space"]
        fit_arguments = [str(word) for word in begun["fit"]]
        is_own = keys.is_sealed(partial(text_of, fit_arguments), begun.get("seal"))
    except (ValueError, TypeError, KeyError, AttributeError):
        raise UserError(f"{name}: {record} is damaged. Choose another name.") from None
    begun_with = short(shlex.join(fit_arguments))
    if space != now["space"]:
        raise UserError(f"{name} was begun with another search space. Choose another name.")
    if now["fit"] and now["fit"] != fit_arguments:
        advice = "Remove these options to go on with it, or choose another name."
        raise UserError(f"{name} was begun with `{begun_with}`. {advice}")
    if now["fit"] != fit_arguments and not is_own:
        raise UserError(
            f"{name} was begun with `{begun_with}`, without a seal of yours: options"
            " of somebody else can run anything. If you trust them, type them to go on with it."
        )
    if not is_own:
        # Now he has typed them.
        write_atomically(json.dumps(sealed, indent=2), record)
    return fit_arguments


def short(text: str) -> str:
    """A text of which a line has room for what comes after it."""
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]} ..."


def text_of(fit_arguments: list[str]) -> list[str]:
    """What is sealed of a sweep."""
    return [f"a sweep with {json.dumps(fit_arguments)}"]


def has_trained(folder: Path) -> bool:
    """Whether a trial of the sweep has begun to train: then it has a folder."""
    return any(path.is_dir() for path in folder.iterdir())


def remove(folder: Path, lock: filelock.BaseFileLock) -> None:
    """Delete the folder of a sweep that never began: its name is free again."""
    # Windows deletes no file that is open.
    lock.release()
    shutil.rmtree(folder)


def say_what_is_searched(study: optuna.Study, space: Space, args: Namespace) -> None:
    """What the sweep goes on with, and what of its file it does not use."""
    for note in space.notes:
        print(note, flush=True)
    trials = number_of_trials(space, args.trials)
    if space.method == "grid":
        print(
            f"the grid has {space.grid_size()} settings, of which {trials} are tried.", flush=True
        )
    if study.trials:
        begun = f"{len(study.trials)} of {trials} trials were begun"
        print(f"going on with {args.name}: {begun}.", flush=True)


def refuse_what_fit_refuses(
    package: str, space: Space, space_file: Path, fit_arguments: Sequence[str]
) -> None:
    """A UserError for arguments with which no trial can start, before the first one does.

    Where the sweep file chooses a class, such as ``model.network``, the options of that class are
    known in a trial alone.
    """
    typed = [word.removeprefix("--") for word in fit_arguments]
    for name in space.parameters:
        if any(word.startswith(f"{name}.") for word in [*typed, *space.parameters]):
            return
    with quick_imports():
        from unbroken.cli.cli import configure
        from unbroken.commands.program_of import program_of
    drawn = [f"--{name}={as_typed(value)}" for name, value in space.first_setting().items()]
    try:
        configure(program_of(package), "fit", [*fit_arguments, *drawn])
    except UserError as error:
        named = re.findall(r"--[\w.]*\w", str(error))
        if not any(f"--{name}" in named for name in space.parameters):
            raise
        raise UserError(
            f"{space_file} searches what fit refuses: {error} Change the file, or name another one"
            " by --space."
        ) from None


def without_limits(fit_arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments of the trials without those that keep a trial short, and these."""
    kept: list[str] = []
    left_out: list[str] = []
    part = kept
    for word in fit_arguments:
        if word.startswith("--"):
            name = word.removeprefix("--").partition("=")[0].removeprefix("trainer.")
            part = left_out if name in LIMITS else kept
        # A value follows its option.
        part.append(word)
    return kept, left_out


def first_failure(study: optuna.Study, folder: Path) -> str:
    """Why the first trial that failed did so; nothing where none says why."""
    for trial in study.trials:
        name = TRIAL.format(trial.number)
        reason = reason_in(folder / f"{name}.log") if trial.state.name == "FAIL" else ""
        if reason:
            return f" {name}: {reason}"
    return ""


def say_what_is_best(
    package: str, study: optuna.Study, folder: Path, space: Space, fit_arguments: Sequence[str]
) -> None:
    """The commands that test the best trial and train one like it; a UserError where none
    finished.

    What is trained follows the metric by which it has won, and is as long as a run without a limit.
    """
    if not any(trial.state.name == "COMPLETE" for trial in study.trials):
        raise UserError(f"no trial finished; see {folder}/*.log.{first_failure(study, folder)}")
    best = study.best_trial
    flags: list[str] = []
    for name, value in space.values_in(best.params).items():
        flags += [f"--{name}", as_typed(value)]
    chosen = shlex.quote(f"{folder}/{TRIAL.format(best.number)}/best.ckpt")
    print(f"\npicture: {folder}/sweep.png")
    print(f"best:    python -m {package}.test --ckpt_path {chosen}\n")
    kept, left_out = without_limits(fit_arguments)
    if left_out:
        print(f"to train it without the trials' limits ({shlex.join(left_out)}):")
    flags += ["--monitor", space.metric, "--mode", space.goal[:3]]
    print(shlex.join(["python", "-m", f"{package}.fit", *kept, *flags]))
