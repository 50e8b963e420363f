"""What the user's objects hold, and who keeps it: one walk, whose result all others ask.

The walk begins with the trained module, the data module, optimizers, schedules and the user's
callbacks, in this order. What it finds belongs to one of

- :class:`unbroken.parts.declared.DeclaredStates`: what has ``state_dict`` and ``load_state_dict``;
- :class:`unbroken.parts.generators.OwnGenerators`: generators of random numbers;
- :class:`unbroken.parts.undeclared.attributes.PlainAttributes`: plain attributes;
- :class:`unbroken.parts.undeclared.modules.HiddenModules`: modules that are no layers;
- nobody: :class:`unbroken.parts.undeclared.not_kept.NotKept` tells what of it changes.

What Lightning saves itself, and the loaders that :class:`unbroken.loading.RunLoaders` reads with
their samplers and data, is passed by. A name says where something is held, and depends on nobody
else: callbacks are counted among those of their class.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import io
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from enum import Enum
from multiprocessing.sharedctypes import SynchronizedBase
from types import BuiltinMethodType, FunctionType, MethodType, SimpleNamespace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler
from torchmetrics import Metric
from unbroken import contract
from unbroken.holding import walk
from unbroken.holding.beside_objects import held_by_function, values_beside_objects
from unbroken.holding.bounds import LONGEST, MOST_BYTES_OF_DATA, MOST_ENTRIES_OF_DATA
from unbroken.holding.users_modules import LIBRARY
from unbroken.holding.walk import FUNCTIONS, LEAVES, Place
from unbroken.lightning_internals import (
    HOOKS_OF_LAYERS,
    HOOKS_OF_OPTIMIZERS,
    HOOKS_OF_WEIGHTS,
    buffers_left_out,
)
from unbroken.loading import ExactLoader, LiveLoader, position_of
from unbroken.loading.order_of_sampler import kept_with_the_loader
from unbroken.loading.own_generators import KINDS as GENERATORS
from unbroken.loading.own_generators import (
    classes_of_generators,
    draws_from_a_state,
    generators_of_modules,
)
from unbroken.loading.samplers import (
    has_state,
    is_stream,
    samplers_within,
)
from unbroken.parts.plain_values import (
    NUMBERS_AND_TEXTS,
    can_be_kept,
    is_plain,
    is_single,
    is_users_own,
    values_inside,
)
from unbroken.parts.remade import is_fillable
from unbroken.parts.users_callbacks import NOT_THE_USERS, set_by_lightning, users_callbacks

OF_EVERY_MODULE = walk.OF_EVERY_MODULE | {"track_running_stats"}
IMMUTABLE = {type(None), *NUMBERS_AND_TEXTS}
# The packages of objects that belong to the machinery: they change, and no state is lost.
MACHINERY = (
    *("lightning.", "lightning_fabric.", "torch.distributed", "torch.cuda", "torch.utils.hooks"),
    *("torch.autograd", "torch.utils.tensorboard", "torch.profiler", "torch.fx", "torch._"),
    *("threading", "_thread", "logging", "weakref", "multiprocessing", "concurrent", "asyncio"),
    *("io", "_io", "socket", "subprocess", "tqdm", "functools"),
)
# They may keep something.
KEEPING_FUNCTIONS = (FunctionType, MethodType, BuiltinMethodType, functools.partial)
# The hooks by which somebody saves what he keeps himself.
SAVING_HOOKS = ("on_save_checkpoint", "state_dict", "get_extra_state")
# What these save says nothing of the user's attributes.
NO_SAVING_OF_THE_USERS = ("lightning.", "torch.", "torchmetrics.")


class MetricWithoutState(Metric):
    """Has the attributes that every metric has, and no others."""

    def update(self, *_: Any, **__: Any) -> None: ...

    def compute(self) -> None: ...


OF_EVERY_METRIC = OF_EVERY_MODULE | vars(MetricWithoutState()).keys()


def _of_every_optimizer() -> set[str]:
    """What optimizers keep in their state dicts, and what schedules leave in them."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    return {*vars(optimizer), "_opt_called", "_step_count", "step"}


OF_EVERY_OPTIMIZER = _of_every_optimizer()


class Length(NamedTuple):
    """Stands for a list whose entries are looked at one by one."""

    entries: int


@dataclasses.dataclass(frozen=True)
class Entries:
    """Stands for a list or dictionary of numbers and texts, which is compared as a whole.

    Attributes:
        by_key: The entries. What a dictionary has more of them later is no change.
    """

    by_key: dict[Any, Any]

    @classmethod
    def of(cls, value: Any) -> Entries:
        entries = dict(walk.entries_of(value))
        return cls(entries if isinstance(value, dict) else {**entries, "length": len(entries)})


