"""Trainings with a fault each, for tests that paste the lines that :mod:`unbroken.testing` prints.

Each is made of classes that are looked up in a dictionary by their names, so that a mended one can
stand in its place.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from lightning.pytorch import Callback, LightningDataModule
from torch.utils.data import DataLoader, Sampler

from tests.planted import Averages, Counting, Endless, OfTheClass, Plain, Tables, table

# A file of a package: its classes are not the user's own.
PACKAGE = '''
from lightning.pytorch import Callback


class Box:
    """Holds what it is given."""

    def __init__(self, **values):
        vars(self).update(values)


class Meter:
    """Leaves its count out of its state."""

    def __init__(self):
        self.total = 0.0
        self.count = 0

    def add(self, value):
        self.total += value
        self.count += 1

    def state_dict(self):
        return {"total": self.total}

    def load_state_dict(self, state):
        self.total = state["total"]


class Watch(Callback):
    """Keeps the sum of losses, and no state."""

    def __init__(self):
        self.meter = Meter()
        self.losses = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))
        pl_module.log("sum", sum(self.losses))
'''


def package(folder: Path) -> Any:
    """The module of :data:`PACKAGE`, as it is when it is installed."""
    if "meters_of_a_package" not in sys.modules:
        installed = folder / "site-packages"
        installed.mkdir()
        (installed / "meters_of_a_package.py").write_text(PACKAGE, encoding="utf-8")
        sys.path.insert(0, str(installed))
    import meters_of_a_package  # type: ignore[import-not-found]

    return meters_of_a_package


class HoldsAnObject(Plain):
    """An object of a package's class, with values of each kind that a checkpoint can hold."""

    make_box: ClassVar[Callable[..., Any]]

    def __init__(self) -> None:
        super().__init__()
        kinds: dict[str, Any] = {"number": 0.0, "rows": [], "tensor": torch.zeros(2)}
        kinds |= {"array": np.zeros(2), "queue": deque(maxlen=3), "words": {"a": [0]}}
        self.held = type(self).make_box(**kinds)

    def further(self, batch: Any) -> Any:
        held = self.held
        held.number += 0.1
        held.rows.append(torch.ones(1))
        held.tensor = held.tensor + 1
        held.array = held.array + 1
        held.queue.append(len(held.rows))
        held.words["a"][0] += 1
        if not hasattr(held, "late"):
            held.late = 0
        held.late += 1
        numbers = [held.number, len(held.rows), held.tensor.sum(), held.array.sum()]
        numbers += [sum(held.queue), held.words["a"][0], held.late]
        return self.weigh(0.001 * float(sum(numbers)))


class SavesAlready(Plain):
    """An object, in a module with a hook that saves something else."""

    make_box: ClassVar[Callable[..., Any]]

    def __init__(self) -> None:
        super().__init__()
        self.held = type(self).make_box(count=0, rows=[])

    def further(self, batch: Any) -> Any:
        self.held.count += 1
        self.held.rows.append(torch.ones(1))
        return self.weigh(0.01 * (self.held.count + len(self.held.rows)))

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        checkpoint["mine"] = 7

    def on_load_checkpoint(self, checkpoint: Any) -> None:
        assert checkpoint["mine"] == 7


class HoldsAMeter(Plain):
    """A package's object, whose state leaves an attribute out."""

    make_meter: ClassVar[Callable[[], Any]]

    def __init__(self) -> None:
        super().__init__()
        self.meter = type(self).make_meter()

    def further(self, batch: Any) -> Any:
        self.meter.add(float(batch[0].sum()))
        return self.weigh(0.001 * self.meter.count)


class Kinds(Callback):
    """Values of each kind that a callback's state holds as they are, or in another form."""

    def __init__(self) -> None:
        self.tensor = torch.zeros(1)
        self.array = np.zeros(2)
        self.queue: deque[float] = deque(maxlen=3)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.tensor = self.tensor + outputs["loss"]
        self.array = self.array + 1
        self.queue.append(float(self.tensor))
        pl_module.log("kinds", float(self.array.sum() + sum(self.queue)))


def draws(noise: torch.Generator) -> type:
    """A class of a module that draws from a generator in a closure, or from its own."""

    class Draws(Plain):
        def further(self, batch: Any) -> Any:
            return self.weigh(float(torch.rand(1, generator=noise)))

    return Draws


class DrawsFromItsOwn(Plain):
    """The same with the generator in the module, as the lines say."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = torch.Generator().manual_seed(1)

    def further(self, batch: Any) -> Any:
        return self.weigh(float(torch.rand(1, generator=self.noise)))


class CountsItself(Plain):
    """As a class that counts, with the number in the module, as the lines say."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def further(self, batch: Any) -> Any:
        self.count += 1
        return self.weigh(0.01 * self.count)


class Forgets(Averages):
    """Has a state that leaves something out."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class MadeAtStart(Plain):
    """An object that is made when a checkpoint has been loaded already."""

    make_box: ClassVar[Callable[..., Any]]

    def on_train_start(self) -> None:
        self.held = type(self).make_box(count=0)

    def further(self, batch: Any) -> Any:
        self.held.count += 1
        return self.weigh(0.01 * self.held.count)


class Decaying(torch.optim.SGD):
    """Decays weights by a number that an object of a package holds."""

    make_box: ClassVar[Callable[..., Any]]

    def __init__(self, weights: Any, lr: float) -> None:
        super().__init__(weights, lr)
        self.held = type(self).make_box(turn=0)

    def step(self, closure: Any = None) -> Any:
        self.held.turn += 1
        for weight in self.param_groups[0]["params"]:
            weight.data.mul_(1 - 0.001 * self.held.turn)
        return super().step(closure)


class Turning(Sampler[int]):
    """Begins each epoch where the last one has ended."""

    def __init__(self) -> None:
        self.first = 0

    def __len__(self) -> int:
        return 104

    def __iter__(self) -> Iterator[int]:
        self.first += 17
        return iter([(self.first + place) % 104 for place in range(104)])


class OwnData(Tables, LightningDataModule):
    """An object of a package's class, in a data module."""

    make_box: ClassVar[Callable[..., Any]]

    def __init__(self) -> None:
        super().__init__()
        self.held = type(self).make_box(count=0)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.trainer is not None and self.trainer.training:
            self.held.count += 1
        return batch[0] + 0.01 * self.held.count, batch[1]


