"""Modules that are no layers of the trained one: a teacher or averaged weights that are kept in a
list, a dictionary, an object or a callback.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.memory import recursive_detach
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torchmetrics import Metric
from unbroken.lightning_internals import version_of
from unbroken.parts.held import Held
from unbroken.parts.metrics import give_values, own_values
from unbroken.tensors.same_values import deep_copy, is_same


class HiddenModules:
    """Weights, buffers and metrics outside of the trained module that training has changed.

    No state dict holds them. A frozen network, such as that of a perceptual loss, does not change
    and is left out.
    """

    def __init__(self) -> None:
        self.versions: dict[str, tuple[int, int]] = {}
        self.buffers: dict[str, Tensor] = {}

    def begin(self, held: Held, trained: LightningModule) -> None:
        """Note the tensors when training starts: weights without a copy of them."""
        self.versions = {}
        self.buffers = {}
        for name, tensor in tensors_in(held, trained):
            if isinstance(tensor, nn.Parameter):
                self.versions[name] = version_of(tensor)
            else:
                # A batch norm changes its statistics past their version.
                self.buffers[name] = tensor.detach().clone()

    def take(self, held: Held, trained: LightningModule) -> dict[str, Any]:
        """Copies of what has changed, by name."""
        tensors: dict[str, Tensor] = {}
        for name, tensor in tensors_in(held, trained):
            if isinstance(tensor, nn.Parameter):
                is_fresh = self.versions.get(name) == version_of(tensor)
            else:
                is_fresh = is_same(self.buffers.get(name), tensor.detach())
            if not is_fresh:
                tensors[name] = tensor.detach().to("cpu", copy=True)
        metrics: dict[str, Any] = {}
        for name, metric in metrics_in(held):
            metrics[name] = deep_copy(recursive_detach(own_values(metric), to_cpu=True))
        return {"tensors": tensors, "metrics": metrics, "other_names": dict(held.other_names)}

    def give_back(self, held: Held, trained: LightningModule, value: dict[str, Any]) -> None:
        """Fill the modules that there are."""
        saved = _by_every_name(value)
        with torch.no_grad():
            for name, tensor in tensors_in(held, trained):
                found = saved["tensors"].get(name)
                if found is not None and found.shape == tensor.shape:
                    tensor.copy_(found)
        for name, metric in metrics_in(held):
            give_values(metric, saved["metrics"].get(name, {}))


def _by_every_name(value: dict[str, Any]) -> dict[str, Any]:
    """What was saved, also by the further names of the modules that it is of."""
    found: dict[str, Any] = {}
    for kind in ("tensors", "metrics"):
        found[kind] = dict(value[kind])
        for other, first in value.get("other_names", {}).items():
            for name, each in value[kind].items():
                if name == first or name.startswith(f"{first}."):
                    found[kind][other + name[len(first) :]] = each
    return found


def tensors_in(held: Held, trained: LightningModule) -> Iterator[tuple[str, Tensor]]:
    """The weights and buffers of such modules, by their names in a checkpoint."""
    if not held.modules:
        return
    seen = {id(tensor) for tensor in (*trained.parameters(), *trained.buffers())}
    for path, value in held.modules.items():
        inside = [("", value)]
        if isinstance(value, nn.Module):
            inside = [*value.named_parameters(), *value.named_buffers()]
        for name, tensor in inside:
            if id(tensor) not in seen and not is_lazy(tensor):
                yield f"{path}.{name}".rstrip("."), tensor


def metrics_in(held: Held) -> Iterator[tuple[str, Metric]]:
    """The metrics among such modules, by their names in a checkpoint."""
    for path, value in held.modules.items():
        parts = value.named_modules() if isinstance(value, nn.Module) else ()
        for name, part in parts:
            if isinstance(part, Metric):
                yield f"{path}.{name}", part
