"""A state between two optimizer steps: every kept part, and how Lightning's own entries were at
that moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities.memory import recursive_detach
from torch import nn
from torch.nn.parameter import is_lazy
from unbroken import lightning_internals
from unbroken.parts.declared import plain_state
from unbroken.parts.hyperparameters import plain_groups
from unbroken.parts.loops import Place
from unbroken.parts.part import Part
from unbroken.parts.users_callbacks import users_callbacks
from unbroken.stopping.ranks import say
from unbroken.storage.checkpoint_files import RUN_KEY, plain_entries
from unbroken.tensors.same_values import deep_copy, is_same

# The module or a callback, and what its own on_save_checkpoint adds; None where it cannot be asked.
Saved = tuple[Any, dict[str, Any] | None]
# How a state dict names what a part of a module gives it beside tensors.
EXTRA_STATE = "_extra_state"


@dataclass
class Snapshot:
    """The state at one place in the loops. A save writes it, at once or a little later."""

    place: Place
    # By name of the part: this rank's own, and those of which rank zero's counts.
    mine: dict[str, Any] = field(default_factory=dict)
    shared: dict[str, Any] = field(default_factory=dict)
    # Lightning's own entries as they are now. Empty where the save follows at once.
    entries: dict[str, Any] = field(default_factory=dict)
    # What the module's and the user's callbacks' own on_save_checkpoint added at that moment.
    added: dict[str, Any] = field(default_factory=dict)
    # The counters of the fit loop, where they are not those at the save.
    loops: dict[str, Any] | None = None

    def add(self, trainer: Trainer, parts: Sequence[Part]) -> None:
        """Take parts. They are copied, for the training goes on and changes sums in place."""
        for part in parts:
            value = part.take(trainer)
            if not part.takes_copies:
                value = deep_copy(value)
            if part.of_each_rank:
                self.mine[part.name] = value
            else:
                self.shared[part.name] = value

    def add_entries(self, trainer: Trainer) -> None:
        """Take what hooks may change before the save, of what Lightning saves itself.

        Those are the states of callbacks and of the data module, and the buffers and extra states
        of the module.
        """
        states = {}
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            states[callback.state_key] = callback.state_dict()
        entries: dict[str, Any] = {"callbacks": states}
        module = trainer.lightning_module
        buffers = {name: each for name, each in module.named_buffers() if not is_lazy(each)}
        entries["state_dict"] = {**buffers, **extra_states(module)}
        data = trainer.datamodule  # type: ignore[attr-defined]
        if data is not None:
            entries[type(data).__qualname__] = data.state_dict()
        self.entries = deep_copy(recursive_detach(entries))

    def add_saved(self, trainer: Trainer) -> None:
        """Take what the user's own ``on_save_checkpoint`` adds."""
        for _, saved in saved_by_users(trainer):
            self.added |= plain_entries(saved or {})

    def put_entries_into(self, checkpoint: dict[str, Any]) -> None:
        """Let Lightning's own entries in a checkpoint be those of this moment."""
        for key, before in self.entries.items():
            saved = checkpoint.get(key)
            if not saved or not before:
                # A data module's state_dict may return None.
                continue
            for name, value in before.items():
                if name in saved:
                    saved[name] = value


class BeforeHooks:
    """What Lightning has restored, as it is before the user's hooks of the start, to be given back
    after them.

    A resumed run calls ``on_fit_start`` and ``on_train_start`` again, and ``on_train_epoch_start``
    for the epoch that goes on. The run that was killed had called them long ago. So what they do to
    weights, optimizers, schedules, callbacks and the data module must be undone: else a rate that
    is halved at each epoch's start would be halved twice.
    """

    def __init__(self) -> None:
        self.weights: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.optimizers: list[Any] = []
        self.schedules: list[Any] = []
        self.callbacks: list[tuple[Any, Any]] = []
        self.data: dict[str, Any] = {}
        self.own: list[Saved] = []
        self.extra: dict[str, Any] = {}

    def take_loaded(self, trainer: Trainer) -> None:
        """Note what Lightning loads first: weights and buffers (on the CPU), the user's callbacks,
        data, the module's own.
        """
        module = trainer.lightning_module
        self.weights = []
        for tensor in tensors_of(trainer):
            self.weights.append((tensor, tensor.detach().to("cpu", copy=True)))
        self.callbacks = []
        for callback in users_callbacks(trainer):
            self.callbacks.append((callback, deep_copy(callback.state_dict())))
        data = trainer.datamodule  # type: ignore[attr-defined]
        if data is not None:
            self.data = deep_copy(data.state_dict())
        self.own = saved_by_users(trainer)
        self.extra = deep_copy(extra_states(module))

    def take_training(self, trainer: Trainer) -> None:
        """Note what Lightning loads later: the states of optimizers and schedules."""
        self.optimizers = [deep_copy(each.state_dict()) for each in trainer.optimizers]
        configs = trainer.lr_scheduler_configs
        self.schedules = [deep_copy(plain_state(config.scheduler)) for config in configs]

    def give_back(self, trainer: Trainer) -> None:
        """Undo what the hooks have changed."""
        with torch.no_grad():
            for tensor, value in self.weights:
                tensor.copy_(value)
        for optimizer, state in zip(trainer.optimizers, self.optimizers, strict=True):
            optimizer.load_state_dict(state)
        for config, state in zip(trainer.lr_scheduler_configs, self.schedules, strict=True):
            config.scheduler.load_state_dict(state)
        for callback, state in self.callbacks:
            if state:
                callback.load_state_dict(state)
        data = trainer.datamodule  # type: ignore[attr-defined]
        if self.data:
            data.load_state_dict(self.data)
        give_extra_states(trainer.lightning_module, self.extra)
        # The hooks may count something that a part saves and loads itself.
        load_what_has_changed(trainer, self.own)


