"""Run folders, ``checkpoints/<run_name>/``: which run a command line means, and what a checkpoint gives back of it."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import inspect
import itertools
import json
import os
import re
import shutil
import sys
import time
import uuid
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
import yaml
from jsonargparse import ArgumentParser, get_loader
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities.seed import isolate_rng

from project.command_line.cli import Configuration, configure, differences
from project.command_line.typed import CommandLine
from project.data import BatchedDataModule
from project.engine.checkpoint_files import damage, load_weights, read, record
from project.engine.ranks import decided_by_rank_zero, is_rank_zero
from project.errors import UserError, nearest, require

ROOT = Path("checkpoints")
LATEST = "latest"
RUN_ID = "run-id.txt"
PACKAGE = __name__.split(".")[0]
# What a checkpoint's configuration may name besides the user's own files
TRUSTED: dict[str, list[str]] = yaml.safe_load(
    Path(__file__).with_name("trusted.yaml").read_text(encoding="utf-8")
)
FUNCTIONS = [f"{PACKAGE}.model", f"{PACKAGE}.data", *TRUSTED["functions"]]
CLASSES = [PACKAGE, *TRUSTED["classes"]]
COMMAND_LINES = (
    ArgumentParser,
    LightningCLI,
    CommandLine,
)  # not these: they make what a text names
PATHS = (
    "class_path",
    "optimizer",
    "schedule",
    "loss",
)  # Arguments of a module that may hold an import path
IMPORT_PATH = re.compile(r"\w[\w-]*(?:\.[\w-]+)+")  # importlib takes more than identifiers
MOST_NESTED = 5000  # brackets, lines and the like in a text; the parser's loader is written in C and can overflow
FILES = (
    "csv",
    "tsv",
    "txt",
    "json",
    "jsonl",
    "yaml",
    "yml",
    "npy",
    "npz",
    "parquet",
    "pt",
    "pth",
    "ckpt",
)  # endings


def read_configuration(argv: list[str], prog: str) -> tuple[Configuration, Run]:
    """Parse ``argv`` and find its run. A resumed run uses the checkpoint's configuration; what is typed wins."""
    line = CommandLine(argv)
    run_name, ckpt_path = line.value("run_name"), line.value("ckpt_path")
    root = Path(line.value("trainer.default_root_dir") or ROOT)
    is_new = ckpt_path is None or (ckpt_path == "auto" and run_name is None)
    config = (
        configure(argv, prog) if is_new or line.asks_for_help else None
    )  # a wrong flag leaves no folder behind
    run = Run(**decided_by_rank_zero(lambda: vars(choose(root, run_name, ckpt_path))))
    if run.checkpoint is None:
        return config or configure(argv, prog), run
    try:
        if line.value("init_weights") is not None:
            raise UserError(
                "--init_weights starts a new run, --ckpt_path goes on with one: leave one of them away."
            )
        known = record(run.checkpoint, to_resume=True)
        base = dict(known["config"])
        refuse_foreign_classes(base, line.value("allow_imports"), run.checkpoint)
        refuse_writing_elsewhere(base, line, run)
        if line.sets_a_length:  # the typed limit counts; the saved max_epochs could come first
            base["trainer"] = {**(base.get("trainer") or {}), "max_epochs": -1}
        config = configure(argv, prog, base)
        load_weights(
            config.module, run.checkpoint, late=True, again=True
        )  # here a misfit becomes one line
    except BaseException:
        run.discard()
        raise
    data: Any = config.datamodule
    if hasattr(data, "stay_with"):  # it has several sources: the earlier run's is used
        data.stay_with(known.get("data_source"))
    run.changes = differences(known["config"], config.resolved)
    return config, run


@dataclass
class Loaded:
    """What a checkpoint holds, ready for use on the CPU."""

    module: LightningModule  # weights loaded, in eval mode
    datamodule: LightningDataModule | None  # as in training; not set up, nothing read from disk
    config: Configuration
    run: dict[str, Any]  # run_name, data_source, precision, epoch, global_step, metrics, ...
    path: Path
    changes: list[str] = field(
        default_factory=list
    )  # settings of model and data that differ from the checkpoint's