Classes = dict[str, Any]


@dataclass
class Fault:
    """A training that loses something.

    Attributes:
        name: The class that is mended.
        classes: All classes that are looked up.
        training: Makes the module, the data and the Trainer's arguments, of the classes.
        says: Words that the lines must have.
        can_be_pasted: Whether the lines mend it; else they are comments.
        moved: The class in which a value has been moved as the comments say; None: none has.
    """

    name: str
    classes: Classes
    training: Callable[[Classes], tuple[Any, Any, dict[str, Any]]]
    says: str
    can_be_pasted: bool = True
    moved: type | None = None


def with_module(kind: type, says: str) -> Fault:
    """A fault of a module."""
    name = kind.__name__
    return Fault(name, {name: kind}, lambda classes: (classes[name](), None, {}), says)


def with_callback(kind: type, says: str) -> Fault:
    """A fault of a callback."""
    name = kind.__name__

    def training(classes: Classes) -> tuple[Any, Any, dict[str, Any]]:
        return Plain(), None, {"callbacks": [classes[name]()]}

    return Fault(name, {name: kind}, training, says)


def with_optimizer(kind: type, says: str) -> Fault:
    """A fault of an optimizer."""
    name = kind.__name__

    def training(classes: Classes) -> tuple[Any, Any, dict[str, Any]]:
        class Optimized(Plain):
            def configure_optimizers(self) -> Any:
                return classes[name](self.parameters(), 0.05)

        return Optimized(), None, {}

    return Fault(name, {name: kind}, training, says)


def with_loader(kind: type, says: str, can_be_pasted: bool = True) -> Fault:
    """A fault of a stream, a sampler or a dataset."""
    name = kind.__name__

    def training(classes: Classes) -> tuple[Any, Any, dict[str, Any]]:
        part = classes[name]()
        if isinstance(part, Sampler):
            return Plain(), DataLoader(table(104, 0), 8, sampler=part), {}
        return Plain(), DataLoader(part, 8), {}

    return Fault(name, {name: kind}, training, says, can_be_pasted)


def with_data() -> Fault:
    """A fault of a data module."""
    return Fault(
        "OwnData",
        {"OwnData": OwnData},
        lambda classes: (Plain(), classes["OwnData"](), {}),
        "def state_dict(self):",
    )


def faults(folder: Path) -> dict[str, Fault]:
    """All of them, by name."""
    meters = package(folder)
    HoldsAnObject.make_box = meters.Box
    SavesAlready.make_box = meters.Box
    MadeAtStart.make_box = meters.Box
    OwnData.make_box = meters.Box
    HoldsAMeter.make_meter = meters.Meter
    Decaying.make_box = meters.Box
    in_closure = with_module(draws(torch.Generator().manual_seed(1)), "as self.noise, and use that")
    in_closure.moved = DrawsFromItsOwn
    of_class = with_module(OfTheClass, "as self.count, and use that")
    of_class.moved = CountsItself
    return {
        "object": with_module(HoldsAnObject, "each.numpy()"),
        "hook_that_is_there": with_module(SavesAlready, "super().on_save_checkpoint(checkpoint)"),
        "object_with_state": with_module(HoldsAMeter, 'for name in ("count",)'),
        "class_attribute": of_class,
        "generator": in_closure,
        "list": with_callback(Averages, 'return {"losses": self.losses}'),
        "tensor_and_array": with_callback(Kinds, "torch.from_numpy(self.array.copy())"),
        "state_that_is_there": with_callback(Forgets, "**super().state_dict()"),
        "made_at_start": with_module(MadeAtStart, "(Part)"),
        "callback_of_a_package": with_callback(meters.Watch, "(Part)"),
        "optimizer": with_optimizer(Decaying, "**super().state_dict()"),
        "stream": with_loader(Endless, 'return {"place": self.place}'),
        "sampler": with_loader(Turning, 'return {"first": self.first}'),
        "rows": with_loader(Counting, "function of its index and the epoch", can_be_pasted=False),
        "data_module": with_data(),
    }


def blocks_of(text: str) -> list[str]:
    """The lines to write, of each cause."""
    return [textwrap.dedent(each) for each in re.findall(r"   write:\n((?:       .*\n?)+)", text)]


def pasted(text: str, fault: Fault) -> tuple[Classes, list[Any]]:
    """The classes with the lines in them, and the parts that are to be given to ExactCheckpoint."""
    names: dict[str, Any] = {**fault.classes, "torch": torch, "__name__": __name__}
    if fault.moved is not None:
        names[fault.name] = fault.moved
    parts = []
    for block in blocks_of(text):
        code = [line for line in block.splitlines() if not line.startswith("#")]
        if not code:
            continue
        if code[0].startswith(("class ", "from ")):
            exec(block, names)
            made = re.findall(r"(?m)^class (\w+)\((\w+)\)", block)
            for kind, base in made:
                if base == "Part":
                    parts.append(names[kind]())
                else:
                    names[base] = names[kind]
        else:
            head = f"class {fault.name}({fault.name}):\n"
            exec(head + textwrap.indent(block, "    "), names)
    return {name: names[name] for name in fault.classes}, parts
