"""Checkpoint files: written completely or not at all, read as plain data or refused."""

import hashlib
import io
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng

from project.errors import UserError
from project.tables import write_atomically

MAPPINGS = (dict, OrderedDict, Counter)
SEQUENCES = (list, tuple, set, torch.Size)
VALUES = (type(None), bool, int, float, str, dict, list)  # in a configuration; the last two: empty
PLAIN = (*VALUES, complex, bytes, torch.dtype, torch.device, *MAPPINGS, *SEQUENCES)
RUN_KEY = (
    "run"  # what this project adds to Lightning's checkpoint: name, configuration, data source, ...
)


class AtomicCheckpointIO(TorchCheckpointIO):
    """Saves beside the target, flushes to disk, renames: whatever happens, the target is whole, old or new. Lightning's
    own renames from the temporary folder, does not flush, swallows a PermissionError (issue 21800).
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        Path(path).parent.mkdir(
            parents=True, exist_ok=True
        )  # of a ModelCheckpoint that the user added
        if state := checkpoint.get(RUN_KEY, {}).get("state"):
            state["outline"] = outline(checkpoint)
        make_hyperparameters_plain(checkpoint)
        buffer = io.BytesIO()
        try:
            if odd := _not_plain(checkpoint, "checkpoint"):
                raise TypeError(odd)
            torch.save(checkpoint, buffer)
        except (
            MemoryError,
            RuntimeError,
        ) as error:  # known to every rank, as what writing raises is
            raise UserError(f"{path} could not be saved: {type(error).__name__} {error}") from error
        write_atomically(buffer.getbuffer(), Path(path))

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        return read(Path(path))


def make_hyperparameters_plain(checkpoint: dict[str, Any]) -> None:
    """Keep ``hparams`` that are no plain data as the configuration has them, for ``load_from_checkpoint`` to make them
    again. What is not from there is kept as text, such as a path, or as numbers and lists where it is NumPy's.
    """
    checkpoint.pop("hparams_type", None)  # a class of OmegaConf
    for key, part in {"hyper_parameters": "model", "datamodule_hyper_parameters": "data"}.items():
        if key not in checkpoint:
            continue
        checkpoint[key] = given = dict(checkpoint[key])
        odd = {name: value for name, value in given.items() if _not_plain(value, name)}
        given |= {name: x.tolist() if hasattr(x, "tolist") else str(x) for name, x in odd.items()}
        written = checkpoint.get(RUN_KEY, {}).get("config", {}).get(part) or {}
        if odd and odd.keys() <= written.get("init_args", {}).keys():
            given |= {name: written["init_args"][name] for name in odd}
            given |= {
                "_class_path": written["class_path"],
                "_instantiator": "lightning.pytorch.cli.instantiate_module",
            }


class Unreadable(UserError):
    """The system cannot read a file now: no permission, no memory, a lost network drive."""


def read(path: Path) -> dict[str, Any]:
    """A checkpoint's contents, on the CPU; nothing in it is executed. A UserError where it is damaged, or is none."""
    if not path.is_file():
        raise UserError(f"--ckpt_path: there is no checkpoint {path}.")
    try:
        with zipfile.ZipFile(
            path
        ) as archive:  # torch.load checks no sums: flipped bits would become weights
            if (broken := archive.testzip()) is not None:
                raise zipfile.BadZipFile(f"checksum of {broken}")
        checkpoint = torch.load(
            path, map_location="cpu", weights_only=True
        )  # else an environment variable decides it
        leaves = [value for _, value in _leaves(checkpoint)]
    except Exception as error:
        # zipfile and torch raise an OSError without a number for a truncated file; otherwise it may be whole
        if isinstance(error, MemoryError) or (
            isinstance(error, OSError) and error.errno is not None
        ):
            reason = getattr(error, "strerror", None) or "not enough memory"
            raise Unreadable(
                f"--ckpt_path {path} cannot be read now: {reason}. Mend that and try again."
            ) from None
        # torch's own message advises weights_only=False, which would run the code in a malicious file
        if "eights only" in str(error) or "eights_only" in str(error):
            danger = "pickled Python objects, which could run code; it was refused and nothing in it was run"
            raise UserError(
                f"--ckpt_path {path} holds {danger}. Give a checkpoint written by this project."
            ) from None
        kind = type(error).__name__
        raise UserError(
            f"--ckpt_path {path} is damaged or no checkpoint ({kind}). Give another one."
        ) from None
    if not isinstance(checkpoint, dict) or not {"state_dict", "loops"} <= checkpoint.keys():
        raise UserError(
            f"--ckpt_path {path} is not a Lightning checkpoint. Give a best.ckpt or last.ckpt of a run."
        )
    _check(checkpoint, LIGHTNING, path, "checkpoint")
    size = path.stat().st_size
    for value in leaves:  # a shape of a few bytes can claim any size
        if isinstance(value, torch.Tensor) and value.numel() * value.element_size() > size:
            raise UserError(
                f"--ckpt_path {path} has a tensor that is larger than the file. Give another checkpoint."
            )
    return checkpoint


def damage(path: Path) -> str | None:
    """Why a checkpoint cannot be used, or None where it is whole. Unreadable is raised: it may be whole."""
    try:
        read(path)
    except Unreadable:
        raise
    except UserError as error:
        return str(error).removeprefix("--ckpt_path ")
    return None


