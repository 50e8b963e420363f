"""The epoch that a limit has cut: a later start with more to do goes on inside it."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from unbroken import lightning_internals
from unbroken.checkpoint.before_hooks import (
    EXTRA_STATE,
    OptimizerGroups,
    Schedules,
    SwappedWeights,
    give_extra_states,
)
from unbroken.checkpoint.kept import KeptParts
from unbroken.checkpoint.snapshot import Snapshot, entries_of_users
from unbroken.loading.log_steps import SHARDING
from unbroken.parts.hyperparameters import plain_groups
from unbroken.parts.loops import clean_counters
from unbroken.parts.module import give_plain_buffers


class CutEpoch:
    """The state inside an epoch that ends early: by ``--max_steps``, by ``--max_time``, or by an
    early stop.

    Lightning ends such an epoch like any other, with its hooks, and the checkpoint is saved after
    them. So it holds the state before them as well.
    """

    def __init__(self, kept: KeptParts) -> None:
        self._kept = kept
        self.forget()

    def forget(self) -> None:
        """The epoch that ends now is whole, unless :meth:`note` finds it cut."""
        # None: it is whole.
        self._inside: Snapshot | None = None
        self._loops: dict[str, Any] = {}
        self._entries_of_users: dict[str, Any] = {}
        # What hooks of the epoch's end may change of the training. Under a strategy that shards
        # weights these are None.
        self._weights: SwappedWeights | None = None
        self._optimizers: OptimizerGroups | None = None
        self._schedules: Schedules | None = None

    def note(self, trainer: Trainer) -> None:
        """Keep the state of this moment, if the epoch that ends is cut."""
        # Training may have gone on after an epoch that was cut.
        self.forget()
        if not is_cut(trainer):
            return
        with lightning_internals.as_inside_the_epoch(trainer):
            self._inside = self._kept.take(trainer, "batch")
        with self._kept.without_a_trace(trainer):
            self._inside.add_entries(trainer)
            self._entries_of_users = entries_of_users(trainer)
            loops = trainer.fit_loop.state_dict()
        if not isinstance(trainer.strategy, SHARDING):
            self._weights = SwappedWeights(trainer)
        self._optimizers = OptimizerGroups(trainer)
        self._schedules = Schedules(trainer)
        # Lightning has counted the epoch as processed by now.
        for counters in loops["epoch_progress"].values():
            counters["processed"] -= 1
        clean_counters(loops, "batch", self._kept.was_validated.is_so)
        self._loops = loops

    def as_data(self, trainer: Trainer, group: Any) -> dict[str, Any] | None:
        """What the checkpoint after this epoch holds of it; None where the epoch is whole. Every
        rank calls it.
        """
        inside = self._inside
        if inside is None:
            return None
        return {
            "state": self._kept.state_of(inside, group),
            "loops": self._loops,
            "entries": inside.entries,
            "added": self._entries_of_users,
            "training": self._changed_training(trainer),
        }

    def _changed_training(self, trainer: Trainer) -> dict[str, Any]:
        """The old values of what the hooks of the epoch's end have changed, as plain data."""
        assert self._optimizers is not None
        assert self._schedules is not None
        copies: dict[int, torch.Tensor] = {}
        if self._weights is not None:
            copies = {id(tensor): value for tensor, value in self._weights.copies}
        weights: dict[str, torch.Tensor] = {}
        for name, parameter in trainer.lightning_module.named_parameters():
            before = copies.get(id(parameter))
            if before is not None and not torch.equal(before, parameter.detach()):
                weights[name] = before.cpu()
        groups = [plain_groups(each.values) for each in self._optimizers.before]
        schedules = [state for _, state in self._schedules.states]
        return {"weights": weights, "groups": groups, "schedules": schedules}


def is_cut(trainer: Trainer) -> bool:
    """Whether the run ends inside the epoch that ends now."""
    is_last_step = trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps
    batches = trainer.fit_loop.epoch_loop.batch_progress
    is_done = batches.current.completed >= trainer.num_training_batches or batches.is_last_batch
    return (is_last_step or trainer.should_stop) and not is_done


def go_inside(trainer: Trainer, checkpoint: dict[str, Any], inside: dict[str, Any]) -> None:
    """Let a checkpoint's own entries be those of inside the epoch, where :meth:`CutEpoch.as_data`
    has put them: also what Lightning has loaded already.

    Lightning loads callbacks last. The module and the data module have been loaded by now.
    """
    checkpoint["loops"]["fit_loop"] = inside["loops"]
    entries = inside["entries"]
    checkpoint["callbacks"].update(entries["callbacks"])
    module = trainer.lightning_module
    buffers = dict(entries["state_dict"])
    extra = {name: buffers.pop(name) for name in list(buffers) if name.endswith(EXTRA_STATE)}
    give_plain_buffers(module, buffers)
    give_extra_states(module, extra)
    data = trainer.datamodule  # type: ignore[attr-defined]
    if data is not None and entries.get(type(data).__qualname__):
        data.load_state_dict(entries[type(data).__qualname__])
    if inside["training"]:
        _give_training(module, checkpoint, inside["training"])
    if inside["added"]:
        checkpoint.update(inside["added"])
        module.on_load_checkpoint(checkpoint)


def _give_training(
    module: LightningModule, checkpoint: dict[str, Any], training: dict[str, Any]
) -> None:
    """Let weights, rates and schedules be those before the hooks of the epoch's end.

    Lightning loads optimizers and schedules later, from the checkpoint.
    """
    with torch.no_grad():
        for name, value in training["weights"].items():
            module.get_parameter(name).copy_(value)
    states = checkpoint["optimizer_states"]
    for state, groups in zip(states, training["groups"], strict=True):
        for group, before in zip(state["param_groups"], groups, strict=False):
            group.update(before)
    checkpoint["lr_schedulers"] = training["schedules"]
