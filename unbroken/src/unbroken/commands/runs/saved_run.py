"""What a run's folder says of the run."""

import os
import re
import shlex
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from unbroken.results.summary_file import LONGEST_NAME, read_summary
from unbroken.storage.reading import MOST_YAML, UNREADABLE, NotRead, read_text, yaml_in
from unbroken.tables import Row, flat, is_number

# Settings that do not tell configurations apart: where a run lies
PLACES = ("run_name", "ckpt_path", "config", "trainer.default_root_dir")
# What a run tells, and where to: no number of a run depends on these.
TOLD = (
    "trainer.logger",
    "trainer.log_every_n_steps",
    "trainer.profiler",
    "trainer.enable_progress_bar",
    "trainer.enable_model_summary",
    "trainer.enable_autolog_hparams",
    "trainer.model_registry",
    "tensorboard",
    "report",
    "monitors",
    "checkpoint_every",
)
# Where the data lie tells them apart, too, unless a setting says what the data are.
DATA_ROOT = "data.root"
DATA_SOURCE = "data.source"
# What the run has found there, such as files or sample
FOUND_SOURCE = "data_source"
# The changes that resumes have made, as one setting: so a run that changed on its way is never
# averaged with runs that had its last settings from the start.
RESUMED_WITH = "resumed_with"
# What a run has begun with, which its command alone tells
INIT_WEIGHTS = "init_weights"
# How the config.yaml of a run tells of one, such as "# step 20: model.lr: 0.1 → 0.02"
CHANGE = re.compile(r"# (step \d+: (.+?): .*)")
# A run's folder has at least one of these files.
FILES = ("config.yaml", "summary.json", "metrics.csv", "last.ckpt")
LOCK = ".lock"
# What ExactCheckpoint leaves at the end of a script's run, see run_folder.py. To import it would
# import torch.
ENDED = ".ended"
# Settings of a run that are compared; and names of settings, and of results, of all runs together
MOST_SETTINGS = 1_000
MOST_NAMES = 2_000
CLASS_PATH = ".class_path"
# Only what was read from a mirror has one.
LEASE = "lease.json"


