"""Checkpoint files: written completely or not at all, read as plain data or refused."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, get_args, get_origin

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from unbroken.errors import UserError, printable, without_control_characters
from unbroken.stopping.ranks import say
from unbroken.storage.contents import (
    CHOSEN,
    LEFT_OUT,
    RESTORED,
    RUN_KEY,
    VALUES,
    leaves,
    record_in,
    with_own_containers,
)
from unbroken.storage.files import WholeWrites, not_written, written_atomically
from unbroken.storage.savable import NotPlain, made_plain, make_hyperparameters_plain
from unbroken.storage.seals import (
    is_own,
    outline,
    refuse_other_contents,
    sign,
    steps_vouched_for,
    without_states,
)
from unbroken.storage.staging import Staging
from unbroken.trust.torch_file import MANY_VALUES, Foreign, TooMuch, opened


class AtomicCheckpointIO(TorchCheckpointIO):
    """Saves beside the target, flushes to disk, renames: whatever happens, the target is whole, old
    or new.

    Lightning's own renames from the temporary folder, does not flush, and swallows a
    PermissionError (issue 21800). The first file is read back before it takes its place (unless
    there is no memory for that), so that a run that could not be resumed ends at its first save,
    and not when it is needed.
    """

    def __init__(self) -> None:
        # The fingerprint of the contents that are read next. None: they may be any.
        self.reads_next: str | None = None
        # Whether what is read is used as a stranger's.
        self.reads_no_states = False
        # What was read before, and is given in the place of what lies on the disk now.
        self.gives: dict[str, Any] | None = None
        self._is_proved = False
        self._has_told_left_out = False

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Write ``checkpoint`` to ``path``. Its own containers are changed, never those of the
        run's objects.
        """
        self.make_plain(checkpoint)
        self.write(checkpoint, Path(path))

    def write(self, checkpoint: dict[str, Any], target: Path) -> None:
        """Write a plain checkpoint, which nobody changes meanwhile.

        Raises:
            NotWritten: The disk has no room, or does not answer as it should.
            UserError: The file could not be read again.
        """
        if record_in(checkpoint):
            sign(checkpoint)
        # A ModelCheckpoint that the user added may name a new folder.
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise not_written(target, error) from error
        with written_atomically(target) as beside:
            save_to(checkpoint, beside)
            if not self._is_proved:
                prove_it_can_be_read(beside, target)
                self._is_proved = True

    def make_plain(self, checkpoint: dict[str, Any], needed: Collection[str] = frozenset()) -> None:
        """Let a checkpoint hold plain values only.

        What the user's own ``on_save_checkpoint`` has added is left out where it holds objects: the
        module that a resumed run makes has them, too. In Lightning's entries, and in those that are
        ``needed``, they are NotPlain.
        """
        make_hyperparameters_plain(checkpoint)
        # The names of entries, and the place of what is no plain value in them.
        left_out: dict[str, str] = {}
        for key, value in checkpoint.items():
            try:
                checkpoint[key] = made_plain(value, key)
            except NotPlain as error:
                if key in ENTRIES_OF_A_RUN or key in needed:
                    raise
                left_out[key] = str(error).partition(" is ")[0]
        for key in left_out:
            del checkpoint[key]
        if left_out and record_in(checkpoint):
            checkpoint[RUN_KEY][LEFT_OUT] = list(left_out)
        if left_out and not self._has_told_left_out:
            self._has_told_left_out = True
            places = ", ".join(left_out.values())
            say(
                f"left out of checkpoints, which hold plain values only: {places}."
                " A resumed run has what is made anew."
            )

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """What Lightning restores.

        The weights stay on the file's pages, because the module copies them from there. All else is
        in memory: an optimizer takes the tensors themselves, and a training keeps them.

        Raises:
            UserError: The file cannot be read, or has other contents than ``reads_next`` says.
        """
        if self.gives is not None:
            return dict(with_own_containers(self.gives))
        mapped = read(Path(path))
        # The run saves to the same path later, and may read it again.
        expected, self.reads_next = self.reads_next, None
        if expected is not None:
            refuse_other_contents(mapped, expected, Path(path))
        if self.reads_no_states:
            mapped = without_states(mapped)
            # Lightning looks into it where it is there.
            del mapped["loops"]
        weights = mapped.pop("state_dict")
        return {"state_dict": weights, **Staging().copy(mapped)}


