"""Numbers, texts, tensors, arrays and lists that a module, a metric or data module keeps as plain
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


class MetricWithoutState(Metric):
    """Has the attributes that every metric has, and no others."""

    def update(self, *_: Any, **__: Any) -> None: ...

    def compute(self) -> None: ...


# What every module has. Other parts, and Lightning itself, see to it.
OF_EVERY_MODULE = {*vars(LightningModule()), *vars(LightningDataModule()), "track_running_stats"}
OF_EVERY_METRIC = OF_EVERY_MODULE | vars(MetricWithoutState()).keys()
# A checkpoint holds NumPy's arrays and numbers as tensors, in a dictionary of this one key.
ARRAY = "numpy.ndarray"
NUMBER_OF_NUMPY = "numpy.generic"
# In the same way it holds a tensor that was on the accelerator.
ON_ACCELERATOR = "torch.Tensor.on_accelerator"
# A larger array, or a longer list of texts, is taken for data, which a module does not count in.
LARGEST_ARRAY_BYTES = 64 * 2**20
MOST_TEXTS = 1000


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
                attributes[attribute] = like(attributes.get(attribute), copied(saved), device)


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
        on_cpu = value.detach().to("cpu", copy=True)
        return on_cpu if value.device.type == "cpu" else {ON_ACCELERATOR: on_cpu}
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


def like(now: Any, saved: Any, device: torch.device) -> Any:
    """A saved value in the form that the attribute has now: its device, or a queue; and NumPy's as
    they were.

    Args:
        now: The attribute's value, or what it holds in the same place.
        saved: What :func:`copied` has made. The attribute gets it, or parts of it.
        device: The accelerator, for tensors that were on it.
    """
    if is_plain(now) and is_same(copied(now), saved):
        # The same object, for it may share its memory with a weight.
        return now
    if isinstance(saved, Tensor):
        return saved.to(now.device) if isinstance(now, Tensor) else saved
    if type(saved) in (list, tuple):
        return entries_like(now, saved, device)
    if type(saved) is not dict:
        return saved
    if saved.keys() == {ON_ACCELERATOR}:
        return saved[ON_ACCELERATOR].to(device)
    if saved.keys() == {ARRAY}:
        return saved[ARRAY].numpy()
    if saved.keys() == {NUMBER_OF_NUMPY}:
        return saved[NUMBER_OF_NUMPY].numpy()[()]
    there = now if type(now) is dict else {}
    return {key: like(there.get(key), each, device) for key, each in saved.items()}


def entries_like(now: Any, saved: Any, device: torch.device) -> Any:
    """The same for a saved list or tuple. The attribute may be a queue now."""
    there = list(now) if type(now) in (list, tuple, deque) else []
    # The attribute may have fewer entries.
    there += [None] * len(saved)
    entries = [like(mine, each, device) for mine, each in zip(there, saved, strict=False)]
    if type(now) is deque:
        return deque(entries, now.maxlen)
    return type(saved)(entries)
