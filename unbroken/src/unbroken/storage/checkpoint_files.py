"""Checkpoint files: written completely or not at all, read as plain data or refused."""

from __future__ import annotations

import hashlib
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, cast, get_args, get_origin

import numpy
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.nn.parameter import is_lazy
from unbroken.errors import UserError, printable, without_control_characters
from unbroken.lightning_internals import METADATA
from unbroken.parts.module import SPARSE, device_of, give_plain_buffers, make_buffer
from unbroken.stopping.ranks import say
from unbroken.storage.files import written_atomically
from unbroken.storage.staging import Staging
from unbroken.trust import keys
from unbroken.trust.torch_file import MANY_VALUES, Foreign, TooMuch, opened

MAPPINGS = (dict, OrderedDict, Counter)
SEQUENCES = (list, tuple, set, torch.Size)
LEAVES = (type(None), bool, int, float, str)
# In a configuration; the last two are empty ones
VALUES = (*LEAVES, dict, list)
PLAIN = (*VALUES, complex, bytes, torch.dtype, torch.device, *MAPPINGS, *SEQUENCES)
# What this project adds to Lightning's checkpoint: name, configuration, data source, ...
RUN_KEY = "run"
# What the run chose by itself, in what this project adds: see :mod:`unbroken.chosen`.
CHOSEN = "chosen"
# The names of entries that were left out, in what this project adds.
LEFT_OUT = "left_out"
# How a seal begins that is over all of a checkpoint, and is followed by the length of the text that
# it is over, the seal of that length, and the seal of the text
SEAL = "seal"
# How one of an older version begins that is over all but the attributes of dictionaries
SEAL_OF_ALL = "all:"
# What a seal looks like in a pickle: with a length that is sealed, and without. The latter is one
# of an older version: the key "seal", how the pickle remembers it (q or r), and a text (X) of a
# known length.
WITH_LENGTH = re.compile(rb"seal:([0-9]{1,15}):([0-9a-f]{64}):")
WITHOUT_LENGTH = re.compile(rb"seal(?:q.|r....)X(?:D\0\0\0all:|@\0\0\0)[0-9a-f]{64}", re.DOTALL)
# A pickle has fewer steps than four times the letters of the text that is sealed.
STEPS_OF_LETTER = 4
# As many steps has a file that an older version may have sealed.
MOST_STEPS_BEFORE = 1_000_000
# Seals in one file that are looked at: a run's record may hold an older one.
MOST_SEALS = 10


