"""A checkpoint's weights and buffers, given to a module as Lightning does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.nn.parameter import is_lazy
from unbroken.errors import UserError, without_control_characters
from unbroken.parts.module import device_of, give_plain_buffers, make_buffer
from unbroken.storage.contents import LEFT_OUT, record_in, with_own_containers
from unbroken.storage.savable import is_expanded
from unbroken.storage.seals import without_states

# What torch raises where a module cannot take weights
MISFITS = (RuntimeError, TypeError, AttributeError)


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
    taker = module
    if late and again and fills_in_on_load and _has_no_place_for(weights, module):
        # Lightning calls the hook before it loads them. The hook may make room, or put in what was
        # not saved, and would do so twice. So a copy tells here whether they fit then.
        taker = copy.deepcopy(module)
        taker.on_load_checkpoint(checkpoint)
        weights = checkpoint["state_dict"]
    with misfits_as_errors(f"--ckpt_path {path}"):
        missing, unexpected = taker.load_state_dict(weights, strict=False)
        makes_layers = is_overridden("setup", module) or fills_in_on_load
        if late and makes_layers and unexpected and not missing:
            return False
        if missing or unexpected:
            # The error tells which.
            taker.load_state_dict(weights, strict=module.strict_loading)
    return taker is module


def _has_no_place_for(weights: dict[str, Any], module: LightningModule) -> bool:
    """Load weights; returns whether the module has others than these, or of other sizes."""
    try:
        missing, _ = module.load_state_dict(weights, strict=False)
    except MISFITS:
        return True
    return bool(missing)


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
