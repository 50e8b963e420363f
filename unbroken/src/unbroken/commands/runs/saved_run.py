"""What a run's folder says of the run."""

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout
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
# A run's folder has at least one of these files.
FILES = ("config.yaml", "summary.json", "metrics.csv", "last.ckpt")
LOCK = ".lock"
# What ExactCheckpoint leaves at the end of a script's run, see run_folder.py. To import it would
# import torch.
ENDED = ".ended"
# Of what a run writes. A million rows of ten metrics take half of the last. To read that much YAML
# takes seconds.
LARGEST_BYTES = {".yaml": 2**18, ".json": 2**24, ".csv": 2**28}
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
            data were.
        classes: The names of those settings that are classes.
        typed: The options of the command that has begun the run, without their dashes.
        summary: What ``summary.json`` holds.
        results: The metric that the run followed, at its best, and those of the test. The first
            two are what the run is judged by.
        state: ``finished``, ``interrupted`` or ``running``; ``running or killed`` for a run in a
            mirror that has a lease, which tells no more than that.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = folder.name
        self.summary = mapping_in(folder / "summary.json")
        config = flat(mapping_in(folder / "config.yaml"))
        self.typed = options_in(folder / "config.yaml")
        self.settings = settings_of(config)
        if FOUND_SOURCE in self.summary:
            self.settings[FOUND_SOURCE] = self.summary[FOUND_SOURCE]
        self.classes = {
            name.removesuffix(CLASS_PATH) for name in config if name.endswith(CLASS_PATH)
        }
        self.module = last_name(self.settings.get("model") or "")
        self.results = self._find_results()
        self.state = self._find_state()

    def _find_results(self) -> dict[str, float]:
        # The followed metric comes first, then the same one of the test: test/loss or test_loss.
        followed = str(self.summary.get("monitor"))
        of_test = followed.replace("val", "test", 1)
        first = [followed, f"test/{followed.rpartition('/')[2]}", of_test]
        tests = [name for name in self.summary if name.startswith("test")]
        names = dict.fromkeys([*first, *tests])
        return {name: self.summary[name] for name in names if is_number(self.summary.get(name))}

    def _find_state(self) -> str:
        if is_locked(self.folder / LOCK):
            return "running"
        if (self.folder / LEASE).exists():
            return "running or killed"
        is_ended = self.summary.get("finished") or (self.folder / ENDED).exists()
        return "finished" if is_ended else "interrupted"

    def row(self, settings: Row) -> Row:
        """The run as a line of the list, with these settings as they are shown."""
        files = [self.folder / name for name in FILES]
        written = max(file.stat().st_mtime for file in files if file.exists())
        date = time.strftime("%Y-%m-%d %H:%M", time.localtime(written))
        row: dict[str, Any] = {"name": self.name}
        row |= settings
        row |= self.results
        row |= {name: self.summary.get(name) for name in ("epochs", "fit_seconds")}
        row |= {"state": self.state, "date": date}
        return row


def find_runs(root: Path) -> list[SavedRun]:
    """The runs in a folder, by name; a link to one, such as ``latest``, is none of its own."""
    folders = sorted(path for path in root.glob("*") if path.is_dir() and not path.is_symlink())
    runs = [SavedRun(folder) for folder in folders if is_run(folder)]
    name_classes_alike(runs)
    return runs


def name_classes_alike(runs: list[SavedRun]) -> None:
    """Give a class one name in all runs, its shortest one: a package often offers what its files
    define, such as ``mine.Net`` for ``mine.networks.Net``.
    """
    paths = {str(run.settings[name]) for run in runs for name in run.classes & run.settings.keys()}
    for run in runs:
        for name in run.classes & run.settings.keys():
            path = str(run.settings[name])
            run.settings[name] = min((each for each in paths if offers(each, path)), key=len)


def offers(path: str, other: str) -> bool:
    """Whether one class path is another's, or that of a package around it with the same name."""
    module, _, kind = path.rpartition(".")
    return other == path or (other.startswith(f"{module}.") and last_name(other) == kind)


def options_in(path: Path) -> set[str]:
    """The options in the command that a ``config.yaml`` begins with, without their dashes."""
    if not is_readable(path):
        return set()
    with open(path, encoding="utf-8", errors="replace") as file:
        line = file.readline()
    if not line.startswith("# "):
        return set()
    words = [word.partition("=")[0] for word in line.split() if word.startswith("--")]
    return {word.removeprefix("--").removesuffix(CLASS_PATH) for word in words}


class WithoutAliases(yaml.SafeLoader):
    """Reads YAML in which nothing stands in several places: a few bytes could name very much. A run
    writes no aliases.
    """

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("an alias")
        return super().compose_node(parent, index)


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run."""
    return any((folder / name).exists() for name in FILES)


def settings_of(config: dict[str, Any]) -> dict[str, Any]:
    """What tells a flat configuration from others, with ``model`` in place of
    ``model.class_path``.
    """
    left_out = [*PLACES, *TOLD]
    if DATA_SOURCE in config:
        left_out.append(DATA_ROOT)
    settings = {}
    for name, value in config.items():
        # A logger may be a class with settings of its own.
        if not any(name == each or name.startswith(f"{each}.") for each in left_out):
            settings[name.removesuffix(CLASS_PATH)] = value
    return settings


def last_name(path: Any) -> str:
    """A class's name, without its module."""
    return str(path).rpartition(".")[2]


def mapping_in(path: Path) -> dict[str, Any]:
    """A YAML or JSON file's mapping; empty where the file is missing or damaged, or is none that a
    run writes.
    """
    content: Any = None
    if not is_readable(path):
        return {}
    with contextlib.suppress(OSError, ValueError, yaml.YAMLError, RecursionError):
        text = path.read_text(encoding="utf-8")
        is_json = path.suffix == ".json"
        content = json.loads(text) if is_json else yaml.load(text, Loader=WithoutAliases)
    return content if isinstance(content, dict) else {}


def is_readable(path: Path) -> bool:
    """Whether a path is a file, and no larger than what a run writes: a folder may come from
    somebody else. To read a named pipe would take for ever.
    """
    return path.is_file() and path.stat().st_size <= LARGEST_BYTES[path.suffix]


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock of a run, and so writes it."""
    if not path.exists():
        return False
    try:
        with FileLock(path, blocking=False):
            return False
    except Timeout:
        return True
    # A folder that may only be read, or a file system without locks
    except (OSError, NotImplementedError):
        return False