def record_in(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """What this project has added to a checkpoint; nothing where another program wrote the file."""
    record = checkpoint.get(RUN_KEY)
    return record if isinstance(record, dict) else {}


class NotPlain(TypeError):
    """A value that a checkpoint cannot hold; its message names the place."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Saves beside the target, flushes to disk, renames: whatever happens, the target is whole, old
    or new.

    Lightning's own renames from the temporary folder, does not flush, and swallows a
    PermissionError (issue 21800). The first file is read back before it takes its place, so that a
    run that cannot be gone on with ends at its first save and not when it is needed.
    """

    def __init__(self) -> None:
        # The fingerprint of the contents that are read next. None: they may be any.
        self.reads_next: str | None = None
        # Whether what is read is used as a stranger's.
        self.reads_no_states = False
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
        target.parent.mkdir(parents=True, exist_ok=True)
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


class OneSave(TorchCheckpointIO):
    """The Trainer's way to the disk while the engine saves once.

    Args:
        writer: Makes the checkpoint plain.
        needed: Entries that Lightning restores itself, beside its usual ones. A run cannot do
            without.
        add_state: Puts what a resume needs into Lightning's checkpoint; returns this project's
            entry of it.
        write: Takes the plain checkpoint. It knows where it is written.
    """

    def __init__(
        self,
        writer: AtomicCheckpointIO,
        needed: Collection[str],
        add_state: Callable[[dict[str, Any]], dict[str, Any]],
        write: Callable[[dict[str, Any]], None],
    ) -> None:
        self._writer = writer
        self._needed = needed
        self._add_state = add_state
        self._write = write
        self._record: dict[str, Any] | None = None

    def add_state(self, checkpoint: dict[str, Any]) -> None:
        """Called before the user's own ``on_save_checkpoint``, with Lightning's checkpoint."""
        self._record = self._add_state(checkpoint)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Take the whole checkpoint, on rank zero. Its own containers are changed."""
        if checkpoint.get(RUN_KEY) is not self._record:
            raise UserError(
                f"a checkpoint's entry {RUN_KEY!r} is this project's, and on_save_checkpoint of the"
                " module or of a callback has set it. Give that entry another name."
            )
        self._writer.make_plain(checkpoint, self._needed)
        self._write(checkpoint)


def sign(checkpoint: dict[str, Any]) -> None:
    """Add what tells later whether the file was changed, and that it is the user's."""
    run = checkpoint[RUN_KEY]
    state = run.get("state")
    if state:
        state["outline"] = outline(checkpoint)
    run["seal"] = None
    text = Measured(_sealed(checkpoint))
    seal = keys.seal(text)
    if seal is not None:
        length = keys.seal([_length_sealed(text.length)])
        run["seal"] = f"{SEAL}:{text.length}:{length}:{seal}"


def is_own(checkpoint: dict[str, Any]) -> bool:
    """Whether a run with a key of this user wrote a checkpoint, and nothing but the values of
    tensors was changed since.
    """
    found = record_in(checkpoint).get("seal")
    if not isinstance(found, str):
        return False
    if found.startswith(f"{SEAL}:"):
        return keys.is_sealed(lambda: _sealed(checkpoint), found.rpartition(":")[2])
    if not _has_usual_attributes(checkpoint):
        return False
    if found.startswith(SEAL_OF_ALL):
        before = found.removeprefix(SEAL_OF_ALL)
        return keys.is_sealed(lambda: _all_sealed_before(checkpoint), before)
    # Still older versions sealed the configuration, and the texts of callbacks and attributes.
    return keys.is_sealed(lambda: _sealed_before(checkpoint), found)


class Measured:
    """The pieces of a text, and its length after they were asked for."""

    def __init__(self, pieces: Iterator[str]) -> None:
        self._pieces = pieces
        self.length = 0

    def __iter__(self) -> Iterator[str]:
        for piece in self._pieces:
            self.length += len(piece)
            yield piece


def _with_versions_alone(weights: dict[str, Any]) -> dict[str, Any]:
    """Weights, and of what steers how they are loaded the versions of parts alone: nn.Module would
    put other tensors in the place of its own.
    """
    made: Any = OrderedDict(weights)
    parts = getattr(weights, METADATA, None)
    if isinstance(parts, dict):
        setattr(made, METADATA, OrderedDict((part, _versions_of(parts[part])) for part in parts))
    return cast("dict[str, Any]", made)


def _length_sealed(length: int) -> str:
    """The text that is sealed for the length of another one. No other text begins like this."""
    return f"length {length}"


def fingerprint(checkpoint: dict[str, Any]) -> str:
    """What tells the contents of a checkpoint from any others, but for the values of tensors.

    A path is no such thing: another file may lie there a moment later.
    """
    found = hashlib.sha256()
    for part in _pieces(checkpoint, with_all=True):
        found.update(part.encode(errors="backslashreplace"))
    return found.hexdigest()


def refuse_other_contents(checkpoint: dict[str, Any], expected: str, path: Path) -> None:
    """A UserError where a file that was read again does not hold what was judged before."""
    if fingerprint(checkpoint) != expected:
        raise UserError(
            f"--ckpt_path {path} was replaced while it was read, and nothing of the new file was"
            " used. If it is yours, try again."
        )


def without_states(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """What is used of a stranger's checkpoint: no states of callbacks, loops, optimizers and
    attributes.
    """
    kept = {key: value for key, value in checkpoint.items() if key not in STATES}
    kept["state_dict"] = _with_versions_alone(checkpoint["state_dict"])
    run = {key: value for key, value in record_in(checkpoint).items() if key != "state"}
    return kept | {RUN_KEY: run, "loops": {}}


def _sealed(checkpoint: dict[str, Any]) -> Iterator[str]:
    """All that the reader gives but the values of tensors, in pieces of one text.

    Its beginning is that of no older seal's text.
    """
    yield "all with attributes:"
    yield from _pieces(_without_seal(checkpoint), with_all=True)


def _all_sealed_before(checkpoint: dict[str, Any]) -> Iterator[str]:
    yield from _pieces(_without_seal(checkpoint), with_all=False)


def _without_seal(checkpoint: dict[str, Any]) -> dict[str, Any]:
    return {**checkpoint, RUN_KEY: {**checkpoint[RUN_KEY], "seal": None}}


def _pieces(value: Any, with_all: bool) -> Iterator[str]:
    kind = type(value)
    if kind in MAPPINGS:
        yield f"{kind.__name__}{len(value)}:"
        for each in chain.from_iterable(value.items()):
            if type(each) in LEAVES:
                yield f"{each!r},"
            else:
                yield from _pieces(each, with_all)
        if with_all and isinstance(value, OrderedDict):
            yield "attributes "
            yield from _pieces(vars(value), with_all)
    elif kind in SEQUENCES:
        yield f"{kind.__name__}{len(value)}:"
        # A set has no order of its own.
        items = sorted(value, key=repr) if kind is set else value
        for item in items:
            # The most frequent ones need no generator of their own.
            if type(item) in LEAVES:
                yield f"{item!r},"
            else:
                yield from _pieces(item, with_all)
    elif isinstance(value, Tensor):
        yield f"{value.dtype}{list(value.shape)}"
        if with_all:
            # torch does not save it of others.
            needs_grad = value.requires_grad and (
                value.layout == torch.strided or kind is not Tensor
            )
            yield f"{value.layout} {kind.__name__} {needs_grad},"
    else:
        yield f"{value!r},"


def _has_usual_attributes(contents: Any) -> bool:
    """Whether no dictionary in contents has other attributes than those of nn.Module's state dict:
    the versions of its parts.
    """
    waiting = [contents]
    while waiting:
        value = waiting.pop()
        kind = type(value)
        if kind is OrderedDict and not _are_versions(vars(value)):
            return False
        if kind in MAPPINGS:
            waiting += value.values()
        elif kind in SEQUENCES:
            waiting += value
    return True


def _are_versions(attributes: dict[str, Any]) -> bool:
    if not attributes:
        return True
    versions: Any = attributes.get(METADATA)
    if attributes.keys() != {METADATA} or type(versions) is not OrderedDict or vars(versions):
        return False
    return all(
        type(part) is str and _versions_of(found) == found for part, found in versions.items()
    )


def _versions_of(found: Any) -> dict[str, int]:
    """What is used of what nn.Module knows of a part: the number of its version."""
    version = found.get("version") if type(found) is dict else None
    return {"version": version} if type(version) is int else {}


def _sealed_before(checkpoint: dict[str, Any]) -> Iterator[str]:
    yield f"[{checkpoint[RUN_KEY].get('config')!r}, ["
    between = ""
    for place, text in _texts_of_states(checkpoint):
        yield f"{between}{(place, text)!r}"
        between = ", "
    yield "]]"


def _texts_of_states(checkpoint: dict[str, Any]) -> Iterator[tuple[str, str]]:
    states = [(checkpoint.get("callbacks"), True)]
    states += [(attributes, False) for attributes in _attributes_in(checkpoint)]
    for state, has_keys in states:
        for place, leaf in _leaves(state):
            if isinstance(leaf, str) and (has_keys or not place.startswith("a key of")):
                yield place, leaf


def _attributes_in(checkpoint: dict[str, Any]) -> list[dict[str, Any]]:
    """What each rank keeps of attributes of the module and data module, as a checkpoint has it."""
    found: list[dict[str, Any]] = []
    state = record_in(checkpoint).get("state")
    while isinstance(state, dict):
        ranks = state.get("ranks")
        if isinstance(ranks, list):
            objects = [rank.get("objects") for rank in ranks if isinstance(rank, dict)]
            for kept in objects:
                kinds = kept if isinstance(kept, dict) else {}
                states = [kinds.get("attributes"), kinds.get("declared")]
                found += [each for each in states if isinstance(each, dict)]
        inside = state.get("inside_epoch")
        state = inside.get("state") if isinstance(inside, dict) else None
    return found


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


class WholeWrites:
    """A file as torch.save takes it, whose writes are whole: the system may write a part only.

    PyTorch's writer turns an error of the file's into one of its own, which names no reason. So it
    is kept here.
    """

    def __init__(self, file: Any) -> None:
        self._file = file
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        """Write all of ``data``; returns its bytes."""
        rest = memoryview(data).cast("B")
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self.failure = error
            raise
        return len(data)

    def flush(self) -> None:
        """Nothing: what was written is with the system."""


def prove_it_can_be_read(written: Path, path: Path) -> None:
    """A UserError if the file that was written beside ``path`` could not be used."""
    try:
        _read_plain(written, check_sums=False)
    except Exception as error:
        if isinstance(error, MemoryError) or "t allocate memory" in str(error):
            # There is no room for a second copy. That says nothing about the file.
            return
        reason = " ".join(f"{type(error).__name__} {error}".split())[:300]
        raise UserError(
            f"{path} was not saved, for it could not be read again: {reason}."
        ) from error


def make_hyperparameters_plain(checkpoint: dict[str, Any]) -> None:
    """Keep ``hparams`` that are no plain data as the configuration has them, for
    ``load_from_checkpoint`` to make them again. What is not from there is kept as text, such as a
    path, or as numbers and lists where it is NumPy's.
    """
    # A class of OmegaConf
    checkpoint.pop("hparams_type", None)
    for key, part in {"hyper_parameters": "model", "datamodule_hyper_parameters": "data"}.items():
        if key not in checkpoint:
            continue
        given = dict(checkpoint[key])
        odd = {name: value for name, value in given.items() if _reason_not_plain(value, name)}
        for name, value in odd.items():
            given[name] = value.tolist() if hasattr(value, "tolist") else str(value)
        config = record_in(checkpoint).get("config", {})
        written = config.get(part) or {}
        arguments = written.get("init_args", {})
        if odd and odd.keys() <= arguments.keys():
            for name in odd:
                given[name] = arguments[name]
            given["_class_path"] = written["class_path"]
            given["_instantiator"] = "lightning.pytorch.cli.instantiate_module"
        checkpoint[key] = given


def made_plain(value: Any, place: str) -> Any:
    """``value`` as it is saved: NumPy's numbers become Python's, an expanded tensor a whole one.
    Containers are new; the run's own stay as they are.

    Raises:
        NotPlain: What would not load again, by name.
    """
    if isinstance(value, Tensor):
        return _tensor_as_saved(value, place)
    if isinstance(value, numpy.generic):
        number = value.item()
        if isinstance(number, numpy.generic):
            # Python has no number of that precision, as of a longdouble.
            raise NotPlain(_no_plain(value, place))
        return made_plain(number, place)
    kind = type(value)
    if kind in MAPPINGS:
        return _mapping_made_plain(value, place)
    if kind is set:
        return {made_plain(item, f"{place}[...]") for item in value}
    if kind in SEQUENCES:
        return kind([made_plain(item, f"{place}[{index}]") for index, item in enumerate(value)])
    if kind not in PLAIN:
        raise NotPlain(_no_plain(value, place))
    return value


def _mapping_made_plain(value: Any, place: str) -> Any:
    made = type(value)()
    for key, item in value.items():
        plain_key = made_plain(key, f"a key of {place}")
        made[plain_key] = made_plain(item, f"{place}[{key!r}]")
    # nn.Module keeps the versions of its parts as an attribute of a state dict.
    if isinstance(value, OrderedDict):
        vars(made).update(vars(value))
    return made


def _tensor_as_saved(tensor: Tensor, place: str) -> Tensor:
    if is_lazy(tensor):
        raise NotPlain(
            f"{place} is the weight of a lazy layer that no batch has passed, and has no size:"
            " use the layer, or remove it."
        )
    if tensor.is_meta:
        raise NotPlain(f"{place} is a tensor without values (on the device meta).")
    if tensor.layout != torch.strided:
        if tensor.layout not in SPARSE:
            raise NotPlain(
                f"{place} is a tensor of layout {tensor.layout}, which would not load again."
            )
        return tensor.coalesce() if tensor.layout == torch.sparse_coo else tensor
    if tensor.is_nested:
        raise NotPlain(f"{place} is a nested tensor, which would not load again.")
    # An expanded tensor says that it is larger than what it stores. Such a file would be refused.
    if is_expanded(tensor):
        tensor = tensor.contiguous()
    # A view that negates or conjugates as it is read, and attributes of a tensor, are no plain
    # values.
    tensor = tensor.resolve_conj().resolve_neg()
    return tensor.detach() if vars(tensor) else tensor


def is_expanded(tensor: Tensor) -> bool:
    """Whether several places of a tensor are one place in memory, as after ``expand``."""
    if is_lazy(tensor) or tensor.layout != torch.strided or tensor.is_nested:
        return False
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in sizes)


def _no_plain(value: Any, place: str) -> str:
    kind = type(value)
    allowed = "checkpoints hold plain values only (numbers, text, lists, dicts, tensors)"
    name = f"{kind.__module__}.{kind.__qualname__}"
    return f"{place} is a {name}, which would not load again: {allowed}."


def _reason_not_plain(value: Any, place: str) -> str | None:
    """What in a value is no plain data and would not load with ``weights_only=True``, in words.
    None: nothing.
    """
    for where, leaf in _leaves(value, place):
        if type(leaf) not in PLAIN and not isinstance(leaf, Tensor):
            return _no_plain(leaf, where)
    return None


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
    contents = reader.read(usual + _further_steps(reader.pickle))
    if reader.steps > usual and not (isinstance(contents, dict) and is_own(contents)):
        raise TooMuch(MANY_VALUES)
    return contents


def _further_steps(pickle: bytes) -> int:
    """How many steps of a pickle this user's key vouches for, before it is read."""
    for found in islice(WITH_LENGTH.finditer(pickle), MOST_SEALS):
        length = int(found[1])
        text = [_length_sealed(length)]
        if keys.is_sealed(partial(list, text), found[2].decode()):
            return STEPS_OF_LETTER * length
    return MOST_STEPS_BEFORE if WITHOUT_LENGTH.search(pickle) else 0


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
# Entries that a resume alone needs
STATES = ("callbacks", "optimizer_states", "lr_schedulers", "loops")
# What torch raises where a module cannot take weights
MISFITS = (RuntimeError, TypeError, AttributeError)
SECTIONS: dict[str, Any] = dict.fromkeys(("model", "data", "trainer"), (dict, type(None)))
RESTORED = ("loops", "optimizer_states", "lr_schedulers")


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
        for _, value in _leaves(run.get(key), with_places=False):
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


def outline(checkpoint: dict[str, Any]) -> str:
    """A hash of what a resume restores besides weights and callbacks. A misfit would show only
    after files changed.
    """
    state = {**checkpoint[RUN_KEY]["state"], "outline": None}
    parts = [state, *(checkpoint.get(key) for key in RESTORED)]
    plain: list[Any] = []
    for _, leaf in _leaves(parts, with_places=False):
        plain.append((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf)
    return hashlib.sha256(repr(plain).encode()).hexdigest()


def _leaves(value: Any, where: str = "", with_places: bool = True) -> Iterator[tuple[str, Any]]:
    """The keys and values in nested plain containers, and containers that are empty, each with its
    place in words.

    Only exact types are opened: a subclass, as NumPy's numbers and text are, would not load again.
    """
    kind = type(value)
    if kind in MAPPINGS and value:
        for key, item in value.items():
            key_place = f"a key of {where}" if with_places else ""
            yield from _leaves(key, key_place, with_places)
            item_place = f"{where}[{key!r}]" if with_places else ""
            yield from _leaves(item, item_place, with_places)
    elif kind in SEQUENCES and value:
        items = sorted(value, key=repr) if kind is set else value
        for index, item in enumerate(items):
            item_place = f"{where}[{index}]" if with_places else ""
            yield from _leaves(item, item_place, with_places)
    else:
        yield where, value


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


def with_own_containers(value: Any) -> Any:
    """A value whose containers a hook may change without changing the value's own. The tensors are
    the same ones.
    """
    kind = type(value)
    if kind in MAPPINGS:
        made: Any = kind()
        for key, item in value.items():
            made[key] = with_own_containers(item)
        if kind is OrderedDict:
            vars(made).update(vars(value))
        return made
    if kind in (list, tuple):
        return kind([with_own_containers(item) for item in value])
    return set(value) if kind is set else value


# What draws in a setup() that comes later, such as a split, draws as in a new run.
@isolate_rng()
def load_weights(
    module: LightningModule,
    checkpoint: dict[str, Any],
    path: Path,
    late: bool = False,
    again: bool = False,
    own: bool = True,
) -> bool:
    """Give a module a checkpoint's weights, as Lightning does.

    Args:
        module: As it was made, before its ``setup``.
        checkpoint: What was read from the file. It is not changed.
        path: The file, for the error.
        late: Whether Lightning loads the weights later, after hooks that may make further layers.
        again: Whether Lightning loads the same weights once more, as for a resume.
        own: Whether the checkpoint is the user's. Of a stranger's, no states are used.

    Returns:
        Whether the weights fit as the module is now. Where they may fit ``late`` only, it is False.

    Raises:
        UserError: They do not fit.
    """
    checkpoint = with_own_containers(checkpoint if own else without_states(checkpoint))
    # SupervisedModule warns of it; here a misfit is an error.
    checkpoint.pop("network", None)
    module.configure_model()
    fill_in_what_was_left_out(checkpoint, [module.on_save_checkpoint])
    if not again:
        module.on_load_checkpoint(checkpoint)
        # Those that a state dict leaves out. On a resume the engine gives them back itself.
        give_plain_buffers(module, buffers_left_out(checkpoint))
    make_room_for_buffers(module, checkpoint)
    weights = checkpoint["state_dict"]
    if not own:
        with misfits_as_errors(f"--ckpt_path {path}"):
            refuse_other_kinds_of_numbers(module, weights)
    fills_in_on_load = is_overridden("on_load_checkpoint", module)
    if late and is_overridden("setup", module) and _lets_setup_size_buffers(module, weights):
        return False
    if late and again and fills_in_on_load:
        # Lightning calls the hook before it loads them. The hook may make layers, or put in what
        # was not saved, and called here as well it would do so twice.
        return _fit_as_they_are(module, weights)
    with misfits_as_errors(f"--ckpt_path {path}"):
        missing, unexpected = module.load_state_dict(weights, strict=False)
        makes_layers = is_overridden("setup", module) or fills_in_on_load
        if late and makes_layers and unexpected and not missing:
            return False
        if missing or unexpected:
            # The error tells which.
            module.load_state_dict(weights, strict=module.strict_loading)
    return True


def _fit_as_they_are(module: LightningModule, weights: dict[str, Any]) -> bool:
    """Load weights; returns whether all of them, and no others, have a place in the module."""
    try:
        missing, unexpected = module.load_state_dict(weights, strict=False)
    except MISFITS:
        return False
    return not missing and not unexpected


@contextmanager
def misfits_as_errors(option: str) -> Iterator[None]:
    """Inside, weights that a module cannot take are a :class:`UserError` of the option."""
    try:
        yield
    except MISFITS as error:
        reason = without_control_characters(" ".join(str(error).split()))[:300]
        raise UserError(f"{option}: its weights do not fit the network: {reason}") from None


def refuse_other_kinds_of_numbers(module: LightningModule, weights: dict[str, Any]) -> None:
    """Raise a TypeError where a weight would lose more than precision: torch makes a number with
    a fraction whole, and a complex one real, without a word.
    """
    own = module.state_dict()
    for name, value in weights.items():
        there = own.get(name)
        if not isinstance(value, Tensor) or not isinstance(there, Tensor):
            continue
        if _kind_of_numbers(value) > _kind_of_numbers(there):
            kind, own_kind = (str(each.dtype).removeprefix("torch.") for each in (value, there))
            raise TypeError(f"{name} is {kind} and not {own_kind}")


def _kind_of_numbers(tensor: Tensor) -> int:
    return 2 if tensor.is_complex() else int(tensor.is_floating_point())


def _lets_setup_size_buffers(module: LightningModule, weights: dict[str, Any]) -> bool:
    """Whether buffers have other sizes than in a checkpoint, and all parameters have theirs.

    ``setup`` may give a buffer its size, as of a mean of the data. Another network has other
    parameters.
    """
    buffers = dict(module.named_buffers())
    misfits = [
        name
        for name, own in module.state_dict().items()
        if isinstance(own, Tensor) and not is_lazy(own) and name in weights
        if isinstance(weights[name], Tensor) and weights[name].shape != own.shape
    ]
    return bool(misfits) and all(name in buffers for name in misfits)


def fill_in_what_was_left_out(
    checkpoint: dict[str, Any], saves: Sequence[Callable[[dict[str, Any]], Any]]
) -> None:
    """Put entries that a checkpoint could not hold into it, as they would be saved now.

    Args:
        checkpoint: As it was read.
        saves: The ``on_save_checkpoint`` of the module, and of callbacks.
    """
    left_out = record_in(checkpoint).get(LEFT_OUT)
    if not isinstance(left_out, list) or not left_out:
        return
    # A hook may change Lightning's entries, which it expects to find.
    now = dict(checkpoint)
    for name, value in checkpoint.items():
        if type(value) is dict:
            now[name] = dict(value)
    for save in saves:
        # It may need a training, which has not begun.
        with suppress(Exception):
            save(now)
    for name in left_out:
        if name in now:
            checkpoint.setdefault(name, now[name])


def plain_entries(entries: dict[str, Any]) -> dict[str, Any]:
    """Those entries that a checkpoint can hold."""
    found: dict[str, Any] = {}
    for name, value in entries.items():
        with suppress(NotPlain):
            found[name] = made_plain(value, name)
    return found


def give_expanded_buffers_memory(module: LightningModule) -> None:
    """Make expanded buffers whole, in place: nothing can be copied into a tensor whose places share
    their memory.
    """
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            if is_expanded(buffer):
                setattr(part, name, buffer.contiguous())


def make_room_for_buffers(module: LightningModule, checkpoint: dict[str, Any]) -> None:
    """Let a module take the buffers of a checkpoint that training has made or filled.

    A module may make a buffer in its training, or in the place of None. As it is made anew it lacks
    that buffer, and its state dict would not take it.
    """
    give_expanded_buffers_memory(module)
    parts = dict(module.named_modules())
    there = dict(module.named_buffers())
    weights = checkpoint.get("state_dict", {})
    for name, value in buffers_left_out(checkpoint).items():
        path, _, attribute = name.rpartition(".")
        if name in weights and name not in there and path in parts:
            empty = torch.empty_like(value, device=device_of(module))
            make_buffer(parts[path], attribute, empty, persistent=True)


def buffers_left_out(checkpoint: dict[str, Any], rank: int = 0) -> dict[str, torch.Tensor]:
    """The buffers of a rank that its state dict leaves out, of a checkpoint of ours; else none."""
    state = record_in(checkpoint).get("state")
    ranks = state.get("ranks") if isinstance(state, dict) else None
    if not isinstance(ranks, list) or not ranks:
        return {}
    mine = ranks[rank % len(ranks)]
    buffers = mine.get("buffers") if isinstance(mine, dict) else None
    if not isinstance(buffers, dict):
        return {}
    return {n: value for n, value in buffers.items() if isinstance(value, torch.Tensor)}