def save_to(checkpoint: dict[str, Any], path: Path) -> None:
    """Write a checkpoint straight to a file: no second copy of it is made in memory.

    Raises:
        OSError: The disk has no room, or fails.
        UserError: There is no memory for it.
    """
    with open(path, "wb", buffering=0) as file:
        whole: Any = WholeWrites(file)
        try:
            torch.save(checkpoint, whole)
        except (MemoryError, RuntimeError) as error:
            if whole.failure is not None:
                raise whole.failure from error
            # As a UserError it becomes known to every rank, as what writing raises does.
            raise UserError(f"{path} could not be saved: {type(error).__name__} {error}") from error


def prove_it_can_be_read(written: Path, path: Path) -> None:
    """Read the file that was written beside ``path``.

    Raises:
        OSError: The disk does not give it now.
        UserError: It could not be used.
    """
    try:
        _read_plain(written, check_sums=False)
    except OSError:
        # It says something about the disk at this moment, and nothing about the file.
        raise
    except Exception as error:
        # torch: "can't allocate memory"; the system: "Cannot allocate memory".
        if isinstance(error, MemoryError) or "t allocate memory" in str(error):
            # There is no room for a second copy. That says nothing about the file.
            return
        reason = " ".join(f"{type(error).__name__} {error}".split())[:300]
        raise UserError(
            f"{path} was not saved, for it could not be read again: {reason}."
        ) from error


class Unreadable(UserError):
    """The system cannot read a file now: no permission, no memory, a lost network drive."""


def read(path: Path, check_sums: bool = False) -> dict[str, Any]:
    """A checkpoint's contents, on the CPU; nothing in it is executed. A UserError where it is
    damaged, or is none. For ``check_sums`` see :func:`unbroken.trust.torch_file.read_file`.
    """
    if not path.is_file():
        raise UserError(f"--ckpt_path: there is no checkpoint {path}.")
    try:
        checkpoint = _read_plain(path, check_sums)
    except UserError:
        # It is about the user's key.
        raise
    except Exception as error:
        raise _unusable(path, error) from None
    if not isinstance(checkpoint, dict) or not {"state_dict", "loops"} <= checkpoint.keys():
        raise UserError(
            f"--ckpt_path {path} is not a Lightning checkpoint."
            " Give a best.ckpt or last.ckpt of a run."
        )
    _check(checkpoint, LIGHTNING, path, "checkpoint")
    return checkpoint


def _read_plain(path: Path, check_sums: bool) -> Any:
    """What a file holds. A stranger's has a bounded number of values beside its tensors: whoever
    walks through them takes long.
    """
    reader = opened(path, check_sums)
    usual = reader.usual_steps
    contents = reader.read(usual + steps_vouched_for(reader.pickle))
    if reader.steps > usual and not (isinstance(contents, dict) and is_own(contents)):
        raise TooMuch(MANY_VALUES)
    return contents


def _unusable(path: Path, error: Exception) -> UserError:
    has_number = isinstance(error, OSError) and error.errno is not None
    if isinstance(error, MemoryError) or has_number:
        reason = getattr(error, "strerror", None) or "not enough memory"
        return Unreadable(
            f"--ckpt_path {path} cannot be read now: {reason}. Mend that and try again."
        )
    if isinstance(error, Foreign):
        danger = (
            "pickled Python objects, which could run code; it was refused and nothing in it was run"
        )
        return UserError(
            f"--ckpt_path {path} holds {danger}. Give a checkpoint written by this project."
        )
    if isinstance(error, TooMuch):
        return UserError(
            f"--ckpt_path {path} claims more than it can hold ({error}); nothing of it was used."
            " Give another checkpoint."
        )
    kind = type(error).__name__
    return UserError(f"--ckpt_path {path} is damaged or no checkpoint ({kind}). Give another one.")


def damage(path: Path) -> str | None:
    """Why a checkpoint cannot be used, or None where it is whole. Unreadable is raised: it may be
    whole.
    """
    _, reason = read_or_reason(path)
    return reason