def load(path: Path, argv: list[str] | None = None, again: bool = False) -> Loaded:
    """The module and data module of a checkpoint, from the checkpoint alone, or a UserError; ``again``: see
    :func:`load_weights`. ``argv``: arguments of ``project.test`` that beat what the checkpoint holds.
    """
    run = record(path)
    base = run.pop("config")
    base.pop("trainer", None)  # flags of another machine
    # nothing is compiled; `weights` names pretrained ones, often a download: the checkpoint has its own
    for *names, last, value in (("compile", False), ("network", "init_args", "weights", None)):
        section: Any = base
        for name in ("model", "init_args", *names):
            section = section.get(name) if isinstance(section, dict) else None
        if isinstance(section, dict) and last in section:
            section[last] = value
    refuse_foreign_classes(base, CommandLine(argv or []).value("allow_imports"), path)
    config = configure(argv or [], "project.test", base)
    fits = load_weights(config.module, path, late=True, again=again)
    data: Any = config.datamodule
    if isinstance(data, BatchedDataModule):  # feature: images
        data.describe(run.pop("data", {}))
    if not (
        fits or again
    ):  # layers are made in ``setup``: module and data are set up as for a test
        trainer = Trainer(
            accelerator="cpu", logger=False, enable_checkpointing=False, limit_test_batches=0
        )
        with contextlib.suppress(Exception):  # such as missing data: then the weights do not fit
            trainer.test(config.module, data)
        load_weights(config.module, path, again=True)
    changes = [
        line for line in differences(base, config.resolved) if line.startswith(("model", "data"))
    ]
    return Loaded(config.module.eval(), config.datamodule, config, run, path, changes)


@isolate_rng()  # as in load_weights
def start_from(module: LightningModule, name: str | None) -> list[str]:
    """Give a new run's module the weights of another's checkpoint that fit by name and shape; returns what to say."""
    if name is None:
        return []
    path = find_checkpoint(name, option="--init_weights")
    module.configure_model()
    given = read(path)["state_dict"]
    own = {key: getattr(value, "shape", None) for key, value in module.state_dict().items()}
    fitting = {
        key: value
        for key, value in given.items()
        if key in own and getattr(value, "shape", None) == own[key]
    }
    if not fitting:
        raise UserError(f"--init_weights {name}: nothing in it fits the module by name and shape.")
    module.load_state_dict(fitting, strict=False)
    said = [f"--init_weights {path}: {len(fitting)} of {len(own)} tensors taken."]
    if left := sorted(own.keys() - fitting.keys()):
        said.append(
            f"--init_weights: these keep their random start: {', '.join(left[:8])}{' ...' if left[8:] else ''}"
        )
    return said


def refuse_foreign_classes(config: dict[str, Any], allowed: str | None, path: Path) -> None:
    """Raise a UserError, before any import, if a configuration names an untrusted class; ``allowed``: more packages."""
    packages = (allowed or "").replace(",", " ").split()
    trusted = {name.split(".")[0] for name in (*FUNCTIONS, *CLASSES, *packages)}
    try:
        texts = [*_texts(config)]
    except RecursionError:
        raise UserError(
            f"--ckpt_path {path}: its configuration is nested too deeply. Give another."
        ) from None
    for key, text, _ in texts:
        holds_path = key in PATHS or key.startswith(("callbacks", "logger", "plugins"))
        # the parser also takes a class path, or YAML with one, where the type is not text
        names = (
            IMPORT_PATH.findall(text)
            if re.search(r"[{\[:\n]", text)
            else IMPORT_PATH.fullmatch(text) and [text]
        )
        for named in names or ():
            root, _, end = named.partition(".")
            is_file = (
                end in FILES and not holds_path
            )  # test.csv; as a class it would run nothing: test is empty
            reason, package = "", root
            if root not in trusted and _is_foreign(root, holds_path):
                if not is_file or root not in {
                    "test",
                    *sys.stdlib_module_names & sys.modules.keys(),
                }:
                    which = (
                        "which is neither yours nor PyTorch's or Lightning's. Nothing was imported"
                    )
                    reason = f"the class {named}, {which}"
            elif not is_file and (package := _foreign_home(named, packages) or ""):
                reason = f"{named}, which {package} defines: it is no part of a training, or writes files"
            if reason:
                raise UserError(
                    f"--ckpt_path {path} names {reason}. If you trust the file: --allow_imports {package}"
                )


