"""Numbers, texts, tensors, arrays and lists that a module or data module keeps as plain
attributes.
"""

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torchmetrics import Metric

from project.engine.parts.part import Part
from project.engine.same_values import is_same

# What every module has. Other parts, and Lightning itself, see to it.
OF_EVERY_MODULE = {*vars(LightningModule()), *vars(LightningDataModule()), "track_running_stats"}
# A checkpoint holds NumPy's arrays and numbers as tensors, in a dictionary of this one key.
ARRAY = "numpy.ndarray"
NUMBER_OF_NUMPY = "numpy.generic"
# A larger array, or a longer list of texts, is taken for data, which a module does not count in.
LARGEST_ARRAY_BYTES = 64 * 2**20
MOST_TEXTS = 1000


class PlainAttributes(Part):
    """Plain attributes of the module, its layers and the data module that training has changed.

    Since Lightning 2.0 modules collect the outputs of an epoch in a list of their own, and many
    count steps in an attribute. No state dict holds them. An attribute that has not changed since
    training started is left out: what the user sets in a constructor wins.

    Of layers only numbers and texts are kept, such as a rate of dropout. A layer's lists may hold
    its parameters.
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
            is_kept = is_single(value) or (has_lists and is_plain(value))
            if name not in OF_EVERY_MODULE and is_kept:
                yield f"{path}.{name}", value


def is_single(value: Any) -> bool:
    """Whether a value is a number, of Python's or NumPy's, or a text."""
    if isinstance(value, np.generic):
        return is_kept_by_torch(value.dtype)
    return type(value) in (bool, int, float, str)


def is_plain(value: Any) -> bool:
    """Whether a value is None, a number, a text, a tensor, an array, or a list, set, queue or
    dictionary of them.
    """
    if value is None or is_single(value):
        return True
    if isinstance(value, Tensor):
        return not isinstance(value, nn.Parameter)
    if type(value) is np.ndarray:
        return is_kept_by_torch(value.dtype) and value.nbytes <= LARGEST_ARRAY_BYTES
    if type(value) is set:
        return len(value) <= MOST_TEXTS and all(is_single(each) for each in value)
    if type(value) in (list, tuple, deque):
        if len(value) > MOST_TEXTS and begins_with_text(value):
            return False
        return all(is_plain(each) for each in value)
    if type(value) is dict:
        if len(value) > MOST_TEXTS and begins_with_text(value.values()):
            return False
        are_names = all(isinstance(key, (str, int)) for key in value)
        return are_names and all(is_plain(each) for each in value.values())
    return False


def is_kept_by_torch(kind: np.dtype[Any]) -> bool:
    """Whether a tensor can hold NumPy's values of a kind: numbers in this machine's byte order."""
    return kind.isnative and kind.char in np.typecodes["AllInteger"] + "?efdFD"


def begins_with_text(values: Any) -> bool:
    """Whether the first entry of a long list is a text, or a short list with one."""
    first = next(iter(values))
    if type(first) in (list, tuple):
        return any(type(each) is str for each in first)
    return type(first) is str


def copied(value: Any) -> Any:
    """A copy on the CPU, without graphs, that a checkpoint can hold: a queue becomes a list."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, np.ndarray):
        return {ARRAY: torch.from_numpy(value.copy())}
    if isinstance(value, np.generic):
        return {NUMBER_OF_NUMPY: torch.from_numpy(np.array(value))}
    if type(value) is set:
        return set(value)
    if type(value) in (list, deque):
        return [copied(each) for each in value]
    if type(value) is tuple:
        return tuple(copied(each) for each in value)
    if type(value) is dict:
        return {key: copied(each) for key, each in value.items()}
    return value


def like(now: Any, saved: Any) -> Any:
    """A saved value in the form that the attribute has now: its device, or a queue; and NumPy's as
    they were.
    """
    if isinstance(now, Tensor) and isinstance(saved, Tensor):
        return saved.to(now.device)
    if type(now) is deque:
        return deque(with_numpy(saved), now.maxlen)
    return with_numpy(saved)


def with_numpy(saved: Any) -> Any:
    """A saved value with NumPy's arrays and numbers in it, at any depth, as they were."""
    if type(saved) in (list, tuple):
        return type(saved)(with_numpy(each) for each in saved)
    if type(saved) is not dict:
        return saved
    if saved.keys() == {ARRAY}:
        return saved[ARRAY].numpy()
    if saved.keys() == {NUMBER_OF_NUMPY}:
        return saved[NUMBER_OF_NUMPY].numpy()[()]
    return {key: with_numpy(each) for key, each in saved.items()}
