"""What a run's folder says of the run."""

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout
from unbroken.tables import Row, flat, is_number, load_yaml

# Settings that do not tell configurations apart: where a run lies
PLACES = ("run_name", "ckpt_path", "config", "trainer.default_root_dir")
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
# A million rows of ten metrics take half of this.
LARGEST_FILE_BYTES = 2**28
CLASS_PATH = ".class_path"
# Only what was read from a mirror has one.
LEASE = "lease.json"


class SavedRun:
    """A run as its files describe it; a damaged file counts as an empty one.

    Attributes:
        name: That of its folder.
        module: The name of the class of its module.
        settings: Its configuration, flat, without where the run lies. Classes have their whole
            import path. ``data_source``, where the summary tells it, is what the data were.
        classes: The names of those settings that are classes.
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
        row: dict[str, Any] = {
            "name": self.name,
            "date": time.strftime("%Y-%m-%d %H:%M", time.localtime(written)),
            "state": self.state,
        }
        # A terminal may have room for the first columns alone.
        results = list(self.results.items())
        row |= results[:1]
        row |= settings
        row |= results[1:]
        row |= {name: self.summary.get(name) for name in ("epochs", "fit_seconds")}
        return row


def find_runs(root: Path) -> list[SavedRun]:
    """The runs in a folder, by name; a link to one, such as ``latest``, is none of its own."""
    folders = sorted(path for path in root.glob("*") if path.is_dir() and not path.is_symlink())
    return [SavedRun(folder) for folder in folders if is_run(folder)]


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run."""
    return any((folder / name).exists() for name in FILES)


def settings_of(config: dict[str, Any]) -> dict[str, Any]:
    """What tells a flat configuration from others, with ``model`` in place of
    ``model.class_path``.
    """
    left_out = [*PLACES, DATA_ROOT] if DATA_SOURCE in config else PLACES
    settings = {}
    for name, value in config.items():
        if name not in left_out:
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
        content = json.loads(text) if path.suffix == ".json" else load_yaml(text)
    return content if isinstance(content, dict) else {}


def is_readable(path: Path) -> bool:
    """Whether a path is a file, and no larger than what a run writes: a folder may come from
    somebody else. To read a named pipe would take for ever.
    """
    return path.is_file() and path.stat().st_size <= LARGEST_FILE_BYTES


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
