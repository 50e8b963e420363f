"""The types of the numbers in an optimizer's state.

Torch loads a state in the type of its parameter (pytorch issue 43706). So a master weight or a sum
in 32 bits beside a weight in 16 is rounded, and a moment in 16 bits beside a weight in 32 is not
rounded any more. Each state keeps the type that it was saved with here, as long as the weights have
theirs: with another precision of the run torch's rule holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.optim import Optimizer


class StateTypes:
    """Lets optimizers load states as they were saved.

    Args:
        weights: The weights of the checkpoint, by name.
    """

    def __init__(self, weights: Mapping[str, Any]) -> None:
        self._types = types_of(weights)
        self._handles: list[Any] = []

    def begin(self, trainer: Trainer) -> None:
        """Look at each load of the optimizers, before the first one."""
        now = types_of(dict(trainer.lightning_module.named_parameters()))
        if any(self._types.get(name, kind) != kind for name, kind in now.items()):
            return
        for optimizer in trainer.optimizers:
            # A wrapper of another class may load in its own way.
            if isinstance(optimizer, Optimizer):
                self._look_at(optimizer)

    def _look_at(self, optimizer: Optimizer) -> None:
        waiting: list[dict[str, Any]] = []

        def note(_: Optimizer, saved: dict[str, Any]) -> None:
            waiting.append(saved)

        def put_right(loaded: Optimizer) -> None:
            give_types_back(loaded, waiting.pop())

        # One of one's own, around another, may never have called the constructor of torch's class.
        with suppress(AttributeError):
            self._handles += [
                optimizer.register_load_state_dict_pre_hook(note),
                optimizer.register_load_state_dict_post_hook(put_right),
            ]

    def end(self) -> None:
        """Leave the optimizers alone."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


def types_of(tensors: Mapping[str, Any]) -> dict[str, torch.dtype]:
    """The types of tensors, by name."""
    return {name: each.dtype for name, each in tensors.items() if isinstance(each, Tensor)}


def give_types_back(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Put a saved state where an optimizer has loaded it as numbers of another type."""
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=False):
        state = optimizer.state.get(parameter)
        if state:
            before = saved["state"].get(number, {})
            optimizer.state[parameter] = in_saved_types(state, before)


def in_saved_types(loaded: Any, saved: Any) -> Any:
    """What was loaded; a tensor that has another type than the saved one is the saved one, on the
    device of the other.
    """
    if isinstance(loaded, Tensor):
        is_alike = isinstance(saved, Tensor) and saved.shape == loaded.shape
        if not is_alike or saved.dtype == loaded.dtype:
            return loaded
        return saved.to(loaded.device, copy=True)
    if type(loaded) is dict and isinstance(saved, dict):
        return {key: in_saved_types(value, saved.get(key)) for key, value in loaded.items()}
    is_row = type(loaded) in (list, tuple) and isinstance(saved, list | tuple)
    if is_row and len(loaded) == len(saved):
        return type(loaded)(map(in_saved_types, loaded, saved))
    return loaded
