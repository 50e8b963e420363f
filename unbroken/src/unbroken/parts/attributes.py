"""Numbers, texts, tensors, arrays, lists and the like that a module, a metric, a data module, or an
object of the user's own keeps as plain attributes.
"""

from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
from lightning.pytorch import LightningDataModule, Trainer
from torch import Tensor, nn
from torchmetrics import Metric
from unbroken.errors import UserError
from unbroken.parts.owners import OF_EVERY_MODULE, is_object, owners_of
from unbroken.parts.part import Part
from unbroken.parts.plain_values import (
    copied,
    is_plain,
    is_single,
    is_users_own,
    like,
    values_inside,
)
from unbroken.tensors.same_values import is_same


class MetricWithoutState(Metric):
    """Has the attributes that every metric has, and no others."""

    def update(self, *_: Any, **__: Any) -> None: ...

    def compute(self) -> None: ...


OF_EVERY_METRIC = OF_EVERY_MODULE | vars(MetricWithoutState()).keys()
# How the names of objects begin that the data module holds.
OF_DATA = "data."
# More than this in an attribute of such an object is taken for samples.
MOST_BYTES_OF_DATA = 2**20
MOST_ENTRIES_OF_DATA = 10_000
# What it raises to make a value of what it was not made of.
DAMAGED = (TypeError, ValueError, AttributeError, ArithmeticError)


class PlainAttributes(Part):
    """Plain attributes that training has changed: of the module, its layers and metrics, the data
    module, and objects of the user's own classes that these hold.

    Since Lightning 2.0 modules collect the outputs of an epoch in a list of their own, and many
    count steps in an attribute. No state dict holds them. An attribute that has not changed since
    training started is left out: what the user sets in a constructor wins. One that the sanity
    check has changed is kept, since a resumed run has no such check.

    Of layers of other packages only numbers and texts are kept, such as a rate of dropout. Their
    lists may hold their parameters. The tensors and counters of a metric are of
    :class:`MetricStates`.
    """

    name = "attributes"
    is_left_at_the_end = True

    def __init__(self) -> None:
        self.fresh: dict[str, Any] = {}
        self._before_check: dict[str, Any] = {}
        self._changed_by_check: set[str] = set()
        # What the data module was made with, where it has got something else early.
        self._made_with: dict[str, Any] = {}

    def give_data_back(self, trainer: Trainer, value: dict[str, Any]) -> None:
        """Give the data module its attributes back before it makes loaders of them."""
        saved = {name: each for name, each in value.items() if name.startswith("data.")}
        for name, value_now in plain_attributes(trainer):
            if name in saved:
                self._made_with[name] = copied(value_now)
        self._set(trainer, saved)

    def check_begins(self, trainer: Trainer) -> None:
        """Note the attributes before the sanity check."""
        self._before_check = copied(dict(plain_attributes(trainer)))

    def check_ends(self, trainer: Trainer) -> None:
        """Note which attributes the sanity check has changed."""
        before = self._before_check
        self._before_check = {}
        for name, value in plain_attributes(trainer):
            if name not in before or not is_same(copied(value), before[name]):
                self._changed_by_check.add(name)

    def begin(self, trainer: Trainer) -> None:
        """Note the attributes when training starts, before its first epoch does."""
        fresh = copied(dict(plain_attributes(trainer))) | self._made_with
        self.fresh = {n: value for n, value in fresh.items() if n not in self._changed_by_check}

    def take(self, trainer: Trainer) -> dict[str, Any]:
        changed: dict[str, Any] = {}
        for name, value in plain_attributes(trainer):
            now = copied(value)
            if name not in self.fresh or not is_same(now, self.fresh[name]):
                changed[name] = now
        return changed

    def undo(self, trainer: Trainer) -> None:
        """Put back what has changed since :meth:`begin`.

        A resumed run calls the hooks of its epoch's start again. They may change what had not
        changed when the state was taken. What they make a value of another kind was one then, too.
        """
        plain = {name for name, _ in plain_attributes(trainer)} - self._made_with.keys()
        self._set(trainer, {name: fresh for name, fresh in self.fresh.items() if name in plain})

    def give_back(self, trainer: Trainer, value: dict[str, Any]) -> None:
        self._set(trainer, value)

    def _set(self, trainer: Trainer, values: dict[str, Any]) -> None:
        owners = dict(owners_of(trainer))
        device = trainer.strategy.root_device
        for name, saved in values.items():
            path, _, attribute = name.rpartition(".")
            if path in owners and may_be_set(owners[path], attribute):
                attributes = vars(owners[path])
                now = attributes.get(attribute)
                try:
                    attributes[attribute] = like(now, copied(saved), device)
                except DAMAGED:
                    raise UserError(
                        f"the attribute {name} in the checkpoint is not what this project writes."
                        " Give another checkpoint."
                    ) from None


def may_be_set(owner: Any, attribute: str) -> bool:
    """Whether a checkpoint may set an attribute: nothing of Lightning's, and no method."""
    is_method = callable(getattr(type(owner), attribute, None))
    return attribute not in not_kept_of(owner) and not is_method


def not_kept_of(owner: Any) -> set[str]:
    """The attributes that other parts of a checkpoint, and Lightning itself, see to."""
    if not isinstance(owner, nn.Module | LightningDataModule):
        return set()
    if not isinstance(owner, Metric):
        return OF_EVERY_MODULE
    tensors = {name for name, value in vars(owner).items() if isinstance(value, Tensor)}
    return OF_EVERY_METRIC | tensors | owner.metric_state.keys()


def plain_attributes(trainer: Trainer) -> Iterator[tuple[str, Any]]:
    """Every attribute that can be kept, by its name in a checkpoint."""
    module = trainer.lightning_module
    for path, owner in owners_of(trainer):
        is_own = owner is module or not is_foreign_layer(owner)
        not_kept = not_kept_of(owner)
        is_of_data = path.startswith(OF_DATA)
        for name, value in vars(owner).items():
            if name in not_kept or (is_of_data and not may_be_held(value)):
                continue
            is_kept = is_single(value) or (is_own and is_plain(value))
            if is_kept and not is_object(value):
                yield f"{path}.{name}", value


def is_foreign_layer(owner: Any) -> bool:
    """Whether an object is a layer, and not of a class of the user's own."""
    is_layer = isinstance(owner, nn.Module) and not isinstance(owner, Metric)
    return is_layer and not is_users_own(type(owner))


def may_be_held(value: Any) -> bool:
    """Whether an attribute of an object that the data module holds is not its samples."""
    is_tensor = isinstance(value, Tensor | np.ndarray)
    if not is_tensor and isinstance(value, Collection) and len(value) > MOST_ENTRIES_OF_DATA:
        return False
    return bytes_in(value) <= MOST_BYTES_OF_DATA


def bytes_in(value: Any) -> int:
    """How many bytes tensors, arrays and texts have that a value is or holds."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, str | bytes):
        return len(value)
    return sum(map(bytes_in, values_inside(value) or ()))
