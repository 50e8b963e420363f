"""Numbers, texts, tensors, arrays and lists that a module, a metric or data module keeps as plain
attributes.
"""

from collections.abc import Iterator
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import Tensor
from torchmetrics import Metric

from project.engine.parts.part import Part
from project.engine.parts.plain_values import copied, is_plain, is_single, like
from project.engine.same_values import is_same
from project.errors import UserError


class MetricWithoutState(Metric):
    """Has the attributes that every metric has, and no others."""

    def update(self, *_: Any, **__: Any) -> None: ...

    def compute(self) -> None: ...


# What every module has. Other parts, and Lightning itself, see to it.
OF_EVERY_MODULE = {*vars(LightningModule()), *vars(LightningDataModule()), "track_running_stats"}
OF_EVERY_METRIC = OF_EVERY_MODULE | vars(MetricWithoutState()).keys()
# What it raises to make a value of what it was not made of.
DAMAGED = (TypeError, ValueError, AttributeError, ArithmeticError)


class PlainAttributes(Part):
    """Plain attributes of the module, its layers, its metrics and the data module that training has
    changed.

    Since Lightning 2.0 modules collect the outputs of an epoch in a list of their own, and many
    count steps in an attribute. No state dict holds them. An attribute that has not changed since
    training started is left out: what the user sets in a constructor wins. One that the sanity
    check has changed is kept, since a resumed run has no such check.

    Of layers only numbers and texts are kept, such as a rate of dropout. A layer's lists may hold
    its parameters. The tensors and counters of a metric are of :class:`MetricStates`.
    """

    name = "attributes"
    is_left_at_the_end = True

    def __init__(self) -> None:
        self.fresh: dict[str, Any] = {}
        self._before_check: dict[str, Any] = {}
        self._changed_by_check: set[str] = set()

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
        fresh = copied(dict(plain_attributes(trainer)))
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
        plain = {name for name, _ in plain_attributes(trainer)}
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
    if not isinstance(owner, Metric):
        return OF_EVERY_MODULE
    tensors = {name for name, value in vars(owner).items() if isinstance(value, Tensor)}
    return OF_EVERY_METRIC | tensors | owner.metric_state.keys()


def owners_of(trainer: Trainer) -> Iterator[tuple[str, Any]]:
    """The module, its layers and metrics, and the data module, each with its name in a
    checkpoint.
    """
    module = trainer.lightning_module
    metrics = [part for part in module.modules() if isinstance(part, Metric)]
    inside_metrics = {id(part) for metric in metrics for part in metric.modules()}
    for name, part in module.named_modules():
        if isinstance(part, Metric) or id(part) not in inside_metrics:
            yield f"module.{name}".rstrip("."), part
    data = trainer.datamodule  # type: ignore[attr-defined]
    if data is not None:
        yield "data", data


def plain_attributes(trainer: Trainer) -> Iterator[tuple[str, Any]]:
    """Every attribute that can be kept, by its name in a checkpoint."""
    for path, owner in owners_of(trainer):
        is_layer = path.startswith("module.") and not isinstance(owner, Metric)
        not_kept = not_kept_of(owner)
        for name, value in vars(owner).items():
            is_kept = is_single(value) or (not is_layer and is_plain(value))
            if name not in not_kept and is_kept:
                yield f"{path}.{name}", value
