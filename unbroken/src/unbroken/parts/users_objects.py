"""What the user's objects hold beside weights: found by one walk at each save, kept or told."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from unbroken.parts.declared import DeclaredStates
from unbroken.parts.held import Held, held_by_users
from unbroken.parts.part import Part
from unbroken.parts.replaced import Replaced
from unbroken.parts.shapes import Shapes
from unbroken.parts.undeclared.attributes import PlainAttributes, without_halves
from unbroken.parts.undeclared.modules import HiddenModules
from unbroken.parts.undeclared.not_kept import NotKept
from unbroken.stopping.ranks import say

# As names call the data module and the module
DATA, MODULE = "data", "module"


class UsersObjects(Part):
    """What the module, the data module, optimizers, schedules and the user's callbacks hold.

    Whatever has ``state_dict`` and ``load_state_dict`` comes first: it is kept wherever it is held.
    State that nobody has declared is kept where it is plain. What changes and cannot be kept is
    told by name, before a run is resumed without it.

    Args:
        undeclared: Whether plain attributes and modules that are no layers are kept, too. If not,
            those that change are told.

    Attributes:
        held: What the latest walk has found. States of generators are of
            :class:`unbroken.parts.generators.OwnGenerators`.
    """

    name = "objects"
    is_read_after_training = True
    takes_copies = True

    def __init__(self, undeclared: bool = True) -> None:
        self.keeps_undeclared = undeclared
        self.declared = DeclaredStates()
        self.attributes = PlainAttributes()
        self.modules = HiddenModules()
        self.held = Held()
        self.not_kept = NotKept()
        self.shapes = Shapes()
        self.replaced = Replaced()
        # The epoch whose start's hooks are over
        self._epoch: int | None = None

    def _look(self, trainer: Trainer) -> Held:
        """Go over what they hold, as it is now."""
        self.held = held_by_users(trainer)
        return self.held

    # What is noted at a start

    def fit_starts(self, trainer: Trainer) -> None:
        """Note what the start has made, before states are loaded into it."""
        held = self._look(trainer)
        self.shapes.begin(trainer, held)
        self.declared.begin(held, trainer.optimizers)

    def check_begins(self, trainer: Trainer) -> None:
        """A resumed run has no sanity check. So what it changes belongs to the state."""
        self.attributes.check_begins(self._look(trainer))

    def check_ends(self, trainer: Trainer) -> None:
        """Note what the sanity check has changed."""
        self.attributes.check_ends(self._look(trainer))

    def begin(self, trainer: Trainer) -> None:
        """Note what there is when training starts, after all start-up hooks."""
        held = self._look(trainer)
        self.attributes.begin(held)
        self.modules.begin(held, trainer.lightning_module)
        self.not_kept.begin(held)
        self.replaced.begin(trainer, held)

    def loaders_are_made(self, trainer: Trainer) -> None:
        """Note what the loaders of a new epoch hold, and what ``train_dataloader`` has chosen."""
        held = self._look(trainer)
        self.not_kept.loaders_are_made(held)
        self.replaced.epoch_has_started(held)

    def before_epoch_starts(self, trainer: Trainer) -> None:
        """Before the user's hooks of an epoch's start, note what training has moved."""
        self.replaced.before_epoch_starts(self._look(trainer))

    def before_batch(self, trainer: Trainer) -> None:
        """Before an epoch's first batch, note what the hooks of its start have set."""
        if trainer.current_epoch != self._epoch:
            self._epoch = trainer.current_epoch
            held = self._look(trainer)
            self.not_kept.epoch_has_started(held)
            self.replaced.epoch_has_started(held)

    # What is kept

    def take(self, trainer: Trainer) -> dict[str, Any]:
        held = self._look(trainer)
        states, left_out = self.declared.take(held)
        attributes = self.attributes.take(held)
        modules = self.modules.take(held, trainer.lightning_module)
        lines = [
            *self.shapes.lines(trainer, held),
            *self.replaced.lines(trainer, held),
            *self.not_kept.lines(held),
            *self.not_kept.lines_of_states(left_out),
        ]
        taken: dict[str, Any] = {"declared": states}
        taken["set_by_epochs"] = self.not_kept.set_by_epochs(held)
        if self.keeps_undeclared:
            attributes = without_halves(held, attributes, self.not_kept.packages)
            taken["attributes"] = attributes
            taken["objects"] = self.attributes.objects_of(held, attributes)
            taken["modules"] = modules
        else:
            lines += self.not_kept.lines_of_changed([*attributes, *modules["tensors"]])
        if trainer.is_global_zero:
            say(*lines)
        return taken

    # What loaders are made of

    def take_of_makers(self, trainer: Trainer) -> dict[str, Any]:
        """Before loaders are made: what the data module, or a module that makes them itself, holds
        and a new process would have with other values by then.
        """
        held = self._held_by_makers(trainer)
        if trainer.current_epoch == 0:
            # A new process makes the others as they are. Into the data module Lightning loads the
            # state of the save before it makes loaders.
            held.declared = {name: held.declared[name] for name in held.declared if name == DATA}
        states, _ = self.declared.take(held)
        taken: dict[str, Any] = {"declared": states}
        if self.keeps_undeclared:
            self.attributes.before_loaders(held, are_made_again(trainer))
            attributes = self.attributes.take_before_loaders(held)
            attributes = without_halves(held, attributes, self.not_kept.packages)
            taken["attributes"] = attributes
            taken["objects"] = self.attributes.objects_of(held, attributes)
        return taken

    def give_back_to_makers(self, trainer: Trainer, value: Mapping[str, Any]) -> None:
        """Give the data module, and a module that makes loaders itself, what these are made of.

        Args:
            trainer: It has no loaders yet.
            value: What :meth:`take_of_makers` has returned.
        """
        device = trainer.strategy.root_device
        if self.keeps_undeclared:
            held = self._held_by_makers(trainer)
            attributes = value.get("attributes", {})
            self.attributes.give_back_early(held, attributes, device, value.get("objects", {}))
            self.attributes.before_loaders(self._held_by_makers(trainer), are_made_again(trainer))
        # What cannot be loaded yet is loaded later.
        states = value.get("declared", {})
        self.declared.give_back(self._held_by_makers(trainer), states, device)

    def with_makers_of_now(self, trainer: Trainer, value: Mapping[str, Any]) -> dict[str, Any]:
        """What :meth:`take` has returned, but for what makes loaders: that as it is now."""
        now = self.take_of_makers(trainer)
        changed = dict(value)
        for kind in ("attributes", "declared"):
            if kind in value:
                theirs = of_makers_among(value[kind], trainer)
                others = {name: value[kind][name] for name in value[kind].keys() - theirs.keys()}
                changed[kind] = others | now[kind]
        return changed

    def _held_by_makers(self, trainer: Trainer) -> Held:
        """What they hold as it is now, and the state of the data module."""
        held = self._look(trainer)
        of_makers = dataclasses.replace(
            held,
            attributes=of_makers_among(held.attributes, trainer),
            declared=of_makers_among(held.declared, trainer),
        )
        data = trainer.datamodule  # type: ignore[attr-defined]
        if data is not None and is_overridden("state_dict", data):
            of_makers.declared[DATA] = data
        return of_makers

    # What is given back

    def lines_of_epochs_start(self, trainer: Trainer, value: Mapping[str, Any]) -> list[str]:
        """A line for what the hooks of an epoch's start have set to something else than before the
        save, where nobody keeps it.
        """
        held = self._look(trainer)
        return self.not_kept.lines_of_set_by_epochs(held, value.get("set_by_epochs", {}))

    def undo(self, trainer: Trainer) -> None:
        """Put back what hooks of an epoch's start have changed, which are called again."""
        self.attributes.undo(self._look(trainer), trainer.strategy.root_device)

    def return_to(self, trainer: Trainer, value: Mapping[str, Any]) -> None:
        """Let everything be as it was when ``value`` was taken, earlier in this training."""
        if self.keeps_undeclared:
            device = trainer.strategy.root_device
            self.attributes.return_to_start(self._look(trainer), device)
        self.give_back(trainer, value)

    def give_back(self, trainer: Trainer, value: Mapping[str, Any]) -> None:
        held = self._look(trainer)
        device = trainer.strategy.root_device
        if self.keeps_undeclared:
            attributes = value.get("attributes", {})
            self.attributes.give_back(held, attributes, device, value.get("objects", {}))
            if "modules" in value:
                self.modules.give_back(held, trainer.lightning_module, value["modules"])
        refused = self.declared.give_back(held, value.get("declared", {}), device)
        # Gradients and generators belong to what is there now.
        self._look(trainer)
        if trainer.is_global_zero:
            say(*self.not_kept.lines_of_states(refused), *self.attributes.lines_of_classes())


def of_makers_among(values: Mapping[str, Any], trainer: Trainer) -> dict[str, Any]:
    """Those of the values by name that belong to the data module, or to a module that makes loaders
    itself.
    """
    module = trainer.lightning_module
    maker = None
    if trainer.datamodule is not None:  # type: ignore[attr-defined]
        maker = DATA
    elif is_overridden("train_dataloader", module):
        maker = MODULE
    return {name: values[name] for name in values if name.partition(".")[0] == maker}


def are_made_again(trainer: Trainer) -> bool:
    """Whether the Trainer makes loaders of the training for later epochs, too."""
    return bool(trainer.reload_dataloaders_every_n_epochs > 0)  # type: ignore[attr-defined]