class Told(NamedTuple):
    """What is said where something changes that nobody keeps.

    Attributes:
        kinds: The classes of values whose change is said.
        advice: What the line says at its end.
        since: From when on a change counts: the training's start; an epoch's first batch, because a
            resumed run sets again what hooks of an epoch's start set; or the first epoch's first
            batch, because a loader's workers have begun by then, and outlive the epoch.
        of_new: Whether what training has made is told.
    """

    kinds: tuple[type, ...]
    advice: str = ""
    since: Literal["training", "epoch", "workers"] = "training"
    of_new: bool = True


class Unkept(NamedTuple):
    """A value that no checkpoint holds.

    Attributes:
        value: The value, or the length of a list that is not plain.
        attribute: The name of the attribute that it is, or belongs to.
        package: The package of the class whose attribute that is. Empty: it is the user's own.
        told: What is said of a change.
    """

    value: Any
    attribute: str
    package: str
    told: Told


@dataclasses.dataclass
class Held:
    """What the user's objects hold, by name; each in the field of whoever keeps it.

    Attributes:
        owners: The objects whose plain attributes are kept.
        attributes: Those attributes.
        callbacks: The user's callbacks.
        modules: Modules, and parameters that stand alone, that are no part of the trained module.
        declared: Objects with a state of their own.
        generators: Generators of random numbers.
        unkept: What nobody keeps, and whose change is told.
        layers: The trained module's parts, by name.
        other_names: Further names of a module or an object with a state, each with its first.
        objects: Whatever the walk has opened, and the trained module's parts, by each of its names.
        unreadable: What raises an error as it is looked at, with the class of that error.
    """

    owners: dict[str, Any] = dataclasses.field(default_factory=dict)
    attributes: dict[str, Any] = dataclasses.field(default_factory=dict)
    callbacks: dict[str, Any] = dataclasses.field(default_factory=dict)
    modules: dict[str, Any] = dataclasses.field(default_factory=dict)
    declared: dict[str, Any] = dataclasses.field(default_factory=dict)
    generators: dict[str, Any] = dataclasses.field(default_factory=dict)
    unkept: dict[str, Unkept] = dataclasses.field(default_factory=dict)
    layers: dict[str, nn.Module] = dataclasses.field(default_factory=dict)
    other_names: dict[str, str] = dataclasses.field(default_factory=dict)
    objects: dict[str, Any] = dataclasses.field(default_factory=dict)
    unreadable: dict[str, str] = dataclasses.field(default_factory=dict)

    def saved(self, states: dict[str, Any], name: str) -> Any:
        """The state that was saved for what is held by a name now; None: there is none.

        Where two hold one object, one of them may be left out at a resume.
        """
        names = [name, *(each for each, first in self.other_names.items() if first == name)]
        return next((states[each] for each in names if each in states), None)


# As what a Trainer holds its loaders
LOADERS = ("train_dataloader", "val_dataloaders")
# Numbers in memory that processes share, and those of C
SHARED: tuple[Any, ...] = (SynchronizedBase, ctypes.Array, ctypes.c_int.__base__)
NUMBERS = (*NUMBERS_AND_TEXTS, Enum, np.generic, *SHARED)
NOTHING = Told(())
OF_MODULES = Told(
    (object,), advice="Save it in on_save_checkpoint, or make it a part (see docs/how_it_works.md)."
)
# A package's objects in a callback belong to a tracker, a window or a clock more often than to the
# training.
OF_CALLBACKS = Told(
    (*NUMBERS, Tensor, np.ndarray, Length, *walk.CONTAINERS),
    since="epoch",
    advice="Give it in the callback's state_dict, and take it back in its load_state_dict.",
)
# A list or a package's object in a data set is a cache or an open file more often than a state.
OF_DATA = Told(
    (*NUMBERS, Length),
    since="epoch",
    advice="Let a sample be a function of its key and the epoch alone.",
)
# Numbers of a data set that the workers of a loader have a copy of for the whole run.
OF_WORKERS = Told(
    (*NUMBERS, Length),
    since="workers",
    advice=(
        "Workers that outlive an epoch do not see the change, and those of a resumed run do. With"
        " persistent_workers=False all see it."
    ),
)
# What functions keep, global variables, and attributes of classes and weights
BESIDE_OBJECTS = Told(
    (*OF_CALLBACKS.kinds, Entries),
    since="epoch",
    advice="Keep it in an attribute of the module, which a checkpoint holds.",
)
OF_SAMPLERS = Told(
    OF_CALLBACKS.kinds,
    since="epoch",
    advice="Give the sampler a state_dict and a load_state_dict, or a set_epoch that sets it.",
)

OF_VALIDATION_SAMPLERS = OF_SAMPLERS._replace(
    advice="Keep it in an attribute of the data module, or let a set_epoch set it."
)


