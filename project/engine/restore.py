"""A command line and a checkpoint together: a run to start or resume, or a module ready for use."""

from __future__ import annotations

import copy
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule

from project.engine.checkpoint_files import load_weights, read, record
from project.engine.cli import CommandLine, Configuration, Option, configure, differences
from project.engine.ranks import decided_by_rank_zero
from project.engine.run_folder import ROOT, Run, choose, find_checkpoint
from project.errors import UserError

PACKAGE = __name__.split(".")[0]
# A checkpoint's configuration may name classes of these packages and of the user's own files.
TRUSTED = (PACKAGE, "torch", "torchvision", "torchmetrics", "lightning")
# Arguments of a module that may hold an import path
PATHS = ("class_path", "optimizer", "schedule", "loss")
IMPORT_PATH = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)+")


def read_configuration(argv: list[str], prog: str) -> tuple[Configuration, Run]:
    """Parse ``argv`` and find its run. A resumed run uses the checkpoint's configuration; what is typed wins."""
    line = CommandLine(argv)
    run_name, ckpt_path = line.value("run_name"), line.value("ckpt_path")
    root = Path(line.value("trainer.default_root_dir") or ROOT)
    config = None
    if ckpt_path is None or (ckpt_path == "auto" and run_name is None) or line.asks_for_help:
        config = configure(argv, prog)  # a new run: a wrong flag is reported before the folder is made
    run = Run(**decided_by_rank_zero(lambda: choose(root, run_name, ckpt_path).to_plain()))
    if run.checkpoint is None:
        return config or configure(argv, prog), run
    if line.value("init_weights") is not None:
        raise UserError("--init_weights starts a new run, --ckpt_path goes on with one: leave one of them away.")
    known = record(run.checkpoint, to_resume=True)
    base = copy.deepcopy(known["config"])
    refuse_foreign_classes(base, line.value("allow_imports"), run.checkpoint)
    if line.sets_a_length:  # the typed limit counts; the saved max_epochs could come first
        base.setdefault("trainer", {})["max_epochs"] = -1
    config = configure(argv, prog, base)
    load_weights(config.module, run.checkpoint)  # Lightning loads them again; here a misfit becomes one line
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


def load(
    path: Path, argv: list[str] | None = None, prog: str = "project.test", further: tuple[Option, ...] = ()
) -> Loaded:
    """The module and data module of a checkpoint, from the checkpoint alone.

    ``argv`` are arguments that beat what the checkpoint holds, such as ``["--data.root", "DIR"]``; ``prog`` and
    ``further`` are the command's module name and its own options.

    Raises:
        UserError: The file is unusable, was not written by this project, its weights do not fit its network, or its
            configuration names a class that is not the user's own.
    """
    run = record(path)
    base = _for_use(run.pop("config"))
    refuse_foreign_classes(base, CommandLine(argv or []).value("allow_imports"), path)
    config = configure(argv or [], prog, base, further)
    load_weights(config.module, path)
    data: Any = config.datamodule
    if hasattr(data, "describe"):
        data.describe(run.pop("data", {}))
    return Loaded(config.module.eval(), config.datamodule, config, run, path)


def _for_use(config: dict[str, Any]) -> dict[str, Any]:
    """A resolved configuration for using a checkpoint without training it: not compiled, nothing downloaded.

    Trainer flags are left out: they describe the training run's machine and job.
    """
    config = copy.deepcopy({key: value for key, value in config.items() if key != "trainer"})
    init_args = (config.get("model") or {}).get("init_args") or {}
    if "compile" in init_args:
        init_args["compile"] = False
    # a network's `weights` names pretrained weights, often a download; the checkpoint has its own
    network = init_args.get("network")
    network_args = (network.get("init_args") or {}) if isinstance(network, dict) else {}
    if "weights" in network_args:
        network_args["weights"] = None
    return config


def start_from(module: LightningModule, name: str | None) -> list[str]:
    """Give a new run's module the weights of another run's checkpoint (``--init_weights``), by names and shapes.

    Returns lines that say what was taken and what was not; a UserError where nothing fits.
    """
    if name is None:
        return []
    path = find_checkpoint(name)
    given, own = read(path)["state_dict"], module.state_dict()
    shapes = {key: getattr(value, "shape", None) for key, value in own.items()}
    fitting = {k: value for k, value in given.items() if k in own and getattr(value, "shape", None) == shapes[k]}
    if not fitting:
        raise UserError(f"--init_weights {name}: nothing in it fits the module by name and shape.")
    module.load_state_dict(fitting, strict=False)
    lines = [f"--init_weights {path}: {len(fitting)} of {len(own)} tensors taken."]
    if left := sorted(own.keys() - fitting.keys()):
        lines.append(
            f"--init_weights: these keep their random start: {', '.join(left[:8])}{' ...' if left[8:] else ''}"
        )
    return lines


def refuse_foreign_classes(config: dict[str, Any], allowed: str | None, path: Path) -> None:
    """Raise a UserError, before anything is imported, if a checkpoint's configuration names an untrusted class.

    ``allowed`` is ``--allow_imports``: further packages, with commas between them.
    """
    trusted = {*TRUSTED, *(allowed or "").replace(",", " ").split()}
    for key, text in _texts(config):
        holds_path = key in PATHS or key.startswith(("callbacks", "logger", "plugins"))
        # the parser also takes a class path, or YAML with one, where the type is not text
        names = IMPORT_PATH.findall(text) if re.search(r"[{\[:\n]", text) else IMPORT_PATH.fullmatch(text) and [text]
        for named in names or ():
            root = named.split(".")[0]
            if root not in trusted and not _is_users_own(root) and (holds_path or _can_be_imported(root)):
                raise UserError(
                    f"--ckpt_path {path} names the class {named}, which is neither yours nor PyTorch's or Lightning's. "
                    f"Nothing was imported. If you trust the file: --allow_imports {root}"
                )


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every text in a configuration, with the key it stands under."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _texts(item, str(name))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item, key)
    elif isinstance(value, str):
        yield key, value


def _can_be_imported(root: str) -> bool:
    """Whether there is a module of this name; it is not imported."""
    try:
        return importlib.util.find_spec(root) is not None
    except (ImportError, ValueError):
        return True


def _is_users_own(root: str) -> bool:
    """Whether a module of this name lies in the working folder, or beside this package in a clone."""
    folders = [Path.cwd()]
    clone = Path(__file__).parents[2]
    folders += [clone] if "site-packages" not in clone.parts else []
    return any((folder / root).is_dir() or (folder / f"{root}.py").is_file() for folder in folders)