class SavedRun:
    """A run as its files describe it; a damaged file counts as an empty one.

    Attributes:
        name: That of its folder.
        module: The name of the class of its module.
        settings: Its configuration, flat, without where the run lies and what it tells. Classes
            have their whole import path. ``data_source``, where the summary tells it, is what the
            data were; ``init_weights``, where it was typed, what the run began with.
            ``resumed_with``, where a resume changed settings, tells which, and at which step.
        classes: The names of those settings that are classes.
        typed: The options of the command that has begun the run, without their dashes.
        summary: What is used of ``summary.json``.
        results: The metric that the run followed, at its best, and those of the test. The first
            two are what the run is judged by.
        state: ``finished``, ``interrupted`` or ``running``; ``running or killed`` for a run in a
            mirror that has a lease, which tells no more than that.
        left_out: What of its folder is not shown, and why; a line each.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = folder.name
        self.left_out: list[str] = []
        self.summary = self._read_summary()
        text = self.read("config.yaml", lambda path: read_text(path, MOST_YAML), "")
        config = self._read_config(text)
        self.typed = options_in(text)
        self.settings = settings_of(config)
        changes = changes_in(text, not_compared(config))
        if changes:
            self.settings[RESUMED_WITH] = "; ".join(changes)
        weights = value_in(text, INIT_WEIGHTS)
        if weights is not None:
            self.settings[INIT_WEIGHTS] = weights
        if FOUND_SOURCE in self.summary:
            self.settings[FOUND_SOURCE] = self.summary[FOUND_SOURCE]
        self.classes = {
            name.removesuffix(CLASS_PATH) for name in config if name.endswith(CLASS_PATH)
        }
        self.module = last_name(self.settings.get("model") or "")
        self.results = self._find_results()
        self.state = self._find_state()

    def read(self, name: str, reader: Callable[[Path], Any], otherwise: Any) -> Any:
        """What a reader gives of a file of the run; ``otherwise`` where the file is missing or
        damaged, or is none that a run writes, which is noted.
        """
        try:
            return reader(self.folder / name)
        except NotRead as error:
            self.left_out.append(f"{self.name}/{name} {error}, and is not read")
        except UNREADABLE:
            pass
        return otherwise

    def _read_summary(self) -> dict[str, Any]:
        summary, left_out = self.read("summary.json", read_summary, ({}, 0))
        if left_out:
            self.left_out.append(f"{self.name}: {left_out:,} more results are left out")
        return dict(summary)

    def _read_config(self, text: str) -> dict[str, Any]:
        """The flat configuration in the text of ``config.yaml``."""
        content = self.read("config.yaml", lambda _: yaml_in(text), None)
        config = flat(content) if isinstance(content, dict) else {}
        kept = [name for name in config if len(name) <= LONGEST_NAME][:MOST_SETTINGS]
        if len(kept) < len(config):
            left_out = len(config) - len(kept)
            self.left_out.append(f"{self.name}: {left_out:,} more settings are left out")
        return {name: config[name] for name in kept}

    def _find_results(self) -> dict[str, float]:
        # The followed metric comes first, then the same one of the test: test/loss or test_loss.
        followed = self.summary.get("monitor", "")
        of_test = followed.replace("val", "test", 1)
        first = [followed, f"test/{followed.rpartition('/')[2]}", of_test]
        # Runs that follow different metrics are compared by those that both have.
        others = [name for name in self.summary if name.startswith(("val", "test"))]
        names = dict.fromkeys([*first, *others])
        return {name: self.summary[name] for name in names if is_number(self.summary.get(name))}

    def _find_state(self) -> str:
        if is_locked(self.folder / LOCK):
            return "running"
        if os.path.lexists(self.folder / LEASE):
            return "running or killed"
        is_ended = self.summary.get("finished") or os.path.lexists(self.folder / ENDED)
        return "finished" if is_ended else "interrupted"

    def row(self, settings: Row) -> Row:
        """The run as a line of the list, with these settings as they are shown."""
        row: dict[str, Any] = {"name": self.name}
        row |= settings
        row |= self.results
        row |= {name: self.summary.get(name) for name in ("epochs", "fit_seconds")}
        row |= {"state": self.state, "date": self._date()}
        return row

    def _date(self) -> str | None:
        """When its files were last written; None where the file system tells no date."""
        written = []
        for name in FILES:
            with suppress(OSError):
                written.append((self.folder / name).lstat().st_mtime)
        with suppress(OSError, ValueError, OverflowError):
            return time.strftime("%Y-%m-%d %H:%M", time.localtime(max(written)))
        return None


def find_runs(root: Path) -> list[SavedRun]:
    """The runs in a folder, by name; a link to one, such as ``latest``, is none of its own."""
    folders = sorted(path for path in root.glob("*") if path.is_dir() and not path.is_symlink())
    runs = [SavedRun(folder) for folder in folders if is_run(folder)]
    name_classes_alike(runs)
    bound_names([run.settings for run in runs], "settings", runs)
    bound_names([run.results for run in runs], "results", runs)
    return runs


def bound_names(columns: Sequence[dict[str, Any]], what: str, runs: Sequence[SavedRun]) -> None:
    """Leave out what comes after the first :data:`MOST_NAMES` names of all runs: each run has a
    cell for each of them.
    """
    known: dict[str, None] = {}
    for run, own in zip(runs, columns, strict=True):
        left_out = 0
        for name in list(own):
            if len(known) < MOST_NAMES:
                known[name] = None
            elif name not in known:
                del own[name]
                left_out += 1
        if left_out:
            run.left_out.append(f"{run.name}: {left_out:,} more {what} are left out")


def name_classes_alike(runs: list[SavedRun]) -> None:
    """Give a class one name in all runs, its shortest one: a package often offers what its files
    define, such as ``mine.Net`` for ``mine.networks.Net``.
    """
    paths = {str(run.settings[name]) for run in runs for name in run.classes & run.settings.keys()}
    for run in runs:
        for name in run.classes & run.settings.keys():
            run.settings[name] = shortest_name(str(run.settings[name]), paths)


def shortest_name(path: str, known: set[str]) -> str:
    """The shortest of the known paths of a class: its own, or that of a package around it."""
    module, _, kind = path.rpartition(".")
    parts = module.split(".")
    # No class lies so deep. To try each package of a long text would take long.
    if len(path) > LONGEST_NAME:
        return path
    for count in range(1, len(parts)):
        package = ".".join([*parts[:count], kind])
        if package in known:
            return package
    return path


def options_in(config: str) -> set[str]:
    """The options in the command that a ``config.yaml`` begins with, without their dashes."""
    line = config.partition("\n")[0]
    if not line.startswith("# "):
        return set()
    words = [word.partition("=")[0] for word in line.split() if word.startswith("--")]
    return {word.removeprefix("--").removesuffix(CLASS_PATH) for word in words}


def value_in(config: str, option: str) -> str | None:
    """The value of an option, which is given without dashes, in the command that a ``config.yaml``
    begins with; None where it was not typed.
    """
    try:
        words = shlex.split(config.partition("\n")[0].removeprefix("# "))
    except ValueError:
        # Somebody has changed the line.
        return None
    found = None
    for word, next_word in pairwise([*words, ""]):
        name, is_joined, value = word.partition("=")
        if name == f"--{option}":
            found = value if is_joined else next_word
    return found


def changes_in(config: str, left_out: Sequence[str]) -> list[str]:
    """What a ``config.yaml`` says of settings that were changed at a resume, such as
    ``step 20: model.lr: 0.1 → 0.02``, but for those that are left out.
    """
    changes = []
    for line in config.splitlines()[1:]:
        found = CHANGE.fullmatch(line)
        if found is None:
            # The comments stand above the settings.
            break
        text, name = found.groups()
        if not is_one_of(name, left_out):
            changes.append(text)
    return changes


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run."""
    return any(os.path.lexists(folder / name) for name in FILES)


def settings_of(config: dict[str, Any]) -> dict[str, Any]:
    """What tells a flat configuration from others, with ``model`` in place of
    ``model.class_path``.
    """
    left_out = not_compared(config)
    settings = {}
    for name, value in config.items():
        if not is_one_of(name, left_out):
            settings[name.removesuffix(CLASS_PATH)] = value
    return settings


def not_compared(config: dict[str, Any]) -> list[str]:
    """The settings of a flat configuration on which no number of a run depends."""
    root = [DATA_ROOT] if DATA_SOURCE in config else []
    return [*PLACES, *TOLD, *root]


def is_one_of(name: str, settings: Sequence[str]) -> bool:
    """Whether a setting is one of these, or of one of these: a logger may be a class with settings
    of its own.
    """
    return any(name == each or name.startswith(f"{each}.") for each in settings)


def last_name(path: Any) -> str:
    """A class's name, without its module."""
    return str(path).rpartition(".")[2]


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock of a run, and so writes it."""
    try:
        # Whoever takes a lock opens its file, which may be a link or a pipe of a stranger.
        if not stat.S_ISREG(path.lstat().st_mode):
            return False
        with FileLock(path, blocking=False):
            return False
    except Timeout:
        return True
    # A folder that may only be read, or a file system without locks
    except (OSError, NotImplementedError):
        return False
