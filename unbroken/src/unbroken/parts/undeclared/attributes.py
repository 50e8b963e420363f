"""Numbers, texts, tensors, arrays, lists and the like that a module, a metric, a data module, an
optimizer, or an object of the user's own keeps as plain attributes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from unbroken.errors import UserError
from unbroken.parts.held import Held, changeable_of_class, not_kept_of, package_of
from unbroken.parts.plain_values import DELETED, copied, is_unchanged, lasting, name_of
from unbroken.parts.remade import Remaking
from unbroken.parts.undeclared.objects import Objects, held_by_several
from unbroken.tensors.same_values import deep_copy, is_same

# What it raises to make a value of what it was not made of.
DAMAGED = (TypeError, ValueError, AttributeError, ArithmeticError)
NOTHING_NOTED: Mapping[str, Any] = {}


class ObjectsAtSave(NamedTuple):
    """Which objects attributes held at a save.

    Attributes:
        filled: Places of those that training had begun with, which are filled.
        same: Names of attributes that held the object of another one, each with that one's name.
        classes: The class of each owner of attributes, by the owner's name.
    """

    filled: Collection[str]
    same: dict[str, str]
    classes: dict[str, str]


class PlainAttributes:
    """Plain attributes that training has changed: of the module, its layers and metrics, the data
    module, optimizers, and objects of the user's own classes that these hold.

    Since Lightning 2.0 modules collect the outputs of an epoch in a list of their own, and many
    count steps in an attribute. No state dict holds them. An attribute that has not changed since
    training started is left out: what the user sets in a constructor wins. One that the sanity
    check has changed is kept, since a resumed run has no such check. One that training has deleted
    is deleted again. What is one list in two attributes stays one (see
    :mod:`unbroken.parts.remade`).

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
        self._objects = Objects()
        # Those of which loaders are made, as they were before the first loaders.
        self._before_first_loaders: Mapping[str, Any] | None = None
        # Owners of another class than at the save, each with that one.
        self._of_another_class: dict[str, str] = {}

    def give_back_early(
        self,
        held: Held,
        value: Mapping[str, Any],
        device: torch.device,
        objects: Mapping[str, Any] = NOTHING_NOTED,
    ) -> None:
        """Give attributes back before loaders are made of them."""
        there = {name: held.attributes[name] for name in value if name in held.attributes}
        self._objects.note(there)
        self._objects.pass_by(value)
        # It may be given a second time: who asks how many steps there are makes loaders, too.
        self._made_with = copied(there) | self._made_with
        self._made_by_training |= value.keys() - there.keys()
        # What another attribute holds may come later.
        early = read_objects(objects)._replace(same={})
        self._set(held, value, device, early)

    def before_loaders(self, held: Held, are_made_again: bool) -> None:
        """Note what the first loaders are made of.

        Args:
            held: Its attributes are those of which loaders are made.
            are_made_again: Whether later epochs have loaders of their own.
        """
        if self._before_first_loaders is None:
            now = copied(held.attributes) if are_made_again else held.attributes
            self._before_first_loaders = self._as_a_start_makes_it(now)

    def take_before_loaders(self, held: Held) -> dict[str, Any]:
        """Copies of those attributes of which loaders are made, and which a new process has with
        other values by then.
        """
        changed = self._changed(held, self._before_first_loaders or {})
        return {name: copied(value) for name, value in changed.items()}

    def _as_a_start_makes_it(self, now: Mapping[str, Any]) -> dict[str, Any]:
        """``now`` as the user's code alone makes it in a new process: what was given back early is
        as it was made, and what a sanity check has changed or training has made is left out.
        """
        made = {**now, **self._made_with}
        known_to_change = self._changed_by_check | self._made_by_training
        return {name: value for name, value in made.items() if name not in known_to_change}

    def check_begins(self, held: Held) -> None:
        """Note the attributes before the sanity check."""
        self._objects.note(held.attributes)
        self._before_check = copied(held.attributes)

    def check_ends(self, held: Held) -> None:
        """Note which attributes the sanity check has changed."""
        before = self._before_check
        self._before_check = {}
        self._changed_by_check |= self._changed(held, before).keys()

    def begin(self, held: Held) -> None:
        """Note the attributes when training starts, before its first epoch does."""
        self._objects.note(held.attributes)
        self.fresh = self._as_a_start_makes_it(copied(held.attributes))

    def take(self, held: Held) -> dict[str, Any]:
        """Copies of what has changed, by name."""
        changed = {name: copied(value) for name, value in self._changed(held, self.fresh).items()}
        for name in self.fresh.keys() - held.attributes.keys():
            path, _, attribute = name.rpartition(".")
            if path in held.owners and not hasattr(held.owners[path], attribute):
                changed[name] = {DELETED: None}
        return changed

    def objects_of(self, held: Held, changed: Collection[str]) -> dict[str, Any]:
        """Which objects attributes hold: places of those that training began with and has changed;
        names of attributes in whose place it has put the object of another one, with that one's
        name; and the classes of those whose attributes they are.
        """
        attributes = {name: held.attributes[name] for name in changed if name in held.attributes}
        same = {
            name: other
            for name, other in held_by_several(held.attributes).items()
            if self._objects.first(name, None) is not held.attributes[name]
        }
        owners = {name.rpartition(".")[0] for name in changed}
        classes = {
            path: name_of(lasting(type(held.owners[path])))
            for path in sorted(owners & held.owners.keys())
        }
        return {
            "filled": self._objects.unreplaced(attributes),
            "same": same,
            "classes": classes,
        }

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
        self._return(held, plain, device)

    def return_to_start(self, held: Held, device: torch.device) -> None:
        """Let every attribute be what it was when training began."""
        self._return(held, held.attributes.keys(), device)

    def _return(self, held: Held, names: Collection[str], device: torch.device) -> None:
        """Let attributes be what they were when training began, and the same objects."""
        fresh = {name: before for name, before in self.fresh.items() if name in names}
        self._set(held, fresh, device, ObjectsAtSave(self._objects.places, {}, {}))

    def give_back(
        self,
        held: Held,
        value: Mapping[str, Any],
        device: torch.device,
        objects: Mapping[str, Any] = NOTHING_NOTED,
    ) -> None:
        """Set the attributes of what there is.

        Args:
            held: What the user's objects hold.
            value: What :meth:`take` has returned.
            device: The accelerator.
            objects: What :meth:`objects_of` has returned.
        """
        # What was kept and is as this start makes it was changed by a sanity check, which a resumed
        # run has not. It is kept again.
        for name in value.keys() & self.fresh.keys():
            if is_same(value[name], self.fresh[name]):
                del self.fresh[name]
        self._set(held, value, device, read_objects(objects))

    def _set(
        self, held: Held, values: Mapping[str, Any], device: torch.device, objects: ObjectsAtSave
    ) -> None:
        filled, same, classes = objects
        remaking = Remaking(device, filled)
        for name, saved in values.items():
            path, _, attribute = name.rpartition(".")
            owner = held.owners.get(path)
            if owner is None or not may_be_set(owner, attribute):
                continue
            kind = name_of(lasting(type(owner)))
            if classes.get(path, kind) != kind:
                # It may have no use for such an attribute, or another one.
                self._of_another_class[path] = classes[path]
                continue
            if type(saved) is dict and saved.keys() == {DELETED}:
                vars(owner).pop(attribute, None)
            else:
                self._set_one(owner, attribute, name, saved, remaking)
        for name, other in same.items():
            is_known = other in held.attributes or other in values
            if name not in filled and is_known:
                self._share(held, name, other)

    def _set_one(
        self, owner: Any, attribute: str, name: str, saved: Any, remaking: Remaking
    ) -> None:
        attributes = vars(owner)
        of_class = None
        if attribute not in attributes:
            of_class = changeable_of_class(owner).get(attribute)
        now = attributes.get(attribute, of_class)
        if name in remaking.filled:
            # A hook of the start may have put another one in its place.
            now = self._objects.first(name, now)
        try:
            made = remaking.like(now, deep_copy(saved), name)
        except DAMAGED:
            raise damaged(f"the attribute {name}") from None
        # What was filled in the class stays there.
        if of_class is None or made is not of_class:
            attributes[attribute] = made

    def lines_of_classes(self) -> list[str]:
        """A line for each owner that has not got its attributes back. Each is told once."""
        told = self._of_another_class
        self._of_another_class = {}
        return [
            f"the resume is not exact: {path} was of the class {kind} at the save, and is of"
            " another one now. Its attributes stay as they are."
            for path, kind in told.items()
        ]

    @staticmethod
    def _share(held: Held, name: str, other: str) -> None:
        """Let an attribute hold the object of another one."""
        path, _, attribute = name.rpartition(".")
        path_of_other, _, its_attribute = other.rpartition(".")
        owner = held.owners.get(path)
        its_owner = held.owners.get(path_of_other)
        is_there = owner is not None and its_attribute in getattr(its_owner, "__dict__", {})
        if is_there and may_be_set(owner, attribute):
            vars(owner)[attribute] = vars(its_owner)[its_attribute]


def read_objects(objects: Mapping[str, Any]) -> ObjectsAtSave:
    """What :meth:`PlainAttributes.objects_of` has returned, as a checkpoint has it."""
    try:
        return ObjectsAtSave(
            set(objects.get("filled", ())),
            dict(objects.get("same", {})),
            dict(objects.get("classes", {})),
        )
    except DAMAGED:
        raise damaged("the list of what attributes share") from None


def damaged(what: str) -> UserError:
    """The error where a checkpoint was changed."""
    return UserError(
        f"{what} in the checkpoint is not what this project writes. Give another checkpoint."
    )


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