class Inside(NamedTuple):
    """What holds for the attributes of an object, and for what they hold.

    Attributes:
        keeps_attributes: Whether plain attributes of the user's own objects are kept here.
        told: What is told of a change of what nobody keeps.
        keeps_states: Whether modules and declared states are kept here. Else they belong to
            somebody who declares a state for all that he holds.
        keeps_generators: Whether generators are kept here. Else they are seeded for each batch, or
            belong to a stream, whose state is kept with its loader.
        attribute: See :class:`Unkept`. Empty: each attribute stands for itself.
        package: See :class:`Unkept`.
    """

    keeps_attributes: bool = True
    told: Told = OF_MODULES
    keeps_states: bool = True
    keeps_generators: bool = True
    attribute: str = ""
    package: str = ""


def held_by_users(trainer: Trainer) -> Held:
    """Go over what the user's objects hold, as it is now."""
    look = _Look(trainer)
    look.module()
    look.data()
    look.optimizers_and_schedules()
    look.callbacks()
    look.data_sets()
    look.hooks_and_attributes_of_weights()
    look.functions()
    look.beside_objects()
    look.held.generators |= generators_of_modules()
    return look.held


class _Look:
    """One walk. It is over before anything changes."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.held = Held()
        self.seen: dict[int, Place] = {}
        # Lists and the like that are kept as attributes, by id. Others may hold them, too.
        self.kept: set[int] = set()
        module = trainer.lightning_module
        data = trainer.datamodule  # type: ignore[attr-defined]
        schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
        everyone: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        lightnings = [*trainer.optimizers, *schedules, *everyone, *trainer.loggers, data]
        self.named = list(module.named_modules())
        # What Lightning saves itself.
        self.seen_to = {id(each) for each in lightnings}
        for _, part in self.named:
            self.seen_to.add(id(part))
            # module.parameters() would go over all layers once more.
            self.seen_to.update(map(id, vars(part)["_parameters"].values()))
        self.optimizer_states = {id(each.state) for each in trainer.optimizers}
        self.read = _read_by(trainer)
        self.read_by_workers = _read_by_workers_that_stay(trainer)
        self.samplers = _samplers_of_training(trainer)
        # What is kept with the state of a loader of the training.
        self.kept_with_loaders = self.samplers | _read_by_loaders_with_a_state(trainer)
        # Who saves something himself may save what he puts into a sampler, or keeps beside objects.
        self.is_saved_by_users = any(map(saves_itself, (module, data)))
        # Functions that were found, and are opened when all objects are known that others hold.
        self.waiting_functions: list[Place] = []

    # Where the walk begins

    def module(self) -> None:
        module = self.trainer.lightning_module
        places: list[Place] = []
        for path, part in parts_outside_metrics(self.named):
            name = f"module.{path}".rstrip(".")
            is_foreign = part is not module and is_foreign_layer(part)
            places += self._owner(name, part, Inside(), 0, only_singles=is_foreign)
        for path, part in self.named:
            name = f"module.{path}".rstrip(".")
            self.held.layers[name] = part
            # One part may have several names, of which named_modules gives the first.
            for child, each in vars(part)["_modules"].items():
                if each is not None:
                    self.held.objects[f"{name}.{child}"] = each
            for buffer in buffers_left_out(part):
                self._buffer(part, buffer, f"{name}.{buffer}")
        self._walk(places)

    def _buffer(self, part: nn.Module, attribute: str, name: str) -> None:
        """A buffer that the state dict leaves out: tell of one that no checkpoint can hold."""
        value = getattr(part, attribute, None)
        is_lazy_one = isinstance(value, Tensor) and is_lazy(value)
        if value is None or is_lazy_one or can_be_kept(value) or saves_itself(part):
            return
        self._tell(name, value, Inside())

    def data(self) -> None:
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        if data is not None:
            self._walk(self._owner("data", data, Inside(), 0))

    def optimizers_and_schedules(self) -> None:
        places: list[Place] = []
        for number, optimizer in enumerate(self.trainer.optimizers):
            places += self._optimizer(f"optimizers.{number}", optimizer, Inside(), 0)
        for number, config in enumerate(self.trainer.lr_scheduler_configs):
            places += self._schedule(f"schedules.{number}", config.scheduler, Inside(), 0)
        self._walk(places)

    def callbacks(self) -> None:
        of_class: Counter[str] = Counter()
        places: list[Place] = []
        for callback in users_callbacks(self.trainer):
            if isinstance(callback, Logger):
                # What a tracker keeps is no part of the training.
                continue
            kind: type = type(callback)
            title = kind.__qualname__
            name = f"callbacks.{title}.{of_class[title]}"
            of_class[title] += 1
            self.held.callbacks[name] = callback
            # A callback keeps what its state_dict says, as Lightning has it.
            is_silent = saves_itself(callback) or package_of(callback) == LIBRARY
            inside = Inside(keeps_attributes=False, told=NOTHING if is_silent else OF_CALLBACKS)
            places += self._attributes(name, callback, inside, 0, set_by_lightning(kind))
        self._walk(places)

    def data_sets(self) -> None:
        """What the loaders read that nobody else holds. States that it declares are kept. Its
        generators are seeded for each batch, but for those of a validation's samplers.
        """
        trainer = self.trainer
        found = dict(zip(LOADERS, (trainer.train_dataloader, trainer.val_dataloaders), strict=True))
        told = NOTHING if self.is_saved_by_users else OF_DATA
        places: list[Place] = []
        for name, loader in walk.loaders_in(found):
            for part in ("dataset", "sampler", "batch_sampler", "collate_fn"):
                value = getattr(loader, part, None)
                draws_on = isinstance(value, Sampler) and id(value) not in self.kept_with_loaders
                inside = Inside(False, told, keeps_generators=draws_on)
                places += self._child(f"{name}.{part}", value, inside, 0)
        self._walk(places)

    def hooks_and_attributes_of_weights(self) -> None:
        """The hooks that were registered at layers, weights and optimizers, which are opened with
        the functions; and what the user's code has set in weights.
        """
        inside = Inside(told=self._told_beside_objects())
        for path, part in self.named:
            name = f"module.{path}".rstrip(".")
            self._hooks(name, part, HOOKS_OF_LAYERS)
            for parameter, weight in vars(part)["_parameters"].items():
                if weight is None:
                    continue
                path_of_weight = f"{name}.{parameter}"
                self._hooks(path_of_weight, weight, HOOKS_OF_WEIGHTS)
                for attribute, value in vars(weight).items():
                    if not attribute.startswith("_"):
                        self._tell(f"{path_of_weight}.{attribute}", value, inside)
        for number, optimizer in enumerate(self.trainer.optimizers):
            self._hooks(f"optimizers.{number}", optimizer, HOOKS_OF_OPTIMIZERS)

    def _hooks(self, name: str, part: Any, kinds: Iterable[str]) -> None:
        for kind in kinds:
            for key, hook in (getattr(part, kind, None) or {}).items():
                if isinstance(hook, KEEPING_FUNCTIONS) or is_users_own(type(hook)):
                    place = Place(f"{name}.{kind.lstrip('_')}.{key}", hook)
                    self.waiting_functions.append(place)

    def functions(self) -> None:
        """What functions keep that the objects hold. Attributes of objects in them are not kept."""
        inside = Inside(keeps_attributes=False, told=self._told_beside_objects())
        while self.waiting_functions:
            found, self.waiting_functions = self.waiting_functions, []
            places: list[Place] = []
            for name, function, depth, _ in found:
                if not isinstance(function, KEEPING_FUNCTIONS):
                    # An object that is called as a hook
                    places += self._child(name, function, inside, depth)
                for variable, each in held_by_function(function):
                    places += self._child(f"{name}.{variable}", each, inside, depth)
            self._walk(places)

    def beside_objects(self) -> None:
        """Global variables, attributes of classes, and what functions keep, of the modules in which
        the user's objects are written. Modules and objects with a state are kept, others told.
        """
        objects = [*self.held.owners.values(), *self.held.callbacks.values()]
        objects += [place.value for place in self.seen.values() if id(place.value) in self.read]
        modules = dict.fromkeys(type(each).__module__ for each in objects)
        # A module that is imported late brings new ones.
        told = self._told_beside_objects()._replace(of_new=False)
        inside = Inside(keeps_attributes=False, told=told)
        places: list[Place] = []
        names = ["__main__", *modules]
        for name, value in values_beside_objects(names, classes_of_generators()):
            if isinstance(value, GENERATORS):
                if draws_from_a_state(value):
                    self.held.generators[name] = value
            else:
                places += self._child(name, value, inside, 0)
        self._walk(places)

    def _told_beside_objects(self) -> Told:
        return NOTHING if self.is_saved_by_users else BESIDE_OBJECTS

    # How it goes on

    def _walk(self, places: Iterable[Place]) -> None:
        walk.walk(places, self._opened, self.seen, self._again)

    def _again(self, place: Place, first: Place) -> None:
        self.held.objects[place.name] = place.value
        if first.name in self.held.declared or first.name in self.held.modules:
            self.held.other_names[place.name] = first.name

    def _opened(self, place: Place) -> list[Place]:
        """Note an object, and return what it holds and may be of interest."""
        try:
            return self._open(place)
        except Exception as error:
            # An attribute of the user's may not be there yet, or be computed.
            return self._not_read(place.name, error)

    def _not_read(self, name: str, error: Exception) -> list[Place]:
        self.held.owners.pop(name, None)
        self.held.unreadable[name] = type(error).__name__
        return []

    def _open(self, place: Place) -> list[Place]:
        """The same, where nothing fails."""
        place = place._replace(inside=_inside(place.value, place.inside))
        name, value = place.name, place.value
        self.held.objects[name] = value
        if isinstance(value, GENERATORS):
            if draws_from_a_state(value) and place.inside.keeps_generators:
                self.held.generators[name] = value
            return []
        if isinstance(value, KEEPING_FUNCTIONS):
            self.waiting_functions.append(place)
            return []
        if id(value) in self.seen_to:
            return []
        if isinstance(value, nn.Module | nn.Parameter):
            # A compiled one is of a class of the machinery, and none the less a teacher.
            return self._hidden_module(place)
        if self._is_kept_elsewhere(value):
            return []
        if isinstance(value, walk.CONTAINERS) and not hasattr(type(value), "load_state_dict"):
            return self._container(place)
        if id(value) in self.read or isinstance(value, Dataset | Sampler | DataLoader):
            return self._part_of_data(place)
        if declares_state(value):
            return self._declared(place)
        return self._object(place)

    def _is_kept_elsewhere(self, value: Any) -> bool:
        """Whether Lightning or another part keeps an object, or there is nothing to keep of it."""
        # The class is asked: an object of a package may answer for names that it does not have.
        if hasattr(type(value), "metric_state") and hasattr(type(value), "load_metric_state"):
            return True
        # Hyperparameters are in a dictionary of Lightning's.
        is_open = id(value) in self.read or isinstance(value, dict)
        return not is_open and type(value).__module__.startswith((*MACHINERY, *NOT_THE_USERS))

    def _owner(
        self, name: str, owner: Any, inside: Inside, depth: int, only_singles: bool = False
    ) -> list[Place]:
        """Somebody whose plain attributes are kept; of layers of packages single values, and tuples
        of them, alone.
        """
        self.held.owners[name] = owner
        not_kept = not_kept_of(owner)
        is_silent = only_singles or saves_itself(owner)
        tells = NOTHING if is_silent else inside.told
        inside = inside._replace(told=tells, attribute="", package=package_of(owner))
        attributes = self.held.attributes
        places: list[Place] = []
        of_class = {} if only_singles else changeable_of_class(owner)
        for attribute, value in {**of_class, **vars(owner)}.items():
            if attribute in not_kept:
                continue
            path = f"{name}.{attribute}"
            if type(value) in IMMUTABLE or (only_singles and is_row_of_numbers(value, tuple)):
                if value is not None or not only_singles:
                    attributes[path] = value
            elif not only_singles or not is_row_of_numbers(value, list):
                try:
                    places += self._attribute(path, value, inside, depth, only_singles)
                except Exception as error:
                    self._not_read(path, error)
        return places if only_singles else places + self._slots(name, owner, inside, depth)

    def _attribute(
        self, path: str, value: Any, inside: Inside, depth: int, only_singles: bool
    ) -> list[Place]:
        """An attribute of somebody whose plain attributes are kept."""
        if not is_single(value) and (only_singles or not is_plain(value)):
            return self._child(path, value, inside, depth)
        if is_object(value):
            return [Place(path, value, depth + 1, inside)]
        if path.startswith("data.") and not may_be_held(value):
            self._tell(path, value, inside)
            return []
        self.held.attributes[path] = value
        if is_fillable(value):
            self.kept.add(id(value))
        return []

    def _slots(self, name: str, owner: Any, inside: Inside, depth: int) -> list[Place]:
        """What somebody whose attributes are kept has in slots, which is told."""
        places: list[Place] = []
        for attribute in walk.names_of_slots(type(owner)):
            if hasattr(owner, attribute):
                value = getattr(owner, attribute)
                places += self._child(f"{name}.{attribute}", value, inside, depth)
        return places

    def _attributes(
        self, name: str, owner: Any, inside: Inside, depth: int, left_out: Collection[str] = ()
    ) -> list[Place]:
        """Somebody whose plain attributes are not kept here."""
        places: list[Place] = []
        if isinstance(owner, nn.Module):
            left_out = OF_EVERY_MODULE
        for attribute, value in walk.attributes_of(owner):
            is_cached = isinstance(getattr(type(owner), attribute, None), functools.cached_property)
            if not is_cached and attribute not in left_out:
                places += self._child(f"{name}.{attribute}", value, inside, depth)
        return places

    def _child(self, name: str, value: Any, inside: Inside, depth: int) -> list[Place]:
        """A value that nobody keeps here as it is: what it holds may be kept."""
        is_closed = isinstance(value, FUNCTIONS) and not isinstance(value, KEEPING_FUNCTIONS)
        if is_closed or id(value) in self.kept:
            return []
        is_leaf = isinstance(value, (*LEAVES, Enum, np.ndarray, *SHARED)) or is_iterator(value)
        is_leaf = is_leaf or (isinstance(value, Tensor) and not isinstance(value, nn.Parameter))
        if is_leaf:
            self._tell(name, value, inside)
            return []
        return [Place(name, value, depth + 1, inside)]

    def _tell(self, name: str, value: Any, inside: Inside) -> None:
        told = inside.told
        if isinstance(value, told.kinds) or (told is not NOTHING and is_iterator(value)):
            attribute = inside.attribute or name
            self.held.unkept[name] = Unkept(value, attribute, inside.package, told)

    # The kinds of objects

    def _container(self, place: Place) -> list[Place]:
        name, value, depth, inside = place
        is_short = len(value) <= LONGEST
        if is_short and not inside.told.of_new and holds_leaves(value):
            self._tell(name, Entries.of(value), inside)
            return []
        # A dictionary beside the objects may be a cache, which may grow.
        if inside.told.of_new or not isinstance(value, dict):
            inside = inside._replace(attribute=inside.attribute or name)
            self._tell(name, Length(len(value)) if is_short else value, inside)
        if not is_short:
            return []
        places: list[Place] = []
        for key, each in walk.held_by(value):
            places += self._child(f"{name}.{key}", each, inside, depth)
        if is_users_own(type(value)):
            for attribute, each in walk.attributes_of(value):
                places += self._child(f"{name}.{attribute}", each, inside, depth)
        return places

    def _hidden_module(self, place: Place) -> list[Place]:
        name, value, depth, inside = place
        if inside.keeps_states:
            self.held.modules[name] = value
        if not isinstance(value, nn.Module):
            return []
        places: list[Place] = []
        for path, part in parts_outside_metrics(list(value.named_modules())):
            of_part = f"{name}.{path}".rstrip(".")
            is_foreign = is_foreign_layer(part)
            if inside.keeps_attributes:
                places += self._owner(of_part, part, inside, depth, only_singles=is_foreign)
            elif not type(part).__module__.startswith("torch.nn."):
                within = inside._replace(told=NOTHING if is_foreign else inside.told)
                places += self._attributes(of_part, part, within, depth)
        return places

    def _part_of_data(self, place: Place) -> list[Place]:
        """A data set, a sampler or a loader. Its samples are not looked through."""
        name, value, depth, inside = place
        is_read = id(value) in self.read
        # The state of a loader, a sampler or a stream is a place in a pass, and a validation begins
        # another one.
        is_map_style = isinstance(value, Dataset) and not is_stream(value)
        keeps_a_place = is_read and not is_map_style
        keeps_states = inside.keeps_states and id(value) not in self.kept_with_loaders
        if keeps_states and not keeps_a_place and declares_state(value):
            return self._declared(place)
        self._tell(name, Identity(value), inside)
        length = sized_len(value) if isinstance(value, Dataset) else None
        if length is not None:
            # Caches in it may fill. One that grows is no longer what the constructor makes.
            within = inside._replace(attribute=inside.attribute or name)
            self._tell(f"{name}.length", Length(length), within)
        keeps_its_state = isinstance(value, Dataset) and not is_asked_by_key(value)
        within = inside._replace(
            keeps_attributes=False,
            told=self._told_of_data(value) if is_read else NOTHING,
            keeps_states=keeps_states and (not keeps_a_place or isinstance(value, DataLoader)),
            keeps_generators=inside.keeps_generators and not keeps_its_state,
        )
        left_out = self._kept_with_loader(value)
        return self._attributes(name, value, within, depth, left_out)

    def _kept_with_loader(self, value: Any) -> list[str]:
        """The attributes of a sampler of the training's that LoaderStates keeps."""
        return kept_with_the_loader(value) if id(value) in self.samplers else []

    def _told_of_data(self, value: Any) -> Told:
        """What is told of a data set or a sampler that the Trainer reads."""
        if has_an_order_of_its_own(value):
            if id(value) not in self.kept_with_loaders:
                told = OF_VALIDATION_SAMPLERS
            else:
                told = NOTHING if has_state(value) else OF_SAMPLERS
            return NOTHING if self.is_saved_by_users else told
        if not is_asked_by_key(value):
            return NOTHING
        return OF_WORKERS if id(value) in self.read_by_workers else OF_DATA

    def _declared(self, place: Place) -> list[Place]:
        """An object with a state. It speaks for all that it holds, its generators apart."""
        name, value, depth, inside = place
        if isinstance(value, Optimizer) and id(value.state) in self.optimizer_states:
            # A wrapper of it is the Trainer's.
            return []
        if inside.keeps_states:
            self.held.declared[name] = value
        if isinstance(value, Optimizer):
            return self._optimizer(name, value, inside, depth)
        if isinstance(value, LRScheduler):
            return self._schedule(name, value, inside, depth)
        within = inside._replace(keeps_attributes=False, told=NOTHING, keeps_states=False)
        return self._attributes(name, value, within, depth)

    def _optimizer(self, name: str, optimizer: Any, inside: Inside, depth: int) -> list[Place]:
        """A state dict of torch's optimizers lacks what a subclass keeps in attributes."""
        if inside.keeps_attributes and is_not_overridden(optimizer, Optimizer):
            return self._owner(name, optimizer, inside, depth)
        within = inside._replace(keeps_attributes=False, told=NOTHING, keeps_states=False)
        return self._attributes(name, optimizer, within, depth)

    def _schedule(self, name: str, schedule: Any, inside: Inside, depth: int) -> list[Place]:
        """The state dict that torch makes of a schedule has its attributes, but no state of objects
        in them.
        """
        takes = inside.keeps_states and is_not_overridden(schedule, LRScheduler)
        within = inside._replace(keeps_attributes=False, told=NOTHING, keeps_states=takes)
        return self._attributes(name, schedule, within, depth)

    def _object(self, place: Place) -> list[Place]:
        """An object without a state. Of a package's, attributes are not kept, but what it holds may
        be.
        """
        name, value, depth, inside = place
        if isinstance(value, Callback):
            within = inside._replace(keeps_attributes=False, told=NOTHING)
            return self._attributes(name, value, within, depth)
        if inside.keeps_attributes and is_object(value):
            return self._owner(name, value, inside, depth)
        inside = inside._replace(attribute=inside.attribute or name)
        if not hasattr(value, "__dict__") and not walk.names_of_slots(type(value)):
            is_set = isinstance(value, set | frozenset)
            self._tell(name, value if is_set else Identity(value), inside)
            return []
        self._tell(name, type(value), inside)
        return self._attributes(name, value, inside, depth)