def refuse_writing_elsewhere(config: dict[str, Any], line: CommandLine, run: Run) -> None:
    """A UserError if a Trainer's part would write outside the run's folder, unless typed or a class's default."""
    typed, folder = {text for _, text, _ in _texts(line.given)}, run.folder.resolve()
    for key, text, owner in _texts(config.get("trainer")):
        is_free = text in typed or key in ("class_path", "default_root_dir")
        is_place = re.search("dir|path|root|folder", key) or re.search(
            r"^[/~]|:/|(^|/)\.\.(/|$)", text
        )
        inside = "\0" not in text and Path(
            os.path.realpath(os.path.expanduser(text))
        ).is_relative_to(folder)
        if is_place and not (is_free or inside or text == _default(owner, key)):
            where = f"{key}: {text} in its configuration is outside the run's folder"
            raise UserError(
                f"--ckpt_path {run.checkpoint}: {where}. Type that setting again if it is right."
            )


def _default(class_path: str, name: str) -> Any:
    """The default of an argument of a class, also of one that it hands on; None where there is none."""
    (module, _, kind), parser = class_path.rpartition("."), ArgumentParser()
    with contextlib.suppress(ImportError, AttributeError, KeyError, TypeError, ValueError):
        parser.add_class_arguments(
            getattr(importlib.import_module(module), kind), fail_untyped=False
        )
        return parser.get_default(name)
    return None


def _texts(value: Any, key: str = "", owner: str = "") -> Iterator[tuple[str, str, str]]:
    """Every text in a configuration, with the key it stands under, and the class whose argument it is."""
    if isinstance(value, str):  # the parser reads YAML in a text as well, in its own way
        if len(re.findall(r"[\[{?\n]|- |: ", value)) > MOST_NESTED:
            raise RecursionError
        with contextlib.suppress(yaml.YAMLError, ValueError):
            value = (
                content
                if isinstance(content := get_loader("yaml")(value), (dict, list, set))
                else value
            )
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _texts(item, str(name), str(value.get("class_path", owner)))
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from _texts(item, key, owner)
    elif isinstance(value, str):
        yield key, value, owner


def _is_foreign(root: str, holds_path: bool) -> bool:
    """Whether a module that is not the user's can be imported, or shall be (``holds_path``). Nothing is imported."""
    clone = Path(__file__).parents[
        2
    ]  # the user's own are in the working folder, and in a clone beside this package
    folders = [Path.cwd()] if "site-packages" in clone.parts else [Path.cwd(), clone]
    try:
        spec = importlib.util.find_spec(root)
    except (ImportError, ValueError):
        return True
    if spec is None:
        return holds_path
    # a package that is installed comes before a plain folder of its name
    return any(
        Path(place).parent not in folders
        for place in spec.submodule_search_locations or [spec.origin or ""]
    )


def _foreign_home(named: str, allowed: Collection[str]) -> str | None:
    """The package where a name leads, as ``torch.hub.os.system`` to ``posix``, if nothing of the kind may be named."""
    try:
        found: Any = resolve_name(named)
        holder: Any = resolve_name(named.rpartition(".")[0])
    except Exception:  # the parser reports the reason
        return None
    if not callable(found):
        return None
    home = getattr(found, "__module__", None)  # None: of a builtin function
    home = str(
        home
        or getattr(holder, "__name__" if inspect.ismodule(holder) else "__module__", "builtins")
    )
    root, is_class = home.split(".")[0], inspect.isclass(found)
    end, room = getattr(found, "__name__", ""), home.partition(".")[2].partition(".")[0]
    trusted = (
        *allowed,
        *FUNCTIONS,
        *(CLASSES if is_class and end not in TRUSTED["writers"] else ()),
    )
    is_trusted = any(f"{home}.{end}.".startswith(f"{name}.") for name in trusted)
    is_trusted |= holder is torch and hasattr(torch.Tensor, end)  # tanh and the like
    is_own = (
        room not in TRUSTED["machinery"]
        if root == PACKAGE
        else not _is_foreign(root, holds_path=True)
    )
    is_command_line = is_class and issubclass(found, COMMAND_LINES) and root not in allowed
    return root if is_command_line or not (is_trusted or is_own) else None


