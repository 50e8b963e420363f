"""What hooks may change of that which Lightning restores itself: noted, and given back after them.

Three times a run calls hooks whose effects must not stay:

- A resumed run calls ``on_fit_start`` and ``on_train_start`` again, and ``on_train_epoch_start``
  for the epoch that goes on. The run that was killed had called them long ago, and a rate that is
  halved at each epoch's start would be halved twice.
- A run that is stopped inside a validation begins this validation again when it is resumed, and its
  hooks act a second time.
- A run that ends inside an epoch calls the hooks of the epoch's end. A longer run goes on from
  before them.

Each class notes one thing in its constructor, and ``give_back`` undoes what was changed since. A
list of them is what a moment needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import lightning
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities.memory import recursive_detach
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from unbroken.lightning_internals import buffers_left_out
from unbroken.parts.declared import plain_state
from unbroken.parts.users_callbacks import users_callbacks
from unbroken.stopping.ranks import say
from unbroken.storage.contents import RUN_KEY
from unbroken.tensors.same_values import deep_copy, is_same

# How a state dict names what a part of a module gives it beside tensors.
EXTRA_STATE = "_extra_state"


class BeforeHooks:
    """One thing as it is when it is noted."""

    def __init__(self, trainer: Trainer) -> None:
        raise NotImplementedError

    def give_back(self, trainer: Trainer) -> None:
        """Undo what was changed since."""
        raise NotImplementedError


def give_back_all(noted: Iterable[BeforeHooks], trainer: Trainer) -> None:
    """Give back what was noted, in this order."""
    for each in noted:
        each.give_back(trainer)


class SwappedWeights(BeforeHooks):
    """The parameters and buffers of the module, copied on their device, or in CPU memory where it
    has no room. To be given back where the run ends: hooks may have put other memory in their
    place, such as averaged weights, and this memory is left alone. Or they have put other modules
    or tensors at their names.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.names: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for part in trainer.lightning_module.modules():
            for kind in ("_modules", "_parameters", "_buffers"):
                self.names.append((vars(part)[kind], dict(vars(part)[kind])))
        tensors = tensors_of(trainer)
        devices = {tensor.device for tensor in tensors}
        with_room = {device for device in devices if has_room_for(tensors, device)}
        self.copies: list[tuple[Tensor, Tensor]] = []
        for tensor in tensors:
            value = tensor.detach()
            copy = value.clone() if tensor.device in with_room else value.cpu()
            self.copies.append((tensor, copy))

    def give_back(self, trainer: Trainer) -> None:
        for now, before in self.names:
            now.clear()
            now.update(before)
        for tensor, value in self.copies:
            tensor.data = value.to(tensor.device)


def has_room_for(tensors: Sequence[Tensor], device: torch.device) -> bool:
    """Whether a GPU has, of memory that nobody has taken, twice what a copy of its tensors needs. A
    run that fits without a copy must fit with one.
    """
    if device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    return free >= 2 * sum(tensor.nbytes for tensor in tensors if tensor.device == device)


class WeightValues(BeforeHooks):
    """The parameters and buffers of the module, copied to the CPU. The run goes on with the memory
    that they have. Buffers that a state dict has are at their names again.
    """

    def __init__(self, trainer: Trainer) -> None:
        tensors = tensors_of(trainer)
        self.copies = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in tensors]
        self.buffers: list[tuple[dict[str, Any], str, Tensor]] = []
        for part in trainer.lightning_module.modules():
            left_out = buffers_left_out(part)
            buffers = vars(part)["_buffers"]
            for name, buffer in buffers.items():
                if buffer is not None and name not in left_out:
                    self.buffers.append((buffers, name, buffer))

    def give_back(self, trainer: Trainer) -> None:
        for now, name, buffer in self.buffers:
            if name in now:
                now[name] = buffer
        with torch.no_grad():
            for tensor, value in self.copies:
                tensor.copy_(value)


class GroupsBefore(NamedTuple):
    """The groups of one optimizer, what each of them held, and the states of its parameters."""

    optimizer: Any
    groups: list[dict[str, Any]]
    values: list[dict[str, Any]]
    states: dict[Any, Any]