def parts_outside_metrics(named: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Parts of a module, but for the networks in metrics, which these keep."""
    metrics = [part for _, part in named if isinstance(part, Metric)]
    inside = {id(part) for metric in metrics for part in metric.modules()}
    return [
        (name, each) for name, each in named if isinstance(each, Metric) or id(each) not in inside
    ]


def _inside(value: Any, inside: Inside) -> Inside:
    """What holds inside an object: nothing is told where a change of the object is not."""
    is_told = isinstance(value, inside.told.kinds) or is_users_own(type(value))
    return inside if is_told else inside._replace(told=NOTHING)


class Identity(NamedTuple):
    """Stands for an object of which nothing is compared but whether it is the same one."""

    value: Any


def _read_by(trainer: Trainer) -> set[int]:
    """The loaders that the Trainer reads, with their data and samplers, by id.

    Their state lies ahead of the training. LoaderStates keeps it.
    """
    return _parts_of([trainer.train_dataloader, trainer.val_dataloaders])


def _read_by_loaders_with_a_state(trainer: Trainer) -> set[int]:
    """The loaders of the training whose states speak for all that they read, with that, by id."""
    loaders = [each for _, each in walk.loaders_in(trainer.train_dataloader)]
    return _parts_of([each for each in loaders if not isinstance(each, ExactLoader)])


def _parts_of(loaders: list[Any]) -> set[int]:
    """Loaders, with their data and samplers, by id."""
    found: set[int] = set()
    waiting = list(loaders)
    while waiting:
        value = waiting.pop()
        if value is None or id(value) in found:
            continue
        if isinstance(value, walk.CONTAINERS):
            waiting += value.values() if isinstance(value, dict) else value
            continue
        found.add(id(value))
        if isinstance(value, LiveLoader):
            loader = position_of(value).loader
            found |= {id(each) for each in samplers_within(loader) if each is not loader}
            waiting.append(loader)
            continue
        for name in ("dataset", "sampler", "batch_sampler"):
            part = vars(value).get(name) if hasattr(value, "__dict__") else None
            if part is not None:
                found |= {id(each) for each in samplers_within(part)}
                waiting.append(part)
        if isinstance(value, Dataset):
            waiting += [each for each in vars(value).values() if isinstance(each, Dataset)]
            for each in vars(value).values():
                if isinstance(each, list | tuple) and len(each) <= LONGEST:
                    waiting += [part for part in each if isinstance(part, Dataset)]
    return found


def _samplers_of_training(trainer: Trainer) -> set[int]:
    """The samplers of the training's exact loaders, by id."""
    loaders = [each for _, each in walk.loaders_in(trainer.train_dataloader)]
    exact = [position_of(each) for each in loaders if isinstance(each, ExactLoader)]
    return {id(sampler) for each in exact for sampler in samplers_within(each.source)}


def _read_by_workers_that_stay(trainer: Trainer) -> set[int]:
    """The data sets of loaders whose workers outlive an epoch, with the data sets in them, by
    id.
    """
    found: set[int] = set()
    for _, loader in walk.loaders_in([trainer.train_dataloader, trainer.val_dataloaders]):
        stays = getattr(loader, "persistent_workers", False) and getattr(loader, "num_workers", 0)
        waiting = [getattr(loader, "dataset", None)] if stays else []
        while waiting:
            value = waiting.pop()
            if isinstance(value, Dataset) and id(value) not in found:
                found.add(id(value))
                waiting += [each for _, each in walk.attributes_of(value)]
    return found


def has_an_order_of_its_own(value: Any) -> bool:
    """Whether a value is a sampler whose order is no function of the epoch. How batches are cut is
    kept.
    """
    if not isinstance(value, Sampler) or type(value) is BatchSampler:
        return False
    return not isinstance(value, contract.OrdersByEpoch)


def is_asked_by_key(value: Any) -> bool:
    """Whether a value is a data set whose state nobody keeps."""
    return isinstance(value, Dataset) and not is_stream(value) and not has_state(value)


def declares_state(value: Any) -> bool:
    """Whether an object offers a state and takes it back; its class is asked."""
    kind = type(value)
    offers = (getattr(kind, "state_dict", None), getattr(kind, "load_state_dict", None))
    # Lightning gives every callback and data module one that is empty.
    is_lightnings = offers[0] in (Callback.state_dict, LightningDataModule.state_dict)
    return all(map(callable, offers)) and not is_lightnings


def is_not_overridden(value: Any, kind: type) -> bool:
    """Whether an object's ``state_dict`` is that of a base class. A wrapper that only says it is an
    optimizer has none, and passes on that of the one inside.
    """
    return getattr(type(value), "state_dict", None) in (None, kind.state_dict)  # type: ignore[attr-defined]


def is_row_of_numbers(value: Any, kind: type) -> bool:
    """Whether a value is a tuple or list of numbers, such as the size of a layer's kernel."""
    is_row = type(value) is kind
    return is_row and IMMUTABLE.issuperset(map(type, value))


def package_of(owner: Any) -> str:
    """The package of an object's class; empty where the class is the user's own."""
    kind = type(owner)
    return "" if is_users_own(kind) else kind.__module__.partition(".")[0]


def not_kept_of(owner: Any) -> set[str]:
    """The attributes that other parts of a checkpoint, and Lightning itself, see to."""
    if isinstance(owner, Optimizer):
        return OF_EVERY_OPTIMIZER
    if not isinstance(owner, nn.Module | LightningDataModule):
        return set()
    if not isinstance(owner, Metric):
        return OF_EVERY_MODULE
    tensors = {name for name, value in vars(owner).items() if isinstance(value, Tensor)}
    return OF_EVERY_METRIC | tensors | owner.metric_state.keys()


def is_foreign_layer(owner: Any) -> bool:
    """Whether an object is a layer, and not of a class of the user's own."""
    is_layer = isinstance(owner, nn.Module) and not isinstance(owner, Metric)
    return is_layer and not is_users_own(type(owner))


def changeable_of_class(owner: Any) -> dict[str, Any]:
    """Lists, dictionaries and the like that an object finds in its class, where that is the user's
    own: training may change them as if they were the object's.
    """
    found: dict[str, Any] = {}
    for kind in reversed(type(owner).__mro__):
        if is_users_own(kind):
            found |= {name: each for name, each in vars(kind).items() if is_changeable(each)}
    return {name: each for name, each in found.items() if not name.startswith("__")}


def is_changeable(value: Any) -> bool:
    """Whether training may change a value without putting another one in its place."""
    return is_fillable(value) or isinstance(value, GENERATORS)


def saves_itself(owner: Any) -> bool:
    """Whether somebody has a hook of his own that saves something."""
    for kind in type(owner).__mro__:
        is_own = not kind.__module__.startswith(NO_SAVING_OF_THE_USERS)
        if is_own and any(hook in vars(kind) for hook in SAVING_HOOKS):
            return True
    return False


def is_object(value: Any) -> bool:
    """Whether a value is an object whose attributes can be kept: of a class of the user's own, and
    neither a module, nor a part of the data, nor one that declares a state.
    """
    kind = type(value)
    others = type | nn.Module | tuple | Enum | Tensor | Dataset | Sampler | Callback
    if isinstance(value, others):
        return False
    if not hasattr(value, "__dict__") or is_frozen(kind) or declares_state(value):
        return False
    if kind.__module__.startswith(NOT_THE_USERS):
        # The engine's own, such as a loader that keeps its place.
        return False
    return kind is SimpleNamespace or is_users_own(kind)


def is_frozen(kind: type) -> bool:
    """Whether a class is a dataclass whose objects are replaced, and never changed."""
    return dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]


def holds_leaves(value: Any) -> bool:
    """Whether all entries of a list or dictionary are numbers and texts."""
    return all(isinstance(each, LEAVES) for _, each in walk.entries_of(value))


def is_iterator(value: Any) -> bool:
    """Whether a value goes on whenever it is asked, and cannot be told where it is. What declares a
    state can, and a data set is the loader's.
    """
    if not isinstance(value, Iterator) or isinstance(value, io.IOBase | Dataset):
        return False
    return not is_plain(value) and not declares_state(value)


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