@dataclass
class Run:
    """A run's folder and how the run starts."""

    folder: Path
    checkpoint: Path | None = None  # the run resumes from it
    finished: bool = False  # nothing is left to do
    notes: list[str] = field(default_factory=list)  # what the user should know, a line each
    run_id: str = ""  # belongs to the folder; tells its checkpoints from another run's
    new_parents: int = -1  # folders above it that it makes; -1: those that are missing now
    changes: list[str] = field(
        default_factory=list
    )  # settings that differ from the resumed checkpoint's
    _lock: Any = None
    _created: bool = False  # this process made the folder

    def __post_init__(self) -> None:
        self.folder = Path(
            self.folder
        ).absolute()  # W&B writes later, when the working folder may be another
        self.checkpoint = self.checkpoint and Path(self.checkpoint)
        if self.new_parents == -1:
            self.new_parents = sum(not os.path.exists(parent) for parent in self.folder.parents)
        with contextlib.suppress(OSError, UnicodeDecodeError):
            self.run_id = self.run_id or (self.folder / RUN_ID).read_text().strip()
        self.run_id = self.run_id or uuid.uuid4().hex[:8]

    @property
    def name(self) -> str:
        return self.folder.name

    def elsewhere(self, folder: str) -> Run:
        """The same run in another folder. The folder made for its name is removed."""
        with contextlib.suppress(OSError):
            self.folder.rmdir()
        return replace(self, folder=Path(folder) / self.name, run_id="", new_parents=0)

    def discard(self) -> None:
        """Delete a new run's folder if the run failed before it saved a checkpoint."""
        if self._created and is_rank_zero() and not any(self.folder.glob("*.ckpt")):
            shutil.rmtree(self.folder, ignore_errors=True)
            latest = self.folder.parent / LATEST
            if latest.is_symlink() and not latest.exists():  # it was this run
                latest.unlink()
                if others := sorted(
                    self.folder.parent.glob("*/last.ckpt"), key=lambda path: path.stat().st_mtime
                ):
                    point_latest_at(others[-1].parent)
            with contextlib.suppress(OSError):  # another run is there
                for parent in list(self.folder.parents)[: self.new_parents]:
                    parent.rmdir()

    def release(self) -> None:
        """Let others write in the folder, also where this process goes on."""
        if self._lock is not None:
            self._lock.close()

    def create(self) -> None:
        """Make the folder of a new run, and lock it; a UserError where that fails, or another process writes there."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            is_new = not any(self.folder.iterdir())
            handle = open(self.folder / ".lock", "a+")  # noqa: SIM115 - held until the process ends
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"run {self.name} is written by another process. Wait, or change --run_name."
            ) from None
        except OSError as error:
            raise UserError(
                f"--default_root_dir: {self.folder} cannot be written: {error.strerror}."
            ) from None
        os.register_at_fork(
            after_in_child=handle.close
        )  # a worker that outlives this process must not hold it
        self._lock, self._created = handle, is_new
        (self.folder / RUN_ID).write_text(self.run_id + "\n")
        for stale in self.folder.glob(".*.part"):
            stale.unlink(missing_ok=True)


def point_latest_at(folder: Path) -> None:
    """Make ``checkpoints/latest`` a link to this run, in one step."""
    link = folder.parent / f".{LATEST}.{os.getpid()}"
    with contextlib.suppress(OSError):  # file systems without symbolic links still train
        link.symlink_to(folder.name)
        os.replace(link, folder.parent / LATEST)


def choose(root: Path, run_name: str | None, ckpt_path: str | None) -> Run:
    """The run that ``--run_name`` and ``--ckpt_path`` mean, or a UserError. Writes nothing but a new run's folder."""
    require(
        "\0" not in str(root), "--default_root_dir", "be a folder you may write in", repr(str(root))
    )
    fits = run_name is None or (
        re.fullmatch(r"[\w][\w.\-+=@ ]{0,99}", run_name) and run_name != LATEST
    )
    must = f"be 1 to 100 letters, digits or .-_+=@, starting with a letter or digit, not '{LATEST}'"
    require(bool(fits), "--run_name", must, f"'{run_name}'")
    if ckpt_path == "auto" and run_name is not None:
        run = Run(root / run_name)
        for path in filter(
            Path.exists, (root / run_name / "last.ckpt", root / run_name / "best.ckpt")
        ):
            if (reason := damage(path)) is None:
                return replace(run, checkpoint=path, finished=_is_finished(path))
            run.notes.append(f"skipped: {reason}")
        run.notes += (
            [f"run {run_name} has no whole checkpoint: it starts afresh."]
            if run.folder.exists()
            else []
        )
        return run
    if ckpt_path is None or ckpt_path == "auto":
        run = _new(root, run_name)
        run.notes += (
            [f"--ckpt_path auto without --run_name: a new run starts, {run.name}."]
            if ckpt_path
            else []
        )
        return run
    checkpoint = find_checkpoint(ckpt_path, root, run_name)
    folder = root / run_name if run_name else checkpoint.resolve().parent
    # a checkpoint of another run, or of no run: a new run starts from it
    if checkpoint.resolve().parent != folder.resolve() or not (folder / "config.yaml").exists():
        return replace(_new(root, run_name), checkpoint=checkpoint)
    return Run(folder, checkpoint, finished=_is_finished(checkpoint))