class OptimizerGroups(BeforeHooks):
    """The groups of optimizers, and which state each parameter has. The state's tensors are not
    copied, since they may be larger than the weights: what hooks change inside them stays.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.before: list[GroupsBefore] = []
        for optimizer in trainer.optimizers:
            groups = list(optimizer.param_groups)
            # Beside the states of parameters there may be values of any kind.
            states = {
                key: dict(state) if isinstance(state, dict) else state
                for key, state in optimizer.state.items()
            }
            self.before.append(GroupsBefore(optimizer, groups, list(map(dict, groups)), states))

    def give_back(self, trainer: Trainer) -> None:
        for optimizer, groups, values, states in self.before:
            # A hook may have added some, and taken some out.
            optimizer.param_groups[:] = groups
            for group, value in zip(groups, values, strict=True):
                group.clear()
                group.update(value)
            optimizer.state.clear()
            optimizer.state.update(states)


class OptimizerStates(BeforeHooks):
    """The states of optimizers, copied."""

    def __init__(self, trainer: Trainer) -> None:
        self.states = [deep_copy(each.state_dict()) for each in trainer.optimizers]

    def give_back(self, trainer: Trainer) -> None:
        # A hook may have added one.
        for optimizer, state in zip(trainer.optimizers, self.states, strict=False):
            optimizer.load_state_dict(state)


class Schedules(BeforeHooks):
    """The states of learning-rate schedules. A hook may make one anew, of the same class: then that
    one gets the state.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.states: list[tuple[type, Any]] = []
        for config in trainer.lr_scheduler_configs:
            state = deep_copy(plain_state(config.scheduler))
            self.states.append((type(config.scheduler), state))

    def give_back(self, trainer: Trainer) -> None:
        for config, (kind, state) in zip(trainer.lr_scheduler_configs, self.states, strict=False):
            if type(config.scheduler) is kind:
                config.scheduler.load_state_dict(state)


class CallbackStates(BeforeHooks):
    """What the user's callbacks return as their states."""

    def __init__(self, trainer: Trainer) -> None:
        callbacks = users_callbacks(trainer)
        self.states = [(callback, deep_copy(callback.state_dict())) for callback in callbacks]

    def give_back(self, trainer: Trainer) -> None:
        for callback, state in self.states:
            if state:
                callback.load_state_dict(state)


class DataState(BeforeHooks):
    """The state of the data module, which may be None."""

    def __init__(self, trainer: Trainer) -> None:
        self.data = trainer.datamodule  # type: ignore[attr-defined]
        self.state = None if self.data is None else deep_copy(self.data.state_dict())

    def give_back(self, trainer: Trainer) -> None:
        if self.state:
            self.data.load_state_dict(self.state)


class ExtraStates(BeforeHooks):
    """What parts of the module give a state dict beside tensors."""

    def __init__(self, trainer: Trainer) -> None:
        self.states = deep_copy(extra_states(trainer.lightning_module))

    def give_back(self, trainer: Trainer) -> None:
        give_extra_states(trainer.lightning_module, self.states)


class OwnEntries(BeforeHooks):
    """What the ``on_save_checkpoint`` of the module and of the user's callbacks adds: something
    that they count and load themselves.
    """

    def __init__(self, trainer: Trainer) -> None:
        parts = [*users_callbacks(trainer), trainer.lightning_module]
        # None where a part cannot be asked.
        self.added = [(part, entries_added_by(part, trainer)) for part in parts]

    def give_back(self, trainer: Trainer) -> None:
        for part, added in self.added:
            if added is None or is_same(entries_added_by(part, trainer), added):
                continue
            try:
                load_into(part, trainer, added)
            except Exception as error:
                name = type(part).__name__
                reason = f"{type(error).__name__}: {error}"
                say(
                    f"a resume of this run is not exact: on_load_checkpoint of {name} cannot be"
                    f" called with what its on_save_checkpoint adds alone ({reason})."
                )


def tensors_of(trainer: Trainer) -> list[torch.Tensor]:
    """The parameters and buffers of the module, but for lazy ones, which have no values yet."""
    module = trainer.lightning_module
    tensors = [*module.parameters(), *module.buffers()]
    return [tensor for tensor in tensors if not is_lazy(tensor)]


def extra_states(module: nn.Module) -> dict[str, Any]:
    """What parts of a module give a state dict beside tensors, by its names there."""
    states: dict[str, Any] = {}
    for name, part in module.named_modules():
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            prefix = f"{name}." if name else ""
            states[f"{prefix}{EXTRA_STATE}"] = part.get_extra_state()
    return states


def give_extra_states(module: nn.Module, states: dict[str, Any]) -> None:
    """Put back what :func:`extra_states` has found."""
    for name, value in states.items():
        path = name.removesuffix(EXTRA_STATE).removesuffix(".")
        module.get_submodule(path).set_extra_state(value)


def entries_added_by(part: Any, trainer: Trainer) -> dict[str, Any] | None:
    """What the ``on_save_checkpoint`` of the module or of a callback adds to a checkpoint; None
    where it cannot be asked now.
    """
    added: dict[str, Any] = {}
    try:
        if isinstance(part, Callback):
            part.on_save_checkpoint(trainer, trainer.lightning_module, added)
        else:
            part.on_save_checkpoint(added)
        # A command's own record of the run is none of the training's state.
        added.pop(RUN_KEY, None)
        return deep_copy(recursive_detach(added))
    except Exception:
        # It changes entries of Lightning's, which are not there, or saves what is made later.
        return None


def load_into(part: Any, trainer: Trainer, added: dict[str, Any]) -> None:
    """Call the ``on_load_checkpoint`` of the module or of a callback.

    A hook may look at entries of Lightning's, too. It finds those that are small.
    """
    checkpoint = {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "pytorch-lightning_version": lightning.__version__,
        **added,
    }
    if isinstance(part, Callback):
        part.on_load_checkpoint(trainer, trainer.lightning_module, checkpoint)
    else:
        part.on_load_checkpoint(checkpoint)
