"""The generators of random numbers."""

import random
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from unbroken.holding.beside_objects import owner_beside_objects
from unbroken.loading.own_generators import (
    can_be_restored,
    has_the_same_children,
    made_of,
    restore,
    state_of,
)
from unbroken.parts.part import Part
from unbroken.parts.users_objects import UsersObjects
from unbroken.stopping.ranks import say


class RandomGenerators(Part):
    """Python's, NumPy's, torch's CPU and the device's generator.

    Lightning's checkpoint holds none of them.
    """

    name = "random"
    is_read_after_training = True

    def take(self, trainer: Trainer) -> dict[str, Any]:
        device = trainer.strategy.root_device
        return {**random_state(device), "device": device.type}

    def give_back(self, trainer: Trainer, value: dict[str, Any]) -> None:
        device = trainer.strategy.root_device
        # On a device of another type the numbers differ anyway.
        if value.get("device", device.type) == device.type:
            restore_random_state(value, device)


class OwnGenerators(Part):
    """Generators that the module, the data module and the user's callbacks hold in their
    attributes.

    Args:
        objects: Who finds them.
    """

    name = "own_generators"
    is_read_after_training = True

    def __init__(self, objects: UsersObjects) -> None:
        self._objects = objects
        # What cannot be given back
        self._told: set[str] = set()

    def take(self, trainer: Trainer) -> dict[str, Any]:
        """The states of all that there are, by name, each with the kind of its generator."""
        found = self._objects.held.generators
        return {path: [type(each).__name__, state_of(each)] for path, each in found.items()}

    def give_back(self, trainer: Trainer, value: dict[str, Any]) -> None:
        """Put those back that are of the same kind, and make the others that training has made."""
        owners = self._objects.held.owners | self._objects.held.callbacks
        for path, (kind, state) in value.items():
            owner_path, _, attribute = path.rpartition(".")
            owner = owners.get(owner_path)
            found = self._objects.held.generators.get(path)
            if owner is None:
                owner = _owner_of_late_one(owner_path, attribute, found)
            # A hook may have put another one there since the walk.
            now = found if owner is None else getattr(owner, attribute, None)
            if can_be_restored(now, kind, state) and has_the_same_children(now, state):
                restore(now, state)
                continue
            if owner is None and now is None:
                # It has not been made here, or is no attribute.
                continue
            made = None if owner is None else made_of(kind, state)
            if made is not None and now is found:
                setattr(owner, attribute, made)
                self._objects.held.generators[path] = made
            elif path not in self._told:
                self._told.add(path)
                say(f"the resume is not exact: {path} was a {kind}, which cannot be made here.")


def _owner_of_late_one(path: str, name: str, found: Any) -> Any:
    """The user's module, or class, in which training makes a generator late: as a first step asks
    for it. Here none was found when the walk came by.
    """
    owner = owner_beside_objects(path) if found is None else None
    is_variable = owner is not None and name in vars(owner)
    return owner if is_variable else None


def random_state(device: torch.device) -> dict[str, Any]:
    """The states of all generators, as plain values and tensors."""
    version, words, gauss = random.getstate()
    name, keys, *rest = np.random.get_state()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        # A tensor is saved in microseconds, a list of its 625 numbers in milliseconds.
        "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
        "numpy": [name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
    }
    if device.type in ("cuda", "mps"):
        state[device.type] = torch.get_device_module(device).get_rng_state()
    return state


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Put every generator where :func:`random_state` found it.

    A device of another type keeps its own.
    """
    torch.set_rng_state(state["torch"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    if device.type in state:
        torch.get_device_module(device).set_rng_state(state[device.type])
