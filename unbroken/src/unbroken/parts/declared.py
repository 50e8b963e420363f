"""States that objects declare: whatever has ``state_dict`` and ``load_state_dict``, wherever the
module, the data module, an optimizer, a schedule or a callback holds it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer
from unbroken.parts.held import Held
from unbroken.parts.plain_values import copied, is_plain
from unbroken.parts.remade import Remaking
from unbroken.tensors.same_values import deep_copy


class DeclaredStates:
    """The states of averages of weights, accountants, buffers, samplers, schedules and optimizers
    that the user's objects hold, of whichever package they are.

    What Lightning or another part saves is not among them: the Trainer's own optimizers, schedules
    and callbacks, the data module, the trained module, its loaders.

    A state must be plain data. An entry that is not is left out and told, unless it is an object
    that is held here itself, such as a schedule inside another one.
    """

    def __init__(self) -> None:
        # Optimizers whose parameter groups, or whose states, are those of another one.
        self._same_groups: list[tuple[Optimizer, Optimizer]] = []
        self._same_states: list[tuple[Optimizer, Optimizer]] = []

    def begin(self, held: Held, optimizers: list[Optimizer]) -> None:
        """Note which optimizers share their groups or states, before states are loaded into any.

        To load a state gives an optimizer new ones. A schedule of the one would then no longer set
        the rates of the other, and what steps the one would no longer be seen in the other.
        """
        self._same_groups = []
        self._same_states = []
        inside = [each for each in held.objects.values() if isinstance(each, Optimizer)]
        for inner in inside:
            for outer in optimizers:
                if share_groups(inner, outer):
                    self._same_groups.append((inner, outer))
                if inner is not outer and inner.state is outer.state:
                    self._same_states.append((inner, outer))

    def take(self, held: Held) -> tuple[dict[str, Any], dict[str, str]]:
        """Copies of all states by name; and what was left out of them, each with the reason."""
        states: dict[str, Any] = {}
        left_out: dict[str, str] = {}
        for name, value in held.declared.items():
            try:
                state = value.state_dict()
            except Exception as error:
                left_out[name] = f"its state_dict fails ({type(error).__name__}: {error})"
                continue
            if not state:
                continue
            if type(state) is dict:
                plain, odd = plain_entries_of(state)
                for key in odd:
                    if not is_held(held, state[key]):
                        kind = type(state[key]).__name__
                        left_out[f"{name}.{key}"] = f"its state_dict gives a {kind}"
                states[name] = copied(plain)
            elif is_plain(state):
                states[name] = copied(state)
            else:
                left_out[name] = f"its state_dict gives a {type(state).__name__} of objects"
        for name, first in held.other_names.items():
            if first in states:
                states[name] = states[first]
        return states, left_out

    def give_back(self, held: Held, states: dict[str, Any], device: torch.device) -> dict[str, str]:
        """Load the states of what there is; what cannot be loaded is returned with the reason."""
        refused: dict[str, str] = {}
        for name, value in held.declared.items():
            saved = held.saved(states, name)
            if saved is None:
                continue
            state = Remaking(device).like(None, deep_copy(saved), name)
            try:
                load_state(value, state)
            except Exception as error:
                refused[name] = f"its load_state_dict fails ({type(error).__name__}: {error})"
        for inner, outer in self._same_groups:
            inner.param_groups = outer.param_groups
        for inner, outer in self._same_states:
            inner.state = outer.state
        return refused


def plain_entries_of(state: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The entries of a state that a checkpoint can hold, and the names of the others."""
    plain: dict[str, Any] = {}
    odd: list[str] = []
    for key, value in state.items():
        if is_plain(value):
            plain[key] = value
        elif not callable(value):
            odd.append(key)
    return plain, odd


def plain_state(schedule: Any) -> Any:
    """The state of one of the Trainer's schedules without objects, such as another schedule.

    torch's own state dict of a schedule has every attribute. Those that declare a state themselves
    are kept by :class:`DeclaredStates`.
    """
    state = schedule.state_dict()
    # That of a schedule of the user's own may be None.
    return without_objects(state) if isinstance(state, dict) else state


def without_objects(value: Any) -> Any:
    """A value without the objects in it. Those of a dictionary are left out; in the place of one in
    a list is None: torch's schedules read the states of others by their place.
    """
    if is_plain(value):
        return value
    if type(value) is list:
        return [without_objects(each) for each in value]
    if type(value) is dict:
        inside = {key: without_objects(each) for key, each in value.items()}
        return {key: each for key, each in inside.items() if each is not None or value[key] is None}
    return None


def load_state(value: Any, state: Any) -> None:
    """Load a state into an object. An optimizer keeps its parameter groups themselves: a schedule
    or another optimizer may hold them.
    """
    if not isinstance(value, Optimizer):
        value.load_state_dict(state)
        return
    groups = value.param_groups
    value.load_state_dict(state)
    if value.param_groups is groups:
        return
    for group, loaded in zip(groups, value.param_groups, strict=True):
        group.clear()
        group.update(loaded)
    value.param_groups = groups


def is_held(held: Held, value: Any) -> bool:
    """Whether an object's state is kept under a name of its own."""
    return any(each is value for each in held.declared.values())


def share_groups(one: Optimizer, other: Optimizer) -> bool:
    """Whether two optimizers have the same parameter groups, and not only equal ones."""
    pairs = zip(one.param_groups, other.param_groups, strict=False)
    return one is not other and any(mine is theirs for mine, theirs in pairs)
