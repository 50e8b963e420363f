"""Whether a start would still make what the checkpoint of a run holds."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, StochasticWeightAveraging
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.nn.parameter import is_lazy
from unbroken.parts.held import Held

# Names that a line tells.
MOST_NAMES = 4


class Shapes:
    """The parameters, optimizers and schedules that a start makes, with their sizes.

    A resumed run makes them anew and loads the checkpoint's states into them. Where training adds a
    head, grows a parameter or takes another optimizer, that cannot be done, and the run says so at
    the first save and not at the resume.
    """

    def __init__(self) -> None:
        self._weights: dict[str, torch.Size | None] = {}
        self._optimizers: list[Any] = []
        self._schedules: list[str] = []

    def begin(self, trainer: Trainer, held: Held) -> None:
        """Note what the start has made."""
        self._weights = sizes_of(held)
        self._optimizers = outline_of_optimizers(trainer)
        self._schedules = names_of_schedules(trainer)

    def lines(self, trainer: Trainer, held: Held) -> list[str]:
        """A line for what is no longer as the start has made it. Each is told once."""
        found: list[str] = []
        weights = sizes_of(held)
        for name, size in weights.items():
            if self._weights.get(name, size) is None:
                # A lazy one gets its size with the first batch. At a resume the checkpoint has it.
                self._weights[name] = size
        if weights != self._weights:
            if not is_overridden("on_load_checkpoint", trainer.lightning_module):
                found.append(line_of_weights(self._weights, weights))
            elif names := sorted(weights.keys() - self._weights.keys() - trained_by(trainer)):
                found.append(
                    f"a resume of this run may be refused: training has made {names[0]}, which no"
                    " optimizer trains. If configure_optimizers takes all parameters, it takes that"
                    " one, too, as soon as on_load_checkpoint makes it: let it take those that the"
                    " optimizer has now."
                )
            self._weights = weights
        optimizers = outline_of_optimizers(trainer)
        if optimizers != self._optimizers:
            if not makes_groups_again(trainer):
                found.append(line_of_optimizers(self._optimizers, optimizers))
            self._optimizers = optimizers
        schedules = names_of_schedules(trainer)
        if schedules != self._schedules:
            before = " and ".join(self._schedules) or "none"
            now = " and ".join(schedules) or "none"
            found.append(
                "a resume will not be exact, or be refused: training has changed the schedules from"
                f" {before} to {now}. Let configure_optimizers make those that the checkpoint"
                " holds: on_load_checkpoint is called before it."
            )
            self._schedules = schedules
        return found


def sizes_of(held: Held) -> dict[str, torch.Size | None]:
    """The size of each parameter of the trained module, by name; None for a lazy one."""
    sizes: dict[str, torch.Size | None] = {}
    for path, layer in held.layers.items():
        # named_parameters() takes ten times as long, and this is asked at each save.
        for name, tensor in vars(layer)["_parameters"].items():
            if tensor is not None:
                size = None if is_lazy(tensor) else tensor.shape
                sizes[f"{path}.{name}".removeprefix("module.")] = size
    return sizes


def trained_by(trainer: Trainer) -> set[str]:
    """The names of the parameters that an optimizer has."""
    trained: set[int] = set()
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            trained |= {id(parameter) for parameter in group["params"]}
    parameters = trainer.lightning_module.named_parameters()
    return {name for name, parameter in parameters if id(parameter) in trained}


def line_of_weights(before: dict[str, Any], now: dict[str, Any]) -> str:
    """What has changed in the sizes and names of weights, and what helps."""
    changes = [f"{name} is new" for name in now.keys() - before.keys()]
    changes += [f"{name} is gone" for name in before.keys() - now.keys()]
    for name in before.keys() & now.keys():
        if before[name] != now[name]:
            sizes = f"{tuple(before[name])} to {tuple(now[name])}"
            changes.append(f"{name} has gone from {sizes}")
    shown = ", ".join(sorted(changes)[:MOST_NAMES])
    more = len(changes) - MOST_NAMES
    further = f", and {more} more" if more > 0 else ""
    return (
        "a resume of this run will be refused: training has changed the module's weights"
        f" ({shown}{further}), and a new start makes them as they were. Make them so in"
        " on_load_checkpoint(checkpoint), which is called before the weights are loaded."
    )


def makes_groups_again(trainer: Trainer) -> bool:
    """Whether a callback of Lightning's adds groups of parameters, notes them, and adds them again
    at a resume.
    """
    everyone: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return any(isinstance(each, BaseFinetuning) for each in everyone)


def outline_of_optimizers(trainer: Trainer) -> list[Any]:
    """The class of each optimizer, with the number of parameters in each of its groups."""
    found: list[Any] = []
    for optimizer in trainer.optimizers:
        groups = [len(group["params"]) for group in optimizer.param_groups]
        found.append((type(optimizer).__name__, groups))
    return found


def line_of_optimizers(before: list[Any], now: list[Any]) -> str:
    """What has changed in the optimizers, and what helps."""
    return (
        "a resume will not be exact, or be refused: training has changed the optimizers from"
        f" {in_words(before)} to {in_words(now)}, and configure_optimizers makes those of the"
        " start. Let it make what the checkpoint holds: on_load_checkpoint is called before it."
    )


def in_words(optimizers: list[Any]) -> str:
    """Each optimizer with the sizes of its groups."""
    words = [
        f"{name} (groups of {', '.join(map(str, groups))} parameters)"
        for name, groups in optimizers
    ]
    return " and ".join(words) or "none"


def names_of_schedules(trainer: Trainer) -> list[str]:
    """The class of each schedule. StochasticWeightAveraging makes its own again at a resume."""
    everyone: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    if any(isinstance(each, StochasticWeightAveraging) for each in everyone):
        return []
    return [type(config.scheduler).__name__ for config in trainer.lr_scheduler_configs]
