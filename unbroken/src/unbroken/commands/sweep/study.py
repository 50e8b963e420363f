"""The search itself: Optuna's study, which proposes values and remembers results in a file."""

from pathlib import Path

import numpy as np
import optuna
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import Trial, TrialState
from unbroken.commands.sweep.journal import STUDY, check_journal
from unbroken.commands.sweep.space import Space
from unbroken.errors import UserError
from unbroken.storage.reading import NotRead

# The part of all trials that are drawn at random, before the sampler learns from them.
RANDOM_SHARE = 0.4
FEWEST_RANDOM = 3
# Trials that must have ended before one is stopped early.
FEWEST_TO_COMPARE = 3
# Characters of what Optuna says of a journal that it does not read
LONGEST_REASON = 200


def open_study(folder: Path, space: Space, trials: int, seed: int) -> optuna.Study:
    """The study in a folder, new or continued: it proposes unfinished trials first.

    Its journal survives any kill. The caller holds the lock of the folder: nobody else writes here.
    A UserError for a journal that no sweep of this space has written, before anything of it is
    used.
    """
    path = folder / "journal.log"
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    pruner = optuna.pruners.MedianPruner(
        n_startup_trials=FEWEST_TO_COMPARE, n_warmup_steps=space.min_epochs - 1
    )
    try:
        check_journal(path, space)
        storage = JournalStorage(journal_at(path))
        study = optuna.create_study(
            storage=storage,
            pruner=pruner,
            study_name=STUDY,
            direction=space.goal,
            load_if_exists=True,
        )
        let_interrupted_trials_go_on(study, storage)
        study.sampler = make_sampler(space, trials, seed_of_start(study, seed))
    except NotRead as odd:
        raise UserError(f"--name {folder.name}: {path} {odd}. Choose another name.") from None
    except Exception as error:  # Optuna does not check what it reads.
        told = f"{type(error).__name__}: {error}"[:LONGEST_REASON]
        reason = f"{path} cannot be read ({told})"
        raise UserError(f"--name {folder.name}: {reason}. Choose another name.") from None
    return study


def journal_at(path: Path) -> JournalFileBackend:
    """The file of a sweep's results."""
    # A sweep that was killed while it wrote leaves Optuna's lock behind, and Optuna would wait for
    # half a minute. Nobody holds it now, because this process has the lock of the whole folder.
    Path(f"{path}.lock").unlink(missing_ok=True)
    # Optuna's default lock is a symbolic link, which some file systems and Windows do not have.
    return JournalFileBackend(str(path), JournalFileOpenLock(str(path)))


def let_interrupted_trials_go_on(study: optuna.Study, storage: JournalStorage) -> None:
    """Let trials that ran when the sweep was killed be asked for again. They keep their values."""
    study_id = storage.get_study_id_from_name(STUDY)
    for begun in study.get_trials(states=(TrialState.RUNNING,)):
        trial_id = storage.get_trial_id_from_study_id_trial_number(study_id, begun.number)
        storage.set_trial_state_values(trial_id, TrialState.WAITING)


def seed_of_start(study: optuna.Study, seed: int) -> int:
    """The seed of this start of a sweep, from the sweep's own and from what was drawn before.

    A sampler that began with the same seed at each start would draw the first trials once more.
    """
    drawn = sum(len(trial.params) for trial in study.trials)
    if drawn == 0:
        return seed
    return int(np.random.SeedSequence([seed, drawn]).generate_state(1)[0])


def make_sampler(space: Space, trials: int, seed: int) -> BaseSampler:
    """What draws the values of a trial. A grid draws nothing: see :func:`next_trial`."""
    if space.method == "random":
        return RandomSampler(seed=seed)
    random_trials = max(FEWEST_RANDOM, int(RANDOM_SHARE * trials))
    return TPESampler(seed=seed, n_startup_trials=random_trials, constant_liar=True)


def has_next_trial(study: optuna.Study, space: Space, trials: int) -> bool:
    """Whether fewer than ``trials`` were begun, or some that were interrupted wait."""
    if waits(study):
        return True
    return len(study.trials) < number_of_trials(space, trials)


def number_of_trials(space: Space, wanted: int) -> int:
    """How many trials there are: as many as ``wanted``, but in a grid each setting once."""
    if space.method == "grid":
        return min(wanted, space.grid_size())
    return wanted


def next_trial(study: optuna.Study, space: Space) -> Trial:
    """The next trial with its values: one that was interrupted, else a new one."""
    if space.method == "grid" and not waits(study):
        # Optuna's GridSampler shuffles, gives running settings twice, and ends a study by itself.
        study.enqueue_trial(space.grid_setting(len(study.trials)))
    return study.ask(space.parameters)


def waits(study: optuna.Study) -> bool:
    """Whether a trial waits to be asked for."""
    return bool(study.get_trials(deepcopy=False, states=(TrialState.WAITING,)))
