"""Numbers, texts, tensors, arrays, lists and the like that a module, a metric, a data module, an
optimizer, or an object of the user's own keeps as plain attributes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from unbroken.errors import UserError
from unbroken.parts.held import Held, not_kept_of, package_of
from unbroken.parts.plain_values import DELETED, copied, is_unchanged, like

# Attributes of these are given back before loaders are made of them.
MAKE_LOADERS = ("data.", "module.")
# What it raises to make a value of what it was not made of.
DAMAGED = (TypeError, ValueError, AttributeError, ArithmeticError)


class PlainAttributes:
    """Plain attributes that training has changed: of the module, its layers and metrics, the data
    module, optimizers, and objects of the user's own classes that these hold.

    Since Lightning 2.0 modules collect the outputs of an epoch in a list of their own, and many
    count steps in an attribute. No state dict holds them. An attribute that has not changed since
    training started is left out: what the user sets in a constructor wins. One that the sanity
    check has changed is kept, since a resumed run has no such check. One that training has deleted
    is deleted again.

    Of layers of other packages only numbers and texts are kept, such as a rate of dropout. Their
    lists may hold their parameters. The tensors and counters of a metric are of
    :class:`unbroken.parts.metrics.MetricStates`.
    """

    def __init__(self) -> None:
        self.fresh: dict[str, Any] = {}
        self._before_check: dict[str, Any] = {}
        self._changed_by_check: set[str] = set()
        # What was made with other values than it has got back early.
        self._made_with: dict[str, Any] = {}
        # What it was made without, and has got back early: training had made it.
        self._made_by_training: set[str] = set()

    def give_back_early(
        self, held: Held, value: Mapping[str, Any], names: Collection[str], device: torch.device
    ) -> None:
        """Give attributes back before loaders are made of them."""
        for name in names:
            if name in held.attributes:
                self._made_with[name] = copied(held.attributes[name])
            else:
                self._made_by_training.add(name)
        self._set(held, {name: value[name] for name in names}, device)

    def check_begins(self, held: Held) -> None:
        """Note the attributes before the sanity check."""
        self._before_check = copied(held.attributes)

    def check_ends(self, held: Held) -> None:
        """Note which attributes the sanity check has changed."""
        before = self._before_check
        self._before_check = {}
        self._changed_by_check |= self._changed(held, before).keys()

    def begin(self, held: Held) -> None:
        """Note the attributes when training starts, before its first epoch does."""
        fresh = copied(held.attributes) | self._made_with
        known_to_change = self._changed_by_check | self._made_by_training
        self.fresh = {name: value for name, value in fresh.items() if name not in known_to_change}

    def take(self, held: Held) -> dict[str, Any]:
        """Copies of what has changed, by name."""
        changed = {name: copied(value) for name, value in self._changed(held, self.fresh).items()}
        for name in self.fresh.keys() - held.attributes.keys():
            path, _, attribute = name.rpartition(".")
            if path in held.owners and not hasattr(held.owners[path], attribute):
                changed[name] = {DELETED: None}
        return changed

    @staticmethod
    def _changed(held: Held, before: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: value
            for name, value in held.attributes.items()
            if name not in before or not is_unchanged(value, before[name])
        }

    def undo(self, held: Held, device: torch.device) -> None:
        """Put back what has changed since :meth:`begin`.

        A resumed run calls the hooks of its epoch's start again. They may change what had not
        changed when the state was taken. What they make a value of another kind was one then, too.
        """
        plain = held.attributes.keys() - self._made_with.keys()
        fresh = {name: value for name, value in self.fresh.items() if name in plain}
        self._set(held, fresh, device)

    def return_to(self, held: Held, value: Mapping[str, Any], device: torch.device) -> None:
        """Let every attribute be as it was when ``value`` was taken in this training."""
        fresh = {name: before for name, before in self.fresh.items() if name in held.attributes}
        self._set(held, fresh, device)
        self._set(held, value, device)

    def give_back(self, held: Held, value: Mapping[str, Any], device: torch.device) -> None:
        """Set the attributes of what there is."""
        self._set(held, value, device)

    def _set(self, held: Held, values: Mapping[str, Any], device: torch.device) -> None:
        for name, saved in values.items():
            path, _, attribute = name.rpartition(".")
            owner = held.owners.get(path)
            if owner is None or not may_be_set(owner, attribute):
                continue
            attributes = vars(owner)
            if type(saved) is dict and saved.keys() == {DELETED}:
                attributes.pop(attribute, None)
                continue
            now = attributes.get(attribute)
            try:
                attributes[attribute] = like(now, copied(saved), device)
            except DAMAGED:
                raise UserError(
                    f"the attribute {name} in the checkpoint is not what this project writes."
                    " Give another checkpoint."
                ) from None


def without_halves(held: Held, changed: dict[str, Any], told: Collection[str]) -> dict[str, Any]:
    """Leave out the attributes of a package's objects where some of its state cannot be kept.

    Its code may rely on both together: half a state can end a resume that would do without any.

    Args:
        held: What the user's objects hold.
        changed: Attributes by name.
        told: The packages of which something changes that no checkpoint holds.
    """
    if not told:
        return changed
    whole: dict[str, Any] = {}
    for name, value in changed.items():
        owner = held.owners.get(name.rpartition(".")[0])
        if package_of(owner) not in told:
            whole[name] = value
    return whole


def may_be_set(owner: Any, attribute: str) -> bool:
    """Whether a checkpoint may set an attribute: nothing of Lightning's, and no method."""
    is_method = callable(getattr(type(owner), attribute, None))
    return attribute not in not_kept_of(owner) and not is_method
