"""Numbers, tensors and lists that a module or data module keeps as plain attributes."""

from collections import deque
from collections.abc import Iterator
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torchmetrics import Metric

from project.engine import contract
from project.engine.parts.part import Part
from project.engine.same_values import is_same

# What every module has. Other parts, and Lightning itself, see to it.
OF_EVERY_MODULE = {*vars(LightningModule()), *vars(LightningDataModule()), "track_running_stats"}


class PlainAttributes(Part):
    """Plain attributes of the module, its layers and the data module that training has changed.

    Since Lightning 2.0 modules collect the outputs of an epoch in a list of their own, and many
    count steps in an attribute. No state dict holds them. An attribute that has not changed since
    training started is left out: what the user sets in a constructor wins.

    Of layers only numbers are kept, such as a rate of dropout. A layer's lists may hold its
    parameters. Text is never kept, for it may name what was made for one process.
    """

    name = "attributes"
    is_left_at_the_end = True

    def __init__(self) -> None:
        self.fresh: dict[str, Any] = {}

    def begin(self, trainer: Trainer) -> None:
        """Note the attributes when training starts, before its first epoch does."""
        self.fresh = copied(dict(plain_attributes(trainer)))

    def take(self, trainer: Trainer) -> dict[str, Any]:
        changed: dict[str, Any] = {}
        for name, value in plain_attributes(trainer):
            now = copied(value)
            if name not in self.fresh or not is_same(now, self.fresh[name]):
                changed[name] = now
        return changed

    def give_back(self, trainer: Trainer, value: dict[str, Any]) -> None:
        owners = dict(owners_of(trainer))
        # An epoch's start may have changed what had not changed when the state was taken.
        for name, saved in {**self.fresh, **value}.items():
            path, _, attribute = name.rpartition(".")
            if path in owners and may_be_set(owners[path], attribute):
                now = vars(owners[path]).get(attribute)
                if not is_same(copied(now), saved):
                    vars(owners[path])[attribute] = like(now, copied(saved))


def may_be_set(owner: Any, attribute: str) -> bool:
    """Whether a checkpoint may set an attribute: nothing of Lightning's, and no method."""
    is_method = callable(getattr(type(owner), attribute, None))
    return attribute not in OF_EVERY_MODULE and not is_method


def owners_of(trainer: Trainer) -> Iterator[tuple[str, Any]]:
    """The module, its layers and the data module, each with its name in a checkpoint."""
    module = trainer.lightning_module
    if isinstance(module, contract.KeepsSums):
        # It says itself what it keeps.
        return
    metrics = [part for part in module.modules() if isinstance(part, Metric)]
    not_layers = {id(part) for metric in metrics for part in metric.modules()}
    for name, part in module.named_modules():
        if id(part) not in not_layers:
            yield f"module.{name}".rstrip("."), part
    data = trainer.datamodule  # type: ignore[attr-defined]
    if data is not None:
        yield "data", data


def plain_attributes(trainer: Trainer) -> Iterator[tuple[str, Any]]:
    """Every attribute that can be kept, by its name in a checkpoint."""
    for path, owner in owners_of(trainer):
        has_lists = owner is trainer.lightning_module or path == "data"
        for name, value in vars(owner).items():
            is_kept = is_number(value) or (has_lists and is_plain(value))
            if name not in OF_EVERY_MODULE and is_kept:
                yield f"{path}.{name}", value


def is_number(value: Any) -> bool:
    """Whether a value is one of Python's own numbers."""
    return type(value) in (bool, int, float)


def is_plain(value: Any) -> bool:
    """Whether a value is None, a number, a tensor, or a list, queue or dictionary of them."""
    if value is None or is_number(value):
        return True
    if isinstance(value, Tensor):
        return not isinstance(value, nn.Parameter)
    if type(value) in (list, tuple, deque):
        return all(is_plain(each) for each in value)
    if type(value) is dict:
        are_names = all(isinstance(key, (str, int)) for key in value)
        return are_names and all(is_plain(each) for each in value.values())
    return False


def copied(value: Any) -> Any:
    """A copy on the CPU, without graphs. A queue becomes a list, which a checkpoint can hold."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if type(value) in (list, deque):
        return [copied(each) for each in value]
    if type(value) is tuple:
        return tuple(copied(each) for each in value)
    if type(value) is dict:
        return {key: copied(each) for key, each in value.items()}
    return value


def like(now: Any, saved: Any) -> Any:
    """A saved value in the form that the attribute has now: its device, or a queue."""
    if isinstance(now, Tensor) and isinstance(saved, Tensor):
        return saved.to(now.device)
    if type(now) is deque:
        return deque(saved, now.maxlen)
    return saved