def read_or_reason(path: Path) -> tuple[dict[str, Any], str | None]:
    """A checkpoint's contents, and None; or nothing, and why it cannot be used. Unreadable is
    raised: it may be whole.
    """
    try:
        return read(path, check_sums=True), None
    except Unreadable:
        raise
    except UserError as error:
        return {}, str(error).removeprefix("--ckpt_path ")


# What a checkpoint, our record in it and its configuration hold, as far as commands rely on it. Any
# may be absent.
LIGHTNING: dict[str, Any] = {
    "state_dict": dict[str, Any],
    "loops": dict,
    "callbacks": dict,
    "epoch": int,
    "global_step": int,
    "pytorch-lightning_version": str,
    "optimizer_states": list,
    "lr_schedulers": list,
}
# Entries with which a run goes on: one of them that is no plain data is an error.
ENTRIES_OF_A_RUN = {
    *LIGHTNING,
    RUN_KEY,
    "hyper_parameters",
    "datamodule_hyper_parameters",
    # Of WeightAveraging
    "current_model_state",
    "averaging_state",
}
RECORD: dict[str, Any] = {
    "config": dict[str, Any],
    # As the user's own data module describes itself
    "data": dict,
    "metrics": dict[str, Any],
    "versions": dict[str, Any],
    "state": dict[str, Any],
    CHOSEN: dict[str, Any],
    "run_name": str,
    "run_id": str,
    "can_go_on": bool,
    LEFT_OUT: list[str],
}
# What a run may have chosen by itself
CHOICES: dict[str, Any] = {
    "precision": str,
    "accelerator": str,
    "devices": int,
    "threads": int,
    # With so many ranks that many threads were chosen.
    "ranks": int,
}
SECTIONS: dict[str, Any] = dict.fromkeys(("model", "data", "trainer"), (dict, type(None)))


def record(checkpoint: dict[str, Any], path: Path, to_resume: bool = False) -> dict[str, Any]:
    """What a checkpoint records about its run: ``config``, ``run_name``, ``data_source``,
    ``metrics``, ...; and as ``is_own`` whether a run of this user wrote it. A UserError where it is
    not written by this project, or changed since (``to_resume``: also in what :func:`outline` tells
    apart).

    Args:
        checkpoint: What was read from the file.
        path: The file, for the error.
        to_resume: Whether a run goes on from it.
    """
    run = record_in(checkpoint)
    if "config" not in run:
        raise UserError(
            f"--ckpt_path {path} was not written by this project: it does not name its network."
        )
    _check(run, RECORD, path, "run")
    _check(run["config"], SECTIONS, path, "run.config")
    _check(run.get(CHOSEN, {}), CHOICES, path, f"run.{CHOSEN}")
    for key in run["config"]:
        # The parser would take it for a section's entry.
        if "." in str(key):
            raise _changed(path, f"run.config.{key}")
    for key in ("config", "metrics", "data_source", "versions", CHOSEN):
        for _, value in leaves(run.get(key), with_places=False):
            if not isinstance(value, VALUES):
                raise _changed(path, f"run.{key}")
    saved = run.get("state", {}).get("outline")
    if to_resume and saved is not None and saved != outline(checkpoint):
        raise _changed(path, " or ".join(("run.state", *RESTORED)))
    own = is_own(checkpoint)
    # Commands print a run's name, its metrics' names and its versions.
    shown = {
        key: without_control_characters(value) for key, value in run.items() if key != "config"
    }
    return shown | {"config": run["config"], "is_own": own}


def _check(found: dict[str, Any], kinds: dict[str, Any], path: Path, name: str) -> None:
    for key in kinds.keys() & found.keys():
        if not _is_of(found[key], kinds[key]):
            raise _changed(path, f"{name}.{key}")


def _is_of(value: Any, kind: Any) -> bool:
    """Whether a value is of a type; of ``list[type]`` or ``dict[type, Any]``: also its elements, or
    its keys.
    """
    inner = get_args(kind)
    if not inner:
        return isinstance(value, kind)
    # To walk through a dictionary gives its keys.
    return isinstance(value, get_origin(kind)) and all(isinstance(each, inner[0]) for each in value)


def _changed(path: Path, key: str) -> UserError:
    shown = printable(key)[:200]
    return UserError(
        f"--ckpt_path {path}: its entry {shown} is not what this project writes."
        " Give another checkpoint."
    )
