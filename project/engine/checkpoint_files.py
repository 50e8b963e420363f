"""Checkpoint files: written completely or not at all, read as plain data or refused."""

from __future__ import annotations

import contextlib
import io
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import LightningModule

from project.errors import UserError

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.Tensor, torch.Size, torch.dtype, torch.device)
VALUES = (type(None), bool, int, float, str)
RUN_KEY = "run"  # what this project adds to Lightning's checkpoint: name, configuration, data source, ...


class AtomicCheckpointIO(CheckpointIO):
    """Saves beside the target, flushes to disk, renames: whatever happens, the target is whole, old or new.

    Lightning's own goes through the system's temporary folder, where a rename across file systems is a copy, does not
    flush, and swallows a PermissionError (Lightning issue 21800).
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)  # of a ModelCheckpoint that the user added
        write_atomically(serialize(checkpoint), Path(path))

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        return read(Path(path))

    def remove_checkpoint(self, path: Any) -> None:
        Path(path).unlink(missing_ok=True)


def serialize(checkpoint: dict[str, Any]) -> memoryview:
    """The bytes of a checkpoint file.

    Raises:
        TypeError: Something in it is not plain data and would not load again with ``weights_only=True``.
    """
    _require_plain(checkpoint, "checkpoint")
    buffer = io.BytesIO()
    torch.save(checkpoint, buffer)
    return buffer.getbuffer()


def write_atomically(data: bytes | memoryview, path: Path) -> None:
    """Write a file beside ``path``, flush it to disk, and put it in ``path``'s place.

    Raises:
        UserError: The folder cannot be written or the disk is full; what was at ``path`` is untouched.
    """
    beside = path.with_name(f".{path.name}.part")
    try:
        with open(beside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the rename itself must survive a power cut
        finally:
            os.close(folder)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise UserError(
            f"{path} could not be saved: {error.strerror or error}. The run has stopped; what was saved before is "
            "whole. Free space or make the folder writable, then go on with --ckpt_path auto."
        ) from error


class Unreadable(UserError):
    """The system cannot read a file now: no permission, no memory, a lost network drive."""


def read(path: Path) -> dict[str, Any]:
    """A checkpoint's contents, on the CPU. Nothing in the file is ever executed.

    Raises:
        Unreadable: The system cannot read the file now.
        UserError: There is no such file, or it is damaged, holds pickled code, or is no Lightning checkpoint.
    """
    if not path.is_file():
        raise UserError(f"--ckpt_path: there is no checkpoint {path}.")
    try:
        with zipfile.ZipFile(path) as archive:  # torch.load checks no sums: flipped bits would become weights
            if (broken := archive.testzip()) is not None:
                raise zipfile.BadZipFile(f"checksum of {broken}")
        # explicitly, since an environment variable can turn torch's safe default off
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, MemoryError) as error:  # the file may be whole, so the run must not start afresh
        if isinstance(error, OSError) and error.errno is None:  # what zipfile and torch raise for a truncated file
            raise _damaged(path, error) from None
        reason = getattr(error, "strerror", None) or "not enough memory"
        raise Unreadable(f"--ckpt_path {path} cannot be read now: {reason}. Mend that and try again.") from None
    except Exception as error:
        # torch's own message advises weights_only=False, which would run the code in a malicious file
        if "eights only" in str(error) or "eights_only" in str(error):
            raise UserError(
                f"--ckpt_path {path} holds pickled Python objects, which could run code; it was refused and nothing in "
                "it was run. Give a checkpoint written by this project."
            ) from None
        raise _damaged(path, error) from None
    if not isinstance(checkpoint, dict) or not {"state_dict", "loops"} <= checkpoint.keys():
        raise UserError(f"--ckpt_path {path} is not a Lightning checkpoint. Give a best.ckpt or last.ckpt of a run.")
    _check(checkpoint, LIGHTNING, path)
    size = path.stat().st_size
    for value in _leaves(checkpoint):  # a shape of a few bytes can claim any size
        if isinstance(value, torch.Tensor) and value.numel() * value.element_size() > size:
            raise UserError(f"--ckpt_path {path} has a tensor that is larger than the file. Give another checkpoint.")
    return checkpoint


def _damaged(path: Path, error: Exception) -> UserError:
    return UserError(f"--ckpt_path {path} is damaged or no checkpoint ({type(error).__name__}). Give another one.")


def damage(path: Path) -> str | None:
    """Why a checkpoint cannot be used, or None where it is whole.

    Raises:
        Unreadable: The system cannot read it now; it may be whole.
    """
    try:
        read(path)
    except Unreadable:
        raise
    except UserError as error:
        return str(error).removeprefix("--ckpt_path ")
    return None


# Lightning's entries: key -> type
LIGHTNING: dict[str, type] = {
    "state_dict": dict,
    "loops": dict,
    "epoch": int,
    "global_step": int,
    "optimizer_states": list,
    "lr_schedulers": list,
    "callbacks": dict,
    "pytorch-lightning_version": str,
}
# The entries that this project adds to a checkpoint and needs for every use of it: key -> type
RECORD: dict[str, type] = {
    "config": dict,
    "run_name": str,
    "run_id": str,
    "data": dict,
    "metrics": dict,
    "versions": dict,
}
STATE: dict[str, type] = {"place": str, "ranks": list, "samples_per_batch": int, "metric_rows": int}
RANK: dict[str, type] = {
    "random": dict,
    "loaders": list,
    "metrics": dict,
    "logged": dict,
    "module": dict,
    "device": str,
}


def record(path: Path) -> dict[str, Any]:
    """What a checkpoint records about its run: ``config``, ``run_name``, ``data_source``, ``metrics``, ...

    Raises:
        UserError: The file is unusable, was not written by this project, or was changed since.
    """
    run = read(path).get(RUN_KEY)
    if not isinstance(run, dict) or "config" not in run:
        raise UserError(
            f"--ckpt_path {path} was not written by this project: it does not say which network it belongs to."
        )
    _check(run, RECORD, path)
    for key in ("config", "metrics", "data_source", "versions"):
        if not all(isinstance(value, VALUES) for value in _leaves(run.get(key))):
            raise _changed(path, key)
    for section in ("model", "data", "trainer"):
        if not isinstance(run["config"].get(section) or {}, dict):
            raise _changed(path, f"config.{section}")
    if (state := run.get("state")) is not None:
        if not isinstance(state, dict):
            raise _changed(path, "state")
        _check(state, STATE, path)
        for rank in state.get("ranks", []):
            if not isinstance(rank, dict):
                raise _changed(path, "state.ranks")
            _check(rank, RANK, path)
    return dict(run)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _leaves(item)
    else:
        yield value


def _check(found: dict[str, Any], kinds: dict[str, type], path: Path) -> None:
    for key, kind in kinds.items():
        if key in found and not isinstance(found[key], kind):
            raise _changed(path, key)


def _changed(path: Path, key: str) -> UserError:
    return UserError(f"--ckpt_path {path}: its entry {key} is not what this project writes. Give another checkpoint.")


def load_weights(module: LightningModule, path: Path) -> None:
    """Give a module a checkpoint's weights.

    Raises:
        UserError: They do not fit.
    """
    try:
        module.load_state_dict(read(path)["state_dict"])
    except (RuntimeError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"--ckpt_path {path}: its weights do not fit the network: {reason}") from None


def _require_plain(value: Any, where: str) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            _require_plain(key, f"a key of {where}")
            _require_plain(item, f"{where}[{key!r}]")
    elif isinstance(value, (list, tuple, set)):
        for index, item in enumerate(value):
            _require_plain(item, f"{where}[{index}]")
    elif not isinstance(value, PLAIN) or (isinstance(value, int) and type(value).__module__ not in ("builtins",)):
        raise TypeError(
            f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which would not load again: "
            "checkpoints hold plain values only (numbers, text, lists, dicts, tensors)."
        )