class TrainingState:
    """What hooks of a validation or of an epoch's end may change of the training.

    Before a stop inside a validation saves, it is given back: a resumed run begins the validation
    again, and its hooks act a second time. Where a run ends inside an epoch, a longer run gets it.
    Only references are kept of an optimizer's state, for it may be as large as the weights.
    """

    def __init__(self, trainer: Trainer, copies_weights: bool) -> None:
        self.weights: list[tuple[torch.Tensor, torch.Tensor]] = []
        if copies_weights:
            for tensor in tensors_of(trainer):
                self.weights.append((tensor, tensor.detach().clone()))
        self.versions = lightning_internals.versions_of(trainer.lightning_module)
        self.optimizers: list[tuple[Any, list[dict[str, Any]], dict[Any, Any]]] = []
        for optimizer in trainer.optimizers:
            groups = [dict(group) for group in optimizer.param_groups]
            states = {parameter: dict(state) for parameter, state in optimizer.state.items()}
            self.optimizers.append((optimizer, groups, states))
        self.schedules: list[tuple[Any, Any]] = []
        for config in trainer.lr_scheduler_configs:
            state = deep_copy(plain_state(config.scheduler))
            self.schedules.append((config.scheduler, state))
        # A stop inside the sanity check saves nothing, so nobody is asked what he would save.
        self.own = [] if trainer.sanity_checking else saved_by_users(trainer)

    def as_data(self, trainer: Trainer) -> dict[str, Any]:
        """What has been changed since, as it was before: plain data for a checkpoint."""
        copies = {id(tensor): value for tensor, value in self.weights}
        weights: dict[str, torch.Tensor] = {}
        for name, parameter in trainer.lightning_module.named_parameters():
            before = copies.get(id(parameter))
            if before is not None and not torch.equal(before, parameter.detach()):
                weights[name] = before.cpu()
        groups = [plain_groups(before) for _, before, _ in self.optimizers]
        schedules = [state for _, state in self.schedules]
        return {"weights": weights, "groups": groups, "schedules": schedules}

    def has_changed_weights(self, trainer: Trainer) -> bool:
        """Whether the validation has changed weights that :meth:`give_back` cannot give back."""
        if self.weights:
            return False
        now = lightning_internals.versions_of(trainer.lightning_module)
        # One that is there now alone was lazy, and had no value that could be changed.
        return any(now.get(name) != version for name, version in self.versions.items())

    def give_back(self, trainer: Trainer) -> None:
        """Undo what the validation has changed."""
        for tensor, value in self.weights:
            tensor.data = value
        for scheduler, state in self.schedules:
            scheduler.load_state_dict(state)
        for optimizer, groups, states in self.optimizers:
            del optimizer.param_groups[len(groups) :]
            for group, before in zip(optimizer.param_groups, groups, strict=True):
                group.clear()
                group.update(before)
            optimizer.state.clear()
            optimizer.state.update(states)
        load_what_has_changed(trainer, self.own)


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


def saved_by_users(trainer: Trainer) -> list[Saved]:
    """The user's callbacks and the module, each with what its own ``on_save_checkpoint`` adds."""
    parts = [*users_callbacks(trainer), trainer.lightning_module]
    return [(part, saved_by(trainer, part)) for part in parts]


def saved_by(trainer: Trainer, part: Any) -> dict[str, Any] | None:
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


def load_what_has_changed(trainer: Trainer, own: Sequence[Saved]) -> None:
    """Give the module and callbacks back what :func:`saved_by` has found, where it has changed."""
    for part, saved in own:
        if saved is None or is_same(saved_by(trainer, part), saved):
            continue
        try:
            load_into(trainer, part, saved)
        except Exception as error:
            name = type(part).__name__
            reason = f"{type(error).__name__}: {error}"
            say(
                f"a resume of this run is not exact: on_load_checkpoint of {name} cannot be called"
                f" with what its on_save_checkpoint adds alone ({reason})."
            )


def load_into(trainer: Trainer, part: Any, saved: dict[str, Any]) -> None:
    """Call the ``on_load_checkpoint`` of the module or of a callback.

    A hook may look at entries of Lightning's, too. It finds those that are small.
    """
    checkpoint = {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "pytorch-lightning_version": lightning.__version__,
        **saved,
    }
    if isinstance(part, Callback):
        part.on_load_checkpoint(trainer, trainer.lightning_module, checkpoint)
    else:
        part.on_load_checkpoint(checkpoint)
