"""Modules that are no layers of the trained one: a teacher or averaged weights that are kept in a
list, a dictionary, an object or a callback.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.memory import recursive_detach
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torchmetrics import Metric
from unbroken.lightning_internals import version_of
from unbroken.parts.metrics import give_values, own_values
from unbroken.parts.owners import hidden_modules
from unbroken.parts.part import Part
from unbroken.tensors.same_values import is_same


class HiddenModules(Part):
    """Weights, buffers and metrics outside of the trained module that training has changed.

    No state dict holds them. A frozen network, such as that of a perceptual loss, does not change
    and is left out.
    """

    name = "hidden_modules"
    is_left_at_the_end = True

    def __init__(self) -> None:
        self.versions: dict[str, tuple[int, int]] = {}
        self.buffers: dict[str, Tensor] = {}

    def begin(self, trainer: Trainer) -> None:
        """Note the tensors when training starts: weights without a copy of them."""
        for name, tensor in tensors_in(hidden_modules(trainer), trainer):
            if isinstance(tensor, nn.Parameter):
                self.versions[name] = version_of(tensor)
            else:
                # A batch norm changes its statistics past their version.
                self.buffers[name] = tensor.detach().clone()

    def take(self, trainer: Trainer) -> dict[str, Any]:
        hidden = hidden_modules(trainer)
        tensors: dict[str, Tensor] = {}
        for name, tensor in tensors_in(hidden, trainer):
            if isinstance(tensor, nn.Parameter):
                is_fresh = self.versions.get(name) == version_of(tensor)
            else:
                is_fresh = is_same(self.buffers.get(name), tensor.detach())
            if not is_fresh:
                tensors[name] = tensor.detach().cpu()
        metrics: dict[str, Any] = {}
        for name, metric in metrics_in(hidden):
            metrics[name] = recursive_detach(own_values(metric), to_cpu=True)
        return {"tensors": tensors, "metrics": metrics}

    def give_back(self, trainer: Trainer, value: dict[str, Any]) -> None:
        hidden = hidden_modules(trainer)
        with torch.no_grad():
            for name, tensor in tensors_in(hidden, trainer):
                saved = value["tensors"].get(name)
                if saved is not None and saved.shape == tensor.shape:
                    tensor.copy_(saved)
        for name, metric in metrics_in(hidden):
            give_values(metric, value["metrics"].get(name, {}))


def tensors_in(hidden: dict[str, Any], trainer: Trainer) -> Iterator[tuple[str, Tensor]]:
    """The weights and buffers of such modules, by their names in a checkpoint."""
    trained = trainer.lightning_module
    seen = {id(tensor) for tensor in (*trained.parameters(), *trained.buffers())}
    for path, value in hidden.items():
        held = [("", value)]
        if isinstance(value, nn.Module):
            held = [*value.named_parameters(), *value.named_buffers()]
        for name, tensor in held:
            if id(tensor) not in seen and not is_lazy(tensor):
                yield f"{path}.{name}".rstrip("."), tensor


def metrics_in(hidden: dict[str, Any]) -> Iterator[tuple[str, Metric]]:
    """The metrics among such modules, by their names in a checkpoint."""
    for path, value in hidden.items():
        parts = value.named_modules() if isinstance(value, nn.Module) else ()
        for name, part in parts:
            if isinstance(part, Metric):
                yield f"{path}.{name}", part