def find_checkpoint(
    ckpt_path: str | None = None,
    root: Path = ROOT,
    run_name: str | None = None,
    option: str = "--ckpt_path",
) -> Path:
    """The file that ``--ckpt_path`` means: a path, or ``best`` (default) or ``last`` of a run (default: the newest)."""
    kind = "best" if ckpt_path is None else ckpt_path  # nothing after the option is a mistake
    if kind not in ("best", "last"):
        if (path := Path(kind)).is_file():
            return path
        hint = (
            " A folder was given: add /best.ckpt or /last.ckpt." if kind and path.is_dir() else ""
        )
        allowed = "best, last, or a file" + (" (fit: also auto)" if option == "--ckpt_path" else "")
        raise UserError(
            f"{option}: there is no checkpoint {kind or repr(kind)}.{hint} Allowed: {allowed}."
        )
    folder = root / (run_name or LATEST)
    if not folder.is_dir():
        known = [entry.name for entry in root.glob("*") if entry.is_dir()]
        if run_name:
            raise UserError(
                f"--run_name {run_name}: there is no such run in {root}.{nearest(run_name, known)}"
            )
        raise UserError(
            f"{option} {kind}: there is no run in {root} yet. Train one: python -m project.fit"
        )
    path = folder.resolve() / f"{kind}.ckpt"
    if not path.is_file():
        raise UserError(f"{option} {kind}: run {folder.resolve().name} has no {path.name} yet.")
    return root / path.parent.name / path.name


def _new(root: Path, run_name: str | None) -> Run:
    if run_name is not None:
        folder = root / run_name
        if folder.is_symlink() or (
            folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
        ):
            raise UserError(
                f"--run_name {run_name}: {folder} already exists. To go on with it: --ckpt_path auto."
            )
        return Run(folder)
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    run = Run(root / stamp)  # notes which folders are missing
    try:
        root.mkdir(
            parents=True, exist_ok=True
        )  # else, as a link to nowhere, it would be tried for ever
        for attempt in itertools.count(2):
            with contextlib.suppress(
                FileExistsError
            ):  # of two launches in the same second one gets the next number
                run.folder.mkdir()
                break
            run = replace(run, folder=root / f"{stamp}_{attempt}", run_id="")
    except OSError as error:
        raise UserError(
            f"--default_root_dir must be writable, got {root}: {error.strerror}."
        ) from None
    return replace(run, _created=True)


def _is_finished(checkpoint: Path) -> bool:
    """Whether this is the last.ckpt of a finished run: its step is the one that summary.json holds."""
    with contextlib.suppress(
        OSError, ValueError, AttributeError
    ):  # AttributeError: it holds no mapping
        summary = json.loads((checkpoint.parent / "summary.json").read_text())
        if checkpoint.name == "last.ckpt" and summary.get("finished"):
            return bool(summary.get("steps") == read(checkpoint).get("global_step"))
    return False