# What a checkpoint, our record in it and its configuration hold, as far as commands rely on it. Any may be absent.
LIGHTNING: dict[str, Any] = dict.fromkeys(("state_dict", "loops", "callbacks"), dict)
LIGHTNING |= dict.fromkeys(("epoch", "global_step"), int) | {"pytorch-lightning_version": str}
LIGHTNING |= dict.fromkeys(("optimizer_states", "lr_schedulers"), list)
RECORD: dict[str, Any] = dict.fromkeys(("config", "data", "metrics", "versions", "state"), dict)
RECORD |= dict.fromkeys(("run_name", "run_id"), str)
SECTIONS = dict.fromkeys(("model", "data", "trainer"), (dict, type(None)))
RESTORED = ("loops", "optimizer_states", "lr_schedulers")


def record(path: Path, to_resume: bool = False) -> dict[str, Any]:
    """What a checkpoint records about its run: ``config``, ``run_name``, ``data_source``, ``metrics``, ...; a UserError
    where the file is unusable, not written by this project, or changed since (``to_resume``: anywhere).
    """
    checkpoint = read(path)
    run = checkpoint.get(RUN_KEY)
    if not isinstance(run, dict) or "config" not in run:
        raise UserError(
            f"--ckpt_path {path} was not written by this project: it does not name its network."
        )
    _check(run, RECORD, path, "run")
    _check(run["config"], SECTIONS, path, "run.config")
    if dotted := [
        key for key in run["config"] if "." in str(key)
    ]:  # the parser would take it for a section's
        raise _changed(path, f"run.config.{dotted[0]}")
    for key in ("config", "metrics", "data_source", "versions"):
        if not all(isinstance(value, VALUES) for _, value in _leaves(run.get(key))):
            raise _changed(path, f"run.{key}")
    saved = run.get("state", {}).get("outline")
    if to_resume and saved is not None and saved != outline(checkpoint):
        raise _changed(path, " or ".join(("run.state", *RESTORED)))
    return run


def outline(checkpoint: dict[str, Any]) -> str:
    """A hash of what a resume restores besides weights and callbacks; a misfit would show only after files changed."""
    leaves = _leaves(
        [
            {**checkpoint[RUN_KEY]["state"], "outline": None},
            *(checkpoint.get(key) for key in RESTORED),
        ]
    )
    plain = [
        (leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf for _, leaf in leaves
    ]
    return hashlib.sha256(repr(plain).encode()).hexdigest()


def _leaves(value: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """The keys and values in nested plain containers, and containers that are empty, each with its place in words."""
    kind = type(value)  # a subclass, as NumPy's numbers and text are, would not load
    if kind in MAPPINGS and value:
        for key, item in value.items():
            yield from _leaves(key, f"a key of {where}")
            yield from _leaves(item, f"{where}[{key!r}]")
    elif kind in SEQUENCES and value:
        for index, item in enumerate(sorted(value, key=repr) if kind is set else value):
            yield from _leaves(item, f"{where}[{index}]")
    else:
        yield where, value


def _not_plain(value: Any, where: str) -> str | None:
    """What in a value is no plain data and would not load with ``weights_only=True``, in words; None: nothing."""
    for place, leaf in _leaves(value, where):
        kind = type(leaf)
        if kind not in PLAIN and not isinstance(leaf, torch.Tensor):
            plain = "checkpoints hold plain values only (numbers, text, lists, dicts, tensors)"
            return f"{place} is a {kind.__module__}.{kind.__qualname__}, which would not load again: {plain}."
    return None


def _check(found: dict[str, Any], kinds: dict[str, Any], path: Path, name: str) -> None:
    for key in kinds.keys() & found.keys():
        if not isinstance(found[key], kinds[key]):
            raise _changed(path, f"{name}.{key}")


def _changed(path: Path, key: str) -> UserError:
    return UserError(
        f"--ckpt_path {path}: its entry {key} is not what this project writes. Give another checkpoint."
    )


@isolate_rng()  # what draws in a setup() that comes later, such as a split, draws as in a new run
def load_weights(
    module: LightningModule, path: Path, late: bool = False, again: bool = False
) -> bool:
    """Give a module a checkpoint's weights as Lightning does (and will do ``again``); a UserError where they do not
    fit. ``late``: nothing is loaded, and False returned, where a hook may make layers that it still lacks.
    """
    checkpoint = read(path)
    # SupervisedModule warns of it; here a misfit is an error
    checkpoint.pop("network", None)  # feature: supervised
    module.configure_model()
    if not again:
        module.on_load_checkpoint(checkpoint)
    try:
        missing, unexpected = module.load_state_dict(checkpoint["state_dict"], strict=False)
        if (
            missing and again and is_overridden("on_load_checkpoint", module)
        ):  # it may put in what it did not save
            module.on_load_checkpoint(checkpoint)
            missing, unexpected = module.load_state_dict(checkpoint["state_dict"], strict=False)
        makes_layers = is_overridden("setup", module) or is_overridden("on_load_checkpoint", module)
        if late and makes_layers and unexpected and not missing:
            return False
        if missing or unexpected:
            module.load_state_dict(
                checkpoint["state_dict"], strict=module.strict_loading
            )  # tells which
    except (RuntimeError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"--ckpt_path {path}: its weights do not fit the network: {reason}"
        ) from None
    return True
